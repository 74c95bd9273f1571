"""The gradient of an additive mask, tile by tile, beside a backward by any kernel (our method).

For each pair, given the global log-sum-exp,

    dS = P (dP - delta),   P = exp(S - lse),   dP = <dO_i, V_j>,   delta = <dO_i, O_i>

(with dropout dP times Z, kernels/dropout.py). The mask's gradient is dS, summed over the dimensions
that the mask broadcasts over. A pair needs nothing but its query row and its key, so pairs are cut
into plain tiles, whatever the pass beside it is cut into: vendor kernels, which do not return dS,
need not be replaced, and every route has this gradient.

The walk goes by blocks of the *result*. All tiles that are summed into a block are computed one
after the other, added up in the state's dtype (fp32, or fp64), and the block is written once. So
the result may lie anywhere and needs no wider copy; it comes out the same each time; and if memory
runs out, the block that failed is begun anew with smaller tiles: nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from quorum_attention.decomposition import EMPTY, Pairs, Ranges, Rows
from quorum_attention.execution.call import Call
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.memory import first_line, is_out_of_memory
from quorum_attention.execution.trimming import pairs_of
from quorum_attention.execution.workload import Workload, flat_entry
from quorum_attention.kernels.dropout import dropped, dropped_bytes
from quorum_attention.kernels.protocol import InnerKernel, Saved
from quorum_attention.kernels.reference import not_whole
from quorum_attention.sizes import counted

# Without a budget: tiles that a CPU's cache holds, and that keep a GPU busy.
_HOST_BYTES, _DEVICE_BYTES = 8 << 20, 256 << 20
_MOST_QUERIES, _MOST_KEYS = 2048, 2048
# What allocators round up by, for the few tensors alive at once.
_SLACK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Tile:
    """Most batch entries, key/value heads, queries and keys of one tile."""

    entries: int
    heads: int
    queries: int
    keys: int

    def smaller(self) -> Tile | None:
        """Half of it; None for a single pair of one head group."""
        if self.entries > 1:
            return replace(self, entries=-(-self.entries // 2))
        if self.heads > 1:
            return replace(self, heads=-(-self.heads // 2))
        if self.keys > 1 and self.keys >= self.queries:
            return replace(self, keys=-(-self.keys // 2))
        return replace(self, queries=-(-self.queries // 2)) if self.queries > 1 else None


def tile_bytes(work: Workload, tile: Tile, mask_bytes: int) -> int:
    """Upper bound of the device bytes that a tile takes.

    Args:
        mask_bytes: of an element of the mask.
    """
    item, wide = work.element_bytes, work.state_dtype.itemsize
    shared = work.queries_per_key_head
    keys = tile.entries * tile.heads * tile.keys
    rows = tile.entries * tile.heads * shared * tile.queries
    widths = work.head_dim + work.value_dim
    # Inputs as they came, and in the state's dtype; the product of gradient and output.
    found = (rows + keys) * widths * (item + wide) + rows * (2 * work.value_dim + 6) * wide
    # Scores, dP, a copy while one of them is summed; the mask, and the sums so far.
    pairs = rows * tile.keys
    if work.dropout:
        found += dropped_bytes(1, tile.heads * shared, tile.queries, tile.keys)
    return found + pairs * (6 * wide + item + 2 * mask_bytes + 1) + _SLACK_BYTES


def fitting(work: Workload, device: torch.device, left: int | None, mask_bytes: int) -> Tile:
    """The largest tile worth computing at once that takes at most ``left`` bytes (None: what is
    usual on ``device``); the smallest there is if none does."""
    usual = _DEVICE_BYTES if backend_of(device).own_memory else _HOST_BYTES
    most = usual if left is None else min(usual, left)
    tile = Tile(
        work.batch, work.kv_heads, min(work.n_queries, _MOST_QUERIES), min(work.n_keys, _MOST_KEYS)
    )
    while tile_bytes(work, tile, mask_bytes) > most:
        after = tile.smaller()
        if after is None:
            break
        tile = after
    return tile


def add_up_mask_gradient(
    call: Call, given: Saved, target: torch.Tensor, left: int | None
) -> list[str]:
    """Fill ``target`` with the gradient of the call's mask.

    Args:
        given: as the caller gave it, on any device: (*batch, heads, n_queries, value_dim) and
            without it, of the whole rows.
        target: of the mask's shape, on any device, of any floating dtype.
        left: most device bytes to take; None: no limit but what there is.

    Returns:
        A line for each time that memory ran out and smaller tiles were taken.

    Raises:
        Out-of-memory errors of the allocator: not even a tile of one pair can be computed.
    """
    assert call.mask is not None
    mask = call.mask.mask
    knowing = call.kernel if call.kernel.pairwise else None
    walk = _Walk(
        call, given, mask, target.reshape(mask.shape), pairs_of(call.work, call.kernel), knowing
    )
    # What is tested of each pair takes a distance of 64 bits, and a few flags.
    tested = 0 if knowing is None else 8
    tile = fitting(call.work, call.device, left, mask.element_size() + tested)
    recoveries: list[str] = []
    for index in product(*(range(n) for n in mask.shape[:-3])):
        # Blocks are those of the tile that began; a failed one is computed by smaller tiles.
        for block in _blocks(mask, call.work, tile):
            while True:
                failure = _attempt(walk, index, block, tile)
                if failure is None:
                    break
                after = tile.smaller()
                assert after is not None
                backend_of(call.device).give_back_cached()
                recoveries.append(
                    f"mask gradient out of memory ({failure}): tiles of {after.queries} queries "
                    f"by {after.keys} keys of {counted(after.heads, 'key/value head')}"
                )
                tile = after
    return recoveries


def _attempt(walk: _Walk, index: tuple[int, ...], block: _Block, tile: Tile) -> str | None:
    """Compute a block; the allocator's message if memory ran out and smaller tiles are left."""
    try:
        walk.fill(index, block, tile)
    except Exception as error:
        if not is_out_of_memory(error) or tile.smaller() is None:
            raise
        # Only the text leaves: the traceback would hold the failed tile's tensors.
        return first_line(error)
    return None


