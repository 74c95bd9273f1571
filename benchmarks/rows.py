"""One causal head on several devices: cut between rows, as pools do, against tasks of quorum sets.

    python benchmarks/rows.py [--device cuda:0] [--tokens 1048576] [--budget 1GiB] [--seconds 30]

First what goes between host and devices, counted, in units of one tensor of the head (tokens times
head dimension, 16 bits). Rows: a device has its rows and all keys that they see; gradients of keys
and values are added up by the host in fp32. Tasks: a device has a quorum of the chunks, and states
of its rows are merged, gradients added up, by the host in fp32. Then, if a device is named, how
long the two parts of two devices take on it, one after the other, against the whole head.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention.devices.partition import Sizes, partition

# Chunks in a quorum, of so many devices that have a chunk each: the smallest cyclic ones.
QUORUMS = {2: 2, 3: 2, 4: 3, 7: 3, 13: 4, 31: 6}


def counted(devices: int, tokens: int = 1 << 20) -> dict[str, float]:
    """Tensors of the head that are moved in all, forward and backward."""
    sizes = Sizes(1, 1, 1, tokens, tokens, True)
    parts = [part for home in partition(sizes, [1.0] * devices) for part in home]
    assert sum(map(sizes.pairs, parts)) == tokens * (tokens + 1) // 2
    keys = sum(part.keys.length for part in parts) / tokens
    quorum = QUORUMS[devices]
    # A sum in fp32 is two such tensors, written by a device and read by the host.
    return {
        "rows, forward": 1 + 2 * keys + 1,
        "tasks, forward": 3 * quorum + 4 * quorum + 1,
        "rows, backward": 3 + 2 * keys + 1 + 2 * 4 * keys + 2,
        "tasks, backward": 5 * quorum + 3 * 4 * quorum + 3,
    }


def timed(device: str, tokens: int, budget: str, seconds: float) -> None:
    begun = time.perf_counter()
    sizes = Sizes(1, 1, 1, tokens, tokens, True)
    first, last = (slice(*part.rows) for home in partition(sizes, [1.0] * 2) for part in home)
    every = slice(0, tokens)
    q, k, v, grad = (
        torch.randn(1, 1, tokens, 64, dtype=torch.float16, device=device).cpu() for _ in range(4)
    )
    same: dict[str, Any] = {"budget": budget, "devices": device}
    out, lse = qa.attention_with_lse(q, k, v, is_causal=True, **same)
    calls: dict[str, tuple[slice, slice, dict[str, Any]]] = {
        "whole": (every, every, {"is_causal": True}),
        "first rows": (first, first, {"is_causal": True}),
        "last rows": (last, every, {"attn_mask": Mask(causal=True, offset=last.start)}),
        "last rows, earlier keys": (last, first, {}),
        "last rows, own keys": (last, last, {"is_causal": True}),
    }
    for name, (rows, keys, more) in calls.items():
        three = [t[:, :, at].contiguous() for t, at in ((q, rows), (k, keys), (v, keys))]
        after = [t[:, :, rows].contiguous() for t in (grad, out, lse)]
        found = []
        for _ in range(3):
            if found and time.perf_counter() - begun > seconds:
                break
            report = qa.Report()
            times = [time.perf_counter()]
            qa.attention_with_lse(*three, **more, **same, report=report)
            times.append(time.perf_counter())
            qa.attention_backward(after[0], *three, *after[1:], **more, **same, report=report)
            times.append(time.perf_counter())
            found.append((times[1] - times[0], times[2] - times[1]))
        forward, backward = (min(one[i] for one in found) for i in (0, 1))
        assert report.forward is not None
        said = f"{name:24} forward {forward:.3f} s, backward {backward:.3f} s"
        print(f"{said} ({report.forward.kernel})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device")
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--budget", default="1GiB")
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    for devices in QUORUMS:
        found = ", ".join(f"{name} {moved:.1f}" for name, moved in counted(devices).items())
        print(f"{devices} devices: {found}", flush=True)
    if options.device is not None:
        timed(options.device, options.tokens, options.budget, options.seconds)


if __name__ == "__main__":
    main()
