"""Quorum attention against torch's monolithic attention on the CPU, side by side.

    python benchmarks/cpu.py [--tokens 32768] [--heads 2] [--levels 7] [--json FILE]

fp32, causal, same thread count, gradients through autograd for both. The methods run in turn,
several times over, in one process, on random inputs drawn afresh; ratios are of medians.

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
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import quorum_attention as qa
from quorum_attention.writing import write_text

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def timed(attend: Attend, tensors: list[torch.Tensor], backward: bool) -> float:
    """Seconds of one forward, or of a forward and its gradients."""
    query, key, value, grad = tensors
    inputs = [t.detach().requires_grad_(backward) for t in (query, key, value)]
    started = time.perf_counter()
    out = attend(*inputs)
    if backward:
        torch.autograd.grad(out, inputs, grad)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--levels", default="7", help="chunk counts, comma-separated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="torch's default where left out")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    levels = tuple(int(c) for c in args.levels.split(",") if c)
    plan = qa.plan(
        args.tokens, heads=args.heads, head_dim=args.head_dim, dtype=torch.float32,
        is_causal=True, levels=levels, device="cpu", inputs="device",
    )  # fmt: skip

    methods: dict[str, Attend] = {
        "torch": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
        "quorum": lambda q, k, v: qa.attention(q, k, v, is_causal=True, plan=plan),
    }
    shape = (1, args.heads, args.tokens, args.head_dim)
    tensors = [torch.randn(shape) for _ in range(4)]
    difference = (methods["quorum"](*tensors[:3]) - methods["torch"](*tensors[:3])).abs().max()

    seconds: dict[str, dict[str, list[float]]] = {}
    for what, backward in (("forward", False), ("forward+backward", True)):
        taken: dict[str, list[float]] = {name: [] for name in methods}
        for _ in range(args.repeats):
            for name, attend in methods.items():
                taken[name].append(timed(attend, tensors, backward))
        seconds[what] = taken
    median = {
        what: {name: statistics.median(taken) for name, taken in by.items()}
        for what, by in seconds.items()
    }
    ratios = {what: by["quorum"] / by["torch"] for what, by in median.items()}
    print(
        f"{args.tokens} tokens, {args.heads} heads of {args.head_dim}, fp32, causal, levels "
        f"{levels}, {torch.get_num_threads()} threads; largest difference {difference:.1e}"
    )
    for what, ratio in ratios.items():
        times = ", ".join(f"{name} {s:.3f} s" for name, s in median[what].items())
        print(f"  {what:17s} {times}: quorum/torch {ratio:.3f}")
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
            "arguments": vars(args),
            "largest_difference": difference.item(),
            "seconds": seconds,
            "ratios": ratios,
        }
        write_text(args.json, json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
