"""Host-streamed attention under several budgets against monolithic kernels, all in one process.

    python benchmarks/targets.py [--cases 1048576,524288x128,gqa] [--repeats 2] [--json FILE]

The monolithic kernels have everything on the device; ours reads from pinned host memory and
writes to it. For every budget: the first call and the median of later ones, forward and backward
apart, the ratio to the monolithic kernels (forward; forward+backward), what was predicted, and
the peak of device memory. Budgets and the limits to stay under are those of the table in
docs/planner.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import quorum_attention as qa
from quorum_attention.kernels import kernels
from quorum_attention.kernels.protocol import Call, Saved
from quorum_attention.sizes import format_bytes, parse_bytes
from quorum_attention.writing import write_text


@dataclass(frozen=True)
class Case:
    """A call: causal, batch 1."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    budgets: tuple[str, ...]
    backward: bool = True


CASES = {
    "262144": Case(1 << 18, 8, 8, 64, torch.float16, ("1GiB",)),
    "1048576": Case(1 << 20, 8, 8, 64, torch.float16, ("1GiB", "512MiB", "256MiB", "128MiB")),
    "524288x128": Case(1 << 19, 8, 8, 128, torch.float16, ("1GiB",)),
    "gqa": Case(1 << 18, 32, 8, 128, torch.bfloat16, ("2GiB",)),
    "4194304": Case(1 << 22, 8, 8, 64, torch.float16, ("1GiB",)),
    "8388608": Case(1 << 23, 8, 8, 64, torch.float16, ("1GiB",), backward=False),
    "65536": Case(1 << 16, 8, 8, 64, torch.float16, ("1GiB", "128MiB")),
}


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of one run, the device idle before and after; and what it returned."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    result = run()
    torch.cuda.synchronize()
    return time.perf_counter() - started, result


def monolithic(case: Case, name: str, tensors: list[torch.Tensor], repeats: int) -> dict[str, Any]:
    """Medians of torch's operator on the device."""
    kernel: Any = kernels()[name]
    query, key, value, grad = tensors
    call = Call(query, key, value, True, case.head_dim**-0.5)
    forward, backward = [], []
    for _ in range(repeats + 1):
        seconds, made = timed(lambda: kernel.rectangle_forward(call))
        forward.append(seconds)
        if not case.backward:
            backward.append(0.0)
            continue
        saved = Saved(grad, *made)
        seconds, _ = timed(lambda saved=saved: kernel.rectangle_backward(call, saved))
        backward.append(seconds)
        del made, saved
    torch.cuda.empty_cache()
    return {
        "forward": statistics.median(forward[1:] or forward),
        "backward": statistics.median(backward[1:] or backward),
    }


def streamed(
    case: Case, budget: str, host: list[torch.Tensor], results: list[torch.Tensor], repeats: int
) -> dict[str, Any]:
    """The same by quorum attention, host to host."""
    query, key, value, grad = host
    out, *grads = results
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "budget": budget}
    forward, backward, report = [], [], qa.Report()
    for _ in range(repeats + 1):
        report = qa.Report()
        seconds, (_, lse) = timed(
            lambda report=report: qa.attention_with_lse(
                query, key, value, out=out, report=report, **options
            )
        )
        forward.append(seconds)
        if not case.backward:
            backward.append(0.0)
            continue
        seconds, _ = timed(
            lambda lse=lse, report=report: qa.attention_backward(
                grad, query, key, value, out, lse, grads=tuple(grads), report=report, **options
            )
        )
        backward.append(seconds)
    sizes = {
        "heads": case.heads, "kv_heads": case.kv_heads, "head_dim": case.head_dim,
        "dtype": case.dtype, "is_causal": True, "budget": budget,
    }  # fmt: skip
    plans = [qa.plan(case.tokens, backward=b, **sizes) for b in (False, True)]
    passes = [p for p in (report.forward, report.backward) if p is not None]
    return {
        "forward": statistics.median(forward[1:] or forward),
        "backward": statistics.median(backward[1:] or backward),
        "first": forward[0] + backward[0],
        "predicted": [p.predicted_seconds for p in plans],
        "peak_bytes": max(p.peak_bytes or 0 for p in passes),
        "budget_bytes": parse_bytes(budget),
        "report": report.to_dict(),
    }


def measure(case: Case, rivals: list[str], repeats: int) -> dict[str, Any]:
    """All of a case."""
    torch.manual_seed(0)
    shapes = [(1, h, case.tokens, case.head_dim) for h in (case.heads, case.kv_heads)]
    device = [torch.randn(shapes[i], dtype=case.dtype, device="cuda") for i in (0, 1, 1, 0)]
    host = [t.cpu().pin_memory() for t in device]
    found: dict[str, Any] = {name: monolithic(case, name, device, repeats) for name in rivals}
    del device
    torch.cuda.empty_cache()
    results = [torch.empty_like(t).pin_memory() for t in (host[0], *host[:3])]
    found["quorum"] = {
        budget: streamed(case, budget, host, results, repeats) for budget in case.budgets
    }
    return found


def show(name: str, found: dict[str, Any], rivals: list[str]) -> None:
    """A table of one case."""
    table = Table(title=name)
    for column in (
        "", "forward", "f+b", *(f"/ {r}" for r in rivals), "first - warm", "predicted / measured",
        "peak", "levels",
    ):  # fmt: skip
        table.add_column(column)
    for rival in rivals:
        if rival not in found:
            continue
        own = found[rival]
        both = own["forward"] + own["backward"]
        table.add_row(rival, f"{own['forward']:.3f}", f"{both:.3f}")
    for budget, own in found["quorum"].items():
        both = own["forward"] + own["backward"]
        ratios = []
        for rival in rivals:
            their = found.get(rival)
            if their is None:
                ratios.append("")
                continue
            ratio = own["forward"] / their["forward"]
            total = both / (their["forward"] + their["backward"])
            ratios.append(f"{ratio:.3f}; {total:.3f}")
        predicted = [
            f"{p / own[w]:.2f}"
            for p, w in zip(own["predicted"], ("forward", "backward"), strict=True)
            if own[w]
        ]
        passes = own["report"]
        levels = [
            "x".join(map(str, passes[w]["levels"])) + f"/{passes[w]['heads_per_group']}"
            for w in ("forward", "backward")
            if passes[w]
        ]
        table.add_row(
            budget, f"{own['forward']:.3f}", f"{both:.3f}", *ratios,
            f"{own['first'] - both:.2f}", " ".join(predicted),
            f"{format_bytes(own['peak_bytes'])}", " ".join(levels),
        )  # fmt: skip
    Console(width=150).print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default="262144,1048576,524288x128,gqa")
    parser.add_argument("--rivals", default="cudnn,flash")
    parser.add_argument("--repeats", type=int, default=2, help="0 times the first call")
    parser.add_argument("--json")
    args = parser.parse_args()
    rivals = [name for name in args.rivals.split(",") if name]
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "cases": {},
    }
    for name in args.cases.split(","):
        found = measure(CASES[name], rivals, args.repeats)
        result["cases"][name] = found
        show(name, found, rivals)
        if args.json:
            write_text(args.json, json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
