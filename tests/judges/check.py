# SPDX-License-Identifier: Apache-2.0
"""Counts what a judge reported and compares it with the failures that are known.

Called by scripts/lanes/judges.sh: check.py LANE FORMAT REPORT EXPECTED [--minimum N]. FORMAT: junit (pytest), tap (node --test), comply
(llm-comply --json). EXPECTED holds lines `lane<TAB>test<TAB>pattern<TAB>reason`: the test is known to fail with an error that the pattern
is found in. A failure that is not listed, or that fails in another way, fails the lane, and so does a report with fewer than N tests: a
lane that ran nothing has not passed. A listed test that passes is named and fails the lane too, so that its line goes.
"""
import json
import re
import sys
import xml.etree.ElementTree as ElementTree


def Junit(path):
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error")]
        skipped = any(child.tag == "skipped" for child in case)
        said = "\n".join(f"{child.get('message') or ''}\n{child.text or ''}" for child in bad)
        yield case.get("name"), "failed" if bad else "skipped" if skipped else "passed", said


def Tap(path):
    """What a test said stands before its line (its output) and in the block behind it (its error)."""
    result, said = None, ""
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            match = re.match(r"(not )?ok \d+ - (.*?)(?: # (SKIP|TODO).*)?$", line.rstrip("\n"))
            if match:
                result = match[2], "skipped" if match[3] else "failed" if match[1] else "passed"
            else:
                said += line
            if result and line.strip() == "...":
                yield *result, said
                result, said = None, ""


def Comply(path):
    with open(path, encoding="utf-8") as file:
        text = file.read()
    for test in json.loads(text[text.index("{"):])["results"]:
        status = test["status"]
        yield test["id"], {"passed": "passed", "skipped": "skipped"}.get(status, "failed"), "\n".join(test.get("errors") or [])


def main():
    lane, kind, report, expected_path = sys.argv[1:5]
    minimum = int(sys.argv[6]) if len(sys.argv) > 6 and sys.argv[5] == "--minimum" else 1
    expected = {}
    with open(expected_path, encoding="utf-8") as lines:
        for line in lines:
            if line.strip() and not line.startswith("#"):
                where, name, pattern, reason = line.rstrip("\n").split("\t")
                if where == lane:
                    expected[name] = re.compile(pattern), reason
    try:
        results = list({"junit": Junit, "tap": Tap, "comply": Comply}[kind](report))
    except (OSError, ValueError, KeyError, ElementTree.ParseError) as problem:
        print(f"{lane}: no usable report in {report}: {problem!r}")
        return 1
    passed = [name for name, got, _ in results if got == "passed"]
    failed = {name: said for name, got, said in results if got == "failed"}
    known = [name for name, said in failed.items() if name in expected and expected[name][0].search(said)]
    unknown = [name for name in failed if name not in known]
    healed = [name for name in passed if name in expected]
    skipped = len(results) - len(passed) - len(failed)
    print(f"{lane}: {len(passed)} passed, {len(unknown)} failed, {len(known)} failed as expected, {skipped} skipped")
    for name in known:
        print(f"  expected: {name}: {expected[name][1]}")
    for name in healed:
        print(f"  passes now, take it off the list: {name}")
    for name in unknown:
        how = "in another way than expected" if name in expected else "unexpectedly"
        last = [line for line in failed[name].splitlines() if line.strip()]
        print(f"  FAILED {how}: {name}: {last[0][:300] if last else 'no message'}")
    if len(passed) + len(failed) < minimum:
        print(f"{lane}: only {len(passed) + len(failed)} tests ran, at least {minimum} are wanted")
        return 1
    return 1 if unknown or healed else 0


sys.exit(main())
