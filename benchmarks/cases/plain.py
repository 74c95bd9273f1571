"""Plain calls, as a user writes them: ``attention(q, k, v, budget=...)`` and ``out.backward(g)``.

Inputs in host memory (page-locked, or not) or on the device, results made by the call, gradients by
autograd. Beside them other kernels alone: everything on the device, autograd too. All take turns,
call by call, so that a device that gets warmer counts against none of them. First calls, and
medians of the later ones; with --before an older version as well (git worktree add ../before
COMMIT; --before ../before/src). On a CPU a few calls of ours alone. fa4 needs flash-attn-4; flex
is torch's compiled FlexAttention with its block lists made beforehand.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
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
    ``depth`` as in ``attention``; "flex": compiled FlexAttention, recovered, which has the window
    as its rule. ``calls``: how many of them are one measurement.
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
    "native": Case(1 << 18, 8, 8, 64, _HALF, "256MiB", kernel="native"),
    "flex": Case(1 << 18, 8, 8, 64, _HALF, None, "device", 4096, "flex"),
    "flex-cut": Case(1 << 18, 8, 8, 64, _HALF, None, "device", 4096, "flex", 1),
    "flex-host": Case(1 << 18, 8, 8, 64, _HALF, "1GiB", "pinned", 4096, "flex"),
    "flex-causal": Case(1 << 18, 8, 8, 64, _HALF, None, "device", None, "flex"),
    "flex-causal-cut": Case(1 << 18, 8, 8, 64, _HALF, None, "device", None, "flex", 1),
    "flex-causal-host": Case(1 << 18, 8, 8, 64, _HALF, "1GiB", "pinned", None, "flex"),
    "small": Case(1 << 10, 8, 8, 64, _HALF, None, "device", calls=50),
    "short": Case(1 << 15, 8, 8, 64, _HALF, "16MiB"),
}
# On a CPU.
CPU = {
    "16384": Case(1 << 14, 2, 2, 64, torch.float32, "24MiB", "device"),
    "8192-cut": Case(1 << 13, 2, 2, 64, torch.float32, None, "device", depth=1),
    "small": Case(64, 8, 8, 64, torch.float32, None, "device", calls=200),
}
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
Run = Callable[[], list[float]]


def fa4(*three: torch.Tensor, **options: Any) -> torch.Tensor:
    """FlashAttention-4 as its users call it, on tensors token after token."""
    from flash_attn.cute import flash_attn_func

    found = flash_attn_func(*three, **{"causal": True, **options})
    result: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return result


def flex(case: Case) -> Callable[..., torch.Tensor]:
    """Torch's compiled FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def rule(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k < case.window) if case.window else q >= k

    lists = torch.compile(create_block_mask)(rule, None, None, case.tokens, case.tokens, "cuda")
    grouped = case.heads != case.kv_heads
    return partial(torch.compile(flex_attention), block_mask=lists, enable_gqa=grouped)


def alone(name: str, case: Case, tensors: list[torch.Tensor]) -> Run:
    """A kernel by itself, on tensors of the device."""
    if name == "flex":
        compiled = flex(case)
        return lambda: list(both(compiled, tensors[:3], tensors[3]))
    if name == "fa4":
        tensors = [t.transpose(1, 2).contiguous() for t in tensors]
        window = {} if case.window is None else {"window_size": (case.window - 1, 0)}
        attend = partial(fa4, causal=case.window is None, **window)
        return lambda: list(both(attend, tensors[:3], tensors[3]))

    def run() -> list[float]:
        with sdpa_kernel(BACKENDS[name]):
            return list(both(attend, tensors[:3], tensors[3]))

    grouped = case.heads != case.kv_heads
    attend = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=grouped)
    return run


def ours(case: Case, version: Version, tensors: list[torch.Tensor], peaks: list[int]) -> Run:
    """From where the case has its tensors; ``peaks`` gets the bytes of the device at most."""
    kernel: Any = case.kernel
    window = case.window if case.kernel != "flex" else None
    if case.kernel == "flex":
        with version.active():
            kit = importlib.import_module(f"{PACKAGE}.kernels.kit")
            rule = None if case.window is None else kit.sliding_window(case.window)
            kernel = kit.from_score_mod(None, rule, compiled=True)

    def run() -> list[float]:
        on_gpu = torch.cuda.is_available()
        held = torch.cuda.memory_allocated() if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        with version.active() as qa:
            attend = partial(
                qa.attention, attn_mask=window and qa.Mask(window=(window - 1, 0)),
                is_causal=case.kernel != "flex" or case.window is None, enable_gqa=True,
                budget=case.budget, kernel=kernel, depth=case.depth,
            )  # fmt: skip
            pairs = [both(attend, tensors[:3], tensors[3]) for _ in range(case.calls)]
        if on_gpu:
            peaks.append(torch.cuda.max_memory_allocated() - held)
        return [sum(part) / case.calls for part in zip(*pairs, strict=True)]

    return run


def drawn(case: Case, device: str | torch.device) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output, on the device."""
    torch.manual_seed(0)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    shapes = [(1, h, case.tokens, case.head_dim) for h in heads]
    return [torch.randn(shape, device=device).to(case.dtype) for shape in shapes]


def line(found: dict[str, Any]) -> str:
    """Milliseconds of each: forward, backward, and what the first call took beyond."""
    words = []
    for name, calls in found.items():
        if name != "peak_bytes":
            forward, backward = medians(calls[1:] or calls)
            first = sum(calls[0]) - forward - backward
            words.append(f"{name} {forward * 1e3:.1f}, {backward * 1e3:.1f} ms ({first:+.2f} s)")
    return " | ".join(words)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--before", type=Path, help="src of an older version")
    parser.add_argument("--cases", help="by commas; all by default")
    parser.add_argument("--alone", default="cudnn", help="of cudnn, fa4, fa2, flex")
    parser.add_argument("--kernel", help="of our calls")
    parser.add_argument("--rounds", type=int, default=4, help="calls of each, the first included")


def run(options: argparse.Namespace, _: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A line for each case."""
    versions = {} if options.before is None else {"before": Version(options.before)}
    versions["now"] = Version(ROOT / "src")
    on_gpu, cases = torch.cuda.is_available(), {}
    known = CASES if on_gpu else CPU
    # The first one of a process imports sympy, 2 s by itself.
    torch.zeros(2, requires_grad=True).mul(1).backward(torch.ones(2))
    for name in options.cases.split(",") if options.cases else known:
        case, peaks = known[name], list[int]()
        case = replace(case, kernel=options.kernel or case.kernel)
        tensors = drawn(case, "cuda" if on_gpu else "cpu")
        windowed = ("fa4", "flex")  # kernels that have windows
        rivals = [r for r in options.alone.split(",") if r and (not case.window or r in windowed)]
        runs = {rival: alone(rival, case, tensors) for rival in rivals if on_gpu}
        if case.place != "device":
            tensors = [t.cpu() for t in tensors]
        if case.place == "pinned":
            tensors = [t.pin_memory() for t in tensors]
        runs |= {v: ours(case, version, tensors, peaks) for v, version in versions.items()}
        cases[name] = {**in_turn(runs, options.rounds), "peak_bytes": max(peaks, default=None)}
        del runs, tensors
        if on_gpu:
            torch.cuda.empty_cache()
        print(f"{name:18} {line(cases[name])}", flush=True)
        yield {"kernel": options.kernel or "auto", "cases": cases}
