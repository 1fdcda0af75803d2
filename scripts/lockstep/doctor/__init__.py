"""What can this machine do, and do ranks meet on it? report.py says it, ranks.py tries it."""
