"""Experiments that find out what is wrong with a kernel; each varies exactly one thing.

The scores that a kernel used can be computed from its results: values that are 1 for a single key
give that key's weight, and weights and lse give the scores of all pairs. Any part of the sequence
has to give the same scores as the whole sequence, and the lse of exactly these scores. If an
experiment differs, what it varied is the cause.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from quorum_attention.checking import causes
from quorum_attention.checking.gradients import slopes
from quorum_attention.checking.rounding import far, repeated, size
from quorum_attention.checking.subject import (
    Sizes,
    Subject,
    Tensors,
    Weights,
    rectangle,
    square,
    tokens,
)
from quorum_attention.decomposition import Decomposition, Task
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


def likely_causes(kernel: InnerKernel, sizes: Sizes, is_causal: bool, seed: int) -> list[str]:
    """What is wrong, the likeliest cause first.

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
    finest = small.finest(kernel, is_causal)
    for tried in dict.fromkeys((finest, small)):
        found = Experiments(Subject(kernel, tried), is_causal, seed).run()
        if found:
            return found
    return [causes.UNKNOWN]


@dataclass(frozen=True, slots=True)
class _Difference:
    """How the weights of a task differ from those by the whole sequence's scores.

    Attributes:
        nan_rows: (b, h, rows) whether a row's result is NaN, or it has an lse but no weights.
        nan_without_keys: all these rows keep no key.
        outside: pairs that the task does not keep have a weight.
        added: pairs that the whole sequence does not keep have a weight.
        filled: all rows with such pairs keep no key, and every key has a weight in them.
        blank: all rows with such pairs keep no key of the whole sequence.
        missing: pairs that are kept have no weight.
        weights: other weights differ.
        lse, lse_off: the difference of the lse, and whether it is more than rounding.
    """

    nan_rows: torch.Tensor
    nan_without_keys: bool
    outside: bool
    added: bool
    filled: bool
    blank: bool
    missing: bool
    weights: bool
    lse: torch.Tensor
    lse_off: bool

    def __bool__(self) -> bool:
        return bool(
            self.nan_rows.any()
            or self.outside
            or self.added
            or self.missing
            or self.weights
            or self.lse_off
        )


