"""Plain calls, as a user writes them: ``attention(q, k, v, budget=...)`` and ``out.backward(g)``.

    python benchmarks/plain.py [--before ../before/src] [--cases ...] [--rounds 4] [--json FILE]

Inputs in host memory (page-locked, or not), results made by the call, gradients by autograd; beside
them torch's own attention on cuDNN, autograd too, with everything on the device (once for all cases
of a shape). First calls, and medians of the later ones; with ``--before`` an older version in turn.
Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from versions import Version, timed


@dataclass(frozen=True)
class Case:
    """A causal call of batch 1."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    budget: str
    pinned: bool = True


_HALF, _BFLOAT = torch.float16, torch.bfloat16
CASES = {
    "262144": Case(1 << 18, 8, 8, 64, _HALF, "1GiB"),
    "262144-pageable": Case(1 << 18, 8, 8, 64, _HALF, "1GiB", pinned=False),
    "65536-gqa": Case(1 << 16, 32, 8, 128, _BFLOAT, "1GiB"),
    "262144-gqa": Case(1 << 18, 32, 8, 128, _BFLOAT, "2GiB"),
    "524288x128": Case(1 << 19, 8, 8, 128, _HALF, "1GiB"),
    "1048576": Case(1 << 20, 8, 8, 64, _HALF, "1GiB"),
    "1048576-pageable": Case(1 << 20, 8, 8, 64, _HALF, "1GiB", pinned=False),
    "1048576-512MiB": Case(1 << 20, 8, 8, 64, _HALF, "512MiB"),
    "1048576-256MiB": Case(1 << 20, 8, 8, 64, _HALF, "256MiB"),
}
Seconds = list[tuple[float, float]]


def both(
    forward: Callable[..., torch.Tensor], three: list[torch.Tensor], grad: torch.Tensor
) -> tuple[float, float]:
    """Seconds of a forward and of its backward."""
    leaves = [t.detach().requires_grad_() for t in three]
    seconds, out = timed(lambda: forward(*leaves), 1)
    after, _ = timed(lambda: out.backward(grad), 1)
    return seconds, after


def on_the_device(case: Case, tensors: list[torch.Tensor], rounds: int) -> Seconds:
    """Torch's own."""
    grouped = case.heads != case.kv_heads

    def forward(*three: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(*three, is_causal=True, enable_gqa=grouped)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return [both(forward, tensors[:3], tensors[3]) for _ in range(rounds)]


def ours(
    case: Case, versions: dict[str, Version], tensors: list[torch.Tensor], rounds: int
) -> dict[str, Any]:
    """From host memory; the versions in turn."""
    found: dict[str, Seconds] = {name: [] for name in versions}
    for _ in range(rounds):
        for name, version in versions.items():
            with version.active() as qa:

                def forward(*three: torch.Tensor, qa: Any = qa) -> torch.Tensor:
                    result: torch.Tensor = qa.attention(
                        *three, is_causal=True, enable_gqa=True, budget=case.budget
                    )
                    return result

                found[name].append(both(forward, tensors[:3], tensors[3]))
            gc.collect()
    return found


def measure(
    case: Case, versions: dict[str, Version], rounds: int = 4, known: Seconds | None = None
) -> dict[str, Any]:
    """Seconds of all calls of a case; ``known`` are torch's own, if they have been measured."""
    torch.manual_seed(0)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    tensors = [
        torch.randn(1, h, case.tokens, case.head_dim, device="cuda", dtype=case.dtype)
        for h in heads
    ]
    found: dict[str, Any] = {"cudnn": known or on_the_device(case, tensors, rounds)}
    host = [t.cpu().pin_memory() if case.pinned else t.cpu() for t in tensors]
    del tensors
    torch.cuda.empty_cache()
    return found | ours(case, versions, host, rounds)


def line(found: dict[str, Any]) -> str:
    """Milliseconds, and ratios to cuDNN (forward; forward and backward)."""
    medians = {
        name: [statistics.median(part) for part in zip(*seconds[1:], strict=True)]
        for name, seconds in found.items()
    }
    whole = medians["cudnn"]
    words = [f"cuDNN {whole[0] * 1e3:.1f}, {whole[1] * 1e3:.1f} ms"]
    for name, (forward, backward) in list(medians.items())[1:]:
        words.append(
            f"{name} {forward * 1e3:.1f}, {backward * 1e3:.1f} ({forward / whole[0]:.2f}; "
            f"{(forward + backward) / sum(whole):.2f}; first {sum(found[name][0]):.2f} s)"
        )
    return " | ".join(words)


def main() -> None:
    """Measure, print a line for each case, write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="src of an older version")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=4, help="calls of each, the first included")
    parser.add_argument("--json")
    given = parser.parse_args()
    versions = {} if given.before is None else {"before": Version(given.before)}
    versions["now"] = Version(Path(__file__).resolve().parents[1] / "src")
    document: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(), "torch": torch.__version__,
        "python": platform.python_version(), "date": datetime.date.today().isoformat(),
        "cases": {},
    }  # fmt: skip
    known: dict[Case, Seconds] = {}
    for name in given.cases.split(","):
        case = CASES[name]
        shape = replace(case, budget="", pinned=True)
        found = measure(case, versions, given.rounds, known.get(shape))
        known[shape] = found["cudnn"]
        document["cases"][name] = found
        print(f"{name:16} {line(found)}", flush=True)
        if given.json:
            Path(given.json).write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
