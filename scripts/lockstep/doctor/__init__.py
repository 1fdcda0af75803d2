"""What can this machine do, and do ranks meet on it? Do several machines reach each other?

report.py    the command: its flags, the report, the exit code
machine.py   what one machine has, seen without a rank
ranks.py     one rank, on this machine or on several
methods.py   do the ranks meet by env://, tcp://, a store and file://?
pairs.py     who reaches whom, and how fast is the way?
machines.py  what differs between machines?
row.py       one line of the report
"""
