"""Compares an inner kernel with itself: uncut, and cut in tokens, heads and batch in many ways."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from quorum_attention.api import attention_backward, attention_with_lse
from quorum_attention.checking import causes
from quorum_attention.checking.experiments import likely_causes
from quorum_attention.checking.laws import Broken, broken_laws, fewer_key_heads
from quorum_attention.checking.result import CaseResult, CheckResult, Verdict
from quorum_attention.checking.rounding import apart, far, limit, repeated, size
from quorum_attention.checking.subject import Sizes
from quorum_attention.counts import real_number, shown, switch, whole_number
from quorum_attention.execution.device.lookup import present
from quorum_attention.execution.memory import first_line, is_out_of_memory
from quorum_attention.execution.report import Report
from quorum_attention.kernels import InnerKernel, get_kernel
from quorum_attention.planner import plan
from quorum_attention.quorums import quorum_size

_NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value")
_CUTS: tuple[tuple[int, ...], ...] = ((3,), (7,), (13,), (3, 3), (7, 3), (3, 3, 3))

Results = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Cut:
    levels: tuple[int, ...]
    layout: str
    heads_per_group: int | None


_UNCUT = _Cut((), "aligned", None)


def check_kernel(
    kernel: str | InnerKernel,
    *,
    n_tokens: int = 331,
    n_keys: int | None = None,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    head_dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    is_causal: bool | None = None,
    backward: bool = True,
    levels: Sequence[tuple[int, ...]] = _CUTS,
    other_sizes: bool = True,
    scale_of_inputs: float = 1.0,
    seed: int = 0,
) -> CheckResult:
    """Test whether a kernel's results are the same however the call is cut.

    The kernel is compared with itself: the uncut call with depths 1 to 3, several chunk counts and
    both layouts, with heads and batch entries together and one by one, at a prime length. Errors
    that no cut shows are looked for as well: the same call is made twice, the backward is compared
    with differences of the forward, and laws that hold for all attention are tested
    (``checking/laws.py``). Only rounding may differ, as much as dtype and scores account for.

    Args:
        kernel: name of a registered kernel, or an ``InnerKernel``.
        n_tokens, n_keys, batch, heads, kv_heads, head_dim, value_dim, dtype: sizes of the calls.
        device: default CUDA if there is one.
        is_causal: causal calls (True) or plain calls (False) alone; default both.
        backward: whether to test gradients as well.
        levels: the decompositions to test.
        other_sizes: whether to test fewer key heads, fewer keys or queries, and other widths, too,
            as far as the kernel takes them.
        scale_of_inputs: factor of the normally distributed inputs.
        seed: random seed of the inputs.

    Returns:
        a ``CheckResult``: verdict, errors, first wrong rows, causes, time and memory.

    Raises:
        NotImplementedError: the kernel cannot run these calls; says why.
        ValueError, TypeError: an argument that makes no sense, by name.

    Examples:
        >>> result = qa.check_kernel("dense", n_tokens=61, heads=2, backward=False, levels=[(3,)])
        >>> bool(result)
        True
    """
    kernel = get_kernel(kernel)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    where = present(default if device is None else device, "device")
    # The planner checks the sizes by name.
    work = plan(
        n_tokens, n_keys=n_keys, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        value_dim=value_dim, dtype=dtype, levels=(), kernel="dense", device=where, inputs="device",
        backward=backward,
    ).work  # fmt: skip
    sizes = Sizes(
        work.n_queries, work.n_keys, work.batch, work.heads, work.kv_heads, work.head_dim,
        work.value_dim, work.dtype, where, backward,
    )  # fmt: skip
    if is_causal is not None:
        is_causal = switch(is_causal, "is_causal")
    levels = [_checked(cut) for cut in levels]
    seed = whole_number(seed, "seed", -(2**63), 2**64 - 1)
    factor = real_number(scale_of_inputs, "scale_of_inputs")
    check = _Check(CheckResult(kernel.name), kernel, sizes, seed, factor)
    kinds = check.kinds(is_causal)
    for causal in kinds:
        check.cuts(causal, levels)
    if not check.spoiled and other_sizes:
        check.other_sizes(kinds)
    check.name_causes(kinds, other_sizes)
    return check.result


@dataclass(slots=True)
class _Check:
    result: CheckResult
    kernel: InnerKernel
    sizes: Sizes
    seed: int
    factor: float
    tried: dict[str, Sizes] = field(default_factory=dict)

    @property
    def spoiled(self) -> bool:
        """Whether results cannot be compared at all, because they are not repeatable."""
        unsteady = (causes.REPEATABLE, causes.STATE, causes.INPUTS)
        return any(b.cause in unsteady for b in self.result.broken)

    def kinds(self, is_causal: bool | None) -> list[bool]:
        """The kinds of calls to make, plain (False) and causal (True): the kind that was asked for,
        or all that the kernel takes.

        Raises:
            NotImplementedError: the kernel takes none of them.
        """
        found = []
        for causal in (False, True) if is_causal is None else (is_causal,):
            reason = self.kernel.refusal(self.sizes.call(causal))
            if reason is None:
                found.append(causal)
            elif is_causal is not None:
                raise NotImplementedError(
                    f"kernel {self.kernel.name!r} cannot run this call: {reason}"
                )
            else:
                self.result.skipped.append(f"{'causal' if causal else 'plain'}: {reason}")
        if not found:
            raise NotImplementedError(
                f"kernel {self.kernel.name!r}: {'; '.join(self.result.skipped)}"
            )
        return found

    def cuts(self, causal: bool, levels: Sequence[tuple[int, ...]]) -> None:
        """Compare one call, uncut, with every cut of it."""
        inputs = self._inputs(self.sizes)
        first, _, _ = self._run(self.sizes, inputs, causal, _UNCUT)
        whole, seconds, peak = self._run(self.sizes, inputs, causal, _UNCUT)
        self.result.monolithic_seconds[causal] = seconds
        self._steadiness(inputs, first, whole, causal)
        self._precision(inputs, whole, causal)
        limits = self._limits(inputs, whole)
        for cut in _cuts(self.sizes, levels):
            found, seconds, cut_peak = self._run(self.sizes, inputs, causal, cut)
            if len(cut.levels) == 1:
                self.result.peak_bytes = peak, cut_peak
            self.result.cases.append(_judge(found, whole, limits, cut, causal, "", seconds))

    def other_sizes(self, kinds: Sequence[bool]) -> None:
        """Compare calls of other sizes that the kernel takes, uncut, with a few cuts."""
        sizes = self.sizes
        n = min(sizes.n_queries, sizes.n_keys)
        fewer = max(1, 2 * n // 3)
        self.tried = tried = {
            f"{fewer} queries, {n} keys": replace(sizes, n_queries=fewer, n_keys=n),
            f"{n} queries, {fewer} keys": replace(sizes, n_queries=n, n_keys=fewer),
        }
        wide = sizes.finest(self.kernel, kinds[0])
        if torch.finfo(sizes.dtype).eps > 1e-6 and wide != sizes:
            # This shows errors that are smaller than 16-bit rounding.
            tried[f"in {str(wide.dtype).removeprefix('torch.')}"] = wide
        if sizes.heads == sizes.kv_heads > 1:
            grouped = fewer_key_heads(sizes)
            tried[f"{grouped.heads} heads over {grouped.kv_heads}"] = grouped
        for name, other in tried.items():
            for causal in kinds:
                if self.kernel.refusal(other.call(causal)) is not None:
                    continue
                try:
                    self._other_size(name, other, causal)
                except Exception as error:
                    if is_out_of_memory(error):
                        raise
                    self._skip(f"{name}: {type(error).__name__}: {first_line(error)}")

    def _other_size(self, name: str, sizes: Sizes, causal: bool) -> None:
        inputs = self._inputs(sizes)
        whole, _, _ = self._run(sizes, inputs, causal, _UNCUT)
        limits = self._limits(inputs, whole)
        for cut in _cuts(sizes, ((3,),)):
            found, seconds, _ = self._run(sizes, inputs, causal, cut)
            self.result.cases.append(_judge(found, whole, limits, cut, causal, name, seconds))

    def name_causes(self, kinds: Sequence[bool], other_sizes: bool) -> None:
        """Name what is wrong, by experiments if a cut differs, and by laws."""
        result, found = self.result, []
        wrong = [c for c in result.cases if c.verdict == "not exact"]
        asked = [c for c in wrong if not c.sizes or c.sizes.startswith("in ")]
        if asked:
            found += likely_causes(self.kernel, self.sizes, asked[0].is_causal, self.seed)
        if not self.spoiled:
            result.broken += broken_laws(
                self.kernel, self.sizes, tuple(kinds), self.seed, result.skipped, other_sizes
            )
        found += [b.cause for b in result.broken]
        if wrong and not asked and not found:
            case = wrong[0]
            sizes = self.tried[case.sizes]
            found += likely_causes(self.kernel, sizes, case.is_causal, self.seed)
            if sizes.n_queries != sizes.n_keys and found == [causes.UNKNOWN]:
                found = [causes.KEYS]
        named = [c for c in dict.fromkeys(found) if c != causes.UNKNOWN]
        if causes.PRECISION in named:
            # Named last: another cause, if there is one, explains it.
            named.remove(causes.PRECISION)
            named.append(causes.PRECISION)
        if wrong and not named:
            named = [causes.UNKNOWN]
        result.cause, result.others = (named[0], named[1:]) if named else (None, [])

    def _steadiness(
        self, inputs: list[torch.Tensor], first: Results, whole: Results, causal: bool
    ) -> None:
        kind = "causal" if causal else "plain"
        for name, tensor in whole.items():
            if not repeated(tensor, first[name], self.sizes.dtype):
                self._broken(causes.REPEATABLE, f"{name} of two {kind} calls, uncut")
        kept = [t.clone() for t in inputs]
        results = {name: tensor.clone() for name, tensor in whole.items()}
        self._run(self.sizes, [-t for t in inputs], causal, _UNCUT)
        self._run(self.sizes, inputs, causal, _UNCUT)
        if not all(torch.equal(a, b) for a, b in zip(kept, inputs, strict=True)):
            self._broken(causes.INPUTS, f"an uncut {kind} call")
        self._run(self.sizes, [2 * t for t in inputs], causal, _UNCUT)
        for name, tensor in results.items():
            if not torch.equal(tensor.nan_to_num(), whole[name].nan_to_num()):
                self._broken(causes.STATE, f"{name} of an uncut {kind} call, after another")

    def _precision(self, inputs: list[torch.Tensor], whole: Results, causal: bool) -> None:
        """Compare with the kernel's own float64 results: the dtype may round, but no more."""
        wide = replace(self.sizes, dtype=torch.float64)
        reason = self.kernel.refusal(wide.call(causal))
        if self.sizes.dtype == torch.float64:
            return
        if reason is None:
            try:
                exact, _, _ = self._run(wide, [t.double() for t in inputs], causal, _UNCUT)
            except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
                if is_out_of_memory(error):
                    raise
                reason = first_line(error)
        if reason is not None:
            self._skip(f"float64, to see what is rounded: {reason}")
            return
        limits = self._limits(inputs, exact)
        for name, tensor in whole.items():
            if far(tensor, exact[name], limits[name]):
                kind = "causal" if causal else "plain"
                off = float(apart(tensor, exact[name]).max()) / size(exact[name])
                self._broken(
                    causes.PRECISION,
                    f"{name} of an uncut {kind} call is off float64 by {off:.1e} of its size, "
                    f"rounding would be {limits[name]:.1e}",
                )
                return

    def _limits(self, inputs: list[torch.Tensor], whole: Results) -> dict[str, float]:
        found = limit(inputs[0], inputs[1], whole["lse"], self.sizes.head_dim**-0.5)
        return dict.fromkeys(whole, found)

    def _broken(self, cause: str, where: str) -> None:
        self.result.broken.append(Broken(cause, where))

    def _skip(self, reason: str) -> None:
        if reason not in self.result.skipped:
            self.result.skipped.append(reason)

    def _inputs(self, sizes: Sizes) -> list[torch.Tensor]:
        return sizes.inputs(torch.Generator().manual_seed(self.seed), self.factor)

    def _run(
        self, sizes: Sizes, inputs: list[torch.Tensor], causal: bool, cut: _Cut
    ) -> tuple[Results, float, int | None]:
        """Results of a call, its seconds and its peak memory."""
        query, key, value, grad = inputs
        common: dict[str, Any] = {
            "heads": sizes.heads, "kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim,
            "value_dim": sizes.value_dim, "n_keys": sizes.n_keys, "batch": sizes.batch,
            "dtype": query.dtype, "is_causal": causal, "levels": cut.levels, "layout": cut.layout,
            "tile": 16, "heads_per_group": cut.heads_per_group, "kernel": self.kernel,
            "device": sizes.device, "inputs": "device",
        }  # fmt: skip
        options: dict[str, Any] = {
            "is_causal": causal, "enable_gqa": sizes.heads != sizes.kv_heads,
            "kernel": self.kernel, "devices": sizes.device,
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
            )
            found |= dict(zip(_NAMES[2:], grads, strict=True))
        _wait(sizes.device)
        passes = [p for p in (report.forward, report.backward) if p is not None]
        peaks = [p.peak_bytes for p in passes if p.peak_bytes is not None]
        return found, time.perf_counter() - began, max(peaks, default=None)


