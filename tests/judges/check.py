# SPDX-License-Identifier: Apache-2.0
"""Counts what a judge reported and compares it with the failures that are known.

Called by scripts/lanes/judges.sh: check.py LANE FORMAT REPORT EXPECTED [--minimum N]. FORMAT: junit (pytest), tap (node --test), comply
(llm-comply --json). EXPECTED holds lines `lane<TAB>test<TAB>reason`. A failure that is not listed there fails the lane, and so does a
report with fewer than N tests: a lane that ran nothing has not passed. A listed test that passes is named, so that its line can go.
"""
import json
import re
import sys
import xml.etree.ElementTree as ElementTree


def Junit(path):
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        yield case.get("name"), outcome


def Tap(path):
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            match = re.match(r"(not )?ok \d+ - (.*?)(?: # (SKIP|TODO).*)?$", line.rstrip("\n"))
            if match:
                yield match[2], "skipped" if match[3] else "failed" if match[1] else "passed"


def Comply(path):
    with open(path, encoding="utf-8") as file:
        text = file.read()
    for test in json.loads(text[text.index("{"):])["results"]:
        status = test["status"]
        yield test["id"], {"passed": "passed", "skipped": "skipped"}.get(status, "failed")


def main():
    lane, kind, report, expected_path = sys.argv[1:5]
    minimum = int(sys.argv[6]) if len(sys.argv) > 6 and sys.argv[5] == "--minimum" else 1
    expected = {}
    with open(expected_path, encoding="utf-8") as lines:
        for line in lines:
            if line.strip() and not line.startswith("#"):
                where, name, reason = line.rstrip("\n").split("\t")
                if where == lane:
                    expected[name] = reason
    try:
        results = list({"junit": Junit, "tap": Tap, "comply": Comply}[kind](report))
    except (OSError, ValueError, KeyError, ElementTree.ParseError) as problem:
        print(f"{lane}: no usable report in {report}: {problem!r}")
        return 1
    of = {outcome: [name for name, got in results if got == outcome] for outcome in ("passed", "failed", "skipped")}
    known = [name for name in of["failed"] if name in expected]
    unknown = [name for name in of["failed"] if name not in expected]
    print(f"{lane}: {len(of['passed'])} passed, {len(unknown)} failed, {len(known)} failed as expected, {len(of['skipped'])} skipped")
    for name in known:
        print(f"  expected: {name}: {expected[name]}")
    for name in of["passed"]:
        if name in expected:
            print(f"  passes now, take it off the list: {name}")
    for name in unknown:
        print(f"  FAILED: {name}")
    if len(of["passed"]) + len(of["failed"]) < minimum:
        print(f"{lane}: only {len(of['passed']) + len(of['failed'])} tests ran, at least {minimum} are wanted")
        return 1
    return 1 if unknown else 0


sys.exit(main())
