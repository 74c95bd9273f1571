"""Plain calls, as a user writes them: ``attention(q, k, v, budget=...)`` and ``out.backward(g)``.

Inputs in host memory (page-locked, or not) or on the device, results made by the call, gradients by
autograd. Beside them other kernels alone: everything on the device, autograd too (once for all
cases of a shape). First calls, and medians of the later ones; with --before an older version in
turn. Needs a CUDA device; fa4 needs flash-attn-4.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import PACKAGE, ROOT, Version, both, in_turn, medians
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Case:
    """A causal call of batch 1.

    ``place`` of the tensors: "pinned" and "pageable" host memory, or "device". ``kernel`` and
    ``depth`` as in ``attention``; "flex": a window of 4,096 by compiled FlexAttention. ``calls``:
    how many of them are one measurement.
    """

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    budget: str | None = None
    place: str = "pinned"
    window: int | None = None
    kernel: str = "auto"
    depth: int | str = "auto"
    calls: int = 1


_HALF, _BFLOAT = torch.float16, torch.bfloat16
_MILLION, _QUARTER = (1 << 20, 8, 8, 64, _HALF), (1 << 18, 32, 8, 128, _BFLOAT)
CASES = {
    "65536": Case(1 << 16, 8, 8, 64, _HALF, "1GiB"),
    "65536-128MiB": Case(1 << 16, 8, 8, 64, _HALF, "128MiB"),
    "262144": Case(1 << 18, 8, 8, 64, _HALF, "1GiB"),
    "262144-256MiB": Case(1 << 18, 8, 8, 64, _HALF, "256MiB"),
    "262144-pageable": Case(1 << 18, 8, 8, 64, _HALF, "1GiB", "pageable"),
    "65536-gqa": Case(1 << 16, 32, 8, 128, _BFLOAT, "1GiB"),
    "262144-gqa": Case(*_QUARTER, "2GiB"),
    "262144-gqa-512MiB": Case(*_QUARTER, "512MiB"),
    "window": Case(1 << 18, 8, 8, 64, _BFLOAT, None, "device", 4096),
    "window-gqa": Case(*_QUARTER, None, "device", 4096),
    "524288x128": Case(1 << 19, 8, 8, 128, _HALF, "1GiB"),
    "1048576": Case(*_MILLION, "1GiB"),
    "1048576-512MiB": Case(*_MILLION, "512MiB"),
    "1048576-256MiB": Case(*_MILLION, "256MiB"),
    "1048576-128MiB": Case(*_MILLION, "128MiB"),
    "1048576-pageable": Case(*_MILLION, "1GiB", "pageable"),
    "1048576-device": Case(*_MILLION, None, "device"),
}
Seconds = list[tuple[float, float]]


def alone(name: str, case: Case, tensors: list[torch.Tensor], rounds: int) -> Seconds:
    """A kernel by itself: torch's on cuDNN or FlashAttention-2, or FlashAttention-4 as its users
    call it, on tensors token after token."""
    if name == "fa4":
        from flash_attn.cute import flash_attn_func

        tensors = [t.transpose(1, 2).contiguous() for t in tensors]
        window = (None, None) if case.window is None else (case.window - 1, 0)

        def forward(*three: torch.Tensor) -> torch.Tensor:
            found = flash_attn_func(*three, causal=case.window is None, window_size=window)
            result: torch.Tensor = found[0] if isinstance(found, tuple) else found
            return result

        return [both(forward, tensors[:3], tensors[3]) for _ in range(rounds)]
    if case.window is not None:
        raise ValueError(f"{name} has no window")
    grouped = case.heads != case.kv_heads

    def of_torch(*three: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(*three, is_causal=True, enable_gqa=grouped)

    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
    with sdpa_kernel(backends[name]):
        return [both(of_torch, tensors[:3], tensors[3]) for _ in range(rounds)]


def ours(
    case: Case, versions: dict[str, Version], tensors: list[torch.Tensor], rounds: int
) -> dict[str, Any]:
    """From where the case has its tensors; the versions in turn."""
    flex = {}
    for name, version in versions.items() if case.kernel == "flex" else ():
        with version.active():
            kit = importlib.import_module(f"{PACKAGE}.kernels.kit")
            flex[name] = kit.from_score_mod(None, kit.sliding_window(4096), compiled=True)

    def run(name: str) -> list[float]:
        with versions[name].active() as qa:
            options = {
                "attn_mask": case.window and qa.Mask(window=(case.window - 1, 0)),
                "is_causal": case.kernel != "flex", "enable_gqa": True, "budget": case.budget,
                "kernel": flex.get(name, case.kernel), "depth": case.depth,
            }  # fmt: skip

            def forward(*three: torch.Tensor) -> Any:
                return qa.attention(*three, **options)

            pairs = [both(forward, tensors[:3], tensors[3]) for _ in range(case.calls)]
        return [sum(part) / case.calls for part in zip(*pairs, strict=True)]

    on_gpu = torch.cuda.is_available()
    held = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    found: dict[str, Any] = in_turn({n: partial(run, n) for n in versions}, rounds)
    if on_gpu:
        found["peak_bytes"] = torch.cuda.max_memory_allocated() - held
    return found


def drawn(case: Case, device: str = "cuda") -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output, on the device."""
    torch.manual_seed(0)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    shapes = [(1, h, case.tokens, case.head_dim) for h in heads]
    return [torch.randn(shape, device=device).to(case.dtype) for shape in shapes]


