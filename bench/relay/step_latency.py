#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Step latency from Python: the relay beside the public designs, one process per rank, same clock, same definition, in one run.

`last` is the time from the moment rank 0 holds the frames to the moment the slowest follower holds the bytes (not decoded); `rank0` is how
long rank 0 is kept. Steps are paced (a decode loop: followers already wait). Designs:
  relay      rankgate.relay, ring back-end
  asleep     the same, its followers always asleep when the step comes (spin_us=0)
  public     the count of frames by a gloo broadcast in every step, the frames by ZMQ PUB/SUB (FreeToken, mini-sglang)
  broadcast  the pickled list by gloo, size first (SGLang's broadcast_pyobj)
The last two need torch. Rounds of the designs are interleaved, so that a busy machine is equally busy for all.
"""

import argparse
import array
import functools
import json
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time

now = time.perf_counter_ns


def relay_design(rank, size, folder, port, spin_us=-1):
    from rankgate import relay

    config = relay.Config(rank=rank, size=size, where=os.path.join(folder, "relay"), epoch=port, join_s=120, spin_us=spin_us)
    end = relay.Leader(config) if rank == 0 else relay.Follower(config)
    end.join()

    def close():
        end.finish(30)
        end.close()

    return (end.publish if rank == 0 else end.next_step), close


def gloo_group(rank, size, port):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    return torch, dist


def public_design(rank, size, folder, port):
    import zmq

    torch, dist = gloo_group(rank, size, port)
    context = zmq.Context()
    address = f"ipc://{folder}/pub"
    socket = context.socket(zmq.PUB if rank == 0 else zmq.SUB)
    if rank == 0:
        socket.bind(address)
    else:
        socket.setsockopt(zmq.RECONNECT_IVL, 2)
        socket.connect(address)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
    time.sleep(1.0)  # the design has no join; without this pause it loses the first request
    dist.barrier()

    def send(frames):
        dist.broadcast(torch.tensor(len(frames)), src=0)
        for frame in frames:
            socket.send(frame, copy=False)

    def receive():
        count = torch.tensor(-1)
        dist.broadcast(count, src=0)
        return [socket.recv() for _ in range(int(count.item()))]

    def close():
        dist.barrier()
        time.sleep(0.2)
        socket.close(0)
        context.term()
        dist.destroy_process_group()

    return (send if rank == 0 else receive), close


def broadcast_design(rank, size, folder, port):
    import numpy as np

    torch, dist = gloo_group(rank, size, port)

    def send(frames):
        if not frames:
            dist.broadcast(torch.tensor([0], dtype=torch.long), src=0)
            return
        data = torch.ByteTensor(np.frombuffer(pickle.dumps(frames), dtype=np.uint8))
        dist.broadcast(torch.tensor([len(data)], dtype=torch.long), src=0)
        dist.broadcast(data, src=0)

    def receive():
        size_tensor = torch.tensor([0], dtype=torch.long)
        dist.broadcast(size_tensor, src=0)
        n = size_tensor.item()
        if n == 0:
            return []
        data = torch.empty(n, dtype=torch.uint8)
        dist.broadcast(data, src=0)
        return pickle.loads(bytes(data.numpy()))

    def close():
        dist.barrier()
        dist.destroy_process_group()

    return (send if rank == 0 else receive), close


DESIGNS = {"relay": relay_design, "asleep": functools.partial(relay_design, spin_us=0), "public": public_design, "broadcast": broadcast_design}


def run_rank(design, rank, size, folder, port, sizes, steps, warm, pace_us, rr, out):
    if rr:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    step, close = DESIGNS[design](rank, size, folder, port)
    stamps = {}
    for name, frame_bytes in sizes:
        frames = [os.urandom(frame_bytes)] if frame_bytes else []
        at, kept = array.array("q"), array.array("q")
        cpu = time.process_time_ns()
        for i in range(warm + steps):
            if i == warm:
                cpu = time.process_time_ns()
            if rank == 0:
                time.sleep(pace_us / 1e6)
                start = now()
                step(frames)
                kept.append(now() - start)
                at.append(start)
            else:
                got = step()
                at.append(now())
                if len(got) != len(frames):
                    raise AssertionError((design, rank, i, len(got)))
        stamps[name] = (at[warm:], kept[warm:], time.process_time_ns() - cpu)
    with open(os.path.join(out, f"{rank}.pickle"), "wb") as f:
        pickle.dump(stamps, f)
    close()


def percentile(values, q):
    values = sorted(values)
    return values[min(len(values) - 1, int(q * len(values)))]


def run_round(design, size, port, args):
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=run_rank,
                args=(design, r, size, folder, port, args.sizes, args.steps, args.warm, args.pace_us, args.rr, folder),
            )
            for r in range(size)
        ]
        for p in processes:
            p.start()
        for p in processes:
            p.join(300)
            if p.exitcode is None:
                p.kill()
        if any(p.exitcode != 0 for p in processes):
            raise SystemExit(f"{design}: a rank ended with {[p.exitcode for p in processes]}")
        ranks = []
        for r in range(size):
            with open(os.path.join(folder, f"{r}.pickle"), "rb") as f:
                ranks.append(pickle.load(f))
    result = {}
    for name, _ in args.sizes:
        start, kept, _ = ranks[0][name]
        last = [max(ranks[r][name][0][i] for r in range(1, size)) - start[i] for i in range(len(start))]
        cpu = sum(ranks[r][name][2] for r in range(size)) / len(start)
        result[name] = (last, list(kept), cpu)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--design", action="append", choices=list(DESIGNS), help="default: all that can run")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=500, help="per round and size")
    parser.add_argument("--warm", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pace-us", type=float, default=1000, dest="pace_us")
    parser.add_argument("--rr", action="store_true", help="ranks under SCHED_RR: keeps other work out of the measured part")
    parser.add_argument("--require", type=float, default=0, help="fail unless public / relay is at least this, p50 and p99")
    parser.add_argument("--out", default="build/bench/relay_python.json")
    args = parser.parse_args()
    args.sizes = [("empty", 0), ("256 B", 256), ("16 KiB", 16384)]
    designs = args.design
    if not designs:
        try:
            import torch  # noqa: F401

            designs = list(DESIGNS)
        except ImportError:
            print("no torch in this Python: only the relay's own figures; the C++ table has 'gloo count + PUB/SUB'")
            designs = ["relay", "asleep"]
    gathered = {d: {name: ([], [], []) for name, _ in args.sizes} for d in designs}
    port = 20000 + os.getpid() % 20000
    for i in range(args.rounds):
        for design in designs:
            port += 1
            for name, (last, kept, cpu) in run_round(design, args.ranks, port, args).items():
                gathered[design][name][0].extend(last)
                gathered[design][name][1].extend(kept)
                gathered[design][name][2].append(cpu)
    print(f"{args.ranks} ranks, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {'SCHED_RR' if args.rr else 'ordinary scheduling'}; us")
    print(f"{'design':10} {'step':7} {'last p50':>9} {'p90':>9} {'p99':>9} {'rank0 p50':>10} {'p99':>9} {'cpu':>7}")
    rows = {}
    for design in designs:
        for name, _ in args.sizes:
            last, kept, cpu = gathered[design][name]
            row = {
                "last_p50": percentile(last, 0.5) / 1e3, "last_p90": percentile(last, 0.9) / 1e3, "last_p99": percentile(last, 0.99) / 1e3,
                "rank0_p50": percentile(kept, 0.5) / 1e3, "rank0_p99": percentile(kept, 0.99) / 1e3, "cpu": sum(cpu) / len(cpu) / 1e3,
            }  # fmt: skip
            rows.setdefault(design, {})[name] = row
            print(f"{design:10} {name:7} " + " ".join(f"{row[k]:{w}.1f}" for k, w in zip(row, (9, 9, 9, 10, 9, 7))))
    ratios = {}
    ok = True
    if "public" in rows and "relay" in rows:
        for name, _ in args.sizes:
            ratios[name] = {k: rows["public"][name][k] / rows["relay"][name][k] for k in ("last_p50", "last_p99")}
            print(f"public / relay, {name}: p50 {ratios[name]['last_p50']:.1f}, p99 {ratios[name]['last_p99']:.1f}")
            ok = ok and min(ratios[name].values()) >= args.require
    os.makedirs(os.path.dirname(args.out) or ".", exist_ok=True)
    with open(args.out, "w") as f:
        json.dump({"ranks": args.ranks, "rr": args.rr, "load": os.getloadavg()[0], "us": rows, "public_over_relay": ratios}, f, indent=1)
    print("written:", args.out)
    if not ok:
        print(f"FAILED: public / relay below {args.require}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
