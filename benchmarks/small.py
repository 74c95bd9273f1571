"""Small calls on a CPU against torch's own, side by side: what a call that fits costs beyond it.

    python benchmarks/small.py [--threads 1] [--seconds 0.4] [--cpu-time] [--in-turn] [--json FILE]

Three columns of each: a forward without gradients, a forward that records them, and a forward with
its backward through autograd; microseconds, medians of torch.utils.benchmark, the two methods in
turn. "growing" has one key more in every call, as a model that decodes. --cpu-time counts what the
one thread computes, on cores that others use as well. --in-turn takes each method after the other,
call by call, in all orders: each finds the processor's caches as another's backward has left them.
Differences are then medians of pairs, and torch is a third method too: what it differs from itself
by ("itself") is what the measurement is off by.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import operator
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

import quorum_attention as qa

_ROUNDS = 3
_METHODS: dict[str, Callable[..., torch.Tensor]] = {
    "torch": scaled_dot_product_attention,
    "quorum": qa.attention,
}
# torch once more, as the third in turn.
_AGAIN = "torch again"


@dataclass(frozen=True)
class Case:
    """One call: its sizes, and what it asks for."""

    queries: int
    keys: int
    heads: int = 8
    kv_heads: int = 8
    batch: int = 1
    dtype: torch.dtype = torch.float32
    causal: bool = False
    mask: bool = False
    growing: bool = False

    def name(self) -> str:
        """In a line."""
        heads = f"{self.heads}/{self.kv_heads}" if self.heads != self.kv_heads else str(self.heads)
        extra = [word for word in ("causal", "mask", "growing") if getattr(self, word)]
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.batch} x {heads} x {self.queries} x {self.keys} {' '.join([dtype, *extra])}"


CASES = (
    Case(1, 1000),
    Case(1, 1000, growing=True),
    Case(1, 1000, kv_heads=2),
    Case(1, 1000, kv_heads=2, growing=True),
    Case(1, 1000, dtype=torch.bfloat16),
    Case(1, 200, batch=4, kv_heads=2),
    Case(64, 64),
    Case(64, 64, causal=True),
    Case(64, 64, mask=True),
    Case(64, 64, kv_heads=2, causal=True),
    Case(64, 64, kv_heads=1),
    Case(16, 16, dtype=torch.bfloat16),
    Case(256, 256, causal=True),
    Case(256, 256, kv_heads=2, causal=True),
    # With gradients of ours, or that were.
    Case(1, 1000, dtype=torch.float64),
    Case(1, 200, dtype=torch.float64),
    Case(16, 16, dtype=torch.float64),
    Case(64, 64, dtype=torch.float64, causal=True),
    Case(64, 64, dtype=torch.float64, kv_heads=2, causal=True),
    Case(64, 64, dtype=torch.float64, mask=True),
    Case(1, 1000, dtype=torch.float16),
    Case(1, 1000, dtype=torch.float16, kv_heads=2),
    Case(16, 16, dtype=torch.float16),
    Case(64, 64, dtype=torch.float16, causal=True),
    Case(64, 64, dtype=torch.float16, kv_heads=2, causal=True),
    Case(256, 256, dtype=torch.float16, causal=True),
    Case(1, 1000, dtype=torch.bfloat16, kv_heads=2),
    Case(64, 64, dtype=torch.bfloat16, causal=True),
    Case(64, 64, dtype=torch.bfloat16, kv_heads=2, causal=True),
    Case(64, 64, dtype=torch.bfloat16, kv_heads=2, mask=True),
    Case(256, 256, dtype=torch.bfloat16, kv_heads=2, causal=True),
)


def calls(case: Case, attend: Callable[..., torch.Tensor]) -> dict[str, Callable[[], object]]:
    """The three things that are timed."""
    room = case.keys + (20_000 if case.growing else 0)
    query = torch.randn(case.batch, case.heads, case.queries, 64).to(case.dtype)
    key, value = (torch.randn(case.batch, case.kv_heads, room, 64).to(case.dtype) for _ in range(2))
    grad_out = torch.randn_like(query)
    options: dict[str, Any] = {
        "is_causal": case.causal,
        "enable_gqa": case.heads != case.kv_heads,
    }
    if case.mask:
        options["attn_mask"] = torch.rand(case.queries, case.keys) < 0.7
    steps = itertools.cycle(range(room - case.keys + 1))
    leaves = [
        t.clone().requires_grad_()
        for t in (query, key[:, :, : case.keys], value[:, :, : case.keys])
    ]

    def forward() -> torch.Tensor:
        n = case.keys + next(steps)
        with torch.no_grad():
            return attend(query, key[:, :, :n], value[:, :, :n], **options)

    def recorded() -> torch.Tensor:
        return attend(*leaves, **options)

    def both() -> object:
        return torch.autograd.grad(recorded(), leaves, grad_out)

    return {"forward": forward, "recorded": recorded, "forward+backward": both}


Times = dict[str, dict[str, list[float]]]


def in_blocks(case: Case, seconds: float, threads: int, clock: Callable[[], float]) -> Times:
    """Microseconds of a call by what is timed and by method, each method for a while."""
    made = {name: calls(case, attend) for name, attend in _METHODS.items()}
    times: Times = {}
    for _ in range(_ROUNDS):
        for name, what in made.items():
            for label, call in what.items():
                timer = Timer("call()", globals={"call": call}, num_threads=threads, timer=clock)
                found = timer.blocked_autorange(min_run_time=seconds).median * 1e6
                times.setdefault(label, {}).setdefault(name, []).append(found)
    return times


def in_turn(case: Case, seconds: float, clock: Callable[[], float]) -> Times:
    """As ``in_blocks``, but each method's call after another's, in every order."""
    methods = {**_METHODS, _AGAIN: scaled_dot_product_attention}
    made = {name: calls(case, attend) for name, attend in methods.items()}
    labels = list(made["torch"])
    times: Times = {label: {name: [] for name in made} for label in labels}
    for label in labels:
        for name in made:
            made[name][label]()  # the first backward of a process takes 0.3 s
        ends = time.monotonic() + len(made) * _ROUNDS * seconds
        for order in itertools.cycle(itertools.permutations(made)):
            for name in order:
                began = clock()
                made[name][label]()
                times[label][name].append((clock() - began) * 1e6)
            if time.monotonic() > ends:
                break
    return times


def measure(
    case: Case, seconds: float, threads: int, clock: Callable[[], float], *, turns: bool
) -> dict[str, dict[str, float]]:
    """Microseconds by what is timed and by method, and what we take beyond torch."""
    found = in_turn(case, seconds, clock) if turns else in_blocks(case, seconds, threads, clock)
    result = {}
    for label, by_method in found.items():
        medians = {name: statistics.median(times) for name, times in by_method.items()}
        beyond = {
            name: statistics.median(map(operator.sub, times, by_method["torch"]))
            for name, times in by_method.items()
        }
        result[label] = {
            **medians,
            "beyond": beyond["quorum"],
            "ratio": medians["quorum"] / medians["torch"],
        }
        if turns:
            result[label]["itself"] = beyond[_AGAIN]
            result[label]["turns"] = len(by_method["torch"])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.2, help="of each of three rounds")
    parser.add_argument("--cpu-time", action="store_true", help="of the thread, with one thread")
    parser.add_argument("--in-turn", action="store_true", help="each method after the other")
    parser.add_argument("--case", help="only those that this is a part of: '256 x 256 float32'")
    parser.add_argument("--json")
    args = parser.parse_args()
    clock = time.perf_counter
    if args.cpu_time:
        args.threads, clock = 1, time.thread_time
    torch.set_num_threads(args.threads)
    rows = []
    print(f"{'batch x heads x queries x keys':44}  microseconds: torch, ours (beyond, ratio)")
    for case in CASES:
        if args.case and args.case not in case.name():
            continue
        found = measure(case, args.seconds, args.threads, clock, turns=args.in_turn)
        rows.append({"case": case.name(), **found})
        cells = [
            f"{label} {f['torch']:.0f}, {f['quorum']:.0f} ({f['beyond']:+.0f}, {f['ratio']:.2f}"
            + (f", itself {f['itself']:+.0f})" if args.in_turn else ")")
            for label, f in found.items()
        ]
        print(f"{case.name():44}  {'; '.join(cells)}", flush=True)
    if args.json:
        about = {
            "date": datetime.date.today().isoformat(),
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "threads": args.threads,
            "calls": "in turn" if args.in_turn else "in blocks",
            "time": "of the thread's processor" if args.cpu_time else "wall",
            "microseconds": rows,
        }
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(about, file, indent=1)


if __name__ == "__main__":
    main()
