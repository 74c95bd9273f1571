"""Compares an inner kernel with itself: uncut, and cut in tokens, heads and batch in
many ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from quorum_attention.argument_checks import real_number, shown, switch, whole_number
from quorum_attention.checking.laws import (
    LAWS_IN_THE_DTYPE,
    LAWS_IN_THE_WIDEST_DTYPE,
    Law,
)
from quorum_attention.checking.result import CaseResult, CheckResult, Verdict
from quorum_attention.checking.rounding import (
    distance,
    is_wide,
    largest_magnitude,
    rounding_limit,
)
from quorum_attention.checking.trial_call import CheckSizes, Cut, Results, run_call
from quorum_attention.errors import first_line, is_out_of_memory
from quorum_attention.execution.device.lookup import available_device, best_device
from quorum_attention.kernels import InnerKernel, get_kernel
from quorum_attention.keywords import helps_with_names
from quorum_attention.plain_types import Keywords
from quorum_attention.planner import plan
from quorum_attention.progress import progress_bar
from quorum_attention.quorums import quorum_size
from quorum_attention.units import counted

_LEVELS: tuple[tuple[int, ...], ...] = ((3,), (7,), (13,), (3, 3), (7, 3), (3, 3, 3))
_LEVELS_OF_VARIANTS = ((3,),)
_MOST_ROWS_SHOWN = 5


@helps_with_names
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
    levels: Sequence[tuple[int, ...]] = _LEVELS,
    other_sizes: bool = True,
    scale_of_inputs: float = 1.0,
    seed: int = 0,
    progress: bool | Callable[[int, int, str], object] = False,
) -> CheckResult:
    """Test whether a kernel's results are the same however the call is cut.

    The kernel is compared with itself. An uncut call of a prime length is compared with
    calls at depths 1 to 3, with several numbers of chunks, in both layouts, and with
    heads and batch entries together and one by one. Some errors are in uncut calls too,
    so there are more tests: a call is repeated, views of larger tensors must give the
    same, the backward is compared with differences of the forward, and the scale must
    have an effect. Results may differ only by rounding, as much as dtype and scores
    explain.

    Args:
        kernel: name of a registered kernel, or an ``InnerKernel``.
        n_tokens: queries of a call.
        n_keys: keys of a call; None is ``n_tokens``.
        batch: batch entries.
        heads: query heads.
        kv_heads: key/value heads; None is ``heads``.
        head_dim: width of queries and keys.
        value_dim: width of values; None is ``head_dim``.
        dtype: of the inputs.
        device: default CUDA if there is one.
        is_causal: True tests only causal calls, False only calls that are not causal;
            the default is both.
        backward: whether to test gradients as well.
        levels: the numbers of chunks of each decomposition to test.
        other_sizes: whether to test calls with fewer key heads, fewer keys or queries,
            and other widths too, if the kernel supports them.
        scale_of_inputs: factor of the normally distributed inputs.
        seed: random seed of the inputs.
        progress: True for a progress bar (plain lines in files), or a callable
            (done, total, label), which is called after each call that was compared.

    Returns:
        The verdict, the errors, the first wrong rows, and the tests of uncut calls that
        failed.

    Raises:
        NotImplementedError: the kernel cannot run these calls; says why.
        ValueError, TypeError: an argument that makes no sense, by name.

    Examples:
        >>> result = qa.check_kernel(
        ...     "dense", n_tokens=61, heads=2, backward=False, levels=[(3,)]
        ... )
        >>> bool(result)
        True
    """
    kernel = get_kernel(kernel)
    sizes = _checked_sizes(
        n_tokens,
        n_keys=n_keys,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        device=best_device() if device is None else available_device(device, "device"),
        backward=backward,
    )
    if is_causal is not None:
        is_causal = switch(is_causal, "is_causal")
    levels = [_checked_levels(counts) for counts in levels]
    seed = whole_number(
        seed,
        "seed",
        -(2**63),
        2**64 - 1,
    )
    factor = real_number(scale_of_inputs, "scale_of_inputs")
    with _progress_of(progress) as report_progress:
        check = _Check(
            CheckResult(kernel.name),
            kernel,
            seed,
            factor,
            report_progress,
        )
        calls = check.accepted_kinds(sizes, is_causal)
        comparisons = [_Comparison("", call, levels) for call in calls]
        variants = check.variants(calls) if other_sizes else []
        for comparison in (*comparisons, *variants):
            check.n_cases += comparison.n_cuts
        for comparison in comparisons:
            check.compare(comparison)
        for comparison in variants:
            check.attempt(comparison.name, partial(check.compare, comparison))
        for call in calls:
            check.try_all_laws(call.shortened(), groups_heads=other_sizes)
    return check.result


def _checked_sizes(
    n_tokens: int, *, device: torch.device, backward: bool, **numbers: Any
) -> CheckSizes:
    """The sizes of the calls; the planner checks them by name."""
    options: Keywords = {
        "levels": (),
        "kernel": "dense",
        "device": device,
        "inputs": "device",
    }
    shape = plan(n_tokens, backward=backward, **options, **numbers).shape
    values = {field.name: getattr(shape, field.name) for field in fields(shape)}
    values["needs_grad"] = backward
    return CheckSizes(**values, device=device)


def _checked_levels(levels: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(levels, str) or not isinstance(levels, Sequence):
        raise TypeError(f"levels must be tuples of chunk counts, got {shown(levels)}")
    for n_chunks in levels:
        quorum_size(n_chunks)
    return tuple(levels)


def _progress_of(progress: Any) -> AbstractContextManager[Any]:
    """A context that gives the callable that shows progress, or None."""
    if callable(progress):
        return nullcontext(progress)
    return progress_bar() if switch(progress, "progress") else nullcontext()


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A call that is compared, uncut, with every cut of it.

    Attributes:
        name: how its sizes differ from those asked for; "" if they do not.
        levels: how its tokens are cut.
    """

    name: str
    sizes: CheckSizes
    levels: Sequence[tuple[int, ...]]

    @property
    def n_cuts(self) -> int:
        """How many cuts the call has."""
        return len(list(self.cuts()))

    def cuts(self) -> Iterator[Cut]:
        """A cut of the heads alone, then two cuts of the tokens for each of ``levels``.

        The chunks of the two are aligned and balanced. Heads and entries run together.
        Only in the balanced chunks of the first cut of one level they run one by one,
        which takes as many times the kernel's calls as there are heads and entries.
        """
        sizes = self.sizes
        one_group = sizes.heads // sizes.kv_heads
        if sizes.batch > 1 or sizes.kv_heads > 1:
            yield Cut(heads_per_group=one_group)
        single_levels = [levels for levels in self.levels if len(levels) == 1]
        for levels in self.levels:
            runs_one_by_one = levels in single_levels[:1]
            yield Cut(levels)
            yield Cut(levels, "balanced", one_group if runs_one_by_one else None)