class Experiments:
    """All experiments on one kernel, at one dtype."""

    def __init__(self, subject: Subject, is_causal: bool, seed: int) -> None:
        self.subject, self.sizes = subject, subject.sizes
        self.seed = seed
        self.n = self.sizes.n_keys
        self.plain = subject.kernel.refusal(self.sizes.call(False)) is None
        self.causal = subject.kernel.refusal(self.sizes.call(True)) is None
        # The call to compare with: plain if the kernel takes that, because it has all pairs.
        self.base_causal = not self.plain
        self.is_causal = is_causal
        self.grad_out = torch.empty(0, device="cpu")
        self.tensors = self._draw(seed)
        # Tolerances of weights and of lse.
        self.loose = [max(_LEAST, 16 * torch.finfo(self.sizes.dtype).eps)] * 2
        self.loose_gradients = 16 * self.loose[0]
        self.found: list[str] = []
        self.scores = torch.empty(0, device="cpu")

    def run(self) -> list[str]:
        """The causes, in the order they were found in."""
        if not self._steady():
            return self.found
        rough = self.roughness()
        later = self._apart(self._forward_of_part)
        if self._base_is_sound():
            self._parts()
            if not self.found:
                self._tasks()
            self._causal_squares()
        self._add(*later)
        if not self.found and rough[0]:
            self._add(causes.PRECISION)
        elif not self.found and rough[1]:
            self._add(causes.LSE)
        if not self.found and self.sizes.backward:
            self._backward()
        return self.found

    def causal_against_plain(self) -> list[str]:
        """The causes if a causal call is not the plain one without the keys after each query."""
        if self._base_is_sound():
            self._causal_squares()
        return self.found if self.scores.numel() else []

    # First of all: the same call has the same result, and its inputs are unchanged.

    def _steady(self) -> bool:
        for causal in self._kinds():
            kept = [t.clone() for t in self.tensors]
            first = self._whole(self.tensors, causal)
            if not all(torch.equal(a, b) for a, b in zip(kept, self.tensors, strict=True)):
                self._add(causes.INPUTS)
                return False
            again = self._whole(self.tensors, causal)
            if not _same(again, first, self.sizes.dtype):
                self._add(causes.REPEATABLE)
                return False
            others = self._draw(self.seed + 1)[:3]
            other = self._whole(others, causal)
            third = self._whole(self.tensors, causal)
            stale = torch.equal(other.out, first.out) and first.out.numel() > 0
            if stale or not _same(third, first, self.sizes.dtype):
                self._add(causes.STATE)
                return False
            before = Statistics(torch.ones_like(first.out), torch.full_like(first.lse, 2.0))
            after = Statistics(before.out.clone(), before.lse.clone())
            merge_(before.out, before.lse, first.out, first.lse)
            self.subject.forward(self.tensors, square(self.n), causal, state=after)
            if far(after.out, before.out, self.loose[0]) or far(
                after.lse, before.lse, self.loose[1]
            ):
                self._add(causes.MERGE)
                return False
        return True

    # Views, heads and entries, compared by their results.

    def _apart(self, difference: Callable[..., tuple[bool, bool]]) -> list[str]:
        """Add what differs; return what differs in lse alone, which others may explain."""
        later: list[str] = []
        for cause, one in (
            (causes.STRIDES, self._strided),
            (causes.HEADS, self._heads),
            (causes.BATCH, self._entries),
        ):
            for causal in self._kinds():
                results = [difference(part, causal) for part in one()]
                if any(out for out, _ in results):
                    self._add(cause)
                elif any(lse for _, lse in results):
                    later.append(cause)
        return later

    def _strided(self) -> list[_Part]:
        """The whole call, as views of larger tensors, and in memory order (b, tokens, h, d)."""
        every = (slice(None), slice(None))
        padded = tuple(_within(t) for t in (*self.tensors, self.grad_out))
        turned = tuple(
            t.transpose(1, 2).contiguous().transpose(1, 2) for t in (*self.tensors, self.grad_out)
        )
        return [_Part(t, *every, 0, None, slice(None)) for t in (padded, turned)]

    def _heads(self) -> list[_Part]:
        group = self.sizes.heads // self.sizes.kv_heads
        if self.sizes.kv_heads == 1:
            return []
        found = []
        for head in range(self.sizes.kv_heads):
            queries, keys = slice(head * group, (head + 1) * group), slice(head, head + 1)
            q, k, v = self.tensors
            part = (q[:, queries], k[:, keys], v[:, keys], self.grad_out[:, queries])
            found.append(_Part(_copies(part), slice(None), queries, head * group, None, keys))
        return found

    def _entries(self) -> list[_Part]:
        if self.sizes.batch == 1:
            return []
        return [
            _Part(
                _copies(tuple(t[b : b + 1] for t in (*self.tensors, self.grad_out))),
                slice(b, b + 1), slice(None), 0, (b,), slice(None),
            )
            for b in range(self.sizes.batch)
        ]  # fmt: skip

    def _forward_of_part(self, part: _Part, causal: bool) -> tuple[bool, bool]:
        whole = self._whole(self.tensors, causal)
        found = self.subject.forward(
            part.inputs, square(self.n), causal, first_head=part.first_head, entries=part.entries
        )
        wanted_out = whole.out[part.batch, part.queries]
        wanted_lse = whole.lse[part.batch, part.queries]
        return (
            far(found.out, wanted_out, self.loose[0]),
            far(found.lse, wanted_lse, self.loose[1]),
        )

    # How finely a kernel computes.

    def roughness(self) -> tuple[bool, bool]:
        """Whether out and lse jump where inputs hardly change; widens the tolerances by that."""
        if torch.finfo(self.sizes.dtype).eps > 1e-6:
            return False, False
        generator = torch.Generator().manual_seed(self.seed + 7)
        found = [0.0, 0.0]
        for causal in self._kinds():
            here = self._whole(self.tensors, causal)
            nearby = [self._whole(moved, causal) for moved in self._nearby(generator)]
            for index, name in enumerate(("out", "lse")):
                bent = _bent(*(getattr(s, name) for s in (here, *nearby)))
                found[index] = max(found[index], bent)
        if max(found) > _ROUGH:
            # Both tolerances: errors of lse become errors of weights in a merge, and vice versa.
            self.loose = [max(*self.loose, min(_MOST, 16 * max(found)))] * 2
        return found[0] > _ROUGH, found[1] > _ROUGH

    def gradient_roughness(self) -> float:
        """How much the gradients jump, for the same out and lse; 0 if they are smooth."""
        if torch.finfo(self.sizes.dtype).eps > 1e-6:
            return 0.0
        generator = torch.Generator().manual_seed(self.seed + 8)
        found = 0.0
        for causal in self._kinds():
            rows = self._whole(self.tensors, causal)
            here = self._gradients(rows, causal)
            nearby = [self._gradients(rows, causal, at=m) for m in self._nearby(generator)]
            for part in zip(here, *nearby, strict=True):
                found = max(found, _bent(*part))
        return found if found > _ROUGH else 0.0

    def _nearby(self, generator: torch.Generator) -> list[Tensors]:
        by = [
            _TINY * torch.randn(t.shape, generator=generator, dtype=torch.float64, device="cpu")
            for t in self.tensors
        ]
        found: list[Tensors] = []
        for sign in (1, -1):
            query, key, value = (
                t + (sign * d).to(t.device, t.dtype) for t, d in zip(self.tensors, by, strict=True)
            )
            found.append((query, key, value))
        return found

    # Weights and scores.

    def _base_is_sound(self) -> bool:
        """Whether an uncut call is a mean of values; other scores are compared with its scores."""
        query, key, value = (t[:1] for t in self.tensors)
        task, causal = square(self.n), self.base_causal
        found = self.subject.weights(query, key, task, causal)
        shares, lse = found.shares, found.lse
        if shares.isnan().any() or lse.isnan().any() or (lse == torch.inf).any():
            empty = ~(shares.nan_to_num(nan=0.0) > 0).any(dim=-1)
            bad = shares.isnan().any(dim=-1) | lse.isnan()
            self._add(causes.NO_KEYS if bool((empty | ~bad).all()) else causes.NOT_FINITE)
            return False
        out = self.subject.forward((query, key, value), task, causal).out
        group = self.sizes.heads // self.sizes.kv_heads
        wanted = shares @ value.double().repeat_interleave(group, dim=1)
        if far(out, wanted, 4 * self.loose[0]):
            self._add(causes.VALUES)
            return False
        total = shares.sum(dim=-1)
        live = (total != 0) | (lse != -torch.inf)
        off = (total - 1).abs().masked_fill(~live, 0.0)
        if float(off.max()) > self.loose[0]:
            below = bool((total[live] < 1 + self.loose[0]).all())
            spread = float(total[live].max() - total[live].min()) > self.loose[0]
            self._add(causes.BESIDE if below and spread else causes.NORMALISATION)
            return False
        self.scores = found.scores()
        return True

    def _parts(self) -> None:
        """Some later rows against some earlier keys: fewer rows, fewer keys."""
        n = self.n
        first, second = n // 3, 2 * n // 3
        middle = (second + n) // 2
        cuts = [
            ((0, second), (second, n)),
            ((0, second), (middle, n)),
            ((0, first), (second, n)),
            ((first, second), (second, n)),
            ((first + 1, second - 2), (second + 1, n)),
        ]
        differences = []
        for keys, queries in cuts:
            task = rectangle(keys, queries)
            difference = self._difference(task, True, self.tensors, self.scores)
            if difference:
                differences.append((task, difference))
        self._name(differences)

    def _tasks(self) -> None:
        """Tasks of a decomposition."""
        differences = []
        for levels in ((3,), (7,)):
            shape = Decomposition(self.n, levels, "balanced")
            for owner in (0, 1):
                for causal in self._kinds():
                    if self.base_causal and not causal:
                        continue
                    task = shape.task((owner,))
                    difference = self._difference(task, causal, self.tensors, self.scores)
                    if difference and not (causal and self._causal_is_off()):
                        differences.append((task, difference))
        self._name(differences)

    def _causal_is_off(self) -> bool:
        if not (self.plain and self.causal):
            return False
        return bool(self._difference(square(self.n), True, self.tensors, self.scores))

    def _causal_squares(self) -> None:
        if not (self.plain and self.causal):
            return
        difference = self._difference(square(self.n), True, self.tensors, self.scores)
        if not difference:
            return
        if difference.nan_rows.any():
            self._add(causes.NO_KEYS if difference.nan_without_keys else causes.NOT_FINITE)
        elif difference.lse_off and not difference.weights:
            self._add(causes.LSE)
        else:
            self._add(causes.CAUSAL)

    def _name(self, differences: list[tuple[Task, _Difference]]) -> None:
        """Add the cause that explains the differences."""
        found = [d for _, d in differences]
        if not found:
            return
        if any(d.nan_rows.any() for d in found):
            bad = [d for d in found if d.nan_rows.any()]
            empty = all(d.nan_without_keys for d in bad)
            self._add(causes.NO_KEYS if empty else causes.NOT_FINITE)
        elif any(d.outside for d in found):
            self._add(causes.TWICE)
        elif any(d.added for d in found):
            others = any(d.missing or d.weights for d in found)
            if not others and all(d.blank for d in found):
                self._add(causes.MISSING)
            elif not others and all(d.filled for d in found):
                self._add(causes.NO_KEYS)
            else:
                self._add(causes.POSITIONS if self._by_place() else causes.LENGTH)
        elif any(d.missing for d in found):
            self._add(causes.MISSING)
        elif any(d.weights for d in found):
            self._add(causes.POSITIONS if self._by_place() else causes.LENGTH)
        elif any(d.lse_off for d in found):
            shifts = self._by_place() and self._same_for_other_contents(differences)
            self._add(causes.POSITIONS if shifts else causes.LSE)

    def _by_place(self) -> bool:
        """Whether a pair's score depends on positions: it changes when keys or queries are
        permuted."""
        generator = torch.Generator().manual_seed(self.seed + 3)
        order = torch.randperm(self.n, generator=generator, device="cpu").to(self.sizes.device)
        query, key, _ = (t[:1] for t in self.tensors)
        if self.base_causal:
            # The rows of the last third against the keys before them.
            task = rectangle((0, 2 * self.n // 3), (2 * self.n // 3, self.n))
            order = torch.cat(
                [torch.randperm(2 * self.n // 3, generator=generator, device="cpu"),
                 torch.arange(2 * self.n // 3, self.n, device="cpu")]
            ).to(self.sizes.device)  # fmt: skip
        else:
            task = square(self.n)
        causal = self.base_causal
        here = self.subject.weights(query, key, task, causal).shares
        there = self.subject.weights(query, key[:, :, order], task, causal).shares
        if far(there, here[..., order], self.loose[0]):
            return True
        if self.base_causal:
            return False
        turned = self.subject.weights(query[:, :, order], key, task, causal).shares
        return far(turned, here[:, :, order], self.loose[0])

    def _same_for_other_contents(self, differences: list[tuple[Task, _Difference]]) -> bool:
        """Whether lse is off by the same amount for other inputs, as it would be by positions."""
        others = self._draw(self.seed + 2)
        task = square(self.n)
        scores = self.subject.weights(
            others[0][:1], others[1][:1], task, self.base_causal
        ).scores()  # fmt: skip
        for part, difference in differences:
            if not difference.lse_off or difference.weights or len(part.spans) != 2:
                continue
            again = self._difference(part, True, others, scores)
            apart = (again.lse - difference.lse).nan_to_num(nan=0.0).abs()
            if float(apart.max()) > 4 * self.loose[1]:
                return False
        return True

    def _difference(
        self, task: Task, causal: bool, tensors: Tensors, scores: torch.Tensor
    ) -> _Difference:
        rows = tokens(task, self.sizes.device)
        query, key, _ = (t[:1, :, rows] for t in tensors)
        found = self.subject.weights(query, key, task, causal)
        keep = torch.from_numpy(task.mask()).to(rows.device)
        if causal or self.base_causal:
            keep = keep.tril()
        own = scores[:, :, rows]
        wanted = own[..., rows].masked_fill(~keep, -torch.inf)
        return _compare(found, wanted, keep, (own == -torch.inf).all(dim=-1), self.loose)

    # The backward.

    def _backward(self) -> None:
        for causal in self._kinds():
            whole = self._whole(self.tensors, causal)
            handed = (*self.tensors, self.grad_out, whole.lse)
            kept = [t.clone() for t in handed]
            out = whole.out.clone()
            first = self._gradients(whole, causal)
            if not all(torch.equal(a, b) for a, b in zip(kept, handed, strict=True)) or far(
                whole.out, out, 0.0
            ):
                self._add(causes.in_backward(causes.INPUTS))
                return
            if not _all_same(self._gradients(whole, causal), first, self.sizes.dtype):
                self._add(causes.REPEATABLE)
                return
            if not all(bool(g.isfinite().all()) for g in first):
                empty = bool((whole.lse == -torch.inf).any())
                self._add(causes.in_backward(causes.NO_KEYS if empty else causes.NOT_FINITE))
                return
            more = self._gradients(whole, causal, 1.0)
            if any(far(a - 1, b, 64 * self.loose[0]) for a, b in zip(more, first, strict=True)):
                self._add(causes.in_backward(causes.MERGE))
                return
        rough = self.gradient_roughness()
        self.loose_gradients = max(16 * self.loose[0], min(_MOST, 16 * rough))
        later = [causes.in_backward(cause) for cause in self._apart(self._gradients_of_part)]
        self.found = [
            causes.in_backward(c) if c in (causes.STRIDES, causes.HEADS, causes.BATCH) else c
            for c in self.found
        ]
        self._add(*later)
        if self.found:
            return
        for causal in self._kinds():
            found = slopes(
                self.subject, self.tensors, self.grad_out, square(self.n), causal, self.seed,
                4 * rough,
            )  # fmt: skip
            if not all(slope.right for slope in found):
                self._add(causes.GRADIENT)
                return
        if self._ignores_lse():
            self._add(causes.GIVEN_LSE)
        if self._ignores_out():
            self._add(causes.GIVEN_OUT)
        if not self.found:
            self._gradients_of_parts(4 * rough)
        if not self.found and rough:
            self._add(causes.in_backward(causes.PRECISION))

    def _gradients_of_parts(self, roughness: float) -> None:
        """A part as if it were the whole call: its backward against differences of its forward."""
        n = self.n
        task = rectangle((n // 3, 2 * n // 3), (2 * n // 3, n))
        rows = tokens(task, self.sizes.device)
        query, key, value = (t[:, :, rows] for t in self.tensors)
        grad_out = self.grad_out[:, :, rows]
        found = slopes(
            self.subject, (query, key, value), grad_out, task, True, self.seed, roughness
        )
        if any(s.error == torch.inf for s in found):
            # The rows of the earlier span keep no key of this task.
            own = self.subject.forward((query, key, value), task, True)
            grads = self.subject.backward((query, key, value), grad_out, own, task, True)
            elsewhere = grads[0].isnan().any(dim=-1) & (own.lse != -torch.inf)
            empty = bool((own.lse == -torch.inf).any()) and not bool(elsewhere.any())
            self._add(causes.in_backward(causes.NO_KEYS if empty else causes.NOT_FINITE))
        elif not all(s.right for s in found):
            place = self._by_place() if self.scores.numel() or self._base_is_sound() else False
            self._add(causes.in_backward(causes.POSITIONS if place else causes.LENGTH))

    def _ignores_lse(self) -> bool:
        """An lse larger by ln 2 has to halve all probabilities, and the gradient of values."""
        causal = self._kinds()[0]
        whole = self._whole(self.tensors, causal)
        more = Statistics(whole.out, whole.lse + torch.log(torch.tensor(2.0, device="cpu")).item())
        first, halved = (self._gradients(s, causal)[2] for s in (whole, more))
        return far(2 * halved, first, 64 * self.loose[0])

    def _ignores_out(self) -> bool:
        """Another output has to change delta, and so the gradients of queries and keys."""
        causal = self._kinds()[0]
        whole = self._whole(self.tensors, causal)
        other = Statistics(whole.out + self.grad_out.to(whole.out.dtype), whole.lse)
        first, moved = (self._gradients(s, causal) for s in (whole, other))
        return not (far(moved[0], first[0], 1e-2) and far(moved[1], first[1], 1e-2))

    def _gradients_of_part(self, part: _Part, causal: bool) -> tuple[bool, bool]:
        whole = self._whole(self.tensors, causal)
        wanted = self._gradients(whole, causal)
        rows = Statistics(
            whole.out[part.batch, part.queries].contiguous(),
            whole.lse[part.batch, part.queries].contiguous(),
        )
        found = self.subject.backward(
            part.inputs, part.tensors[3], rows, square(self.n), causal,
            first_head=part.first_head, entries=part.entries,
        )  # fmt: skip
        heads = (part.queries, part.keys, part.keys)
        off = any(
            far(mine, theirs[part.batch, at], self.loose_gradients)
            for mine, theirs, at in zip(found, wanted, heads, strict=True)
        )
        return off, False

    def _gradients(
        self, rows: Statistics, causal: bool, filled: float = 0.0, at: Tensors | None = None
    ) -> Tensors:
        return self.subject.backward(
            at or self.tensors, self.grad_out, rows, square(self.n), causal, filled=filled
        )

    # Helpers.

    def _kinds(self) -> tuple[bool, ...]:
        """Plain and causal, as far as the kernel takes them; the kind of the wrong call first."""
        taken = {False: self.plain, True: self.causal}
        return tuple(c for c in (self.is_causal, not self.is_causal) if taken[c])

    def _whole(self, tensors: Tensors, causal: bool) -> Statistics:
        return self.subject.forward(tensors, square(self.n), causal)

    def _draw(self, seed: int) -> Tensors:
        query, key, value, grad_out = self.sizes.inputs(torch.Generator().manual_seed(seed))
        if not self.grad_out.numel():
            self.grad_out = grad_out
        return query, key, value

    def _add(self, *found: str) -> None:
        self.found += [cause for cause in found if cause not in self.found]


@dataclass(frozen=True, slots=True)
class _Part:
    """Some heads or entries of the call, or all of them in other memory.

    Attributes:
        tensors: its query, key, value and grad_out.
        batch, queries: which batch entries and query heads of the whole call it has.
        first_head, entries: as in ``TaskTensors``.
        keys: which key heads of the whole call it has.
    """

    tensors: tuple[torch.Tensor, ...]
    batch: slice
    queries: slice
    first_head: int
    entries: tuple[int, ...] | None
    keys: slice

    @property
    def inputs(self) -> Tensors:
        """Query, key and value."""
        return self.tensors[0], self.tensors[1], self.tensors[2]


def _within(tensor: torch.Tensor) -> torch.Tensor:
    """A copy as a view of a larger tensor, whose other elements have quite another value."""
    b, h, n, d = tensor.shape
    room = torch.full((b, h + 1, n + 5, d + 8), 7.0, dtype=tensor.dtype, device=tensor.device)
    view = room[:, :h, 2 : n + 2, :d]
    return view.copy_(tensor)


def _copies(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(t.clone(memory_format=torch.contiguous_format) for t in tensors)


def _compare(
    found: Weights,
    scores: torch.Tensor,
    keep: torch.Tensor,
    blank: torch.Tensor,
    loose: list[float],
) -> _Difference:
    """Compare the weights of a task with those by the whole sequence's scores."""
    lse = torch.logsumexp(scores, dim=-1)
    empty = lse == -torch.inf
    wanted = torch.exp(scores - lse.masked_fill(empty, 0.0).unsqueeze(-1))
    shares = found.shares
    nan = shares.isnan().any(dim=-1) | found.lse.isnan() | (found.lse == torch.inf)
    nan |= empty & (found.lse != -torch.inf) & ~(shares > 0).any(dim=-1)
    shares = shares.nan_to_num(nan=0.0)
    # A masked pair has a weight of exactly 0.
    seen = shares > 0
    sure = wanted > loose[0]
    missing = bool((sure & (shares == 0) & ~nan.unsqueeze(-1)).any())
    extra = seen & keep & (scores == -torch.inf)
    whole_rows = empty & (extra | ~keep).all(dim=-1)
    live = ~(nan | empty)
    apart = (shares - wanted).abs().amax(dim=-1).masked_fill(~live, 0.0)
    off = torch.where(live, found.lse - lse, 0.0)
    return _Difference(
        nan,
        bool((empty | ~nan).all()),
        bool((seen & ~keep).any()),
        bool(extra.any()),
        bool((whole_rows | ~extra.any(dim=-1)).all()),
        bool((blank | ~extra.any(dim=-1)).all()),
        missing,
        bool((apart > loose[0]).any()),
        off,
        bool((off.abs() > loose[1] * max(1.0, size(lse))).any()),
    )


def _same(one: Statistics, other: Statistics, dtype: torch.dtype) -> bool:
    return repeated(one.out, other.out, dtype) and repeated(one.lse, other.lse, dtype)


def _all_same(one: Tensors, other: Tensors, dtype: torch.dtype) -> bool:
    return all(repeated(a, b, dtype) for a, b in zip(one, other, strict=True))


def _bent(middle: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> float:
    """The second difference of three neighbouring results, as a share of their size."""
    found = one.double() + other.double() - 2 * middle.double()
    return float(found.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()) / size(middle)
