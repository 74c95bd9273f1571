"""Host-streamed attention against monolithic kernels on device-resident inputs, side by side.

    python benchmarks/streaming.py [--tokens 258048] [--levels 7] [--budget 1GiB] [--json FILE]

Ours reads query, key, value (and the upstream gradient) from pinned host memory and writes the
results to pinned host memory; the monolithic kernels have everything on the device. All methods
run in turn, several times over, in one process; ratios are of medians.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import quorum_attention as qa
from quorum_attention.kernels import kernels
from quorum_attention.sizes import format_bytes, parse_bytes


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one run, the device idle before and after."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def monolithic(
    name: str, tensors: list[torch.Tensor], scale: float
) -> dict[str, Callable[[], Any]]:
    """Forward, and forward+backward, of torch's operator on the device."""
    kernel: Any = kernels()[name]
    query, key, value, grad = tensors

    def forward() -> Any:
        return kernel.rectangle_forward(query, key, value, True, scale, None)

    def both() -> Any:
        out, lse = forward()
        return kernel.rectangle_backward(grad, query, key, value, out, lse, True, scale, None)

    return {"forward": forward, "forward+backward": both}


def streamed(
    tensors: list[torch.Tensor],
    budget: int | None,
    plans: dict[bool, Any],
    reports: list[qa.Report],
) -> dict[str, Callable[[], Any]]:
    """The same by quorum attention, host to host."""
    query, key, value, grad = tensors
    out = torch.empty_like(query).pin_memory()
    grads = tuple(torch.empty_like(t).pin_memory() for t in (query, key, value))

    def forward() -> Any:
        reports.append(qa.Report())
        return qa.attention_with_lse(
            query, key, value, is_causal=True, budget=budget, plan=plans.get(False), out=out,
            report=reports[-1],
        )  # fmt: skip

    def both() -> Any:
        result, lse = forward()
        return qa.attention_backward(
            grad, query, key, value, result, lse, is_causal=True, budget=budget,
            plan=plans.get(True), grads=grads, report=reports[-1],
        )  # fmt: skip

    return {"forward": forward, "forward+backward": both}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=258_048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--levels", default="7", help="chunk counts, comma-separated; 'auto'")
    parser.add_argument("--heads-per-group", type=int)
    parser.add_argument("--budget")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rivals", default="cudnn,flash")
    parser.add_argument("--json")
    args = parser.parse_args()

    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    shape = (1, args.heads, args.tokens, args.head_dim)
    device = [torch.randn(shape, dtype=dtype, device="cuda") for _ in range(4)]
    host = [t.cpu().pin_memory() for t in device]
    budget = None if args.budget is None else parse_bytes(args.budget)
    plans = {}
    if args.levels != "auto":
        levels = tuple(int(c) for c in args.levels.split(",") if c)
        for backward in (False, True):
            plans[backward] = qa.plan(
                args.tokens, heads=args.heads, head_dim=args.head_dim, dtype=dtype,
                is_causal=True, levels=levels, budget=budget,
                heads_per_group=args.heads_per_group, backward=backward,
            )  # fmt: skip
    reports: list[qa.Report] = []
    scale = args.head_dim**-0.5
    methods = {name: monolithic(name, device, scale) for name in args.rivals.split(",")}
    methods["quorum"] = streamed(host, budget, plans, reports)

    seconds: dict[str, dict[str, list[float]]] = {m: {} for m in methods}
    cold = {}
    for what in ("forward", "forward+backward"):
        for name, runs in methods.items():
            cold[f"{name} {what}"] = timed(runs[what])
        for _ in range(args.repeats):
            for name, runs in methods.items():
                seconds[name].setdefault(what, []).append(timed(runs[what]))
    median = {
        m: {what: statistics.median(s) for what, s in by.items()} for m, by in seconds.items()
    }
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "arguments": {k: v for k, v in vars(args).items() if k != "json"},
        "seconds": seconds,
        "cold_seconds": cold,
        "ratios": {
            f"quorum/{m} {what}": median["quorum"][what] / median[m][what]
            for m in methods
            if m != "quorum"
            for what in median[m]
        },
        "report": reports[-1].to_dict(),
    }
    print(f"{args.tokens} tokens, {args.heads} heads of {args.head_dim}, {args.dtype}, causal")
    for m in methods:
        print(f"  {m:8s}", {w: round(s, 4) for w, s in median[m].items()},
              "cold", {w: round(cold[f'{m} {w}'], 3) for w in median[m]})  # fmt: skip
    for name, ratio in result["ratios"].items():
        print(f"  {name}: {ratio:.3f}")
    peak = max(p.peak_bytes or 0 for p in (reports[-1].forward, reports[-1].backward) if p)
    print(f"  peak device memory {format_bytes(peak)}" + (f" of {args.budget}" if budget else ""))
    print(reports[-1])
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
