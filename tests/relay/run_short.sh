#!/usr/bin/env bash
# The relay's tests in their short form, under four minutes on two busy cores (the builds not counted): unit tests, the case table over
# real processes, the negative controls, and the Python suite through the wheel.
source "$(dirname "$0")/common.sh"
build_tests
build_python
say "unit"
"$bin/relay_test" --gtest_brief=1
say "real processes"
"$bin/relay_process_test" --gtest_brief=1
say "negative controls"
"$bin/relay_controls_test" --gtest_brief=1
say "soak, short"
"$bin/relay_soak" 200000
say "python"
"$venv/bin/python" -m pytest -q -p no:cacheprovider python/tests
