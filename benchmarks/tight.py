"""Tight budgets: the kernel that "auto" plans for beside cuDNN, from and to page-locked memory.

    python benchmarks/tight.py [--cases 1048576,524288x128,gqa] [--repeats 1] [--json FILE]

Causal, batch 1. For every budget and kernel the median seconds of forward and backward after a
first call, what was predicted, the plan and the peak of device memory. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import quorum_attention as qa
from quorum_attention.sizes import format_bytes, parse_bytes
from quorum_attention.writing import write_text

# tokens, heads, kv_heads, head_dim, dtype, budgets
CASES: dict[str, tuple[int, int, int, int, torch.dtype, tuple[str, ...]]] = {
    "1048576": (1 << 20, 8, 8, 64, torch.float16, ("128MiB",)),
    "524288x128": (1 << 19, 8, 8, 128, torch.float16, ("256MiB",)),
    "gqa": (1 << 18, 32, 8, 128, torch.bfloat16, ("256MiB",)),
}


def measure(case: str, budget: str, kernel: str, repeats: int) -> dict[str, Any]:
    """Both passes of one call."""
    tokens, heads, kv_heads, head_dim, dtype, _ = CASES[case]

    def made(n_heads: int) -> torch.Tensor:
        shape = (1, n_heads, tokens, head_dim)
        return torch.randn(shape, dtype=dtype, device="cuda").cpu().pin_memory()

    query, grad, out, grad_query = (made(heads) for _ in range(4))
    key, value, grad_key, grad_value = (made(kv_heads) for _ in range(4))
    torch.cuda.empty_cache()
    options: dict[str, Any] = {
        "is_causal": True, "enable_gqa": heads != kv_heads, "budget": budget, "kernel": kernel,
    }  # fmt: skip
    seconds: list[tuple[float, float]] = []
    report: qa.Report | None = None
    for attempt in range(repeats + 2):
        # Timing every stage of thousands of units costs a fifth: one run more for the report.
        report = qa.Report() if attempt > repeats else None
        began = time.perf_counter()
        _, lse = qa.attention_with_lse(query, key, value, out=out, report=report, **options)
        torch.cuda.synchronize()
        half = time.perf_counter()
        qa.attention_backward(
            grad, query, key, value, out, lse, grads=(grad_query, grad_key, grad_value),
            report=report, **options,
        )  # fmt: skip
        torch.cuda.synchronize()
        seconds.append((half - began, time.perf_counter() - half))
    assert report is not None
    found: dict[str, Any] = {"case": case, "budget": budget, "kernel": kernel}
    timed = seconds[1:-1]
    for index, part in enumerate((report.forward, report.backward)):
        assert part is not None
        assert part.peak_bytes is not None
        assert part.peak_bytes <= parse_bytes(budget)
        plan = qa.plan(
            tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype,
            is_causal=True, budget=budget, kernel=kernel, backward=index == 1,
        )  # fmt: skip
        found["backward" if index else "forward"] = {
            "seconds": statistics.median(t[index] for t in timed),
            "first": seconds[0][index],
            "predicted": plan.predicted_seconds,
            "kernel": part.kernel,
            "levels": part.levels,
            "slots": part.n_cap,
            "peak_bytes": part.peak_bytes,
        }
    return found


def _write(result: dict[str, Any], path: str | None) -> None:
    if path:
        write_text(path, json.dumps(result, indent=1))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(), "date": datetime.date.today().isoformat(),
        "runs": [],
    }  # fmt: skip
    table = Table("case", "budget", "kernel", "pass", "ran on", "plan", "s", "predicted", "peak")
    for case in args.cases.split(","):
        for budget in CASES[case][-1]:
            for kernel in ("cudnn", "auto"):
                try:
                    run = measure(case, budget, kernel, args.repeats)
                except qa.BudgetError as error:
                    result["runs"].append(
                        {"case": case, "budget": budget, "kernel": kernel, "error": str(error)}
                    )
                    table.add_row(case, budget, kernel, "does not fit")
                    _write(result, args.json)
                    continue
                result["runs"].append(run)
                for name in ("forward", "backward"):
                    part = run[name]
                    table.add_row(
                        case, budget, kernel, name, part["kernel"],
                        f"{part['levels']}, {part['slots']} slots", f"{part['seconds']:.3f}",
                        f"{part['predicted']:.3f}", format_bytes(part["peak_bytes"]),
                    )  # fmt: skip
                _write(result, args.json)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
