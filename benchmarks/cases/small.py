"""Small calls on a CPU against torch's own, side by side: what a call that fits costs beyond it.

A forward without gradients, and a forward with its backward through autograd; microseconds,
medians. The methods take turns, call by call, in all orders: each finds the processor's caches as
another's backward has left them. torch is a third method, too: what it differs from itself by
("itself") is what the measurement is off by. --cpu-time counts what the thread computes.
"""

from __future__ import annotations

import argparse
import itertools
import operator
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import quorum_attention as qa

_METHODS: dict[str, Callable[..., torch.Tensor]] = {
    "torch": scaled_dot_product_attention,
    "quorum": qa.attention,
    "torch again": scaled_dot_product_attention,
}
# Batch, query heads, key/value heads, queries, keys; dtypes; causal.
CASES = [
    ((1, 8, 8, 1, 1000), "float32 float64 float16 bfloat16", False),
    ((1, 8, 2, 1, 1000), "float32 float16 bfloat16", False),
    ((4, 8, 2, 1, 200), "float32", False),
    ((1, 8, 8, 16, 16), "float64 float16 bfloat16", False),
    ((1, 8, 8, 64, 64), "float32", False),
    ((1, 8, 8, 64, 64), "float32 float64 float16 bfloat16", True),
    ((1, 8, 2, 64, 64), "float32 float64 float16 bfloat16", True),
    ((1, 8, 1, 64, 64), "float32", False),
    ((1, 8, 8, 256, 256), "float32 float16", True),
    ((1, 8, 2, 256, 256), "float32 bfloat16", True),
]


def calls(
    sizes: tuple[int, ...], dtype: torch.dtype, causal: bool, attend: Callable[..., torch.Tensor]
) -> dict[str, Callable[[], object]]:
    """What is timed."""
    batch, heads, kv_heads, queries, keys = sizes
    leaves = [
        torch.randn(batch, h, n, 64).to(dtype).requires_grad_()
        for h, n in ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    ]
    grad_out = torch.randn(batch, heads, queries, 64).to(dtype)
    options = {"is_causal": causal, "enable_gqa": heads != kv_heads}

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attend(*leaves, **options)

    def both() -> object:
        return torch.autograd.grad(attend(*leaves, **options), leaves, grad_out)

    return {"forward": forward, "forward+backward": both}


def measure(
    sizes: tuple[int, ...], dtype: torch.dtype, causal: bool, seconds: float,
    clock: Callable[[], float],
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Microseconds by what is timed and by method, and what we take beyond torch."""
    made = {name: calls(sizes, dtype, causal, attend) for name, attend in _METHODS.items()}
    result = {}
    for label in made["torch"]:
        times: dict[str, list[float]] = {name: [] for name in made}
        for name in made:
            made[name][label]()  # the first backward of a process takes 0.3 s
        ends = time.monotonic() + seconds
        for order in itertools.cycle(itertools.permutations(made)):
            for name in order:
                began = clock()
                made[name][label]()
                times[name].append((clock() - began) * 1e6)
            if time.monotonic() > ends:
                break
        median, theirs = statistics.median, times["torch"]
        beyond = {name: median(map(operator.sub, mine, theirs)) for name, mine in times.items()}
        middle = {name: median(times[name]) for name in ("torch", "quorum")}
        result[label] = {
            **middle, "beyond": beyond["quorum"], "ratio": middle["quorum"] / middle["torch"],
            "itself": beyond["torch again"], "turns": len(theirs),
        }  # fmt: skip
    return result


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=1.0, help="of each case")
    parser.add_argument("--cpu-time", action="store_true", help="of the thread")


def run(options: argparse.Namespace, _: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A line for each case."""
    clock = time.thread_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print(f"{'batch x heads x queries x keys':44}  microseconds: torch, ours (beyond, ratio)")
    for (batch, heads, kv_heads, queries, keys), dtypes, causal in CASES:
        for dtype in dtypes.split():
            grouped = f"{heads}/{kv_heads}" if heads != kv_heads else str(heads)
            name = f"{batch} x {grouped} x {queries} x {keys} {dtype}" + " causal" * causal
            sizes = (batch, heads, kv_heads, queries, keys)
            found = measure(sizes, getattr(torch, dtype), causal, options.seconds, clock)
            rows.append({"case": name, **found})
            cells = [
                f"{label} {f['torch']:.0f}, {f['quorum']:.0f} ({f['beyond']:+.0f}, "
                f"{f['ratio']:.2f}, itself {f['itself']:+.0f})"
                for label, f in found.items()
            ]
            print(f"{name:44}  {'; '.join(cells)}", flush=True)
            yield {"cpu_time": options.cpu_time, "microseconds": rows}
