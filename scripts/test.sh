#!/usr/bin/env bash
# Checks everything: the linter, then every test and every notebook. Flags go to pytest.
#   bash scripts/test.sh [-k lesson_03] [other flags of pytest]
#   bash scripts/test.sh -m slow         what is slow by nature, and left out otherwise
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" all
cd "$root"
"$python" -m ruff check .
"$python" -m ruff format --check .
# Test files and notebooks are shared out to two processes more than there are CPUs, at most four:
# a third of the time is spent waiting.
workers=$("$python" -c 'import os; print(min(4, os.cpu_count() + 2))')
exec "$python" -m pytest --nbval -n "$workers" -m "not slow" "$@"
