"""Experiments that find out what is wrong with a kernel; each varies exactly one thing.

The scores that a kernel used can be computed from its results: values that are 1 for a single key
give that key's weight, and weights and lse give the scores of all pairs. Any part of the sequence
has to give the same scores as the whole sequence, and the lse of exactly these scores. If an
experiment differs, what it varied is the cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from quorum_attention.checking import causes
from quorum_attention.checking.gradients import slopes
from quorum_attention.checking.trial import (
    Four,
    Sizes,
    Trial,
    exceeds,
    rectangle,
    size,
    square,
    tokens,
)
from quorum_attention.decomposition import Decomposition, Span, Task
from quorum_attention.kernels import InnerKernel, Statistics, merge_

# Tokens of a sequence.
_TOKENS = 251
# Shares and scores with a smaller difference count as equal.
_LEAST = 2e-5
# A kernel's roughness is the second difference of its results for steps of this size in the inputs;
# for a smooth kernel that is about the square of the step. From _ROUGH on a kernel counts as rough.
_TINY = 1e-4
_ROUGH = 3e-5
# The largest tolerance that roughness may lead to.
_MOST = 0.1
_EVERY = slice(None)


@dataclass(frozen=True, slots=True)
class Broken:
    """Something that is wrong: the cause, and where it was seen."""

    cause: str
    where: str


def find_causes(kernel: InnerKernel, sizes: Sizes, is_causal: bool, seed: int) -> list[Broken]:
    """What is wrong with a kernel that some cut changes, the likeliest cause first.

    The experiments are run in the widest dtype that the kernel takes, where rounding hides least;
    if nothing is found, then in the dtype of the call.

    Args:
        kernel: the kernel.
        sizes: sizes of the calls that were wrong.
        is_causal: whether these calls were causal.
        seed: random seed of the inputs.
    """
    n = min(_TOKENS, sizes.n_queries, sizes.n_keys)
    small = replace(sizes, n_queries=n, n_keys=n)
    for tried in dict.fromkeys((small.finest(kernel, is_causal), small)):
        found = Experiments(kernel, tried, is_causal, seed).run()
        if found:
            return found
    return []


@dataclass(frozen=True, slots=True)
class _Difference:
    """How the weights of a task differ from those by the whole sequence's scores.

    Attributes:
        nan: a row's result is NaN, or it has an lse but no weights.
        outside: pairs that the task does not keep have a weight.
        added: pairs that the whole sequence does not keep have a weight: in some rows.
        filled: all rows with such pairs keep no key, and every key has a weight in them.
        missing: pairs that are kept have no weight.
        weights: other weights differ.
        lse: lse differs by more than rounding.
    """

    nan: bool
    outside: bool
    added: bool
    filled: bool
    missing: bool
    weights: bool
    lse: bool

    def __bool__(self) -> bool:
        pairs = self.outside or self.added or self.missing
        return self.nan or pairs or self.weights or self.lse


class Experiments:
    """All experiments on one kernel, at one dtype.

    Attributes:
        kinds: plain (False) and causal (True), if the kernel takes them; ``is_causal`` first.
        tolerance: how much weights and lse may differ.
    """

    def __init__(self, kernel: InnerKernel, sizes: Sizes, is_causal: bool, seed: int) -> None:
        self.kernel, self.sizes, self.seed, self.n = kernel, sizes, seed, sizes.n_keys
        both = (is_causal, not is_causal)
        self.kinds = [c for c in both if kernel.refusal(sizes.call(c)) is None]
        # The call to compare with: plain if the kernel takes that, because it has all pairs.
        self.base_causal = False not in self.kinds
        self.tolerance = max(_LEAST, 16 * torch.finfo(sizes.dtype).eps)
        self.inputs = sizes.inputs(seed)
        self.found: list[Broken] = []

    def whole(self, causal: bool) -> Trial:
        """The uncut call."""
        return Trial(self.kernel, self.inputs, square(self.n), causal)

    def run(self) -> list[Broken]:
        """The causes, in the order they were found in."""
        self._merging()
        rough_out, rough_lse = self.roughness()
        later = self._alone(backward=False)
        scores = None if self.found else self._scores()
        if scores is not None:
            self._parts(scores)
            self._causal_square(scores)
        self._add(*later)
        if not self.found and rough_out:
            self._add(Broken(causes.PRECISION, "results jump where inputs hardly change"))
        elif not self.found and rough_lse:
            self._add(Broken(causes.LSE, "lse jumps where inputs hardly change"))
        if not self.found and self.sizes.backward:
            self._backward()
        return self.found

    def causal_against_plain(self) -> list[Broken]:
        """The causes if a causal call is not the plain one without the keys after each query."""
        scores = self._scores()
        if scores is None:
            return []
        self._causal_square(scores)
        return self.found

    def _merging(self) -> None:
        for causal in self.kinds:
            first = self.whole(causal).forward()
            before = Statistics(torch.ones_like(first.out), torch.full_like(first.lse, 2.0))
            after = Statistics(before.out.clone(), before.lse.clone())
            merge_(before.out, before.lse, first.out, first.lse)
            self.whole(causal).forward(after)
            if exceeds(after.out, before.out, self.tolerance) or exceeds(
                after.lse, before.lse, self.tolerance
            ):
                self._add(Broken(causes.PAIRS, "statistics of earlier tasks are lost"))

    # Heads, entries and views, compared by their results.

    def _alone(self, backward: bool) -> list[Broken]:
        """Add what differs; return what differs in lse alone, which other causes may explain."""
        later: list[Broken] = []
        rough = self.gradient_roughness() if backward else 0.0
        share = max(16 * self.tolerance, min(_MOST, 16 * rough))
        for causal in self.kinds:
            trial = self.whole(causal)
            rows = trial.forward()
            grads = trial.backward(rows) if backward else ()
            for broken, part, batch, queries, keys in self._pieces(trial):
                mine = Statistics(*(t[batch, queries].contiguous() for t in (rows.out, rows.lse)))
                if backward:
                    heads = (queries, keys, keys)
                    pairs = zip(part.backward(mine), grads, heads, strict=True)
                    if any(exceeds(own, all_of[batch, at], share) for own, all_of, at in pairs):
                        self._add(replace(broken, where=f"{broken.where}, in the backward"))
                    continue
                found = part.forward()
                if exceeds(found.out, mine.out, self.tolerance):
                    self._add(broken)
                elif exceeds(found.lse, mine.lse, self.tolerance):
                    later.append(replace(broken, where=f"{broken.where}, lse"))
        return later

    def _pieces(self, trial: Trial) -> Iterator[tuple[Broken, Trial, slice, slice, slice]]:
        """Views of the whole call, each key head, each batch entry; and the batch entries, query
        heads and key heads of the whole call that they have."""
        for where, view in (("larger tensors", _within), ("(b, tokens, h, d)", _turned)):
            query, key, value, grad_out = map(view, trial.tensors)
            views = replace(trial, tensors=(query, key, value, grad_out))
            broken = Broken(causes.SIZES, f"views of {where} in memory")
            yield broken, views, _EVERY, _EVERY, _EVERY
        group = self.sizes.heads // self.sizes.kv_heads
        for head in range(self.sizes.kv_heads if self.sizes.kv_heads > 1 else 0):
            first = head * group
            queries, keys = slice(first, first + group), slice(head, head + 1)
            part = replace(
                trial, tensors=_taken(trial.tensors, _EVERY, queries, keys), first_head=first
            )
            yield Broken(causes.HEADS, "a head alone"), part, _EVERY, queries, keys
        for number in range(self.sizes.batch if self.sizes.batch > 1 else 0):
            entry = slice(number, number + 1)
            part = replace(
                trial, tensors=_taken(trial.tensors, entry, _EVERY, _EVERY), entries=(number,)
            )
            yield Broken(causes.HEADS, "a batch entry alone"), part, entry, _EVERY, _EVERY

    # How finely a kernel computes.

    def roughness(self) -> tuple[bool, bool]:
        """Whether out and lse jump where inputs hardly change; widens the tolerance by that."""

        def results(trial: Trial) -> Sequence[torch.Tensor]:
            rows = trial.forward()
            return rows.out, rows.lse

        bent = [self._bent(self.whole(c), results, self.seed + 7) for c in self.kinds]
        out, lse = (max(found) for found in zip(*bent, strict=True))
        if max(out, lse) > _ROUGH:
            # Errors of lse become errors of weights in a merge, and vice versa.
            self.tolerance = max(self.tolerance, min(_MOST, 16 * max(out, lse)))
        return out > _ROUGH, lse > _ROUGH

    def gradient_roughness(self) -> float:
        """How much the gradients jump, for the same out and lse; 0 if they are smooth."""
        most = 0.0
        for causal in self.kinds:
            trial = self.whole(causal)
            gradients = partial(Trial.backward, rows=trial.forward())
            most = max(most, *self._bent(trial, gradients, self.seed + 8))
        return most if most > _ROUGH else 0.0

    def _bent(
        self, trial: Trial, run: Callable[[Trial], Sequence[torch.Tensor]], seed: int
    ) -> list[float]:
        """Second differences of results for tiny steps of the inputs, as shares of their size; 0 in
        16 bits, where everything jumps."""
        middle = run(trial)
        if torch.finfo(self.sizes.dtype).eps > 1e-6:
            return [0.0] * len(middle)
        *steps, _ = replace(self.sizes, dtype=torch.float64).inputs(seed, _TINY)
        *inputs, grad_out = trial.tensors
        nearby = []
        for sign in (1, -1):
            q, k, v = (t + (sign * d).to(t.dtype) for t, d in zip(inputs, steps, strict=True))
            nearby.append(run(replace(trial, tensors=(q, k, v, grad_out))))
        found = []
        for here, above, below in zip(middle, *nearby, strict=True):
            off = above.double() + below.double() - 2 * here.double()
            off = off.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            found.append(float(off.abs().max()) / size(here))
        return found

    # Weights and scores.

    def _scores(self) -> torch.Tensor | None:
        """The scores of the uncut call, of one batch entry; None if it is no mean of values."""
        trial = self.whole(self.base_causal)
        trial = replace(trial, tensors=_taken(trial.tensors, slice(1), _EVERY, _EVERY))
        shares, lse = trial.weights()
        if shares.isnan().any() or lse.isnan().any() or (lse == torch.inf).any():
            self._add(Broken(causes.NO_KEYS, "an uncut call"))
            return None
        group = self.sizes.heads // self.sizes.kv_heads
        wanted = shares @ trial.tensors[2].double().repeat_interleave(group, dim=1)
        if exceeds(trial.forward().out, wanted, 4 * self.tolerance):
            self._add(Broken(causes.WEIGHTS, "they depend on the values"))
            return None
        total = shares.sum(dim=-1)
        live = total[(total != 0) | (lse != -torch.inf)]
        if live.numel() and float((live - 1).abs().max()) > self.tolerance:
            sums = f"they add up to {float(live.min()):.3g} to {float(live.max()):.3g}"
            self._add(Broken(causes.WEIGHTS, sums))
            return None
        return torch.log(shares) + lse.unsqueeze(-1)

    def _parts(self, scores: torch.Tensor) -> None:
        """Some later rows against some earlier keys; then, if they are right, tasks."""
        n = self.n
        first, second = n // 3, 2 * n // 3
        cuts = [
            ((0, second), (second, n)),
            ((0, second), ((second + n) // 2, n)),
            ((0, first), (second, n)),
            ((first, second), (second, n)),
            ((first + 1, second - 2), (second + 1, n)),
        ]
        parts = [rectangle(*cut) for cut in cuts]
        # Keys with a gap: a bias by local positions shifts all scores of a run alike.
        runs = (Span(0, first // 2, 1), Span(first, second, 1), Span(second, n, 2))
        parts.append(Task((0,), runs))
        found = [self._difference(part, True, scores) for part in parts]
        self._name([d for d in found if d])
        if self.found:
            return
        both = self.kinds if len(self.kinds) < 2 else [False, True]
        causal_is_off = len(both) > 1 and self._difference(square(n), True, scores)
        found = []
        for levels in ((3,), (7,)):
            for owner in (0, 1):
                task = Decomposition(n, levels, "balanced").task((owner,))
                for causal in both:
                    if not (causal and causal_is_off):
                        found.append(self._difference(task, causal, scores))
        self._name([d for d in found if d])

    def _causal_square(self, scores: torch.Tensor) -> None:
        off = len(self.kinds) > 1 and self._difference(square(self.n), True, scores)
        if off:
            lse_alone = off.lse and not off.weights
            cause = causes.NO_KEYS if off.nan else causes.LSE if lse_alone else causes.PAIRS
            where = "a causal call is not the plain one without the keys after each query"
            self._add(Broken(cause, where))

    def _name(self, differences: list[_Difference]) -> None:
        """Add the cause that explains the differences."""

        def any_is(name: str) -> bool:
            return any(getattr(d, name) for d in differences)

        cause = None
        if any_is("nan"):
            cause, where = causes.NO_KEYS, "a task"
        elif any_is("outside"):
            cause, where = causes.PAIRS, "a task computes pairs of another"
        elif any_is("added"):
            cause, where = causes.POSITIONS, "a task has weights that the whole call has not"
            filled = all(d.filled for d in differences)
            if filled and not any_is("missing") and not any_is("weights"):
                cause = causes.NO_KEYS
        elif any_is("missing"):
            cause, where = causes.PAIRS, "a task leaves pairs out"
        elif any_is("weights"):
            cause, where = causes.POSITIONS, "a task has other weights than the whole call"
        elif differences:
            cause, where = causes.LSE, "a task"
        if cause is not None:
            self._add(Broken(cause, where))

    def _part(self, task: Task, causal: bool) -> Trial:
        """A task of one batch entry."""
        at = tokens(task, self.sizes.device)
        query, key, value, grad = (t[:1, :, at] for t in self.whole(causal).tensors)
        return Trial(self.kernel, (query, key, value, grad), task, causal)

    def _difference(self, task: Task, causal: bool, whole: torch.Tensor) -> _Difference:
        """Compare the weights of a task with those by the whole sequence's scores."""
        shares, found_lse = self._part(task, causal).weights()
        at = tokens(task, self.sizes.device)
        keep = torch.from_numpy(task.mask()).to(at.device)
        if causal or self.base_causal:
            keep = keep.tril()
        own = whole[:, :, at]
        scores = own[..., at].masked_fill(~keep, -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        empty = lse == -torch.inf
        wanted = torch.exp(scores - lse.masked_fill(empty, 0.0).unsqueeze(-1))
        nan = shares.isnan().any(dim=-1) | found_lse.isnan() | (found_lse == torch.inf)
        nan |= empty & (found_lse != -torch.inf) & ~(shares > 0).any(dim=-1)
        shares = shares.nan_to_num(nan=0.0)
        # A masked pair has a weight of exactly 0.
        seen = shares > 0
        extra = seen & keep & (scores == -torch.inf)
        without = ~extra.any(dim=-1)
        lost = (wanted > self.tolerance) & (shares == 0) & ~nan.unsqueeze(-1)
        live = ~(nan | empty)
        off = (shares - wanted).abs().amax(dim=-1).masked_fill(~live, 0.0)
        lse_off = torch.where(live, found_lse - lse, 0.0)
        return _Difference(
            nan=bool(nan.any()),
            outside=bool((seen & ~keep).any()),
            added=bool(extra.any()),
            filled=bool((empty & (extra | ~keep).all(dim=-1) | without).all()),
            missing=bool(lost.any()),
            weights=bool((off > self.tolerance).any()),
            lse=bool((lse_off.abs() > self.tolerance * max(1.0, size(lse))).any()),
        )

    # The backward.

    def _backward(self) -> None:
        for causal in self.kinds:
            trial = self.whole(causal)
            rows = trial.forward()
            grads = trial.backward(rows)
            if not all(bool(g.isfinite().all()) for g in grads):
                self._add(Broken(causes.NO_KEYS, "gradients of an uncut call"))
                return
            more = zip(trial.backward(rows, 1.0), grads, strict=True)
            if any(exceeds(a - 1, b, 64 * self.tolerance) for a, b in more):
                self._add(Broken(causes.PAIRS, "gradients of earlier tasks are lost"))
                return
        self._add(*self._alone(backward=True))
        if self.found:
            return
        trial = self.whole(self.kinds[0])
        rows = trial.forward()
        query, key, value = trial.backward(rows)
        # An lse larger by ln 2 halves all probabilities; another output changes delta.
        halved = trial.backward(Statistics(rows.out, rows.lse + math.log(2)))
        if exceeds(2 * halved[2], value, 64 * self.tolerance):
            self._add(Broken(causes.BACKWARD, "it does not use the lse that it is given"))
        other = trial.backward(Statistics(rows.out + trial.tensors[3].to(rows.out), rows.lse))
        if not (exceeds(other[0], query, 1e-2) and exceeds(other[1], key, 1e-2)):
            self._add(Broken(causes.BACKWARD, "it does not use the out that it is given"))
        rough = self.gradient_roughness()
        if not self.found:
            # A part as if it were the whole call: its backward against its forward.
            n = self.n
            task = rectangle((n // 3, 2 * n // 3), (2 * n // 3, n))
            query, key, value, grad = (
                t[:, :, tokens(task, self.sizes.device)] for t in trial.tensors
            )
            part = Trial(self.kernel, (query, key, value, grad), task, True)
            found = slopes(part, self.seed, 4 * rough)
            if any(s.error == torch.inf for s in found):
                self._add(Broken(causes.NO_KEYS, "gradients of a task"))
            elif not all(s.right for s in found):
                self._add(Broken(causes.BACKWARD, "gradients of a task"))
        if not self.found and rough:
            self._add(Broken(causes.PRECISION, "gradients jump where inputs hardly change"))

    def _add(self, *found: Broken) -> None:
        self.found += [broken for broken in found if broken not in self.found]


def _within(tensor: torch.Tensor) -> torch.Tensor:
    """A copy as a view of a larger tensor, whose other elements have quite another value."""
    b, h, n, d = tensor.shape
    room = torch.full((b, h + 1, n + 5, d + 8), 7.0, dtype=tensor.dtype, device=tensor.device)
    view = room[:, :h, 2 : n + 2, :d]
    return view.copy_(tensor)


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _taken(tensors: Four, batch: slice, queries: slice, keys: slice) -> Four:
    """Copies of some entries and heads."""
    query, key, value, grad_out = tensors
    return (
        query[batch, queries].contiguous(), key[batch, keys].contiguous(),
        value[batch, keys].contiguous(), grad_out[batch, queries].contiguous(),
    )  # fmt: skip
