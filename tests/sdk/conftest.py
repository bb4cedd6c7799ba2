"""A second server for what the demo model cannot show: keys, full houses, ranks that die."""
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from rankgate_process import Process, Server, free_port, program  # noqa: E402


class Small:
    """A gateway with a key and room for two choices, and one sim rank of 20 ms a token."""

    def __init__(self, folder: pathlib.Path):
        rpc = free_port()
        self.server = Server("gateway", [":bytes:", "--served-model-name", "m", "--data-parallel-rpc-port", str(rpc), "--api-key", "sesame",
                                         "--max-in-flight", "2"], folder / "gateway.log")
        self.rank_args = [program(), "engine", "m", "--runner", "sim", "--data-parallel-rpc-port", str(rpc), "--sim-vocab-size", "259",
                          "--sim-first-token", "97", "--sim-last-token", "122", "--sim-eos-token", "257", "--max-model-len", "4096",
                          "--sim-step-us", "20000", "--load-page-dir", str(folder)]
        self.folder = folder
        self.start_rank()

    def start_rank(self):
        self.rank = Process(self.rank_args, self.folder / "rank.log")
        self.server.wait_ready()

    def kill_rank(self):
        self.rank.popen.kill()
        self.rank.popen.wait()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    made = Small(tmp_path_factory.mktemp("small"))
    yield made
    made.server.stop()
    made.rank.stop()
