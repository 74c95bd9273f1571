"""One small call at a time on a CPU against torch's own, side by side: what a call
that fits costs beyond it.

A forward without gradients, and a forward with its backward through autograd;
microseconds, medians. The methods take turns, call by call, in all orders: each finds
the processor's caches as another's backward has left them. torch is a third method,
too: what it differs from itself by ("itself") is what the measurement is off by.
--cpu-time counts what the thread computes.
"""

from __future__ import annotations

import argparse
import itertools
import operator
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import quorum_attention as qa

Attention = Callable[..., torch.Tensor]
Clock = Callable[[], float]

METHODS: dict[str, Attention] = {
    "torch": scaled_dot_product_attention,
    "quorum": qa.attention,
    "torch again": scaled_dot_product_attention,
}
HEAD_DIM = 64


@dataclass(frozen=True)
class Case:
    """A call."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dtypes: str
    causal: bool

    def name(self, dtype: str) -> str:
        """The row of this call in a dtype."""
        heads = str(self.heads)
        if self.heads != self.kv_heads:
            heads = f"{self.heads}/{self.kv_heads}"
        name = f"{self.batch} x {heads} x {self.queries} x {self.keys} {dtype}"
        return f"{name} causal" if self.causal else name


CASES = [
    Case(1, 8, 8, 1, 1000, "float32 float64 float16 bfloat16", False),
    Case(1, 8, 2, 1, 1000, "float32 float16 bfloat16", False),
    Case(4, 8, 2, 1, 200, "float32", False),
    Case(1, 8, 8, 16, 16, "float64 float16 bfloat16", False),
    Case(1, 8, 8, 64, 64, "float32", False),
    Case(1, 8, 8, 64, 64, "float32 float64 float16 bfloat16", True),
    Case(1, 8, 2, 64, 64, "float32 float64 float16 bfloat16", True),
    Case(1, 8, 1, 64, 64, "float32", False),
    Case(1, 8, 8, 256, 256, "float32 float16", True),
    Case(1, 8, 2, 256, 256, "float32 bfloat16", True),
]


def timed_calls(
    case: Case, dtype: torch.dtype, attend: Attention
) -> dict[str, Callable[[], object]]:
    """A forward, and a forward with its backward, on new inputs."""
    queries = (case.batch, case.heads, case.queries, HEAD_DIM)
    keys = (case.batch, case.kv_heads, case.keys, HEAD_DIM)
    leaves = [
        torch.randn(shape).to(dtype).requires_grad_() for shape in (queries, keys, keys)
    ]
    grad_out = torch.randn(queries).to(dtype)
    options = {"is_causal": case.causal, "enable_gqa": case.heads != case.kv_heads}

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attend(*leaves, **options)

    def forward_and_backward() -> object:
        return torch.autograd.grad(attend(*leaves, **options), leaves, grad_out)

    return {"forward": forward, "forward+backward": forward_and_backward}


def measure(
    case: Case, dtype: torch.dtype, seconds: float, clock: Clock
) -> dict[str, dict[str, float]]:
    """Microseconds of both passes: of torch, of ours, and beyond torch."""
    calls = {name: timed_calls(case, dtype, attend) for name, attend in METHODS.items()}
    return {
        passes: compare({name: calls[name][passes] for name in METHODS}, seconds, clock)
        for passes in ("forward", "forward+backward")
    }


def compare(
    calls: dict[str, Callable[[], object]], seconds: float, clock: Clock
) -> dict[str, float]:
    """Microseconds of the methods' calls, which take turns for so many seconds."""
    times = times_in_turn(calls, seconds, clock)
    torch_median = median(times["torch"])
    our_median = median(times["quorum"])
    return {
        "torch": torch_median,
        "quorum": our_median,
        "beyond": median_difference(times["quorum"], times["torch"]),
        "ratio": our_median / torch_median,
        "itself": median_difference(times["torch again"], times["torch"]),
        "turns": len(times["torch"]),
    }


def times_in_turn(
    calls: dict[str, Callable[[], object]], seconds: float, clock: Clock
) -> dict[str, list[float]]:
    """Microseconds of each turn, by method."""
    for call in calls.values():
        call()  # the first backward of a process takes 0.3 s
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.monotonic() + seconds
    for order in itertools.cycle(itertools.permutations(calls)):
        for name in order:
            start = clock()
            calls[name]()
            times[name].append((clock() - start) * 1e6)
        if time.monotonic() > end:
            break
    return times


def median_difference(times: list[float], reference_times: list[float]) -> float:
    return median(map(operator.sub, times, reference_times))


def describe(passes: str, result: dict[str, float]) -> str:
    return (
        f"{passes} {result['torch']:.0f}, {result['quorum']:.0f} "
        f"({result['beyond']:+.0f}, {result['ratio']:.2f}, itself "
        f"{result['itself']:+.0f})"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=1.0, help="of each case")
    parser.add_argument("--cpu-time", action="store_true", help="of the thread")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each case."""
    clock = time.thread_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(1)
    print(
        f"{'batch x heads x queries x keys':44}  microseconds: torch, ours (beyond, "
        "ratio)"
    )
    for case in CASES:
        for dtype in case.dtypes.split():
            name = case.name(dtype)
            results = measure(case, getattr(torch, dtype), options.seconds, clock)
            cells = [describe(passes, result) for passes, result in results.items()]
            print(f"{name:44}  {'; '.join(cells)}", flush=True)
            yield {name: results}
