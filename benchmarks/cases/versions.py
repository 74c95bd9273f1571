"""Two versions of this package side by side in one process, in turn: is the new one as fast?

Plain calls (cases/plain.py). On a GPU: calls streamed from pinned host memory under budgets, a
window of compiled FlexAttention on the device, the native kernel, and small calls; on a CPU: small
calls, cut calls, and plans. A first call of each is not counted; ratios are of medians, new over
old. (git worktree add ../before COMMIT; --before ../before/src)
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from cases.plain import Case, drawn, ours, placed
from measure import ROOT, Version, in_turn, medians, timed

_QUARTER = (1 << 18, 8, 8, 64, torch.float16)
_FOUR = (1 << 20, 4, 4, 64, torch.float16)
GPU = {
    "262144": Case(*_QUARTER, "1GiB"),
    "65536": Case(1 << 16, 8, 8, 64, torch.float16, "128MiB"),
    "gqa": Case(1 << 18, 32, 8, 128, torch.bfloat16, "2GiB"),
    "1048576-1GiB": Case(*_FOUR, "1GiB"),
    "1048576-256MiB": Case(*_FOUR, "256MiB"),
    "1048576-128MiB": Case(*_FOUR, "128MiB"),
    "native": Case(*_QUARTER, "256MiB", kernel="native"),
    "window": Case(*_QUARTER, place="device", kernel="flex"),
    "window-cut": Case(*_QUARTER, place="device", kernel="flex", depth=1),
    "small": Case(1 << 10, 8, 8, 64, torch.float16, place="device", calls=50),
}
CPU = {
    "16384": Case(1 << 14, 2, 2, 64, torch.float32, "24MiB", "device"),
    "8192-cut": Case(1 << 13, 2, 2, 64, torch.float32, place="device", depth=1),
    "small": Case(64, 8, 8, 64, torch.float32, place="device", calls=200),
}


def plans(versions: dict[str, Version]) -> dict[str, Any]:
    """Milliseconds of a first plan (of a length that nobody has asked for), and of one again."""
    found: dict[str, dict[str, list[float]]] = {n: {"first": [], "again": []} for n in versions}
    for number in range(7):
        for name, version in versions.items():
            with version.active() as qa:
                budget = "256MiB" if torch.cuda.is_available() else "8GiB"
                sizes = {"heads": 8, "head_dim": 64, "budget": budget, "backward": True}
                tokens = 1_000_000 + 128 * number
                first, _ = timed(lambda qa=qa, t=tokens, s=sizes: qa.plan(t, **s), 1)
                again, _ = timed(lambda qa=qa, t=tokens, s=sizes: qa.plan(t, **s), 50)
            found[name]["first"].append(first * 1e3)
            found[name]["again"].append(again * 1e3)
    return {
        name: {what: statistics.median(times) for what, times in each.items()}
        for name, each in found.items()
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--before", required=True, type=Path, help="src of the older version")
    parser.add_argument("--cases", help="by commas; all by default")
    parser.add_argument("--rounds", type=int, default=4)


def run(options: argparse.Namespace, _: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A line for each case."""
    on_gpu = torch.cuda.is_available()
    cases = GPU if on_gpu else CPU
    versions = {"old": Version(options.before), "new": Version(ROOT / "src")}
    planned = plans(versions)
    for name, each in planned.items():
        print(f"plans, {name}: first {each['first']:.1f} ms, again {each['again']:.3f} ms")
    found: dict[str, Any] = {}
    for name in options.cases.split(",") if options.cases else cases:
        tensors = placed(cases[name], drawn(cases[name], "cuda" if on_gpu else "cpu"))
        runs = {v: ours(cases[name], version, tensors, []) for v, version in versions.items()}
        calls = in_turn(runs, options.rounds + 1)
        old, new = (medians(calls[version][1:]) for version in versions)
        ratios = [b / a for a, b in zip(old, new, strict=True)]
        found[name] = {"seconds": {"old": old, "new": new}, "ratios": ratios}
        print(
            f"{name:16} forward {old[0] * 1e3:9.3f} {new[0] * 1e3:9.3f} ms ({ratios[0]:.3f})  "
            f"backward {old[1] * 1e3:9.3f} {new[1] * 1e3:9.3f} ms ({ratios[1]:.3f})",
            flush=True,
        )
        yield {"plans": planned, "cases": found}
