"""What can this machine do, and do ranks meet on it? Do several machines reach each other?

command.py   the command: its flags, and the way from one machine to its ranks
report.py    the report, and one line of it
machine.py   what one machine has, seen without a rank
ranks.py     one rank, on this machine or on several
pairs.py     who reaches whom, and how fast is the way?
machines.py  what differs between machines?
"""
