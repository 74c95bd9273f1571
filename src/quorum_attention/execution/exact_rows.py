"""Computes rows of gradients anew, in float64, where sums in fp32 were not enough (our method).

In fp16, values and upstream gradients may be so large that dP = <dO_i, V_j> and delta, of 1e11
and more, cancel in

    dS = P (dP - delta),

and what fp32 leaves of them is more than fp16 holds. Rows of one kept key are such: there dS is 0.
To keep dS in range the upstream gradient is divided by as much, and its small rows are lost.
A backward notes which of its gradients may be so (execution/doubts.py). When it is done, the
gradients of those rows are computed as the textbook says, tile by tile, each number of a row from
the same probabilities: delta = rowsum(P dP) / rowsum(P). Rows whose lse is of more keys than these
(a call over a part of the keys) keep it, and the delta of their output.

A gradient that is too large for fp16 in truth is infinite again. Where a loss was scaled by too
much most heads have such, and nobody should wait for them. So in a head of many pairs one row of
the query's gradient, and one of the value's, is computed first: where it is infinite in truth, the
query's gradient, or those of key and value, stay as they are. On a GPU, where float64 may be slow,
so do heads of more than some billions of pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from quorum_attention.decomposition import EMPTY, Pairs, Ranges, Rows
from quorum_attention.execution.call import Call
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.doubts import Doubts
from quorum_attention.execution.mask_gradient import Upstream, fitting
from quorum_attention.execution.trimming import pairs_of
from quorum_attention.execution.workload import flat_entry
from quorum_attention.kernels.blocks import row_blocks
from quorum_attention.kernels.delta import not_whole
from quorum_attention.kernels.dropout import dropped
from quorum_attention.kernels.protocol import Pairwise
from quorum_attention.kernels.traits import pairwise, traits_of

# Most pairs of a head that are computed on a GPU, where float64 may be slow.
_MOST_PAIRS = 1 << 32
# Most pairs of a query head of which all rows are computed for the sake of one.
_FEW_PAIRS = 1 << 20
# The same on a GPU, for whether one row is computed before the others.
_FEW_ON_DEVICE = 1 << 16
# Most bytes of a tile: less than any plan has for its kernel on a CPU.
_HOST_BYTES, _DEVICE_BYTES = 2 << 20, 64 << 20
_MOST_ROWS = 128
# Most bytes of what is kept of rows, four times over, where nobody says how much is left.
_MOST_KEPT = 1 << 30


def computes_rows(call: Call) -> bool:
    """Whether the kernel of ``call`` computes the softmax of scores that it says how to change."""
    traits = traits_of(call.kernel)
    return traits.pairwise or not (traits.own_attention or traits.probed_as is not None)


def mend_rows_(
    call: Call,
    given: Upstream,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    doubts: Doubts,
    left: int | None,
) -> int:
    """Compute doubtful rows of gradients anew; returns how many.

    Doubtful are rows that are not finite, if all that they are made of is; with them, in a head of
    few pairs, all of the head, and so it is where the upstream gradient was divided by very much;
    and where the delta of some rows is doubtful, these rows of the query's gradient, and all of
    their key's and value's.

    Args:
        given: the upstream gradient and the output as the caller gave them.
        grads: of query, key and value, (*batch, heads, n, d); written to.
        left: most device bytes to take; None: what is usual.
    """
    entries = [()] if not call.work.batch_shape else list(_indices(call.work.batch_shape))
    walk = _Walk(call, given, pairs_of(call.work, call.kernel), pairwise(call.kernel), left)
    shared, mended = call.work.queries_per_key_head, 0
    own_memory = backend_of(call.device).own_memory
    for entry in entries:
        for head in range(call.work.kv_heads):
            own = slice(head * shared, (head + 1) * shared)
            of_query, of_key, of_value = (
                grads[0][entry][own], grads[1][entry][head], grads[2][entry][head],
            )  # fmt: skip
            rows = _broken_rows(of_query)
            keys = (_broken_rows(of_key[None]) | _broken_rows(of_value[None]))[0]
            if doubts.rows is not None and bool((more := doubts.rows[entry][own]).any()):
                rows, keys = rows | more.to(rows.device), torch.ones_like(keys)
            few = rows.shape[1] * keys.shape[0] <= _FEW_PAIRS
            if not bool(rows.any()) and not bool(keys.any()) and not (few and doubts.sunk):
                continue
            one = walk.head(entry, head)
            if not _is_finite(one.key) or not _is_finite(one.value):
                continue
            sound = one.sound_rows().to(rows.device)
            if rows.shape[1] * keys.shape[0] > (_FEW_ON_DEVICE if own_memory else _FEW_PAIRS):
                if one.query_outgrows(rows & sound, of_query):
                    rows, few = torch.zeros_like(rows), False
                if bool(sound.all()) and one.value_outgrows(keys, of_value):
                    keys, few = torch.zeros_like(keys), False
            if few:
                # Where one row is too large, others are hardly more than rounding errors.
                rows, keys = torch.ones_like(rows), torch.ones_like(keys)
            rows = rows & sound
            if not bool(sound.all()):
                keys = torch.zeros_like(keys)
            pairs = (int(rows.any(dim=0).sum()) + rows.shape[1] * bool(keys.any())) * keys.shape[0]
            if pairs > _MOST_PAIRS and own_memory:
                continue
            mended += one.mend_queries_(rows, of_query)
            mended += one.mend_keys_(keys, of_key, of_value)
    return mended


def _indices(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    yield from product(*(range(n) for n in sizes))


def _sound_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Which rows of (h, n, d) are finite everywhere: (h, n)."""
    found = torch.empty(tensor.shape[:2], dtype=torch.bool, device=tensor.device)
    heads, rows, width = tensor.shape
    for _, h, r in row_blocks(1, heads, rows, 4 * max(1, width)):
        found[h, r] = tensor[h, r].isfinite().all(dim=-1)
    return found


