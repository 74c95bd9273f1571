"""Runs an inner kernel against itself: as one task, and cut in many ways."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from quorum_attention.api import attention_backward, attention_with_lse
from quorum_attention.checking.causes import likely_cause
from quorum_attention.execution.report import Report
from quorum_attention.kernels import CallShape, InnerKernel, get_kernel
from quorum_attention.planner import plan
from quorum_attention.sizes import format_bytes

Verdict = Literal["bit-identical", "exact within rounding", "not exact"]

_NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value")
_CUTS: tuple[tuple[int, ...], ...] = ((3,), (7,), (13,), (3, 3), (7, 3), (3, 3, 3))
# Of a kernel's own distance from float64: a cut call may be this many times as far ...
_FACTOR = 8.0
# ... and no less than so many units in the last place of the largest value.
_ULPS = 8.0


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One decomposition against the monolithic call.

    Attributes:
        levels, layout, is_causal: which.
        verdict: of all results together.
        errors: by result, the largest difference from the monolithic call as a share of its
            largest value.
        limits: by result, the largest that is rounding.
        rows: the first rows that are off, as (result, batch, head, row); at most five.
        seconds: forward and backward.
    """

    levels: tuple[int, ...]
    layout: str
    is_causal: bool
    verdict: Verdict
    errors: dict[str, float]
    limits: dict[str, float]
    rows: tuple[tuple[str, int, int, int], ...]
    seconds: float


@dataclass(slots=True)
class CheckResult:
    """What ``check_kernel`` found.

    Attributes:
        kernel: its name.
        cases: every decomposition tried.
        cause: what is likely wrong, None where nothing is.
        skipped: what could not be tried, and why.
        monolithic_seconds: of the uncut call, forward and backward, by causality.
        peak_bytes: device memory of the uncut call and of a cut one, None where it is not counted.
    """

    kernel: str
    cases: list[CaseResult] = field(default_factory=list)
    cause: str | None = None
    skipped: list[str] = field(default_factory=list)
    monolithic_seconds: dict[bool, float] = field(default_factory=dict)
    peak_bytes: tuple[int | None, int | None] = (None, None)

    @property
    def verdict(self) -> Verdict:
        """The worst of all cases."""
        order: tuple[Verdict, ...] = ("bit-identical", "exact within rounding", "not exact")
        return max((c.verdict for c in self.cases), key=order.index, default="not exact")

    @property
    def exact(self) -> bool:
        """Whether every case is."""
        return self.verdict != "not exact"

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"verdict": self.verdict, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{self.kernel}: {self.verdict}, {len(self.cases)} decompositions"]
        if self.cause:
            lines.append(f"likely cause: {self.cause}")
        broken = [case for case in self.cases if case.verdict == "not exact"]
        if broken:
            lines.append(f"{len(broken)} of {len(self.cases)} differ; the first:")
        for case in broken[:1]:
            name = " x ".join(map(str, case.levels))
            kind = "causal" if case.is_causal else "plain"
            worst = max(case.errors, key=lambda n: case.errors[n] / max(case.limits[n], 1e-300))
            lines.append(
                f"levels {name}, {case.layout}, {kind}: {worst} off by {case.errors[worst]:.1e} of "
                f"its size, rounding would be {case.limits[worst]:.1e}"
            )
            for what, batch, head, row in case.rows:
                lines.append(f"  first rows: {what}[{batch}, {head}, {row}]")
        for causal, seconds in self.monolithic_seconds.items():
            mine = [c.seconds for c in self.cases if c.is_causal == causal and len(c.levels) == 1]
            if mine and seconds:
                kind = "causal" if causal else "plain"
                lines.append(f"time, {kind}: {min(mine) / seconds:.2f} x the uncut call at depth 1")
        whole, cut = self.peak_bytes
        if whole is not None and cut is not None:
            lines.append(f"memory: {format_bytes(whole)} uncut, {format_bytes(cut)} cut")
        lines += [f"not tried: {reason}" for reason in self.skipped]
        return "\n".join(lines)