@dataclass(frozen=True, slots=True)
class _Block:
    """Key/value heads, queries and keys: of a block of the result, or of a tile."""

    heads: slice
    queries: slice
    keys: slice


_DIMENSIONS = ("heads", "queries", "keys")


def _runs(whole: slice, most: int) -> Iterator[slice]:
    """``whole`` in runs of at most ``most``."""
    for start in range(whole.start, whole.stop, most):
        yield slice(start, min(start + most, whole.stop))


def _blocks(mask: torch.Tensor, work: Workload, tile: Tile) -> Iterator[_Block]:
    """Blocks of the result: no larger than a tile in dimensions that the mask has."""
    heads, queries, keys = mask.shape[-3:]
    whole = _Block(slice(0, work.kv_heads), slice(0, work.n_queries), slice(0, work.n_keys))
    yield from (
        _Block(h, q, k)
        for h in (_runs(whole.heads, tile.heads) if heads > 1 else [whole.heads])
        for q in (_runs(whole.queries, tile.queries) if queries > 1 else [whole.queries])
        for k in (_runs(whole.keys, tile.keys) if keys > 1 else [whole.keys])
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """The query rows of a tile in the state's dtype.

    Attributes:
        query, grad_out: (e, hk, g * queries, d).
        delta, lse: (e, h, queries, 1).
        taken: what the last columns of the output add to delta, (e, h, queries, 1), or 0.0.
    """

    query: torch.Tensor
    grad_out: torch.Tensor
    delta: torch.Tensor
    lse: torch.Tensor
    taken: torch.Tensor | float


@dataclass(slots=True)
class _Walk:
    """The tensors of a call, and where its mask's gradient goes.

    Attributes:
        mask, target: (*batch or 1, heads or 1, n_queries or 1, n_keys or 1).
        pairs: which pairs the call keeps, as far as that is known.
        knowing: the kernel, if it changes scores and says how.
    """

    call: Call
    given: Saved
    mask: torch.Tensor
    target: torch.Tensor
    pairs: Pairs
    knowing: InnerKernel | None = None

    def fill(self, index: tuple[int, ...], block: _Block, tile: Tile) -> None:
        """Write one block of the gradient: the sum of all its tiles."""
        total: torch.Tensor | None = None
        entries = self._entries(index)
        at = self._at(index, block)
        shape = self.target[at].shape
        for some in _runs(slice(0, len(entries)), tile.entries):
            for heads in _runs(block.heads, tile.heads):
                for queries in _runs(block.queries, tile.queries):
                    rows = self._rows(entries[some], heads, queries)
                    for keys in _runs(block.keys, tile.keys):
                        one = _Block(heads, queries, keys)
                        part = self._tile(entries[some], index, one, rows)
                        if part is None:
                            continue
                        if total is None and part.shape == shape:
                            total = part
                            continue
                        if total is None:
                            total = torch.zeros(shape, dtype=part.dtype, device=part.device)
                        total[self._cuts(one, block)].add_(part)
                        del part
        if total is None:
            self.target[at].zero_()
        else:
            self.target[at].copy_(total)

    def _entries(self, index: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The batch entries whose pairs get the mask at ``index``."""
        sizes = zip(self.call.work.batch_shape, self.mask.shape[:-3], index, strict=True)
        return list(product(*(range(n) if m == 1 else (i,) for n, m, i in sizes)))

    def _at(self, index: tuple[int, ...], block: _Block) -> tuple[int | slice, ...]:
        """The indices of the mask's part for a block."""
        return (*index, *self._cuts(block))

    def _cuts(self, block: _Block, within: _Block | None = None) -> tuple[slice, ...]:
        """The mask's part for a block, in positions of all of the mask or of the block ``within``;
        dimensions that it broadcasts over are whole."""
        times, cuts = (self.call.work.queries_per_key_head, 1, 1), []
        for name, factor, n in zip(_DIMENSIONS, times, self.mask.shape[-3:], strict=True):
            part = getattr(block, name)
            first = 0 if within is None else getattr(within, name).start
            cut = slice((part.start - first) * factor, (part.stop - first) * factor)
            cuts.append(cut if n > 1 else slice(None))
        return tuple(cuts)

    def _part(
        self, tensor: torch.Tensor, entries: list[tuple[int, ...]], heads: slice, rows: slice
    ) -> torch.Tensor:
        """Rows of some heads of some batch entries, on the computing device, in the state's
        dtype."""
        work, device = self.call.work, self.call.device
        parts = [tensor[entry][heads, rows] for entry in entries]
        one = parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)
        return one.to(device).to(work.state_dtype)

    def _rows(self, entries: list[tuple[int, ...]], heads: slice, queries: slice) -> _Rows:
        work, given = self.call.work, self.given
        shared = work.queries_per_key_head
        every = slice(heads.start * shared, heads.stop * shared)
        grad_out = self._part(given.grad_out, entries, every, queries)
        out = self._part(given.out, entries, every, queries)
        lse = self._part(given.lse, entries, every, queries).unsqueeze(-1)
        n_heads = heads.stop - heads.start
        query = self._part(self.call.query, entries, every, queries)
        products = grad_out * out
        taken = products[..., -work.columns :].sum(dim=-1, keepdim=True) if work.columns else 0.0
        return _Rows(
            _grouped(query, n_heads),
            _grouped(grad_out, n_heads),
            products.sum(dim=-1, keepdim=True),
            # A row without keys has lse -inf; with 0 instead its probabilities are 0, not NaN.
            lse.masked_fill(lse == -torch.inf, 0.0),
            taken,
        )

    def _tile(
        self, entries: list[tuple[int, ...]], index: tuple[int, ...], one: _Block, rows: _Rows
    ) -> torch.Tensor | None:
        """A tile's part of the gradient: (heads or 1, queries or 1, keys or 1), summed over what
        the mask broadcasts over; None if causal masking leaves nothing of it."""
        call, work = self.call, self.call.work
        block = Ranges.of(one.queries.start, one.queries.stop, one.keys.start, one.keys.stop)
        if self.pairs.of(block) is EMPTY:
            return None
        key = self._part(call.key, entries, one.heads, one.keys)
        value = self._part(call.value, entries, one.heads, one.keys)
        shape = (len(entries), -1, one.queries.stop - one.queries.start, key.shape[-2])
        p = (rows.query @ key.mT).view(shape).mul_(call.scale)
        hidden = []
        if self.knowing is not None:
            shared = work.queries_per_key_head
            every = slice(one.heads.start * shared, one.heads.stop * shared)
            numbers = tuple(flat_entry(work, entry) for entry in entries)
            queries, keys = self._positions(one.queries), self._positions(one.keys)
            hidden.append(self.knowing.masked_pairs(numbers, every, queries, keys))
            self.knowing.change_(p)
        bias = self.mask[self._at(index, one)].to(call.device)
        # Kernels get the mask in the inputs' dtype.
        p.add_(bias.to(work.dtype)).sub_(rows.lse)
        if work.is_causal and one.keys.stop - 1 > one.queries.start:
            queries, keys = self._positions(one.queries), self._positions(one.keys)
            hidden.append(keys > queries.unsqueeze(-1))
        for pairs in hidden:
            p.masked_fill_(pairs, -torch.inf)
        p.exp_()
        ds = (rows.grad_out @ value.mT).view(shape)
        self._drop_(ds, entries, one)
        whole_rows = key.shape[-2] == work.n_keys
        exact = whole_rows and work.dtype != torch.float32 and not work.sinks
        ds.sub_(_exact_delta(p, ds, rows) if exact else rows.delta)
        ds.mul_(p)
        for pairs in hidden:
            # 0 times a value that is not finite is NaN, and such a pair has no part in anything.
            ds.masked_fill_(pairs, 0.0)
        over = [0]
        over += [dim for dim, n in zip((1, 2, 3), self.mask.shape[-3:], strict=True) if n == 1]
        if len(over) == 1 and len(entries) == 1:
            return ds.squeeze(0)
        return ds.sum(dim=over, keepdim=True).squeeze(0)

    def _positions(self, cut: slice) -> torch.Tensor:
        return torch.arange(cut.start, cut.stop, device=self.call.device)

    def _drop_(self, pairs: torch.Tensor, entries: list[tuple[int, ...]], one: _Block) -> None:
        """Multiply (e, h, queries, keys) by 0 where the call drops them, and by 1 / (1 - p) where
        it does not, in place."""
        dropout, work = self.call.dropout, self.call.work
        if dropout is None:
            return
        pairs.mul_(dropout.rescale)
        queries = self._positions(one.queries)
        keys = [Rows(one.keys.start, one.keys.stop, 0)]
        head = one.heads.start * work.queries_per_key_head
        for entry, part in zip(entries, pairs, strict=True):
            at = dropout.at(head, flat_entry(work, entry))
            part.masked_fill_(dropped(at, 1, part.shape[0], queries, keys)[0], 0.0)


def _grouped(rows: torch.Tensor, n_heads: int) -> torch.Tensor:
    """(e, g * hk, n, d) as (e, hk, g * n, d): the queries of the heads that share a key head."""
    return rows.reshape(rows.shape[0], n_heads, -1, rows.shape[-1])


def _exact_delta(p: torch.Tensor, dp: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """The delta of whole rows, from probabilities that are made to add up to 1, in place: without
    the rounding of the output (to 16 bits), and of a large lse (in float64).

    The usual delta for rows whose lse is of more keys than these, or which have none.
    """
    total = p.sum(dim=-1, keepdim=True)
    others = not_whole(total, rows.lse)
    p.div_(total.masked_fill_(others, 1.0))
    found = (p * dp).sum(dim=-1, keepdim=True).add_(rows.taken)
    return torch.where(others, rows.delta, found)


__all__ = ["Tile", "add_up_mask_gradient", "fitting", "tile_bytes"]
