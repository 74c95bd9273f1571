"""Compares an inner kernel with itself: uncut, and cut in tokens, heads and batch in many ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from quorum_attention.api import attention_backward, attention_with_lse
from quorum_attention.argument_checks import real_number, shown, switch, whole_number
from quorum_attention.checking import causes
from quorum_attention.checking.diagnosis import (
    causal_is_not_plain,
    scale_is_ignored,
    small,
    views_differ,
    writes_into_inputs,
    wrong_gradients,
    wrong_weights,
)
from quorum_attention.checking.result import Broken, CaseResult, CheckResult, Verdict
from quorum_attention.checking.trial import CheckSizes, distance, limit, repeated, size
from quorum_attention.errors import first_line, is_out_of_memory
from quorum_attention.execution.device.lookup import available_device, best_device
from quorum_attention.kernels import InnerKernel, get_kernel
from quorum_attention.keywords import helps_with_names
from quorum_attention.planner import plan
from quorum_attention.progress import progress_bar
from quorum_attention.quorums import quorum_size
from quorum_attention.units import counted

_GRADIENTS = ("grad_query", "grad_key", "grad_value")
# Sizes that are named so differ in their dtype alone.
_WIDER = "in a wider dtype"
_CUTS: tuple[tuple[int, ...], ...] = ((3,), (7,), (13,), (3, 3), (7, 3), (3, 3, 3))

Results = dict[str, torch.Tensor]
Cut = dict[str, Any]
"""How a call is cut, as options of a plan."""
_UNCUT: Cut = {"levels": (), "layout": "aligned", "heads_per_group": None}


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
    levels: Sequence[tuple[int, ...]] = _CUTS,
    other_sizes: bool = True,
    scale_of_inputs: float = 1.0,
    seed: int = 0,
    progress: bool | Callable[[int, int, str], object] = False,
) -> CheckResult:
    """Test whether a kernel's results are the same however the call is cut.

    The kernel is compared with itself: the uncut call with calls at depths 1 to 3, in several chunk
    counts and both layouts, with heads and batch entries together and one by one, at a prime
    length. Errors that no cut shows are tested too: a call is repeated, the backward is compared
    with differences of the forward, and the scale must have an effect. Results may differ only by
    rounding, as much as dtype and scores explain.

    Args:
        kernel: name of a registered kernel, or an ``InnerKernel``.
        n_tokens, n_keys, batch, heads, kv_heads, head_dim, value_dim, dtype: sizes of the calls.
        device: default CUDA if there is one.
        is_causal: causal calls (True) or plain calls (False) alone; default both.
        backward: whether to test gradients as well.
        levels: the decompositions to test.
        other_sizes: whether to test fewer key heads, fewer keys or queries, and other widths too,
            if the kernel takes them.
        scale_of_inputs: factor of the normally distributed inputs.
        seed: random seed of the inputs.
        progress: True for a progress bar (plain lines in files), or a callable
            (done, total, label), which is told of each call that has been compared.

    Returns:
        a ``CheckResult``: verdict, errors, first wrong rows and causes.

    Raises:
        NotImplementedError: the kernel cannot run these calls; says why.
        ValueError, TypeError: an argument that makes no sense, by name.

    Examples:
        >>> result = qa.check_kernel("dense", n_tokens=61, heads=2, backward=False, levels=[(3,)])
        >>> bool(result)
        True
    """
    kernel = get_kernel(kernel)
    where = best_device() if device is None else available_device(device, "device")
    # The planner checks the sizes by name.
    shape = plan(
        n_tokens, n_keys=n_keys, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        value_dim=value_dim, dtype=dtype, levels=(), kernel="dense", device=where, inputs="device",
        backward=backward,
    ).shape  # fmt: skip
    numbers = {field.name: getattr(shape, field.name) for field in fields(shape)}
    sizes = CheckSizes(**numbers | {"needs_grad": backward}, device=where)
    if is_causal is not None:
        is_causal = switch(is_causal, "is_causal")
    levels = [_checked(cut) for cut in levels]
    seed = whole_number(seed, "seed", -(2**63), 2**64 - 1)
    factor = real_number(scale_of_inputs, "scale_of_inputs")
    with _shown(progress) as show:
        check = _Check(CheckResult(kernel.name), kernel, sizes, seed, factor, show)
        kinds = check.kinds(is_causal)
        comparisons = [_Comparison("", sizes, causal, levels) for causal in kinds]
        others = check.other_sizes(kinds) if other_sizes else []
        check.n_cuts = sum(len(each.cuts()) for each in (*comparisons, *others))
        for comparison in comparisons:
            check.compare(comparison)
        for comparison in others if not check.result.broken else ():
            check.attempt(comparison.name, check.compare, comparison)
        check.name_causes(kinds, other_sizes)
    return check.result


def _shown(progress: Any) -> AbstractContextManager[Any]:
    """A context that gives what is told of progress, or None."""
    if callable(progress):
        return nullcontext(progress)
    return progress_bar() if switch(progress, "progress") else nullcontext()


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A call that is compared, uncut, with every cut of it.

    Attributes:
        name: how its sizes differ from those asked for; empty if they do not.
        levels: how its tokens are cut.
    """

    name: str
    sizes: CheckSizes
    is_causal: bool
    levels: Sequence[tuple[int, ...]]

    def cuts(self) -> list[Cut]:
        """How the call is cut, one cut after the other."""
        return list(_cuts(self.sizes, self.levels))