def placed(case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Where the case has them."""
    if case.place != "device":
        tensors = [t.cpu().pin_memory() if case.place == "pinned" else t.cpu() for t in tensors]
    return tensors


def measure(
    case: Case,
    versions: dict[str, Version],
    rounds: int,
    rivals: list[str],
    known: dict[str, Seconds],
) -> dict[str, Any]:
    """Seconds of all calls of a case; ``known`` are those of kernels alone that have been measured,
    and gets the others."""
    tensors = drawn(case)
    for name in rivals:
        if name not in known and (case.window is None or name == "fa4"):
            known[name] = alone(name, case, tensors, rounds)
            torch.cuda.empty_cache()
    tensors = placed(case, tensors)
    torch.cuda.empty_cache()
    return known | ours(case, versions, tensors, rounds)


def line(found: dict[str, Any], versions: dict[str, Version]) -> str:
    """Milliseconds, and ratios to the fastest kernel alone (forward; forward and backward)."""
    found = {name: seconds for name, seconds in found.items() if name != "peak_bytes"}
    middle = {name: medians(seconds[1:] or seconds) for name, seconds in found.items()}
    others = {name: parts for name, parts in middle.items() if name not in versions}
    best = min(others, key=lambda name: sum(others[name]), default=None)
    words = [f"{name} {a * 1e3:.1f}, {b * 1e3:.1f} ms" for name, (a, b) in others.items()]
    for name in versions:
        forward, backward = middle[name]
        words.append(f"{name} {forward * 1e3:.1f}, {backward * 1e3:.1f}")
        if best is not None:
            whole = others[best]
            ratios = forward / whole[0], (forward + backward) / sum(whole)
            words[-1] += f" ({ratios[0]:.3f}; {ratios[1]:.3f} of {best}"
            words[-1] += f"; first {sum(found[name][0]) - forward - backward:+.2f} s)"
    return " | ".join(words)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--before", type=Path, help="src of an older version")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--alone", default="cudnn", help="of cudnn, fa4, fa2, by commas")
    parser.add_argument("--kernel", default="auto", help="of our calls")
    parser.add_argument("--rounds", type=int, default=4, help="calls of each, the first included")


def run(options: argparse.Namespace, _: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A line for each case."""
    versions = {} if options.before is None else {"before": Version(options.before)}
    versions["now"] = Version(ROOT / "src")
    known: dict[Case, dict[str, Seconds]] = {}
    rivals = [rival for rival in options.alone.split(",") if rival]
    cases = {}
    for name in options.cases.split(","):
        case = replace(CASES[name], kernel=options.kernel)
        shape = known.setdefault(replace(case, budget=None, place="device"), {})
        cases[name] = measure(case, versions, options.rounds, rivals, shape)
        print(f"{name:18} {line(cases[name], versions)}", flush=True)
        yield {"kernel": options.kernel, "cases": cases}
