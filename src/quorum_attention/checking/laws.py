"""Laws that hold for every attention, whatever its scores.

They find errors that no cut shows, because every cut has the same error. Each law varies one thing
of a small uncut call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.nn.functional import pad

from quorum_attention.checking import causes
from quorum_attention.checking.experiments import Broken, Experiments
from quorum_attention.checking.gradients import slopes
from quorum_attention.checking.trial import Sizes, Trial, exceeds, square
from quorum_attention.errors import first_line, is_out_of_memory
from quorum_attention.kernels import InnerKernel

_TOKENS = 53


def violations(
    kernel: InnerKernel,
    sizes: Sizes,
    kinds: list[bool],
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
    small = replace(sizes, n_queries=n, n_keys=n)
    benches = [_Bench(kernel, small.finest(kernel, causal), causal, seed) for causal in kinds]
    laws = (_causal_calls, _other_scales, _the_gradient)
    found: list[Broken] = []
    for law in (*laws, _grouped_heads, _wider_values, _head_dimensions) if other_sizes else laws:
        for bench in benches:
            try:
                found += law(bench)
            except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError) as error:
                if is_out_of_memory(error):
                    raise
                name = law.__name__.replace("_", " ").strip()
                reason = f"{name}: {type(error).__name__}: {first_line(error)}"
                if reason not in skipped:
                    skipped.append(reason)
    return found


def writes_into_inputs(
    kernel: InnerKernel, sizes: Sizes, kinds: list[bool], seed: int
) -> list[Broken]:
    """Whether a call writes into what it is handed, which may be the caller's."""
    n = min(_TOKENS, sizes.n_queries, sizes.n_keys)
    for causal in kinds:
        inputs = replace(sizes, n_queries=n, n_keys=n).inputs(seed)
        trial = Trial(kernel, inputs, square(n), causal)
        handed = list(inputs)
        kept = [t.clone() for t in handed]
        rows = trial.forward()
        same = all(map(torch.equal, kept, handed))
        if same and sizes.backward:
            handed += [rows.out, rows.lse]
            kept = [t.nan_to_num() for t in handed]
            trial.backward(rows)
            same = all(map(torch.equal, kept, (t.nan_to_num() for t in handed)))
        if not same:
            return [Broken(causes.STATE, "a call writes into tensors that it is handed")]
    return []


