#!/usr/bin/env python3
"""Checks that what the pages name exists: relative links, make targets, source paths in back-ticks. Prints what does not and fails."""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)]*)?\)")
MAKE = re.compile(r"`make ([a-z-]+)")
PATH = re.compile(r"`((?:src|docs|tests|scripts|bench|python|rust|cmake)/[\w./-]+)`")


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
        for path in PATH.findall(text):
            checked += 1
            if not (ROOT / path.rstrip("/.")).exists() and "*" not in path:
                wrong.append(f"{page}: no such path {path}")
    print("\n".join(wrong))
    print(f"docs: {len(pages)} pages, {checked} references, {len(wrong)} wrong")
    return 1 if wrong or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