def check_kernel(
    kernel: str | InnerKernel,
    *,
    n_tokens: int = 331,
    n_keys: int | None = None,
    heads: int = 2,
    kv_heads: int | None = None,
    head_dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    is_causal: bool | None = None,
    backward: bool = True,
    levels: Sequence[tuple[int, ...]] = _CUTS,
    scale_of_inputs: float = 1.0,
    seed: int = 0,
) -> CheckResult:
    """Whether a kernel's results are the same however the call is cut.

    The kernel is compared with itself, uncut against depths 1 to 3, several chunk counts and both
    layouts, at a length that is a multiple of nothing. Rounding is judged by the kernel's own
    distance from float64.

    Args:
        kernel: name of a registered kernel, or an ``InnerKernel``.
        n_tokens, n_keys, heads, kv_heads, head_dim, value_dim, dtype: of the calls.
        device: where; default CUDA where there is one.
        is_causal: only that; default both.
        backward: gradients as well.
        levels: the decompositions.
        scale_of_inputs: factor of the normally distributed inputs.
        seed: of the inputs.

    Returns:
        a ``CheckResult``: verdict, errors, first offending rows, likely cause, time and memory.

    Raises:
        NotImplementedError: the kernel does not take these calls; says why.
    """
    kernel = get_kernel(kernel)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    sizes = _Sizes(
        n_tokens, n_tokens if n_keys is None else n_keys, heads, kv_heads or heads, head_dim,
        value_dim or head_dim, dtype, where, backward,
    )  # fmt: skip
    result = CheckResult(kernel.name)
    generator = torch.Generator().manual_seed(seed)
    inputs = sizes.inputs(generator, scale_of_inputs)
    for causal in (False, True) if is_causal is None else (is_causal,):
        reason = kernel.refusal(sizes.call(causal, dtype))
        if reason is not None:
            if is_causal is not None:
                raise NotImplementedError(f"kernel {kernel.name!r} cannot run this call: {reason}")
            result.skipped.append(f"{'causal' if causal else 'plain'}: {reason}")
            continue
        _check(result, kernel, sizes, inputs, causal, levels)
    if not result.cases:
        raise NotImplementedError(f"kernel {kernel.name!r}: {'; '.join(result.skipped)}")
    broken = [c for c in result.cases if c.verdict == "not exact"]
    if broken:
        result.cause = likely_cause(kernel, inputs, broken[0].is_causal)
    return result


@dataclass(frozen=True, slots=True)
class _Sizes:
    n_queries: int
    n_keys: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    backward: bool

    def call(self, is_causal: bool, dtype: torch.dtype) -> CallShape:
        return CallShape(
            self.device.type, dtype, self.heads, self.kv_heads, self.head_dim, self.value_dim,
            is_causal, self.backward,
        )  # fmt: skip

    def inputs(self, generator: torch.Generator, factor: float) -> list[torch.Tensor]:
        shapes = (
            (1, self.heads, self.n_queries, self.head_dim),
            (1, self.kv_heads, self.n_keys, self.head_dim),
            (1, self.kv_heads, self.n_keys, self.value_dim),
            (1, self.heads, self.n_queries, self.value_dim),
        )
        return [
            (torch.randn(s, generator=generator) * factor).to(self.dtype).to(self.device)
            for s in shapes
        ]


def _check(
    result: CheckResult,
    kernel: InnerKernel,
    sizes: _Sizes,
    inputs: list[torch.Tensor],
    causal: bool,
    levels: Sequence[tuple[int, ...]],
) -> None:
    _run(kernel, sizes, inputs, causal, (), "aligned")  # what only a first call costs
    whole, seconds, peak = _run(kernel, sizes, inputs, causal, (), "aligned")
    result.monolithic_seconds[causal] = seconds
    exact, reason = _in_float64(kernel, sizes, inputs, causal)
    if exact is None and reason not in result.skipped:
        result.skipped.append(reason)
    limits = _limits(whole, exact, sizes.dtype)
    for cut in levels:
        for layout in ("aligned", "balanced"):
            found, seconds, cut_peak = _run(kernel, sizes, inputs, causal, cut, layout)
            if len(cut) == 1:
                result.peak_bytes = peak, cut_peak
            result.cases.append(_judge(found, whole, limits, cut, layout, causal, seconds))


