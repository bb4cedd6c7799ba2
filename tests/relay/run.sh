#!/usr/bin/env bash
# The relay from Python: the wheel, and real spawned processes that are killed, stopped and frozen. The C++ suites run with the unit tests.
source "$(dirname "$0")/common.sh"
build_python
exec "$venv/bin/python" -m pytest -p no:cacheprovider --rootdir python python/tests
