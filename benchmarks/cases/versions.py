"""Two versions of this package side by side in one process, in turn: is the new one as fast?

On a GPU: calls streamed from pinned host memory under budgets, a window of compiled FlexAttention
on the device, the native kernel, and small calls; forward and backward apart. On a CPU: small
calls, cut calls, and plans. Every case is run once by each version before it is measured, results
are allocated beforehand, and the versions alternate; ratios are of medians, new over old.
(git worktree add ../before COMMIT; --before ../before/src)
"""

from __future__ import annotations

import argparse
import importlib
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import PACKAGE, ROOT, Version, in_turn, medians, timed


@dataclass(frozen=True)
class Case:
    """A call: batch 1; ``budget`` None: inputs on the device, and all that is free."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    budget: str | None
    kernel: str = "auto"
    depth: int | str = "auto"
    calls: int = 1


_HALF = torch.float16
GPU = {
    "262144": Case(1 << 18, 8, 8, 64, _HALF, "1GiB"),
    "65536": Case(1 << 16, 8, 8, 64, _HALF, "128MiB"),
    "gqa": Case(1 << 18, 32, 8, 128, torch.bfloat16, "2GiB"),
    "1048576-1GiB": Case(1 << 20, 4, 4, 64, _HALF, "1GiB"),
    "1048576-256MiB": Case(1 << 20, 4, 4, 64, _HALF, "256MiB"),
    "1048576-128MiB": Case(1 << 20, 4, 4, 64, _HALF, "128MiB"),
    "native": Case(1 << 18, 8, 8, 64, _HALF, "256MiB", kernel="native"),
    "window": Case(1 << 18, 8, 8, 64, _HALF, None, kernel="window"),
    "window-cut": Case(1 << 18, 8, 8, 64, _HALF, None, kernel="window", depth=1),
    "small": Case(1 << 10, 8, 8, 64, _HALF, None, calls=50),
}
CPU = {
    "16384": Case(1 << 14, 2, 2, 64, torch.float32, "24MiB"),
    "8192-cut": Case(1 << 13, 2, 2, 64, torch.float32, None, depth=1),
    "small": Case(64, 8, 8, 64, torch.float32, None, calls=200),
}


def kernel_of(qa: Any, case: Case) -> Any:
    """What is handed over as ``kernel=``."""
    if case.kernel != "window":
        return case.kernel
    kit = importlib.import_module(f"{PACKAGE}.kernels.kit")
    return kit.from_score_mod(None, kit.sliding_window(4096), compiled=True)


class Runner:
    """One version on one case's tensors."""

    def __init__(
        self, version: Version, case: Case, inputs: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        self.version, self.case, self.inputs, self.results = version, case, inputs, results
        with version.active() as qa:
            self.options: dict[str, Any] = {
                "is_causal": case.kernel != "window", "enable_gqa": True, "budget": case.budget,
                "depth": case.depth, "kernel": kernel_of(qa, case),
            }  # fmt: skip

    def __call__(self) -> tuple[float, float]:
        """Seconds of a forward and of a backward."""
        query, key, value, grad = self.inputs
        out, *grads = self.results
        with self.version.active() as qa:
            forward, (_, lse) = timed(
                lambda: qa.attention_with_lse(query, key, value, out=out, **self.options),
                self.case.calls,
            )
            backward, _ = timed(
                lambda: qa.attention_backward(
                    grad, query, key, value, out, lse, grads=tuple(grads), **self.options
                ),
                self.case.calls,
            )
        return forward, backward


def measure(case: Case, versions: dict[str, Version], rounds: int) -> dict[str, Any]:
    """Medians of both, and their ratios."""
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    resident = "cuda" if on_gpu and case.budget is None else "cpu"
    pinned = on_gpu and resident == "cpu"
    shapes = [(1, h, case.tokens, case.head_dim) for h in (case.heads, case.kv_heads)]

    def made(shape: tuple[int, ...]) -> torch.Tensor:
        drawn = torch.randn(shape, device="cuda" if on_gpu else "cpu").to(case.dtype).to(resident)
        return drawn.pin_memory() if pinned else drawn

    inputs = [made(shapes[0]), made(shapes[1]), made(shapes[1]), made(shapes[0])]
    results = [torch.zeros_like(inputs[i], pin_memory=pinned) for i in (3, 0, 1, 2)]
    runners = {name: Runner(version, case, inputs, results) for name, version in versions.items()}
    first = {name: runner() for name, runner in runners.items()}
    found = {name: medians(pairs) for name, pairs in in_turn(runners, rounds).items()}
    ratios = [new / old for new, old in zip(found["new"], found["old"], strict=True)]
    return {"first": first, "seconds": found, "ratios": ratios}


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
    cases = GPU if torch.cuda.is_available() else CPU
    versions = {"old": Version(options.before), "new": Version(ROOT / "src")}
    planned = plans(versions)
    for name, each in planned.items():
        print(f"plans, {name}: first {each['first']:.1f} ms, again {each['again']:.3f} ms")
    found: dict[str, Any] = {}
    for name in options.cases.split(",") if options.cases else cases:
        found[name] = measure(cases[name], versions, options.rounds)
        (old, new), ratios = (found[name]["seconds"][v] for v in versions), found[name]["ratios"]
        print(
            f"{name:16} forward {old[0] * 1e3:9.3f} {new[0] * 1e3:9.3f} ms ({ratios[0]:.3f})  "
            f"backward {old[1] * 1e3:9.3f} {new[1] * 1e3:9.3f} ms ({ratios[1]:.3f})",
            flush=True,
        )
        yield {"plans": planned, "cases": found}
