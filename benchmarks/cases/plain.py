"""Plain calls, as a user writes them: ``attention(q, k, v, budget=...)`` and
``out.backward(g)``.

Inputs in host memory (page-locked, or not) or on the device, results made by the call,
gradients by autograd. Beside them other kernels alone: everything on the device,
autograd too. All take turns, call by call, so that a device that gets warmer counts
against none of them. First calls, and medians of the later ones; with --before an older
version as well (git worktree add ../before COMMIT; --before ../before/src). On a CPU a
few calls of ours alone. fa4 needs flash-attn-4; flex is torch's compiled FlexAttention
with its block lists made beforehand.
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
from measure import PACKAGE, ROOT, Version, in_turn, medians, timed_passes
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Case:
    """A causal call.

    Attributes:
        place: of the tensors: "pinned" or "pageable" host memory, or "device".
        kernel, depth: as in ``attention``; "flex" is compiled FlexAttention, recovered,
            which has the window as its rule.
        calls: how many of them are one measurement.
        batch: entries of the call; the number of tokens is that of one entry.
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
    batch: int = 1


_HALF = torch.float16
_BFLOAT = torch.bfloat16
_MILLION = (1 << 20, 8, 8, 64, _HALF)
_QUARTER = (1 << 18, 32, 8, 128, _BFLOAT)
CASES = {
    "65536": Case(1 << 16, 8, 8, 64, _HALF, "1GiB"),
    "65536-128MiB": Case(1 << 16, 8, 8, 64, _HALF, "128MiB"),
    "262144": Case(1 << 18, 8, 8, 64, _HALF, "1GiB"),
    "262144-256MiB": Case(1 << 18, 8, 8, 64, _HALF, "256MiB"),
    "262144-pageable": Case(1 << 18, 8, 8, 64, _HALF, "1GiB", "pageable"),
    "65536-gqa": Case(1 << 16, 32, 8, 128, _BFLOAT, "1GiB"),
    "262144-gqa": Case(*_QUARTER, "2GiB"),
    "262144-gqa-512MiB": Case(*_QUARTER, "512MiB"),
    "32768-gqa-device": Case(1 << 15, 32, 8, 128, _BFLOAT, None, "device"),
    "16384-gqa-device": Case(1 << 14, 32, 8, 128, _BFLOAT, None, "device"),
    "batch": Case(1 << 10, 16, 16, 64, _HALF, None, "device", batch=128),
    "window": Case(1 << 18, 8, 8, 64, _BFLOAT, None, "device", 4096),
    "window-gqa": Case(*_QUARTER, None, "device", 4096),
    "524288x128": Case(1 << 19, 8, 8, 128, _HALF, "1GiB"),
    "1048576": Case(*_MILLION, "1GiB"),
    "1048576-512MiB": Case(*_MILLION, "512MiB"),
    "1048576-256MiB": Case(*_MILLION, "256MiB"),
    "1048576-128MiB": Case(*_MILLION, "128MiB"),
    "1048576-pageable": Case(*_MILLION, "1GiB", "pageable"),
    "1048576-device": Case(*_MILLION, None, "device"),
    "131072-device": Case(1 << 17, 8, 8, 64, _HALF, None, "device"),
    "131072x128-device": Case(1 << 17, 8, 8, 128, _HALF, None, "device"),
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
CPU_CASES = {
    "16384": Case(1 << 14, 2, 2, 64, torch.float32, "32MiB", "device"),
    "8192-cut": Case(1 << 13, 2, 2, 64, torch.float32, None, "device", depth=1),
    "small": Case(64, 8, 8, 64, torch.float32, None, "device", calls=200),
}
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
# Rivals that can leave pairs outside of a window out.
WITH_WINDOWS = ("fa4", "flex")
Measurement = Callable[[], list[float]]
"""Makes a call, and returns the seconds of its forward and of its backward."""


def flash_attention_4(*inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    """FlashAttention-4 as its users call it, on tensors token after token, (batch, n,
    heads, d)."""
    from flash_attn.cute import flash_attn_func

    output = flash_attn_func(*inputs, **{"causal": True, **options})
    out: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return out


def compiled_flex(case: Case) -> Callable[..., torch.Tensor]:
    """Torch's compiled FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def keeps_pair(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k < case.window) if case.window else q >= k

    make_lists = torch.compile(create_block_mask)
    lists = make_lists(keeps_pair, None, None, case.tokens, case.tokens, "cuda")
    is_grouped = case.heads != case.kv_heads
    return partial(
        torch.compile(flex_attention), block_mask=lists, enable_gqa=is_grouped
    )


def rival(name: str, case: Case, tensors: list[torch.Tensor]) -> Measurement:
    """A kernel by itself, on tensors of the device."""
    if name == "flex":
        compiled = compiled_flex(case)
        return lambda: list(timed_passes(compiled, tensors[:3], tensors[3]))
    if name == "fa4":
        return rival_fa4(case, tensors)

    def run() -> list[float]:
        with sdpa_kernel(BACKENDS[name]):
            return list(timed_passes(attend, tensors[:3], tensors[3]))

    is_grouped = case.heads != case.kv_heads
    attend = partial(
        scaled_dot_product_attention, is_causal=True, enable_gqa=is_grouped
    )
    return run


def rival_fa4(case: Case, tensors: list[torch.Tensor]) -> Measurement:
    *inputs, grad_out = (tensor.transpose(1, 2).contiguous() for tensor in tensors)
    attend = flash_attention_4
    if case.window is not None:
        window_size = (case.window - 1, 0)
        attend = partial(flash_attention_4, causal=False, window_size=window_size)
    return lambda: list(timed_passes(attend, inputs, grad_out))


def recovered_flex(case: Case, version: Version) -> Any:
    """The kernel of a version that recovers compiled FlexAttention."""
    with version.active():
        kit = importlib.import_module(f"{PACKAGE}.kernels.kit")
        window = None if case.window is None else kit.sliding_window(case.window)
        return kit.from_score_mod(None, window, compiled=True)


class OurCalls:
    """Calls of a version of the package, from where the case has its tensors.

    Attributes:
        peaks: the most bytes of the device in each measurement, beyond those before it.
    """

    def __init__(
        self,
        case: Case,
        version: Version,
        tensors: list[torch.Tensor],
        peaks: list[int],
    ) -> None:
        self.case = case
        self.version = version
        self.tensors = tensors
        self.peaks = peaks
        is_flex = case.kernel == "flex"
        self.kernel = recovered_flex(case, version) if is_flex else case.kernel
        self.window = None if is_flex else case.window
        self.is_causal = not is_flex or case.window is None

    def __call__(self) -> list[float]:
        """Seconds of a forward and of a backward: means over the case's calls."""
        if not torch.cuda.is_available():
            return self._measure()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        seconds = self._measure()
        self.peaks.append(torch.cuda.max_memory_allocated() - before)
        return seconds

    def _measure(self) -> list[float]:
        case = self.case
        *inputs, grad_out = self.tensors
        with self.version.active() as qa:
            attend = partial(
                qa.attention,
                attn_mask=self.window and qa.Mask(window=(self.window - 1, 0)),
                is_causal=self.is_causal,
                enable_gqa=True,
                budget=case.budget,
                kernel=self.kernel,
                depth=case.depth,
            )
            pairs = [timed_passes(attend, inputs, grad_out) for _ in range(case.calls)]
        return [sum(part) / case.calls for part in zip(*pairs, strict=True)]


def draw_tensors(case: Case, device: str | torch.device) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output, on the device."""
    torch.manual_seed(0)
    tensors = []
    for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads):
        shape = (case.batch, heads, case.tokens, case.head_dim)
        tensor = torch.randn(shape, device=device)
        tensors.append(tensor.to(case.dtype))
    return tensors


def place_tensors(case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors where our calls have them."""
    if case.place == "device":
        return tensors
    tensors = [tensor.cpu() for tensor in tensors]
    if case.place == "pageable":
        return tensors
    return [tensor.pin_memory() for tensor in tensors]


def describe(seconds: dict[str, list[Any]]) -> str:
    """Milliseconds of each method: forward, backward, and what the first call took
    beyond."""
    words = []
    for method, calls in seconds.items():
        forward, backward = medians(calls[1:] or calls)
        later_seconds = forward + backward
        beyond = sum(calls[0]) - later_seconds
        times = f"{forward * 1e3:.1f}, {backward * 1e3:.1f} ms"
        words.append(f"{method} {times} ({beyond:+.2f} s)")
    return " | ".join(words)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--before", type=Path, help="src of an older version")
    parser.add_argument("--cases", help="by commas; all by default")
    parser.add_argument("--alone", default="cudnn", help="of cudnn, fa4, fa2, flex")
    parser.add_argument("--kernel", help="of our calls")
    parser.add_argument(
        "--rounds", type=int, default=4, help="calls of each, the first included"
    )


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each case."""
    versions = {} if options.before is None else {"before": Version(options.before)}
    versions["now"] = Version(ROOT / "src")
    # The first one of a process imports sympy, 2 s by itself.
    torch.zeros(2, requires_grad=True).mul(1).backward(torch.ones(2))
    cases = CASES if torch.cuda.is_available() else CPU_CASES
    for name in options.cases.split(",") if options.cases else cases:
        case = cases[name]
        row = name
        if options.kernel is not None:
            case = replace(case, kernel=options.kernel)
            row = f"{name}, {options.kernel}"
        seconds, peak = measure(case, options, versions)
        print(f"{row:18} {describe(seconds)}", flush=True)
        yield {row: {**seconds, "peak_bytes": peak}}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure(
    case: Case, options: argparse.Namespace, versions: dict[str, Version]
) -> tuple[dict[str, list[Any]], int | None]:
    """Seconds by method and round, and the most bytes of the device that ours took."""
    on_gpu = torch.cuda.is_available()
    tensors = draw_tensors(case, "cuda" if on_gpu else "cpu")
    runs: dict[str, Measurement] = {}
    for name in filter(None, options.alone.split(",")):
        if on_gpu and (case.window is None or name in WITH_WINDOWS):
            runs[name] = rival(name, case, tensors)
    tensors = place_tensors(case, tensors)
    for name, version in versions.items():
        # An older version's are not told.
        peaks: list[int] = []
        runs[name] = OurCalls(case, version, tensors, peaks)
    return in_turn(runs, options.rounds), max(peaks, default=None)
