import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from frontend import TokenSpeedFrontend, VllmFrontend  # noqa: E402


@pytest.fixture
def vllm():
    frontend = VllmFrontend()
    yield frontend
    frontend.close()


@pytest.fixture
def tokenspeed():
    frontend = TokenSpeedFrontend()
    yield frontend
    frontend.close()


@pytest.fixture
def make_vllm():
    made = []

    def make(**kw):
        made.append(VllmFrontend(**kw))
        return made[-1]

    yield make
    for frontend in made:
        frontend.close()