@dataclass(slots=True)
class _Check:
    """A check under way.

    Attributes:
        factor: of the inputs.
        n_cases: how many cuts are compared in all.
    """

    result: CheckResult
    kernel: InnerKernel
    seed: int
    factor: float
    report_progress: Callable[[int, int, str], object] | None = None
    n_cases: int = 0

    def accepted_kinds(
        self, sizes: CheckSizes, is_causal: bool | None
    ) -> list[CheckSizes]:
        """The plain and the causal call, as far as they were asked for and the kernel
        takes them.

        Raises:
            NotImplementedError: the kernel takes none of them.
        """
        accepted = []
        for causal in (False, True) if is_causal is None else (is_causal,):
            call = replace(sizes, is_causal=causal)
            reason = self.kernel.refusal(call)
            if reason is None:
                accepted.append(call)
            else:
                self.result.skipped.append(f"{call.kind}: {reason}")
        if not accepted:
            reasons = "; ".join(self.result.skipped)
            name = self.kernel.name
            raise NotImplementedError(
                f"kernel {name!r} cannot run these calls: {reasons}"
            )
        return accepted

    def variants(self, calls: Sequence[CheckSizes]) -> list[_Comparison]:
        """Calls of other sizes that the kernel takes, with a few cuts."""
        comparisons = []
        for name, sizes in _named_variants(calls[0], self.kernel).items():
            for call in calls:
                variant = replace(sizes, is_causal=call.is_causal)
                if self.kernel.refusal(variant) is None:
                    comparisons.append(_Comparison(name, variant, _LEVELS_OF_VARIANTS))
        return comparisons

    def compare(self, comparison: _Comparison) -> None:
        """Compare one call, uncut, with every cut of it."""
        sizes = comparison.sizes
        inputs = sizes.inputs(self.seed, self.factor)
        copies = [tensor.clone() for tensor in inputs]
        expected = run_call(self.kernel, sizes, inputs)
        limit = rounding_limit(sizes, inputs, expected)
        cases = self.result.cases
        label = f"checking {self.kernel.name}"
        for cut in comparison.cuts():
            results = run_call(self.kernel, sizes, inputs, cut)
            case = _judge(results, expected, limit, cut, comparison)
            cases.append(case)
            if self.report_progress is not None:
                self.report_progress(len(cases), self.n_cases, label)
        are_unchanged = all(map(torch.equal, copies, inputs))
        if not are_unchanged:
            self.result.broken.append(f"calls write into their inputs, {sizes.kind}")

    def try_all_laws(self, sizes: CheckSizes, *, groups_heads: bool) -> None:
        """Try what holds for every attention, on a short call, and with grouped heads
        too."""
        self._try_laws(LAWS_IN_THE_DTYPE, sizes)
        variants = [sizes]
        if groups_heads and sizes.with_grouped_heads() != sizes:
            variants.append(sizes.with_grouped_heads())
        for variant in variants:
            widest = variant.in_widest_dtype(self.kernel)
            self._try_laws(LAWS_IN_THE_WIDEST_DTYPE, widest)

    def _try_laws(self, laws: Sequence[Law], sizes: CheckSizes) -> None:
        if self.kernel.refusal(sizes) is not None:
            return
        for law in laws:
            name = law.__name__.replace("_", " ")
            attempt = partial(law, self.kernel, sizes, self.seed)
            sentence = self.attempt(name, attempt)
            if not sentence:
                continue
            sentence = f"{sentence}, {sizes.kind}"
            if sentence not in self.result.broken:
                self.result.broken.append(sentence)

    def attempt(self, name: str, attempt: Callable[[], str | None]) -> str | None:
        """Run ``attempt``. An error is noted as skipped: a kernel may refuse a call."""
        try:
            return attempt()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            reason = f"{name}: {type(error).__name__}: {first_line(error)}"
        if reason not in self.result.skipped:
            self.result.skipped.append(reason)
        return None