def _broken_rows(tensor: torch.Tensor) -> torch.Tensor:
    return ~_sound_rows(tensor)


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(_sound_rows(tensor[None]).all())


@dataclass(frozen=True, slots=True)
class _Walk:
    """The tensors of a call, and how it changes its scores."""

    call: Call
    given: Upstream
    pairs: Pairs
    knowing: Pairwise | None
    left: int | None

    def head(self, entry: tuple[int, ...], head: int) -> _Head:
        """A key/value head of a batch entry, with the query heads that share it."""
        call, shared = self.call, self.call.work.queries_per_key_head
        own = slice(head * shared, (head + 1) * shared)
        mask = None
        if call.mask is not None:
            sizes = zip(call.mask.mask.shape[:-3], entry, strict=True)
            mask = call.mask.mask[tuple(0 if n == 1 else i for n, i in sizes)]
            mask = mask if mask.shape[0] == 1 else mask[own]
        return _Head(
            self, entry, own, call.query[entry][own], call.key[entry][head],
            call.value[entry][head], self.given.grad_out[entry][own], self.given.out[entry][own],
            self.given.lse[entry][own], mask, self._tile(mask),
        )  # fmt: skip

    def _tile(self, mask: torch.Tensor | None) -> tuple[int, int]:
        """Most queries and keys of a tile."""
        work = replace(
            self.call.work, batch_shape=(), heads=self.call.work.queries_per_key_head, kv_heads=1,
            dtype=torch.float64,
        )  # fmt: skip
        device = self.call.device
        usual = _DEVICE_BYTES if backend_of(device).own_memory else _HOST_BYTES
        # Beside a tile: what its rows are added up in, and flags of pairs.
        tested = 16 if mask is None else 16 + mask.element_size()
        found = fitting(work, device, min(usual, self.left or usual) // 2, tested)
        return min(found.queries, _MOST_ROWS), found.keys


_Softmax = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of query rows, (g, rows, 1) each: their largest score, the sum of exp(S - largest), and delta."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Query rows of a head in float64, with what their softmax comes to.

    Attributes:
        at: the rows.
        query, grad_out: (g, rows, d).
        largest, total, delta: see ``_Softmax``.
    """

    at: slice
    query: torch.Tensor
    grad_out: torch.Tensor
    largest: torch.Tensor
    total: torch.Tensor
    delta: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Head:
    """One key/value head of a batch entry, and the query heads that share it.

    Attributes:
        heads: the query heads.
        query, grad_out, out: (g, n_queries, d); ``key``, ``value``: (n_keys, d).
        lse: (g, n_queries), of the whole rows.
        mask: (g or 1, n_queries or 1, n_keys or 1), or None.
        tile: most queries and keys of a tile.
    """

    walk: _Walk
    entry: tuple[int, ...]
    heads: slice
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_out: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    mask: torch.Tensor | None
    tile: tuple[int, int]

    def sound_rows(self) -> torch.Tensor:
        """Of which query rows all is finite that gradients are made of, (g, n_queries). The output
        and the log-sum-exp, which may be of more keys than these, know of those others."""
        found = (self.lse < torch.inf).to(self.query.device)
        for tensor in (self.query, self.grad_out, self.out):
            found &= _sound_rows(tensor).to(found.device)
        return found

    def query_outgrows(self, rows: torch.Tensor, of_query: torch.Tensor) -> bool:
        """Whether the first that is not finite of ``rows`` (g, n_queries) of the query's gradient
        is too large for its dtype in truth."""
        asked = rows & _broken_rows(of_query)
        for at in _first(asked.any(dim=0)):
            found = self._of_queries(at)
            return _is_too_large(found[asked[:, at].to(found.device)], of_query.dtype)
        return False

    def value_outgrows(self, keys: torch.Tensor, of_value: torch.Tensor) -> bool:
        """The same of ``keys`` (n_keys,) of the value's, whose sums nothing cancels: from lse."""
        for at in _first(keys & _broken_rows(of_value[None])[0]):
            found = self._wide(of_value.new_zeros(1, of_value.shape[-1]))
            # As many as have no more numbers than a tile has pairs.
            width = max(1, self.query.shape[-1] + of_value.shape[-1])
            most = max(self.tile[0], self.tile[0] * self.tile[1] // width)
            for rows in _spans(self.query.shape[1], most):
                if self._is_masked(rows, at):
                    continue
                p = self._scores(self._wide(self.query[:, rows]), rows, at)[0]
                lse = self._wide(self.lse[:, rows, None])
                p.sub_(lse.masked_fill(lse == -torch.inf, 0.0)).exp_()
                self._drop_(p, rows, at)
                found += torch.einsum("gij,gid->jd", p, self._wide(self.grad_out[:, rows]))
            return _is_too_large(found, of_value.dtype)
        return False

    def mend_queries_(self, rows: torch.Tensor, target: torch.Tensor) -> int:
        """Write the ``rows`` (g, n_queries) of the query's gradient (g, n_queries, d)."""
        mended = 0
        for at in _runs(rows.any(dim=0), self.tile[0]):
            mended += _write_(target[:, at], self._of_queries(at), rows[:, at])
        return mended

    def _of_queries(self, at: slice) -> torch.Tensor:
        """Rows of the query's gradient, (g, rows, d)."""
        block = self._block(at)
        found = torch.zeros_like(block.query)
        for keys in self._keys(at):
            _, ds, key = self._gradients(block, keys)
            found.add_(ds @ key, alpha=self.walk.call.scale)
        return found

    def mend_keys_(self, keys: torch.Tensor, of_key: torch.Tensor, of_value: torch.Tensor) -> int:
        """Write the rows ``keys`` (n_keys,) of the gradients of key and value, (n_keys, d)."""
        known: dict[int, _Softmax] = {}
        mended = 0
        for at in _runs(keys, self.tile[1]):
            length = at.stop - at.start
            sums = [self._wide(t.new_zeros(length, t.shape[-1])) for t in (of_key, of_value)]
            for rows in _spans(self.query.shape[1], self.tile[0]):
                if self._is_masked(rows, at) or not self._reaches(rows, at):
                    continue
                block = self._block(rows, known)
                p, ds, _ = self._gradients(block, at)
                sums[0].add_(
                    torch.einsum("gij,gid->jd", ds, block.query), alpha=self.walk.call.scale
                )
                sums[1].add_(torch.einsum("gij,gid->jd", p, block.grad_out))
            for target, made in zip((of_key, of_value), sums, strict=True):
                _write_(target[None, at], made[None], keys[None, at])
            mended += int(keys[at].sum())
        return mended

    def _block(self, at: slice, known: dict[int, _Softmax] | None = None) -> _Block:
        """Query rows; what their softmax comes to is looked up in ``known``, or left there if that
        is not too much."""
        query, grad_out = self._wide(self.query[:, at]), self._wide(self.grad_out[:, at])
        found = None if known is None else known.get(at.start)
        if found is None:
            found = self._softmax(query, grad_out, at)
        kept = 24 * self.query.shape[0] * self.query.shape[1]
        if known is not None and kept <= (self.walk.left or _MOST_KEPT) // 4:
            known[at.start] = found
        return _Block(at, query, grad_out, *found)

    def _softmax(self, query: torch.Tensor, grad_out: torch.Tensor, at: slice) -> _Softmax:
        """What the softmax of query rows comes to, over all of their keys."""
        work, sinks = self.walk.call.work, self.walk.call.sinks
        one = query.new_zeros((*query.shape[:2], 1))
        # A sink is a key of value 0.
        sink = one - torch.inf
        if sinks is not None:
            sink = sink.copy_(self._wide(sinks[self.heads])[:, None, None])
        largest = sink.clone()
        for keys in self._keys(at):
            scores = self._scores(query, at, keys)[0]
            torch.maximum(largest, scores.amax(dim=-1, keepdim=True), out=largest)
        largest.masked_fill_(largest == -torch.inf, 0.0)
        total, delta = (sink - largest).exp(), one
        for keys in self._keys(at):
            scores, _, dp = self._products(query, grad_out, at, keys)
            p = scores.sub_(largest).exp_()
            total += p.sum(dim=-1, keepdim=True)
            delta += (p * dp).sum(dim=-1, keepdim=True)
        products = grad_out * self._wide(self.out[:, at])
        lse = self._wide(self.lse[:, at, None])
        # Rows that see other keys as well.
        others = not_whole(total * (largest - lse).exp(), lse.float()) & lse.isfinite()
        # Rows without keys.
        total.masked_fill_(total == 0.0, 1.0)
        delta /= total
        if work.columns:
            delta += products[..., -work.columns :].sum(dim=-1, keepdim=True)
        delta = torch.where(others, products.sum(dim=-1, keepdim=True), delta)
        largest = torch.where(others, lse, largest)
        return largest, total.masked_fill_(others, 1.0), delta

    def _gradients(
        self, block: _Block, keys: slice
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """P, as it meets the upstream gradient, and dS, (g, rows, keys) each; the keys."""
        scores, slope, dp = self._products(block.query, block.grad_out, block.at, keys)
        p = scores.sub_(block.largest).exp_().div_(block.total)
        ds = dp.sub_(block.delta).mul_(p)
        if slope is not None:
            ds.mul_(slope)
        self._drop_(p, block.at, keys)
        return p, ds, self._wide(self.key[keys])

    def _products(
        self, query: torch.Tensor, grad_out: torch.Tensor, at: slice, keys: slice
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Scores, the slope of their change, and dP, (g, rows, keys) each."""
        scores, slope = self._scores(query, at, keys)
        dp = grad_out @ self._wide(self.value[keys]).mT
        self._drop_(dp, at, keys)
        return scores, slope, dp

    def _scores(
        self, query: torch.Tensor, at: slice, keys: slice
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scores (g, rows, keys), -inf where a pair is not kept, and the slope of their change."""
        walk, call = self.walk, self.walk.call
        scores, slope, masked = (query @ self._wide(self.key[keys]).mT).mul_(call.scale), None, None
        if walk.knowing is not None:
            number = (flat_entry(call.work, self.entry),)
            of_queries, of_keys = (
                torch.arange(cut.start, cut.stop, device=scores.device) for cut in (at, keys)
            )
            masked = walk.knowing.masked_pairs(number, self.heads, of_queries, of_keys)[0]
            slope = walk.knowing.change_(scores)
        if self.mask is not None:
            cuts = zip((slice(None), at, keys), self.mask.shape, strict=True)
            mask = self.mask[tuple(cut if n > 1 else slice(None) for cut, n in cuts)]
            mask = mask.to(scores.device)
            if mask.dtype == torch.bool:
                scores.masked_fill_(~mask, -torch.inf)
            else:
                # Kernels get the mask in the inputs' dtype.
                scores.add_(mask.to(call.work.dtype))
        if call.work.is_causal and keys.stop - 1 > at.start:
            rows, columns = (
                torch.arange(cut.start, cut.stop, device=scores.device) for cut in (at, keys)
            )
            scores.masked_fill_(columns > rows[:, None], -torch.inf)
        if masked is not None:
            scores.masked_fill_(masked, -torch.inf)
        return scores, slope

    def _reaches(self, rows: slice, keys: slice) -> bool:
        """Whether a pair of these rows and keys is kept."""
        scores, _ = self._scores(self._wide(self.query[:, rows]), rows, keys)
        return bool((scores > -torch.inf).any())

    def _drop_(self, pairs: torch.Tensor, at: slice, keys: slice) -> None:
        """Multiply (g, rows, keys) by 0 where the call drops them, by 1 / (1 - p) elsewhere."""
        dropout = self.walk.call.dropout
        if dropout is None:
            return
        rows = torch.arange(at.start, at.stop, device=pairs.device)
        here = dropout.at(self.heads.start, flat_entry(self.walk.call.work, self.entry))
        drops = dropped(here, 1, pairs.shape[0], rows, [Rows(keys.start, keys.stop, 0)])[0]
        pairs.mul_(dropout.rescale).masked_fill_(drops, 0.0)

    def _keys(self, at: slice) -> Iterator[slice]:
        """The keys that rows may see, a tile at a time."""
        for keys in _spans(self.key.shape[0], self.tile[1]):
            if not self._is_masked(at, keys):
                yield keys

    def _is_masked(self, rows: slice, keys: slice) -> bool:
        block = Ranges.of(rows.start, rows.stop, keys.start, keys.stop)
        return self.walk.pairs.of(block) is EMPTY

    def _wide(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.walk.call.device).double()


def _first(wanted: torch.Tensor) -> Iterator[slice]:
    """The first position that is ``wanted`` (n,), if there is one."""
    for at in wanted.nonzero()[:1, 0].tolist():
        yield slice(at, at + 1)


def _is_too_large(made: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether numbers, of which none is NaN, are infinite in ``dtype``."""
    return bool(made.to(dtype).isinf().any()) and not bool(made.isnan().any())


def _spans(length: int, most: int) -> Iterator[slice]:
    for start in range(0, length, most):
        yield slice(start, min(start + most, length))


def _runs(wanted: torch.Tensor, most: int) -> Iterator[slice]:
    """Runs of at most ``most`` positions that hold all that are ``wanted`` (n,)."""
    positions: list[int] = wanted.nonzero()[:, 0].tolist()
    start = 0
    while start < len(positions):
        first, stop = positions[start], start + 1
        while stop < len(positions) and positions[stop] < first + most:
            stop += 1
        yield slice(first, positions[stop - 1] + 1)
        start = stop


def _write_(target: torch.Tensor, made: torch.Tensor, rows: torch.Tensor) -> int:
    """Write the ``rows`` (h, n) of ``made`` (h, n, d) to ``target``, where they are no NaN."""
    rows = rows & ~made.isnan().any(dim=-1).to(rows.device)
    there = rows.to(target.device)
    target[there] = made.to(target.device, target.dtype)[there]
    return int(rows.sum())
