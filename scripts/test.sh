#!/usr/bin/env bash
# Checks everything: the linter, then every test and every notebook. Flags go to pytest.
#   bash scripts/test.sh [-k lesson_03] [other flags of pytest]
#   bash scripts/test.sh -m slow         what is slow by nature, and left out otherwise
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" all
cd "$root"
"$python" -m ruff check .
"$python" -m ruff format --check .
# Test files and notebooks are shared out to three processes for each CPU, at most six, as almost half
# of the time is spent waiting: for ranks that are to give up, and for a lesson that another runs.
workers=$("$python" -c 'import os; print(min(6, 3 * os.cpu_count()))')
exec "$python" -m pytest --nbval -n "$workers" -m "not slow" "$@"
