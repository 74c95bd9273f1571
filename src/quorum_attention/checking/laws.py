"""Laws that hold for every attention, whatever its scores.

They find errors that no cut shows, because every cut has the same error. Each law varies one thing
of a small uncut call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from quorum_attention.checking import causes
from quorum_attention.checking.experiments import Experiments
from quorum_attention.checking.gradients import slopes
from quorum_attention.checking.rounding import far
from quorum_attention.checking.subject import Sizes, Subject, Tensors, Weights, square
from quorum_attention.execution.memory import first_line, is_out_of_memory
from quorum_attention.kernels import InnerKernel, Statistics

_TOKENS = 53
_BELOW = "applied otherwise below 0 (where no call has that: positive_scale=True, or a refusal)"


@dataclass(frozen=True, slots=True)
class Broken:
    """A law that does not hold: the cause, and where it was seen."""

    cause: str
    where: str


def broken_laws(
    kernel: InnerKernel,
    sizes: Sizes,
    kinds: tuple[bool, ...],
    seed: int,
    skipped: list[str],
    other_sizes: bool = True,
) -> list[Broken]:
    """The laws that a kernel breaks, tried in the widest dtype that it takes.

    Args:
        kernel: the kernel.
        sizes: sizes of the calls it is checked with.
        kinds: plain (False), causal (True), or both.
        seed: random seed of the inputs.
        skipped: laws that could not be tried are added to it, with the reason.
        other_sizes: whether to try other widths and numbers of heads as well.
    """
    n = min(_TOKENS, sizes.n_queries, sizes.n_keys)
    found: list[Broken] = []
    limits: dict[bool, float] = {}
    laws = (_untouched, _causal, _scale, _gradient)
    for law in (*laws, _grouped, _value_width, _head_dimension) if other_sizes else laws:
        for causal in kinds:
            small = replace(sizes, n_queries=n, n_keys=n).finest(kernel, causal)
            if causal not in limits:
                rough = Experiments(Subject(kernel, small), causal, seed)
                rough.roughness()
                limits[causal] = 2 * max(rough.loose)
            try:
                found += law(_Bench(kernel, small, causal, seed, limits[causal]))
            except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError) as error:
                if is_out_of_memory(error):
                    raise
                reason = f"{_NAMES[law]}: {type(error).__name__}: {first_line(error)}"
                if reason not in skipped:
                    skipped.append(reason)
        if law is _untouched and found:
            break  # the other laws use the same tensors more than once
    return found


@dataclass(frozen=True, slots=True)
class _Bench:
    """What a law is tried on; results that differ by at most a share of ``limit`` are equal."""

    kernel: InnerKernel
    sizes: Sizes
    causal: bool
    seed: int
    limit: float

    def takes(self, sizes: Sizes) -> bool:
        """Whether the kernel takes calls of other sizes."""
        return self.kernel.refusal(sizes.call(self.causal)) is None

    def draw(self, sizes: Sizes) -> list[torch.Tensor]:
        """Query, key, value and grad_out."""
        return sizes.inputs(torch.Generator().manual_seed(self.seed))

    def run(
        self,
        sizes: Sizes,
        tensors: Tensors,
        grad_out: torch.Tensor,
        scale: float | None = None,
    ) -> list[torch.Tensor]:
        """Out, lse and, if ``sizes`` asks for them, gradients of an uncut call."""
        subject, task = Subject(self.kernel, sizes), square(sizes.n_keys)
        rows: Statistics = subject.forward(tensors, task, self.causal, scale=scale)
        found = [rows.out, rows.lse]
        if sizes.backward:
            found += subject.backward(
                tensors, grad_out.clone(), rows, task, self.causal, scale=scale
            )
        return found

    def equal(self, one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
        """Whether two calls' results are the same."""
        return not any(far(a, b, self.limit) for a, b in zip(one, other, strict=True))


