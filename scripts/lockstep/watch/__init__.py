"""The instrument: watches the ranks of an unchanged script, then compares what they have seen.

A rank finds `inject/sitecustomize.py` on its path, so hooks are in place before the script runs.
Each module here watches one thing and writes facts (facts.py); `read.py` reads the facts of all
ranks, and `findings/` compares them. Nothing is sent: no rank waits because it is watched.
"""
