"""Two versions of this package side by side in one process, in turn: is the new one as fast?

    git worktree add ../before COMMIT
    python benchmarks/versions.py --before ../before/src [--cases 262144,65536] [--json FILE]

On a GPU: calls streamed from pinned host memory under budgets, a window of compiled FlexAttention
on the device, the native kernel, and small calls; forward and backward apart. On a CPU: small
calls, cut calls, and plans. Every case is run once by each version before it is measured, results
are allocated beforehand, and the versions alternate; ratios are of medians, new over old.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

PACKAGE = "quorum_attention"


class Version:
    """The package as it stands under a folder; of several in one process one is importable."""

    def __init__(self, source: Path) -> None:
        self.source = str(source)
        self.modules: dict[str, ModuleType] = {}
        with self.active():
            self.qa = importlib.import_module(PACKAGE)
        found = Path(str(self.qa.__file__)).resolve()
        assert found.is_relative_to(source.resolve()), f"{found} is not under {source}"

    @contextmanager
    def active(self) -> Iterator[Any]:
        """What is imported meanwhile, inside functions too, is of this version."""
        outside = _taken()
        sys.modules.update(self.modules)
        sys.path.insert(0, self.source)
        try:
            yield getattr(self, "qa", None)
        finally:
            sys.path.remove(self.source)
            self.modules = _taken()
            sys.modules.update(outside)


def _taken() -> dict[str, ModuleType]:
    """The package's modules, no longer importable."""
    names = [name for name in sys.modules if name.split(".")[0] == PACKAGE]
    return {name: sys.modules.pop(name) for name in names}


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


def timed(run: Callable[[], Any], calls: int) -> tuple[float, Any]:
    """Seconds of one of so many calls, the device idle before and after; what the last returned."""
    _wait()
    started = time.perf_counter()
    for _ in range(calls):
        result = run()
    _wait()
    return (time.perf_counter() - started) / calls, result


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


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
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    order = itertools.cycle([list(runners), list(runners)[::-1]])
    for names in itertools.islice(order, rounds):
        for name in names:
            seconds[name].append(runners[name]())
    medians = {n: [statistics.median(part) for part in zip(*s, strict=True)] for n, s in
               seconds.items()}  # fmt: skip
    ratios = [new / old for new, old in zip(medians["new"], medians["old"], strict=True)]
    return {"first": first, "seconds": medians, "ratios": ratios}


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


def main() -> None:
    """Measure, print a line for each case, write JSON if asked to."""
    cases = GPU if torch.cuda.is_available() else CPU
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", required=True, type=Path, help="src of the older version")
    parser.add_argument("--cases", default=",".join(cases))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json")
    given = parser.parse_args()
    here = Path(__file__).resolve().parents[1] / "src"
    versions = {"old": Version(given.before), "new": Version(here)}
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    document: dict[str, Any] = {
        "machine": where, "torch": torch.__version__, "python": platform.python_version(),
        "date": datetime.date.today().isoformat(), "cases": {}, "plans": plans(versions),
    }  # fmt: skip
    for name, each in document["plans"].items():
        print(f"plans, {name}: first {each['first']:.1f} ms, again {each['again']:.3f} ms")
    for name in given.cases.split(","):
        found = measure(cases[name], versions, given.rounds)
        document["cases"][name] = found
        (old, new), ratios = (found["seconds"][v] for v in ("old", "new")), found["ratios"]
        print(
            f"{name:16} forward {old[0] * 1e3:9.3f} {new[0] * 1e3:9.3f} ms ({ratios[0]:.3f})  "
            f"backward {old[1] * 1e3:9.3f} {new[1] * 1e3:9.3f} ms ({ratios[1]:.3f})",
            flush=True,
        )
        if given.json:
            Path(given.json).write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