@dataclass(slots=True)
class _Check:
    result: CheckResult
    kernel: InnerKernel
    sizes: CheckSizes
    seed: int
    factor: float
    show: Callable[[int, int, str], object] | None = None
    n_cuts: int = 0

    def kinds(self, is_causal: bool | None) -> list[bool]:
        """The kinds of calls to make, plain (False) and causal (True): the kind that was asked for,
        or all that the kernel takes.

        Raises:
            NotImplementedError: the kernel takes none of them.
        """
        found = []
        for causal in (False, True) if is_causal is None else (is_causal,):
            reason = self.kernel.refusal(replace(self.sizes, is_causal=causal))
            if reason is None:
                found.append(causal)
            else:
                self.result.skipped.append(f"{_kind(causal)}: {reason}")
        if not found:
            reasons = "; ".join(self.result.skipped)
            raise NotImplementedError(
                f"kernel {self.kernel.name!r} cannot run these calls: {reasons}"
            )
        return found

    def compare(self, comparison: _Comparison) -> None:
        """Compare one call, uncut, with every cut of it; if its sizes are those asked for, also
        with itself."""
        name, sizes, causal = comparison.name, comparison.sizes, comparison.is_causal
        inputs = list(sizes.inputs(self.seed, self.factor))
        whole = self._run(sizes, inputs, causal, _UNCUT)
        if not name:
            kept = {result: tensor.clone() for result, tensor in whole.items()}
            other = self._run(sizes, [-2 * t for t in inputs], causal, _UNCUT)
            again = self._run(sizes, inputs, causal, _UNCUT)
            where = ""
            if not all(repeated(kept[n], again[n], sizes.dtype) for n in kept):
                where = "two calls with the same inputs"
            elif torch.equal(other["out"], kept["out"]):
                where = "two calls with other inputs have the same output"
            elif not all(torch.equal(kept[n].nan_to_num(), whole[n].nan_to_num()) for n in kept):
                where = "results change in a later call"
            if where:
                self.result.broken.append(Broken(causes.STATE, f"{where}, {_kind(causal)}"))
        most = limit(inputs[0], inputs[1], whole["lse"], sizes.head_dim**-0.5)
        for cut in comparison.cuts():
            found = self._run(sizes, inputs, causal, cut)
            self.result.cases.append(_judge(found, whole, most, cut, causal, name))
            if self.show is not None:
                self.show(len(self.result.cases), self.n_cuts, f"checking {self.kernel.name}")

    def other_sizes(self, kinds: Sequence[bool]) -> list[_Comparison]:
        """Calls of other sizes that the kernel takes, with a few cuts."""
        sizes = self.sizes
        n = min(sizes.n_queries, sizes.n_keys)
        fewer, wide = max(1, 2 * n // 3), sizes.value_dim + 8
        tried = {
            _lengths(fewer, n): replace(sizes, n_queries=fewer, n_keys=n),
            _lengths(n, fewer): replace(sizes, n_queries=n, n_keys=fewer),
            f"values of {wide}": replace(sizes, value_dim=wide),
        }
        wider = sizes.finest(self.kernel, kinds[0])
        if torch.finfo(sizes.dtype).eps > 1e-6 and wider != sizes:
            # This shows errors that are smaller than 16-bit rounding.
            tried[_WIDER] = wider
        grouped = _grouped(sizes)
        if grouped != sizes:
            tried[f"{counted(grouped.heads, 'head')} over {grouped.kv_heads}"] = grouped
        return [
            _Comparison(name, other, causal, ((3,),))
            for name, other in tried.items()
            for causal in kinds
            if self.kernel.refusal(replace(other, is_causal=causal)) is None
        ]

    def name_causes(self, kinds: list[bool], other_sizes: bool) -> None:
        """Name what is wrong: by what differs between the cuts, by the weights of tasks, and by
        what holds for every attention."""
        result, kernel, seed = self.result, self.kernel, self.seed
        wrong = [c for c in result.cases if c.verdict == "not exact"]
        least = small(self.sizes)
        if not result.broken and any(writes_into_inputs(kernel, least, c, seed) for c in kinds):
            result.broken.append(Broken(causes.STATE, "a call writes into tensors it is handed"))
        found = result.broken
        if not found:
            asked = [c for c in wrong if c.sizes in ("", _WIDER)]
            if asked:
                found += self._of_cuts(asked, kinds)
            elif wrong:
                heads = " over " in wrong[0].sizes
                found.append(Broken(causes.HEADS if heads else causes.SIZES, wrong[0].sizes))
            for sizes in dict.fromkeys((least, _grouped(least)) if other_sizes else (least,)):
                for causal in kinds:
                    self._laws(sizes.finest(kernel, causal), causal)
        result.broken = list(dict.fromkeys(found))
        named = list(dict.fromkeys(b.cause for b in found))
        result.cause, result.others = (named[0], named[1:]) if named else (None, [])

    def _of_cuts(self, wrong: list[CaseResult], kinds: list[bool]) -> list[Broken]:
        """Why cuts of the call that was asked for differ, the likeliest cause first.

        Experiments are run in the widest dtype that the kernel takes, where rounding hides least;
        if nothing is found, then in the dtype of the call.
        """
        causal, least = wrong[0].is_causal, small(self.sizes)
        finest = least.finest(self.kernel, causal)
        if views_differ(self.kernel, finest, causal, self.seed):
            return [Broken(causes.SIZES, "views of larger tensors in memory")]
        found = []
        together = [case for case in wrong if case.heads_per_group is None]
        for case in (case for case in wrong if not case.levels):
            what = case.wrong()[0]
            if what in ("out", "lse") or not together:
                cause = causes.LSE if what == "lse" else causes.HEADS
                found.append(Broken(cause, f"heads and batch entries alone: {what}"))
        if any({"out", "lse"} & {*case.wrong()} for case in together):
            for sizes in dict.fromkeys((finest, least)):
                weights = wrong_weights(self.kernel, sizes, kinds, self.seed)
                if weights:
                    # What differs in lse alone, other causes may explain.
                    return sorted([*found, *weights], key=lambda b: b.cause == causes.LSE)
        if not found:
            unknown = any({"out", "lse"} & {*case.wrong()} for case in wrong)
            nan = any(torch.inf in case.errors.values() for case in wrong)
            cause = causes.UNKNOWN if unknown else causes.NO_KEYS if nan else causes.BACKWARD
            found.append(Broken(cause, str(wrong[0])))
        return found

    def _laws(self, sizes: CheckSizes, causal: bool) -> None:
        """What holds for every attention, whatever its scores, tried on an uncut call."""
        if self.kernel.refusal(replace(sizes, is_causal=causal)) is not None:
            return
        laws = [
            (causes.SIZES, scale_is_ignored), (causes.PAIRS, causal_is_not_plain),
            (causes.BACKWARD, wrong_gradients),
        ]  # fmt: skip
        for cause, law in laws[: 2 + sizes.needs_grad]:
            where = self.attempt(
                law.__name__.replace("_", " "), law, self.kernel, sizes, causal, self.seed
            )
            if where:
                self.result.broken.append(Broken(cause, where))

    def attempt(self, what: str, attempt: Callable[..., Any], *given: Any) -> Any:
        """Try what a kernel may refuse in words of its own: that is no error."""
        try:
            return attempt(*given)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            reason = f"{what}: {type(error).__name__}: {first_line(error)}"
            if reason not in self.result.skipped:
                self.result.skipped.append(reason)

    def _run(
        self, sizes: CheckSizes, inputs: list[torch.Tensor], causal: bool, cut: Cut
    ) -> Results:
        """Results of a call."""
        query, key, value, grad = inputs
        common: dict[str, Any] = {
            "heads": sizes.heads, "kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim,
            "value_dim": sizes.value_dim, "n_keys": sizes.n_keys, "batch": sizes.batch,
            "dtype": query.dtype, "is_causal": causal, "tile": 16, "kernel": self.kernel,
            "device": sizes.device, "inputs": "device", **cut,
        }  # fmt: skip
        options: dict[str, Any] = {
            "is_causal": causal, "enable_gqa": sizes.heads != sizes.kv_heads,
            "kernel": self.kernel, "devices": sizes.device,
        }  # fmt: skip
        plans = [plan(sizes.n_queries, backward=b, **common) for b in (False, sizes.needs_grad)]
        out, lse = attention_with_lse(query, key, value, plan=plans[0], **options)
        found = {"out": out, "lse": lse}
        if sizes.needs_grad:
            grads = attention_backward(grad, query, key, value, out, lse, plan=plans[1], **options)
            found |= dict(zip(_GRADIENTS, grads, strict=True))
        return found


def _lengths(queries: int, keys: int) -> str:
    return f"{counted(queries, 'query', 'queries')}, {counted(keys, 'key')}"


def _grouped(sizes: CheckSizes) -> CheckSizes:
    """The same sizes with half as many key heads as query heads, or with one, where each query head
    has its own."""
    if sizes.heads != sizes.kv_heads:
        return sizes
    return replace(sizes, kv_heads=sizes.heads // 2 if sizes.heads % 2 == 0 else 1)


def _kind(causal: bool) -> str:
    return "causal" if causal else "plain"


def _checked(levels: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(levels, str) or not isinstance(levels, Sequence):
        raise TypeError(f"levels must be tuples of chunk counts, got {shown(levels)}")
    for c in levels:
        quorum_size(c)
    return tuple(levels)


def _cuts(sizes: CheckSizes, levels: Sequence[tuple[int, ...]]) -> Iterator[Cut]:
    """A cut of the heads alone, then two cuts of the tokens for each of ``levels``.

    The chunks of these are aligned and balanced. All heads and entries are together, but for the
    balanced chunks of the first cut of one level: there they run one by one, which takes as many
    times the kernel's calls as there are heads and entries.
    """
    alone = sizes.heads // sizes.kv_heads
    if sizes.batch > 1 or sizes.kv_heads > 1:
        yield {**_UNCUT, "heads_per_group": alone}
    one_by_one = next((cut for cut in levels if len(cut) == 1), None)
    for cut in levels:
        yield {**_UNCUT, "levels": tuple(cut)}
        group = alone if cut == one_by_one else None
        yield {"levels": tuple(cut), "layout": "balanced", "heads_per_group": group}


def _judge(
    found: Results, whole: Results, most: float, cut: Cut, causal: bool, name: str
) -> CaseResult:
    """The verdict on a cut call; errors are shares of each result's largest value."""
    errors: dict[str, float] = {}
    rows: list[tuple[str, int, int, int]] = []
    for result, mine in found.items():
        off = distance(mine, whole[result])
        errors[result] = float(off.max()) / size(whole[result]) if off.numel() else 0.0
        wrong = off > most * size(whole[result])
        by_row = wrong if wrong.ndim == 3 else wrong.any(dim=-1)
        rows += [(result, b, h, n) for b, h, n in by_row.nonzero()[:5].tolist()]
    verdict: Verdict = "exact within rounding"
    if max(errors.values()) > most:
        verdict = "not exact"
    elif all(map(torch.equal, found.values(), whole.values())):
        verdict = "bit-identical"
    return CaseResult(
        **cut, is_causal=causal, sizes=name, verdict=verdict, errors=errors, limit=most,
        rows=tuple(rows[:5]),
    )  # fmt: skip