def _judge(
    found: dict[str, torch.Tensor],
    whole: dict[str, torch.Tensor],
    limits: dict[str, float],
    levels: tuple[int, ...],
    layout: str,
    causal: bool,
    seconds: float,
) -> CaseResult:
    errors: dict[str, float] = {}
    rows: list[tuple[str, int, int, int]] = []
    same = True
    for name, mine in found.items():
        wanted = whole[name]
        same &= torch.equal(mine, wanted)
        apart = _apart(mine, wanted)
        errors[name] = float(apart.max()) / _size(wanted) if apart.numel() else 0.0
        off = apart > limits[name] * _size(wanted)
        if off.any() and len(rows) < 5:
            by_row = off if off.ndim == 3 else off.any(dim=-1)
            first = by_row.nonzero()[: 5 - len(rows)].tolist()
            rows += [(name, b, h, n) for b, h, n in first]
    exact = all(errors[name] <= limits[name] for name in errors)
    verdict: Verdict = "not exact"
    if same:
        verdict = "bit-identical"
    elif exact:
        verdict = "exact within rounding"
    return CaseResult(levels, layout, causal, verdict, errors, limits, tuple(rows), seconds)


def _limits(
    whole: dict[str, torch.Tensor], exact: dict[str, torch.Tensor] | None, dtype: torch.dtype
) -> dict[str, float]:
    """What a result may be off by, as a share of its largest value."""
    ulp = torch.finfo(dtype).eps
    # Without float64 to compare with: a sum's rounding, generously.
    if exact is None:
        return dict.fromkeys(whole, 64 * ulp)
    found = {}
    for name, mine in whole.items():
        own = float(_apart(mine, exact[name]).max()) / _size(mine) if mine.numel() else 0.0
        found[name] = _FACTOR * own + _ULPS * ulp
    return found


def _in_float64(
    kernel: InnerKernel, sizes: _Sizes, inputs: list[torch.Tensor], causal: bool
) -> tuple[dict[str, torch.Tensor] | None, str]:
    reason = kernel.refusal(sizes.call(causal, torch.float64))
    if reason is not None or sizes.dtype == torch.float64:
        return None, f"float64, to judge rounding by: {reason or 'the calls are float64'}"
    wide = [t.double() for t in inputs]
    try:
        return _run(kernel, sizes, wide, causal, (), "aligned")[0], ""
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        return None, f"float64, to judge rounding by: {first[0]}"


def _run(
    kernel: InnerKernel,
    sizes: _Sizes,
    inputs: list[torch.Tensor],
    causal: bool,
    levels: tuple[int, ...],
    layout: str,
) -> tuple[dict[str, torch.Tensor], float, int | None]:
    query, key, value, grad = inputs
    common: dict[str, Any] = {
        "heads": sizes.heads, "kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim,
        "value_dim": sizes.value_dim, "n_keys": sizes.n_keys, "dtype": query.dtype,
        "is_causal": causal, "levels": levels, "layout": layout, "tile": 16, "kernel": kernel,
        "device": sizes.device, "inputs": "device",
    }  # fmt: skip
    options: dict[str, Any] = {
        "is_causal": causal, "enable_gqa": sizes.heads != sizes.kv_heads, "kernel": kernel,
        "devices": sizes.device,
    }  # fmt: skip
    report = Report()
    plans = [plan(sizes.n_queries, backward=b, **common) for b in (False, sizes.backward)]
    _wait(sizes.device)
    began = time.perf_counter()
    out, lse = attention_with_lse(query, key, value, plan=plans[0], report=report, **options)
    found = {"out": out, "lse": lse}
    if sizes.backward:
        grads = attention_backward(
            grad, query, key, value, out, lse, report=report, plan=plans[1], **options
        )  # fmt: skip
        found |= dict(zip(_NAMES[2:], grads, strict=True))
    _wait(sizes.device)
    passes = [p for p in (report.forward, report.backward) if p is not None]
    peaks = [p.peak_bytes for p in passes if p.peak_bytes is not None]
    return found, time.perf_counter() - began, max(peaks, default=None)


def _apart(mine: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Differences; equal infinities do not differ, and what is no number is infinitely off."""
    a, b = mine.double(), wanted.double()
    return torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)


def _size(tensor: torch.Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return max(float(finite.abs().max()), 1e-30) if finite.numel() else 1.0


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
