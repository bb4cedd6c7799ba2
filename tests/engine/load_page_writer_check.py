"""The Python writer against the C++ reader (named by argv[1]): run by ctest, needs nothing but Python."""
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from load_page_writer import LoadPage  # noqa: E402


def read(path: str) -> str:
    return subprocess.run([sys.argv[1], path], capture_output=True, text=True).stdout.strip()


def main() -> None:
    with tempfile.TemporaryDirectory() as base:
        page = LoadPage(os.path.join(base, "load"), "rank0")
        assert read(page.path) == "nothing gone=0", read(page.path)
        page.publish(3, 1, 40, 1000, step=17)
        assert read(page.path) == "3 1 40 1000 17 fresh=1 gone=0", read(page.path)
        page.publish(0, 0, 0, 1000, step=18)
        assert read(page.path) == "0 0 0 1000 18 fresh=1 gone=0", read(page.path)
        page.words[3] = (1 << 22) + 1  # a process that cannot exist
        assert read(page.path).endswith("gone=1"), read(page.path)
        os.chmod(page.path, 0o644)
        assert read(page.path).startswith("refused"), read(page.path)
        os.chmod(page.path, 0o600)
        path = page.path
        page.close()
        assert read(path).startswith("refused"), "unlinked"


main()
print("1 passed, 0 failed")
