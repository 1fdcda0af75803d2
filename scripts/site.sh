#!/usr/bin/env bash
# Builds the course as a web site: docs/_build/html. Nothing of the notebooks is executed.
#   bash scripts/site.sh [--open]      --open shows it in the browser
#   bash scripts/site.sh --gettext     brings the translations up to date with the text
#   bash scripts/site.sh --translated  says what is not translated
# It has an environment of its own, .venv.site; LOCKSTEP_PYTHON is for the lessons.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" site
exec "$python" "$root/docs/build/build.py" "$@"
