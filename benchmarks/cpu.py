"""Quorum attention against torch's monolithic attention on the CPU, side by side.

    python benchmarks/cpu.py [--cases demo,depth1,depth1-bf16] [--threads 2] [--json FILE]
    python benchmarks/cpu.py --cases long --repeats 1

Causal, same thread count, on random inputs drawn afresh. The methods run in turn, several times
over, in one process, after a call of each that does not count; ratios are of medians.

`demo` is the call of `make demo`: results given, a budget below them. torch's forward returns what
it makes; its backward is its own operator on what the forward returned. The other cases are plain
calls, gradients through autograd. `long` has no other method to be compared with: it says how much
memory a call takes beyond its results, counted by torch's allocator.

Cores shared with other work distort the comparison: OpenMP threads that spin at the end of each of
the many small copies lose whole scheduler ticks. OMP_WAIT_POLICY=passive takes that away.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.profiler import profile
from torch.nn.functional import scaled_dot_product_attention

import quorum_attention as qa
from quorum_attention.writing import write_text


@dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        budget: None is without one; results are given where there is one.
        levels: chunk counts of a plan that is given; None leaves the plan to the call.
        alone: whether only our memory is measured.
    """

    tokens: int
    heads: int
    dtype: torch.dtype = torch.float32
    budget: int | None = None
    levels: tuple[int, ...] | None = None
    alone: bool = False


CASES = {
    "demo": Case(16_384, 8, budget=22 << 20),
    "depth1": Case(32_768, 2, levels=(7,)),
    "depth1-bf16": Case(32_768, 2, torch.bfloat16, levels=(7,)),
    "long": Case(65_536, 8, budget=16 << 20, alone=True),
}
Methods = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]


def methods_of(case: Case) -> Methods:
    """By name, a forward and its backward, of the same tensors."""
    shape = (1, case.heads, case.tokens, 64)
    query, key, value, grad = (torch.randn(shape).to(case.dtype) for _ in range(4))
    three = (query, key, value)
    if case.budget is None:
        plans = [
            qa.plan(
                case.tokens, heads=case.heads, dtype=case.dtype, is_causal=True,
                levels=case.levels, device="cpu", inputs="device",
            )
        ]  # fmt: skip
        return {
            "torch": _by_autograd(
                lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), three, grad
            ),
            "quorum": _by_autograd(
                lambda q, k, v: qa.attention(q, k, v, is_causal=True, plan=plans[0]), three, grad
            ),
        }
    limits = {"is_causal": True, "budget": case.budget}
    out, grads = torch.empty(shape), tuple(torch.empty(shape) for _ in range(3))
    kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def ours() -> None:
        kept["quorum"] = qa.attention_with_lse(*three, out=out, **limits)

    def ours_backward() -> None:
        qa.attention_backward(grad, *three, *kept["quorum"], grads=grads, **limits)

    if case.alone:
        return {"quorum": (ours, ours_backward)}
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def torchs() -> None:
        kept["torch"] = forward(*three, 0.0, True)

    def torchs_backward() -> None:
        backward(grad, *three, *kept["torch"], 0.0, True)

    return {"torch": (torchs, torchs_backward), "quorum": (ours, ours_backward)}


def _by_autograd(
    attend: Callable[..., torch.Tensor], three: tuple[torch.Tensor, ...], grad: torch.Tensor
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    made: list[Any] = []

    def forward() -> None:
        inputs = [t.detach().requires_grad_() for t in three]
        made[:] = [attend(*inputs), inputs]

    def backward() -> None:
        torch.autograd.grad(*made, grad)

    return forward, backward


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of one call, and seconds of CPU time of all threads."""
    started, used = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - started, time.process_time() - used


def peak_mib(call: Callable[[], Any]) -> float:
    """MiB of torch's allocator that ``call`` takes at most at any one time, inside operators too,
    what it returns included."""
    with profile(profile_memory=True) as profiled:
        call()
    live = peak = 0
    events = [e for e in profiled.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak / 2**20


def run(name: str, case: Case, repeats: int) -> dict[str, Any]:
    """Measure a case and print it."""
    methods = methods_of(case)
    print(
        f"{name}: {case.tokens} tokens, {case.heads} heads of 64, {case.dtype}, causal, "
        f"{torch.get_num_threads()} threads, budget {case.budget}, levels {case.levels}"
    )
    if case.alone:
        # What is imported and tried out once is not the call's.
        for call in methods_of(replace(case, tokens=1024))["quorum"]:
            call()
        peaks, seconds = {}, {}
        for part, call in zip(("forward", "backward"), methods["quorum"], strict=True):
            started = time.perf_counter()
            peaks[part] = peak_mib(call)
            seconds[part] = time.perf_counter() - started
            print(f"  {part:9s} {peaks[part]:.2f} MiB beyond results, {seconds[part]:.1f} s")
        return {"seconds": seconds, "peak_mib": peaks}
    parts = [f"{part}{of}" for part in ("forward", "backward") for of in ("", ", CPU time")]
    taken: dict[str, dict[str, list[float]]] = {
        part: {method: [] for method in methods} for part in parts
    }
    for turn in range(repeats + 1):
        for method, calls in methods.items():
            for part, seconds in zip(parts, (*timed(calls[0]), *timed(calls[1])), strict=True):
                if turn:
                    taken[part][method].append(seconds)
    ratios = {}
    for part, by in taken.items():
        middle = {method: statistics.median(of) for method, of in by.items()}
        ratios[part] = middle["quorum"] / middle["torch"]
        least = min(by["quorum"]) / min(by["torch"])
        times = ", ".join(f"{method} {s:.3f} s" for method, s in middle.items())
        print(f"  {part:18s} {times}: quorum/torch {ratios[part]:.3f} (of minima {least:.3f})")
    return {"seconds": taken, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default="demo,depth1,depth1-bf16", help="of " + ",".join(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="torch's default where left out")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    found = {name: run(name, CASES[name], args.repeats) for name in args.cases.split(",")}
    if args.json:
        result: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": platform.platform(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"),
            "load": os.getloadavg(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "quorum_attention": qa.__version__,
            "cases": found,
        }
        write_text(args.json, json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
