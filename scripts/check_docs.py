#!/usr/bin/env python3
"""Checks that what the pages name exists: relative links, make targets, source paths and tests in back-ticks. Prints what does not and fails."""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)]*)?\)")
MAKE = re.compile(r"`make ([a-z-]+)")
PATH = re.compile(r"`((?:src|docs|tests|scripts|bench|python|rust|cmake)/[\w./-]+)`")
CPP_TEST = re.compile(r"^TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\s*\)", re.M)
PYTHON_TEST = re.compile(r"^\s*(?:async )?def (test_\w+)\(", re.M)
# A page with a name like this in back-ticks means a test; elsewhere it may mean a type's member.
TESTS_PAGE = "docs/field-cases.md"
NAMED_TEST = re.compile(r"`([A-Z]\w+\.[A-Z]\w+|test_\w+)`")


def tests_there_are() -> set[str]:
    names = set()
    for path in (ROOT / "src").rglob("*_test.cc"):
        names |= {f"{suite}.{name}" for suite, name in CPP_TEST.findall(path.read_text())}
    for path in (ROOT / "tests").rglob("*.py"):
        names |= set(PYTHON_TEST.findall(path.read_text()))
    return names


def main() -> int:
    pages = [p for p in subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    wrong, checked = [], 0
    for page in pages:
        text = (ROOT / page).read_text()
        for match in LINK.finditer(text):
            link = match.group(1)
            if "://" in link or link.startswith("mailto:"):
                continue
            checked += 1
            if not (ROOT / page).parent.joinpath(link).exists():
                wrong.append(f"{page}: link to {link}")
        for target in MAKE.findall(text):
            checked += 1
            if target not in targets:
                wrong.append(f"{page}: no target `make {target}`")
        if page == TESTS_PAGE:
            there = tests_there_are()
            for name in NAMED_TEST.findall(text):
                checked += 1
                if name not in there:
                    wrong.append(f"{page}: no test {name}")
        for path in PATH.findall(text):
            checked += 1
            if not (ROOT / path.rstrip("/.")).exists() and "*" not in path:
                wrong.append(f"{page}: no such path {path}")
    print("\n".join(wrong))
    print(f"docs: {len(pages)} pages, {checked} references, {len(wrong)} wrong")
    return 1 if wrong or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
