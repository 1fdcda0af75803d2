"""Lesson 16: an all-reduce by send and receive, in five ways; PASS sees bits, bytes and rounds."""

import ast
import re
from pathlib import Path

import lesson_16_all_reduce as lesson
import pytest
from breaks import check_breaks
from conftest import run_warm

POWERS = (2, 4)  # where doubling and halving run
NAIVE_ADDS = "        dist.recv(arrived, other)\n        tensor += arrived"
SUMS = "        swap(leaving, right, arrived, left)\n        mine += arrived"
ROUND = "swap(chunks[(rank + 1 - step) % n], right, chunks[(rank - step) % n], left)"

BREAKS = {
    "nobody waits": ("        work.wait()  #", "        pass  #"),
    "only the send is waited for": (
        "in dist.batch_isend_irecv(pair):",
        "in dist.batch_isend_irecv(pair)[:1]:",
    ),
    "naive: the last rank is left out": (
        f"range(1, n) if rank == 0 else ():\n{NAIVE_ADDS}",
        "range(1, n) if rank == 0 else ():\n        dist.recv(arrived, other)\n"
        "        tensor += arrived * (other < n - 1)",
    ),
    "naive: what arrived last is the sum": (
        NAIVE_ADDS,
        NAIVE_ADDS.replace("tensor += arrived", "tensor.copy_(arrived)"),
    ),
    "naive: each sends its own back": (
        "        dist.recv(tensor, 0)",
        "        dist.recv(arrived, 0)",
    ),
    "naive: it calls the library": (
        "        dist.send(tensor, 0)\n        dist.recv(tensor, 0)\n",
        "",
    ),
}