def _checked(levels: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(levels, str) or not isinstance(levels, Sequence):
        raise TypeError(f"levels must be tuples of chunk counts, got {shown(levels)}")
    for c in levels:
        quorum_size(c)
    return tuple(levels)


def _cuts(sizes: Sizes, levels: Sequence[tuple[int, ...]]) -> Iterator[_Cut]:
    """A cut of the heads alone, then two cuts of the tokens for each of ``levels``.

    Aligned chunks are run with all heads and entries together, balanced chunks of one level with
    heads and entries one by one.
    """
    alone = sizes.heads // sizes.kv_heads
    if sizes.batch > 1 or sizes.kv_heads > 1:
        yield _Cut((), "aligned", alone)
    for cut in levels:
        yield _Cut(tuple(cut), "aligned", None)
        yield _Cut(tuple(cut), "balanced", alone if len(cut) == 1 else None)


def _judge(
    found: Results,
    whole: Results,
    limits: dict[str, float],
    cut: _Cut,
    causal: bool,
    sizes: str,
    seconds: float,
) -> CaseResult:
    errors: dict[str, float] = {}
    rows: list[tuple[str, int, int, int]] = []
    same = True
    for name, mine in found.items():
        wanted = whole[name]
        same &= torch.equal(mine, wanted)
        off = apart(mine, wanted)
        errors[name] = float(off.max()) / size(wanted) if off.numel() else 0.0
        wrong = off > limits[name] * size(wanted)
        if wrong.any() and len(rows) < 5:
            by_row = wrong if wrong.ndim == 3 else wrong.any(dim=-1)
            first = by_row.nonzero()[: 5 - len(rows)].tolist()
            rows += [(name, b, h, n) for b, h, n in first]
    exact = all(errors[name] <= limits[name] for name in errors)
    verdict: Verdict = "not exact"
    if same:
        verdict = "bit-identical"
    elif exact:
        verdict = "exact within rounding"
    return CaseResult(
        cut.levels, cut.layout, causal, cut.heads_per_group, sizes, verdict, errors, limits,
        tuple(rows), seconds,
    )  # fmt: skip


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
