"""The process's own peak beside a call's budget: what memory is taken beyond torch's allocator.

Each budget in a process of its own, forward and backward after a small call that loads what is
loaded once. ``python benchmarks/beyond.py [--device cuda] [--json FILE]``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

MIB = 1 << 20
BUDGETS = {"cpu": (16, 32, 64, 128, 256), "cuda": (64, 128, 256, 512, 1024)}
SIZES = {"cpu": (16_384, 8, 64), "cuda": (131_072, 8, 64)}


def main() -> int:
    """Prints a row for each budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--budget", type=int, action="append", help="in MiB; may be repeated")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        print(json.dumps(measured(given.device, given.child * MIB)))
        return 0
    rows = []
    print("| budget | pass | planned | torch's allocator | process | beyond | page-locked |")
    print("|---|---|---|---|---|---|---|")
    for budget in given.budget or BUDGETS[given.device]:
        command = [sys.executable, __file__, "--device", given.device, "--child", str(budget)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        for row in json.loads(done.stdout.splitlines()[-1]):
            rows.append(row)
            names = ("planned", "allocator", "process", "beyond", "page_locked")
            shown = ("" if row[n] is None else f"{row[n] / MIB:.1f}" for n in names)
            print(f"| {budget} | {row['pass']} | {' | '.join(shown)} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def measured(device: str, budget: int) -> list[dict[str, Any]]:
    """Peaks of a forward and of its backward, in bytes, from where the process was before.

    Inputs and results are in host memory, and touched before. "process": of resident memory.
    "beyond": of this what the plan does not account for; on a GPU all of it.
    """
    import torch

    import quorum_attention as qa

    locked = _watch_page_locks(torch) if device == "cuda" else {}
    n, heads, d = SIZES[device]
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v, grad, out, *grads = (torch.randn(1, heads, n, d).to(dtype) for _ in range(8))
    lse_shape = (1, heads, n)
    small = [t[:, :, :300].clone() for t in (q, k, v, grad)]
    how: dict[str, Any] = {"is_causal": True, "devices": device}
    first = qa.attention_with_lse(*small[:3], depth=1, **how)
    qa.attention_backward(small[3], *small[:3], *first, depth=1, **how)
    rows, lse = [], torch.zeros(lse_shape)

    def forward(report: Any) -> None:
        nonlocal lse
        _, lse = qa.attention_with_lse(q, k, v, out=out, budget=budget, report=report, **how)

    def backward(report: Any) -> None:
        qa.attention_backward(
            grad, q, k, v, out, lse, grads=tuple(grads), budget=budget, report=report, **how
        )

    for name, call in (("forward", forward), ("backward", backward)):
        report = qa.Report()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        locked["peak"] = locked.get("now", 0)
        before = _reset_peak()
        try:
            call(report)
        except qa.BudgetError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        taken = _status("VmHWM") - before
        planned = getattr(report, name).planned_peak_bytes
        rows.append({
            "budget": budget, "pass": name, "planned": planned,
            "allocator": torch.cuda.max_memory_allocated() if device == "cuda" else None,
            "process": taken, "beyond": taken - planned if device == "cpu" else taken,
            "page_locked": locked["peak"] if device == "cuda" else None,
        })  # fmt: skip
    return rows


def _reset_peak() -> int:
    """Resident bytes now, free ones given back; from here on VmHWM counts anew."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def _watch_page_locks(torch: Any) -> dict[str, int]:
    """Counts what is page-locked through torch's runtime: "now" and "peak"."""
    runtime, found, sizes = torch.cuda.cudart(), {"now": 0, "peak": 0}, {}
    lock, unlock = runtime.cudaHostRegister, runtime.cudaHostUnregister

    def locked(start: int, n_bytes: int, flags: int) -> Any:
        answer = lock(start, n_bytes, flags)
        if int(answer) == 0:
            sizes[start] = n_bytes
            found["now"] += n_bytes
            found["peak"] = max(found["peak"], found["now"])
        return answer

    def unlocked(start: int) -> Any:
        found["now"] -= sizes.pop(start, 0)
        return unlock(start)

    runtime.cudaHostRegister, runtime.cudaHostUnregister = locked, unlocked
    return found


if __name__ == "__main__":
    sys.exit(main())
