"""What is behind the commands in scripts/: how lessons start, end, and are told what went wrong."""
