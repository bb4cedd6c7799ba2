# SPDX-License-Identifier: Apache-2.0
"""`--long` turns the counted cases into their long forms (see tests/relay/run_long.sh)."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="1000 publish-at-once runs and 500 cold starts instead of a few")


@pytest.fixture
def long_form(request):
    return request.config.getoption("--long")
