# SPDX-License-Identifier: Apache-2.0
"""Judges a guidellm run: guidellm_report.py REPORT.json REQUESTS METRICS_URL. Every request answered, none refused or left over, each with
the tokens that were asked for, and guidellm's totals equal to the server's own counters."""
import json
import sys
import urllib.request

path, wanted, metrics_url = sys.argv[1], int(sys.argv[2]), sys.argv[3]
try:
    with open(path, encoding="utf-8") as file:
        requests = json.load(file)["benchmarks"][0]["requests"]
except (OSError, ValueError, LookupError) as problem:
    sys.exit(f"guidellm: no usable report in {path}: {problem!r}")
page = urllib.request.urlopen(metrics_url, timeout=10).read().decode()


def Metric(name):
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith((name + "{", name + " ")))


good = requests["successful"]
prompt = sum(one["prompt_tokens"] for one in good)
output = sum(one["output_tokens"] for one in good)
checks = {
    f"{wanted} requests answered": len(good) == wanted,
    "none refused": not requests["errored"],
    "none left over": not requests["incomplete"],
    "16 tokens each": all(one["output_tokens"] == 16 for one in good),
    "prompt tokens as the server counts them": prompt == Metric("vllm:prompt_tokens_total"),
    "output tokens as the server counts them": output == Metric("vllm:generation_tokens_total"),
}
print(f"guidellm: {sum(checks.values())} passed, {len(checks) - sum(checks.values())} failed: {len(good)} requests, {prompt} + {output} tokens")
for what, true in checks.items():
    if not true:
        print(f"  FAILED: {what}")
sys.exit(0 if all(checks.values()) else 1)