class _Bench:
    """What a law is tried on; results that differ by at most a share of ``limit`` are equal."""

    def __init__(self, kernel: InnerKernel, sizes: Sizes, causal: bool, seed: int) -> None:
        self.kernel, self.sizes, self.causal, self.seed = kernel, sizes, causal, seed
        self.experiments = Experiments(kernel, sizes, causal, seed)
        self.experiments.roughness()
        self.limit = 2 * self.experiments.tolerance

    def takes(self, *others: Sizes) -> bool:
        """Whether the kernel takes calls of other sizes."""
        return all(self.kernel.refusal(sizes.call(self.causal)) is None for sizes in others)

    def run(self, *tensors: torch.Tensor, scale: float | None = None) -> list[torch.Tensor]:
        """Out, lse and, if they are asked for, gradients of an uncut call."""
        query, key, value, grad_out = tensors
        task = square(key.shape[2])
        trial = Trial(self.kernel, (query, key, value, grad_out), task, self.causal, scale)
        rows = trial.forward()
        grads = trial.backward(rows) if self.sizes.backward else ()
        return [rows.out, rows.lse, *grads]

    def equal(self, one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
        """Whether two calls' results are the same."""
        return not any(exceeds(a, b, self.limit) for a, b in zip(one, other, strict=True))


def _grouped_heads(bench: _Bench) -> Iterator[Broken]:
    """Fewer key heads give the same as repeating each of them for its group."""
    sizes = bench.sizes
    if sizes.heads == sizes.kv_heads:
        # Not more query heads, because a kernel may have a number for each.
        sizes = fewer_key_heads(sizes)
    group = sizes.heads // sizes.kv_heads
    if sizes.heads == 1 or not bench.takes(sizes, replace(sizes, kv_heads=sizes.heads)):
        return
    query, key, value, grad_out = sizes.inputs(bench.seed)
    one = bench.run(query, key, value, grad_out)
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    other = bench.run(query, key, value, grad_out)
    other[3:] = [t.unflatten(1, (sizes.kv_heads, group)).sum(dim=2) for t in other[3:]]
    if not bench.equal(one, other):
        yield Broken(causes.HEADS, f"{sizes.heads} over {sizes.kv_heads}")


def _wider_values(bench: _Bench) -> Iterator[Broken]:
    """The columns of the values are independent of each other."""
    narrow = bench.sizes.value_dim
    wide = replace(bench.sizes, value_dim=narrow + 8)
    if not bench.takes(wide):
        return
    query, key, value, grad_out = wide.inputs(bench.seed)
    grad_out[..., narrow:] = 0
    few, grad = (t[..., :narrow].contiguous() for t in (value, grad_out))
    other = bench.run(query, key, few, grad)
    if exceeds(bench.run(query, key, 2 * few, grad)[0], 2 * other[0], bench.limit):
        return  # the output is not linear in the values
    one = bench.run(query, key, value, grad_out)
    cut = [t[..., :narrow] if i in (0, 4) else t for i, t in enumerate(one)]
    if not bench.equal(cut, other):
        yield Broken(causes.SIZES, f"values of {wide.value_dim} columns")


def _head_dimensions(bench: _Bench) -> Iterator[Broken]:
    """Columns of zeros do not change scores.

    This is tried for other head dimensions only if it holds for the usual one. (With rotary
    positions, for example, it does not.)
    """
    usual = bench.sizes.head_dim
    if usual >= 8 and _changed_by_zeros(bench, usual, 2 * usual) is False:
        for other in (usual - 4, usual - 3):
            if _changed_by_zeros(bench, other, usual):
                yield Broken(causes.SIZES, f"head_dim {other}")
                return


def _changed_by_zeros(bench: _Bench, few: int, more: int) -> bool | None:
    """Whether padding ``few`` columns to ``more`` changes the result; None: calls are refused."""
    narrow, wide = (replace(bench.sizes, head_dim=d) for d in (few, more))
    if not bench.takes(narrow, wide):
        return None
    query, key, *rest = narrow.inputs(bench.seed)
    one = bench.run(query, key, *rest, scale=few**-0.5)
    wider = (pad(t, (0, more - few)) for t in (query, key))
    other = bench.run(*wider, *rest, scale=few**-0.5)
    other[2:4] = [t[..., :few] for t in other[2:4]]
    return not bench.equal(one, other)


def _other_scales(bench: _Bench) -> Iterator[Broken]:
    """The scale is one factor, of query times key or of the scores.

    All known attention has one or the other; a scale that is applied twice has neither. So it is
    below 0, where the kernel takes that: the probe asks for it only of plain attention.
    """
    sizes = bench.sizes
    query, key, value, grad_out = (t[:1] for t in sizes.inputs(bench.seed))

    def weights(factor: float, by: float = 1.0) -> list[torch.Tensor]:
        inputs = (query * by, key, value, grad_out)
        scale = factor * sizes.head_dim**-0.5
        trial = Trial(bench.kernel, inputs, square(sizes.n_keys), bench.causal, scale)
        return list(trial.weights())

    once, twice, moved = weights(1.0), weights(2.0), weights(1.0, 2.0)
    total = once[0].sum(dim=-1)
    if float(((total - 1).abs() * (total != 0)).max()) > bench.limit:
        return  # these are no weights, so there are no scores to compute from them
    signed = replace(sizes.call(bench.causal), positive_scale=False)
    factors = (3.0, -1.0) if bench.kernel.refusal(signed) is None else (3.0,)
    if bench.equal(moved, twice):
        if len(factors) > 1 and not bench.equal(weights(-1.0), weights(1.0, -1.0)):
            yield Broken(causes.SIZES, "a scale below 0 (or say positive_scale=True)")
        return
    if bench.equal(twice, once) and not bench.equal(moved, once):
        yield Broken(causes.SIZES, "the scale is ignored")
        return
    # The scores change in proportion. None can be computed from a share of a few units in the last
    # place.
    least = 64 * torch.finfo(sizes.dtype).eps
    for factor in factors:
        three = (once, twice, weights(factor))
        told = torch.stack([shares > least for shares, _ in three]).all(dim=0)
        if not told.any():
            return
        first, second, other = ((w.log() + lse.unsqueeze(-1))[told] for w, lse in three)
        off = float((other - first - (factor - 1) * (second - first)).abs().max())
        if off > bench.limit * max(float(first.abs().max()), 1.0) * (1 if factor > 0 else 2):
            yield Broken(causes.SIZES, f"the scale times {factor:.0f}")
            return


def _causal_calls(bench: _Bench) -> Iterator[Broken]:
    """A causal square is the plain one without the keys after each query."""
    if bench.causal and bench.kernel.refusal(bench.sizes.call(False)) is None:
        one = replace(bench.sizes, batch=1)
        tried = Experiments(bench.kernel, one, False, bench.seed)
        tried.tolerance = bench.limit
        yield from tried.causal_against_plain()


def _the_gradient(bench: _Bench) -> Iterator[Broken]:
    """A backward is the gradient of its forward."""
    if not bench.sizes.backward:
        return
    rough = bench.experiments.gradient_roughness()
    found = slopes(bench.experiments.whole(bench.causal), bench.seed, 4 * rough)
    if any(s.error == torch.inf for s in found):
        yield Broken(causes.NO_KEYS, "gradients of an uncut call")
        return
    for slope in found:
        if not slope.right:
            kind = "causal" if bench.causal else "plain"
            where = f"{slope.name} off by {slope.error:.1e} of its size, {kind}"
            yield Broken(causes.BACKWARD, where)
        elif slope.limit == torch.inf:
            raise RuntimeError(f"{slope.name}: the forward is too rough for steps along it")


def fewer_key_heads(sizes: Sizes) -> Sizes:
    """The same sizes with half as many key heads as query heads, or with one."""
    kv_heads = sizes.heads // 2 if sizes.heads % 2 == 0 else 1
    return replace(sizes, kv_heads=kv_heads)