def _named_variants(sizes: CheckSizes, kernel: InnerKernel) -> dict[str, CheckSizes]:
    """Sizes that differ in one way from those asked for, by what differs."""
    length = min(sizes.n_queries, sizes.n_keys)
    fewer = max(1, 2 * length // 3)
    wide = sizes.value_dim + 8
    variants = {
        _lengths(fewer, length): replace(sizes, n_queries=fewer, n_keys=length),
        _lengths(length, fewer): replace(sizes, n_queries=length, n_keys=fewer),
        f"values of {wide}": replace(sizes, value_dim=wide),
    }
    if not is_wide(sizes.dtype):
        # A wider dtype shows errors that are smaller than 16-bit rounding.
        variants["in a wider dtype"] = sizes.in_widest_dtype(kernel)
    grouped = sizes.with_grouped_heads()
    variants[f"{counted(grouped.heads, 'head')} over {grouped.kv_heads}"] = grouped
    return {name: variant for name, variant in variants.items() if variant != sizes}


def _lengths(n_queries: int, n_keys: int) -> str:
    return f"{counted(n_queries, 'query', 'queries')}, {counted(n_keys, 'key')}"


def _judge(
    results: Results, expected: Results, limit: float, cut: Cut, comparison: _Comparison
) -> CaseResult:
    """The verdict on a cut call; errors are shares of each result's largest value."""
    errors: dict[str, float] = {}
    wrong_rows: list[tuple[str, int, int, int]] = []
    for name, result in results.items():
        size = largest_magnitude(expected[name])
        differences = distance(result, expected[name])
        errors[name] = float(differences.max()) / size if differences.numel() else 0.0
        is_wrong = differences > limit * size
        if is_wrong.ndim > 3:
            is_wrong = is_wrong.any(dim=-1)
        first_rows = is_wrong.nonzero()[:_MOST_ROWS_SHOWN].tolist()
        wrong_rows += [(name, batch, head, row) for batch, head, row in first_rows]
    return CaseResult(
        **cut._asdict(),
        is_causal=comparison.sizes.is_causal,
        sizes=comparison.name,
        verdict=_verdict(results, expected, max(errors.values()) > limit),
        errors=errors,
        limit=limit,
        rows=tuple(wrong_rows[:_MOST_ROWS_SHOWN]),
    )


def _verdict(results: Results, expected: Results, is_wrong: bool) -> Verdict:
    if is_wrong:
        return "not exact"
    if all(torch.equal(result, expected[name]) for name, result in results.items()):
        return "bit-identical"
    return "exact within rounding"
