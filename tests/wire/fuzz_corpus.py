#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Seeds for wire_messages_fuzz from the captured vectors: usage fuzz_corpus.py OUT_DIR. The first byte of a seed picks the decoder."""
import json
import pathlib
import sys

HANDSHAKE, VLLM_REQUEST, VLLM_OUTPUT, TS_REQUEST, TS_OUTPUT, KV_EVENTS = 0, 1, 2, 4, 5, 6
MOST = 6000  # longer frames slow the fuzzer down and teach it nothing new


def messages(entry):
    if entry.get("frames_hex"):
        yield entry
    for step in entry.get("steps", []):
        yield from messages(step)


def main():
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    root = pathlib.Path(__file__).resolve().parent.parent / "vectors"
    count = 0
    for path in sorted(root.glob("*/*.json")):
        data = json.loads(path.read_text())
        for entry in data["vectors"] if isinstance(data, dict) else data:
            for message in messages(entry):
                frames = message["frames_hex"]
                if isinstance(frames[0], list):
                    frames = [frame for group in frames for frame in group]
                sent = message.get("direction", "").startswith("frontend")
                if "handshake" in path.name or message.get("name", "").startswith("registration"):
                    kind = HANDSHAKE
                elif "kv_events" in path.name:
                    kind = KV_EVENTS
                elif path.parent.name == "tokenspeed":
                    kind = TS_REQUEST if sent else TS_OUTPUT
                else:
                    kind = VLLM_REQUEST if sent else VLLM_OUTPUT
                for frame in frames:
                    payload = bytes.fromhex(frame)
                    if 4 <= len(payload) <= MOST:
                        (out / f"seed-{count}").write_bytes(bytes([kind]) + payload)
                        count += 1
    print(f"{count} seeds")


if __name__ == "__main__":
    main()