def _grouped(bench: _Bench) -> Iterator[Broken]:
    """Fewer key heads give the same as repeating each of them for its group."""
    sizes = bench.sizes
    if sizes.heads == 1:
        return
    if sizes.heads == sizes.kv_heads:
        # Not more query heads, because a kernel may have a number for each.
        sizes = fewer_key_heads(sizes)
    group = sizes.heads // sizes.kv_heads
    repeated = replace(sizes, kv_heads=sizes.heads)
    if not (bench.takes(sizes) and bench.takes(repeated)):
        return
    query, key, value, grad_out = bench.draw(sizes)
    many = tuple(t.repeat_interleave(group, dim=1) for t in (key, value))
    one = bench.run(sizes, (query, key, value), grad_out)
    other = bench.run(repeated, (query, many[0], many[1]), grad_out)
    for index in range(3, len(other)):
        other[index] = other[index].unflatten(1, (sizes.kv_heads, group)).sum(dim=2)
    if not bench.equal(one, other):
        yield Broken(causes.GROUPED, f"{sizes.heads} over {sizes.kv_heads}")


def _value_width(bench: _Bench) -> Iterator[Broken]:
    """The columns of the values are independent of each other."""
    sizes, narrow = bench.sizes, bench.sizes.value_dim
    wide = replace(sizes, value_dim=narrow + 8)
    if not bench.takes(wide):
        return
    query, key, value, grad_out = bench.draw(wide)
    grad_out[..., narrow:] = 0
    values, grad = (t[..., :narrow].contiguous() for t in (value, grad_out))
    other = bench.run(sizes, (query, key, values), grad)
    twice = bench.run(sizes, (query, key, 2 * values), grad)
    if not bench.equal([twice[0]], [2 * other[0]]):
        return  # the output is not linear in the values
    one = bench.run(wide, (query, key, value), grad_out)
    for index in (0, 4)[: 2 if sizes.backward else 1]:
        one[index] = one[index][..., :narrow]
    if not bench.equal(one, other):
        yield Broken(causes.VALUE_DIM, f"{wide.value_dim} columns")


def _head_dimension(bench: _Bench) -> Iterator[Broken]:
    """Columns of zeros do not change scores.

    This is tried for other head dimensions only if it holds for the usual one. (With rotary
    positions, for example, it does not.)
    """
    usual = bench.sizes.head_dim
    if usual < 8 or _changed_by_zeros(bench, usual, 2 * usual) is not False:
        return
    for other in (usual - 4, usual - 3):
        if _changed_by_zeros(bench, other, usual):
            yield Broken(causes.HEAD_DIM, f"head_dim {other}")
            return


def _changed_by_zeros(bench: _Bench, few: int, more: int) -> bool | None:
    """Whether padding ``few`` columns to ``more`` changes the result; None: calls are refused."""
    narrow, wide = (replace(bench.sizes, head_dim=d) for d in (few, more))
    if not (bench.takes(narrow) and bench.takes(wide)):
        return None
    query, key, value, grad_out = bench.draw(narrow)
    padded = tuple(torch.nn.functional.pad(t, (0, more - few)) for t in (query, key))
    scale = few**-0.5
    one = bench.run(narrow, (query, key, value), grad_out, scale)
    other = bench.run(wide, (padded[0], padded[1], value), grad_out, scale)
    for index in range(2, len(other) - 1):
        other[index] = other[index][..., :few]
    return not bench.equal(one, other)


def _scale(bench: _Bench) -> Iterator[Broken]:
    """The scale is one factor, of query times key or of the scores.

    All known attention has one or the other; a scale that is applied twice has neither. So it is
    below 0, where the kernel takes that: the probe asks for it only of plain attention.
    """
    sizes = bench.sizes
    query, key, _, _ = bench.draw(sizes)
    query, key = query[:1], key[:1]
    usual = sizes.head_dim**-0.5
    subject, task = Subject(bench.kernel, sizes), square(sizes.n_keys)

    def weights(factor: float, by: float) -> Weights:
        return subject.weights(query * by, key, task, bench.causal, scale=factor * usual)

    def same(one: Weights, other: Weights) -> bool:
        return bench.equal([one.shares, one.lse], [other.shares, other.lse])

    total = weights(1.0, 1.0).shares.sum(dim=-1)
    if float(((total - 1).abs() * (total != 0)).max()) > bench.limit:
        return  # these are no weights, so there are no scores to compute from them
    once, twice, moved = weights(1.0, 1.0), weights(2.0, 1.0), weights(1.0, 2.0)
    signed = replace(sizes.call(bench.causal), positive_scale=False)
    below = weights(-1.0, 1.0) if bench.kernel.refusal(signed) is None else None
    if same(moved, twice):
        if below is not None and not same(below, weights(1.0, -1.0)):
            yield Broken(causes.SCALE, _BELOW)
        return
    if same(twice, once) and not same(moved, once):
        yield Broken(causes.SCALE, "ignored")
        return
    # No score can be computed from a share of a few units in the last place.
    least = 64 * torch.finfo(sizes.dtype).eps
    thrice = weights(3.0, 1.0)
    told = (once.shares > least) & (twice.shares > least) & (thrice.shares > least)
    if not told.any():
        return
    first, second, third = (w.scores()[told] for w in (once, twice, thrice))
    bent = (third - second) - (second - first)
    if float(bent.abs().max()) > bench.limit * max(float(first.abs().max()), 1.0):
        yield Broken(causes.SCALE, "applied otherwise")
        return
    if below is None:
        return
    told &= below.shares > least
    if told.any():
        first, second, turned = (w.scores()[told] for w in (once, twice, below))
        # With twice the rounding of the difference above.
        off = (turned - (3 * first - 2 * second)) / 2
        if float(off.abs().max()) > bench.limit * max(float(first.abs().max()), 1.0):
            yield Broken(causes.SCALE, _BELOW)


