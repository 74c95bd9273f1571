"""What a pool's workers wait for: at the beginning and the end of passes, and between their orders.

    python benchmarks/gaps.py [--devices cpu cpu] [--tokens 2000] [--heads 8] [--passes 8]

A worker says how long it was at each of its orders; what is left of the time that the coordinator
saw is messages. Passes are run as the pool divides them among devices that are alike, and cut into
many small orders, as among devices that are not.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise
from typing import Any

import torch

import quorum_attention as qa
from quorum_attention.devices import Pool, PoolPass


def orders(one: PoolPass) -> list[tuple[int, float, float, float]]:
    """(device, start, stop, worked) of each order of a pass: its parts say their share of what it
    took. One that waited at its worker starts when the one before stops."""
    found: dict[int, tuple[int, float, float, float]] = {}
    for r in one.ran:
        device, start, stop, worked = found.get(r.index, (r.device, r.start, r.stop, 0.0))
        found[r.index] = (device, min(start, r.start), max(stop, r.stop), worked + r.worked)
    return sorted(found.values())


def waits(one: PoolPass) -> dict[str, float]:
    """Milliseconds of a pass: per order in messages, before the first and after the last order, and
    the share of the workers' time in which they were at no order."""
    every = orders(one)
    messages = [stop - start - worked for _, start, stop, worked in every]
    between = []
    for device in {order[0] for order in every}:
        mine = [order for order in every if order[0] == device]
        between += [b[1] - a[2] for a, b in pairwise(mine)]
    worked = sum(order[3] for order in every)
    last = max(order[2] for order in every)
    return {
        "orders": len(every),
        "seconds": one.seconds,
        "messages ms": 1e3 * statistics.median(messages),
        "least": 1e3 * min(messages),
        "between ms": 1e3 * statistics.median(between) if between else 0.0,
        "begin ms": 1e3 * min(order[1] for order in every),
        "end ms": 1e3 * (one.seconds - last),
        "idle": 1 - worked / one.seconds / len({order[0] for order in every}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--passes", type=int, default=8)
    options = parser.parse_args()
    on_cpu = all(name == "cpu" for name in options.devices)
    dtype = torch.float32 if on_cpu else torch.float16
    shape = (1, options.heads, options.tokens, 64)
    q, k, v = (torch.randn(shape).to(dtype).share_memory_() for _ in range(3))
    with Pool(options.devices, threads=1 if on_cpu else None) as pool:
        alike = pool.alike
        for name in ("alike", "small orders"):
            pool.alike = alike if name == "alike" else lambda *asked: False  # type: ignore[method-assign]
            found: list[dict[str, float]] = []
            outside: list[float] = []
            for _ in range(options.passes):
                report = qa.Report()
                begun = time.perf_counter()
                out: Any = qa.attention(q, k, v, is_causal=True, devices=pool, report=report)
                seconds = time.perf_counter() - begun
                found.append(waits(report.pool.forward))
                outside.append(seconds - report.pool.forward.seconds)
                del out
            later = found[2:] or found
            said = {key: statistics.median(one[key] for one in later) for key in later[0]}
            said["call ms"] = 1e3 * statistics.median(outside[2:] or outside)
            print(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in said.items()))


if __name__ == "__main__":
    main()