def _causal(bench: _Bench) -> Iterator[Broken]:
    """A causal square is the plain one without the keys after each query."""
    plain = bench.kernel.refusal(bench.sizes.call(False)) is None
    if not (bench.causal and plain):
        return
    tried = Experiments(Subject(bench.kernel, replace(bench.sizes, batch=1)), False, bench.seed)
    tried.loose = [bench.limit] * 2
    for cause in tried.causal_against_plain():
        yield Broken(cause, "a causal square")


def _untouched(bench: _Bench) -> Iterator[Broken]:
    """A call does not write to its inputs, which may be the caller's."""
    sizes, task = bench.sizes, square(bench.sizes.n_keys)
    query, key, value, grad_out = bench.draw(sizes)
    subject = Subject(bench.kernel, sizes)
    handed = [query, key, value]
    kept = [t.clone() for t in handed]
    rows = subject.forward((query, key, value), task, bench.causal)
    kind = "forward"
    if sizes.backward and all(torch.equal(a, b) for a, b in zip(kept, handed, strict=True)):
        kind = "backward"
        handed += [grad_out, rows.out, rows.lse]
        kept += [t.clone() for t in handed[3:]]
        subject.backward((query, key, value), grad_out, rows, task, bench.causal)
    if not all(_unchanged(a, b) for a, b in zip(kept, handed, strict=True)):
        cause = causes.INPUTS if kind == "forward" else causes.in_backward(causes.INPUTS)
        yield Broken(cause, f"a {kind}")


def _unchanged(before: torch.Tensor, after: torch.Tensor) -> bool:
    return torch.equal(before.nan_to_num(), after.nan_to_num())


def _gradient(bench: _Bench) -> Iterator[Broken]:
    """A backward is the gradient of its forward."""
    sizes = bench.sizes
    if not sizes.backward:
        return
    query, key, value, grad_out = bench.draw(sizes)
    subject = Subject(bench.kernel, sizes)
    rough = Experiments(subject, bench.causal, bench.seed).gradient_roughness()
    found = slopes(
        subject, (query, key, value), grad_out, square(sizes.n_keys), bench.causal, bench.seed,
        4 * rough,
    )  # fmt: skip
    if any(s.error == torch.inf for s in found):
        yield Broken(causes.in_backward(causes.NOT_FINITE), "an uncut call")
        return
    for slope in found:
        if not slope.right:
            kind = "causal" if bench.causal else "plain"
            where = f"{slope.name} off by {slope.error:.1e} of its size, {kind}"
            yield Broken(causes.GRADIENT, where)
        elif slope.limit == torch.inf:
            raise RuntimeError(f"{slope.name}: the forward is too rough for steps along it")


_Law = Callable[[_Bench], Iterator[Broken]]
_NAMES: dict[_Law, str] = {
    _untouched: "what is handed over",
    _grouped: "grouped heads",
    _value_width: "values wider than queries",
    _head_dimension: "other head dimensions",
    _scale: "other scales",
    _causal: "causal against plain",
    _gradient: "the gradient",
}


def fewer_key_heads(sizes: Sizes) -> Sizes:
    """The same sizes with half as many key heads as query heads, or with one."""
    kv_heads = sizes.heads // 2 if sizes.heads % 2 == 0 else 1
    return replace(sizes, kv_heads=kv_heads)
