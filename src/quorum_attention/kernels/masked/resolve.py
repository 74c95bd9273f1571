"""Resolves a ``Mask`` for the sizes of a call: one geometry for each batch entry."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.masked.alignment import Ids, offsets_from_last
from quorum_attention.kernels.masked.captured_tensors import TensorVersion
from quorum_attention.kernels.masked.cells import NO_KEY
from quorum_attention.kernels.masked.geometry import (
    AnyOf,
    Geometry,
    bounds_of,
    geometry_of,
)
from quorum_attention.kernels.masked.packing import Packing
from quorum_attention.kernels.masked.pair_bias import PairBias
from quorum_attention.kernels.masked.pair_functions import MaskMod
from quorum_attention.kernels.masked.rules import EqualIds, PlacesInBand
from quorum_attention.kernels.masked.token_rules import PlaceRule, TokenRules
from quorum_attention.kernels.masked.ways import fastest_way
from quorum_attention.kernels.protocol import CallShape, Kernel
from quorum_attention.kernels.torch_private import no_torch_modes
from quorum_attention.mask import FAR, Mask, map_tensors
from quorum_attention.units import counted

# Ids whose runs make more blocks than this many times the runs are compared pair by pair instead.
_MOST_BLOCKS = 8
_FEW_BLOCKS = 4096
# So many calls take the host less than the device.
_FEW_BANDS = 16
# A query that no key has.
_NO_QUERY = NO_KEY + 1


class ResolvedMask:
    """A mask with the sizes of a call, its bias and its sinks left aside.

    Attributes:
        rules: of a mask with a bias or a packing.
        pair_bias: of a mask that becomes a bias for whole calls; None: of others.
        packing: of a mask whose kept pairs are gathered for few calls; None: of others.
        without_bias: of a mask with a bias, the mask without it.
        by_blocks: of a mask with a bias or a packing, the mask without both, for calls that are cut
            into tasks.
        sizes: of a call that it is for; the others have its batch entries and lengths.
        softcap: of scores, or None.
        functions: the user's, in the geometries.
        is_causal: whether no query keeps a later key (counted from the first query and the first
            key), so that tasks need not have them.
        keeps_all: whether nothing else is masked.
        kernels: those made for it (``kernel.py``), by the id of the kernel that each computes with.
    """

    def __init__(
        self, mask: Mask, shape: CallShape, *, packs: bool = True, biases: bool = True
    ) -> None:
        self.sizes, self.softcap = shape, mask.softcap
        self.kernels: dict[Hashable, Kernel] = {}
        self.rules: TokenRules | None = None
        self.pair_bias: PairBias | None = None
        self.packing: Packing | None = None
        if packs and _is_of_tokens(mask, shape):
            # The caller's tensors may have changed when they are read again.
            copied = map_tensors(replace(mask, bias=None, sinks=None), _copied)
            with no_torch_modes():
                self._find_whole_calls(copied, biases=biases)
        if self.is_whole:
            self.without_bias = cache(partial(ResolvedMask, copied, shape, biases=False))
            self.by_blocks = cache(partial(ResolvedMask, copied, shape, packs=False))
            self.functions: tuple[MaskMod, ...] = ()
            self.is_causal = self.keeps_all = False
            return
        self._geometries = geometries(mask, shape, shape.is_causal)
        # By their ids: a callable may have no hash.
        self.functions = tuple({id(f): f for g in self.geometries for f in g.functions}.values())
        bands = [band for geometry in self.geometries for band in geometry.block_bands]
        self.is_causal = all(band.high is not None and band.high <= 0 for band in bands)
        below = Band(None, 0) if self.is_causal else Band()
        self.keeps_all = all(
            g.band == below and g.blocks is None and not g.rules for g in self.geometries
        )

    def _find_whole_calls(self, mask: Mask, *, biases: bool) -> None:
        """Find the way to run whole calls: with a bias, packed, or (neither) by blocks."""
        shape = self.sizes
        by_query, by_key = _ids(mask, shape)
        by_key = np.where(_kept_keys(mask, shape), by_key, NO_KEY)
        places = np.arange(shape.n_queries) + query_offsets(mask, shape)
        rule = PlaceRule(relative_band(mask), places, mask.chunk, shape.is_causal)
        self.rules = TokenRules(mask, shape.n_keys, rule)
        way = fastest_way(self.rules, by_query, by_key, shape, biases=biases)
        if isinstance(way, PairBias):
            self.pair_bias = way
        elif isinstance(way, Packing):
            self.packing = way

    @property
    def is_whole(self) -> bool:
        """Whether whole calls are run in another way than by blocks."""
        return self.pair_bias is not None or self.packing is not None

    @property
    def geometries(self) -> tuple[Geometry, ...]:
        """One for each batch entry, or one for all of them."""
        return self.by_blocks().geometries if self.is_whole else self._geometries

    @property
    def kept_pairs(self) -> float:
        """Pairs of a head that a batch entry keeps, with those that rules leave out; the mean."""
        if self.packing is not None:
            return self.packing.pairs / self.sizes.batch
        if self.pair_bias is not None:
            return float(self.sizes.n_queries * self.sizes.n_keys)
        counts = [g.count(self.sizes.n_queries, self.sizes.n_keys) for g in self.geometries]
        return sum(counts) / len(counts)

    @property
    def few_bands(self) -> bool:
        """Whether it is a band within a few large blocks."""
        return not self.is_whole and all(
            not g.rules and (g.blocks is None or len(g.blocks) <= _FEW_BANDS)
            for g in self.geometries
        )


def resolve(mask: Mask, shape: CallShape) -> ResolvedMask:
    """``mask`` for a call, without its bias and its sinks; remembered as long as none of its
    tensors changes, and shared by masks of the same tensors.

    Raises:
        ValueError: a tensor of the mask does not fit the call, by name.
    """
    tensors = [tensor for _, tensor in tensors_of(mask)]
    ids = tuple(map(id, tensors))
    key = (described(mask), shape.device_type, shape.batch, shape.lengths, ids)

    # Before they are read: what another thread writes meanwhile is a change.
    held = list(map(_contents, tensors))
    known = _SHARED if shape.batch < _MANY_ENTRIES else _OF_MANY_ENTRIES
    if any(one.keeps is not None for one in masks_in(mask)):
        # The geometries hold them: in the shared cache they would outlive their mask.
        known = _BY_MASK.setdefault(mask, Cache(1))
    then, resolved = known.get(key, lambda: (held, ResolvedMask(mask, shape)))
    if then != held:  # an id may be used again, too
        resolved = ResolvedMask(mask, shape)
        known.put(key, (held, resolved))
    return resolved


_Known = tuple[list[Hashable], ResolvedMask]
_BY_MASK: WeakKeyDictionary[Mask, Cache[_Known]] = WeakKeyDictionary()
_SHARED: Cache[_Known] = Cache(64)
# Masks of so many entries, whose tables of tokens may take hundreds of megabytes.
_MANY_ENTRIES = 1024
_OF_MANY_ENTRIES: Cache[_Known] = Cache(4)


def _contents(tensor: torch.Tensor) -> Hashable:
    """What a tensor holds, as far as it can be told.

    On a GPU that is its version: the host would have to wait for its numbers. torch counts what is
    written, but not through ``.data``, nor by NumPy or another library in memory that it shares. In
    host memory numbers are compared: 0.2 ms for the ids of 262,144 tokens.
    """
    if tensor.is_cpu or tensor.is_inference():  # which has no version
        with no_torch_modes():  # a transformation or a mode would take part in that
            return tensor.shape, tensor.dtype, tensor.cpu().numpy().tobytes()
    return TensorVersion(tensor)


def relative_band(mask: Mask) -> Band:
    """The band of a mask's own causal rule and window, around the place of a query."""
    left, right = mask.sides
    highs = [right] if right >= 0 else []
    highs += [0] if mask.causal else []
    return Band(-left if left >= 0 else None, min(highs, default=None))


def geometries(mask: Mask, shape: CallShape, is_causal: bool) -> tuple[Geometry, ...]:
    """One geometry for each batch entry, or one for all of them.

    Raises:
        ValueError: a tensor of the mask does not fit the call, by name.
    """
    with no_torch_modes():
        own = _own(mask, shape, is_causal)
        if mask.keeps is not None:
            own = _both(own, (geometry_of(mask.keeps),))
        for nested in mask.every:
            own = _both(own, geometries(nested, shape, False))
        if mask.either:
            each = [geometries(nested, shape, False) for nested in mask.either]
            alternatives = (
                AnyOf(tuple(one[i % len(one)] for one in each)) for i in range(max(map(len, each)))
            )
            own = _both(own, tuple(Geometry(rules=(rule,)) for rule in alternatives))
    return own


def _copied(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return tensor.detach().clone()


def _is_of_tokens(mask: Mask, shape: CallShape) -> bool:
    """Whether a mask has ids, lengths or padding, and no more than positions beside them."""
    if mask.keeps is not None or mask.every or mask.either:
        return False
    if 0 in (shape.batch, shape.heads, shape.n_queries, shape.n_keys):
        return False
    by_tokens = (mask.documents, mask.key_lengths, mask.key_padding)
    return any(field is not None for field in by_tokens)


def _both(one: tuple[Geometry, ...], other: tuple[Geometry, ...]) -> tuple[Geometry, ...]:
    """What two masks keep, entry by entry; the same objects give the same object."""
    meeting, count = cache(Geometry.__and__), max(len(one), len(other))
    return tuple(meeting(one[i % len(one)], other[i % len(other)]) for i in range(count))


def _own(mask: Mask, shape: CallShape, is_causal: bool) -> tuple[Geometry, ...]:
    """The geometries of a mask's own fields, without the masks that it holds."""
    if not shape.batch:
        return (_at_offset(mask, shape, is_causal, 0),)
    every = (*_ids(mask, shape), _kept_keys(mask, shape), query_offsets(mask, shape))
    at_offset = cache(partial(_at_offset, mask, shape, is_causal))
    known: dict[bytes, Geometry] = {}
    found = []
    for entry in range(max(map(len, every))):
        by_query, by_key, kept, offsets = (each[entry % len(each)] for each in every)
        by_key = np.where(kept, by_key, NO_KEY)
        name = by_query.tobytes() + by_key.tobytes() + offsets.tobytes()
        if name not in known:
            if (offsets == offsets[:1]).all():
                own = at_offset(int(offsets[0]) if len(offsets) else 0)
                known[name] = own & _equal_numbers(by_query, by_key)
            else:
                known[name] = _at_offsets(mask, shape, is_causal, (by_query, by_key, offsets))
        found.append(known[name])
    return tuple(found) if len(known) > 1 else (found[0],)


def _at_offset(mask: Mask, shape: CallShape, is_causal: bool, offset: int) -> Geometry:
    """What causal rule, window and chunk keep where all queries stand ``offset`` keys further."""
    band = relative_band(mask).moved(offset) & Band(None, 0 if is_causal else None)
    # Bounds that cut nothing are none.
    low = None if band.low is None or band.low <= 1 - shape.n_queries else band.low
    high = None if band.high is None or band.high >= shape.n_keys - 1 else band.high
    return Geometry(Band(low, high)) & _in_chunk(mask, shape, np.array(offset))


def _at_offsets(
    mask: Mask, shape: CallShape, is_causal: bool, numbers: tuple[Ids, Ids, Ids]
) -> Geometry:
    """What a mask's own fields keep where queries stand at different offsets.

    Args:
        numbers: the ids of queries and of keys, and the offset of each query.
    """
    by_query, by_key, offsets = numbers
    band = Band(None, 0 if is_causal and shape.n_keys > 1 else None)
    own = Geometry(band) & _in_chunk(mask, shape, offsets)
    if relative_band(mask).keeps_all:
        return own & _equal_numbers(by_query, by_key)
    return own & _equal_numbers(by_query, by_key, offsets, relative_band(mask))


def _in_chunk(mask: Mask, shape: CallShape, offsets: Ids) -> Geometry:
    """Pairs within one chunk; all, if the mask has no chunks."""
    if mask.chunk is None:
        return Geometry()
    places, keys = np.arange(shape.n_queries) + offsets, np.arange(shape.n_keys)
    return _equal_numbers(places // mask.chunk, keys // mask.chunk)


def _equal_numbers(
    by_query: Ids, by_key: Ids, offsets: Ids | None = None, band: Band | None = None
) -> Geometry:
    """Pairs of equal numbers, as blocks; as a rule where there would be too many blocks.

    Args:
        offsets, band: of each query; ``key - query - offset`` has to lie in the band, too.
    """
    rows, columns = _runs(by_query, *([] if offsets is None else [offsets])), _runs(by_key)
    row_names, column_names = by_query[rows[:, 0]], by_key[columns[:, 0]]
    order = np.argsort(column_names, kind="stable")
    ordered = column_names[order]
    first = np.searchsorted(ordered, row_names, side="left")
    count = np.searchsorted(ordered, row_names, side="right") - first
    n = int(count.sum())
    rules: tuple[EqualIds, ...] = (EqualIds(by_query, by_key),)
    if offsets is not None and band is not None:
        rules += (PlacesInBand(np.arange(len(by_query)) + offsets, len(by_key), band),)
    if n > max(_FEW_BLOCKS, _MOST_BLOCKS * (len(rows) + len(columns))):
        return Geometry(rules=rules)
    row = np.repeat(np.arange(len(rows)), count)
    nth = np.arange(n) - np.repeat(np.cumsum(count) - count, count)
    column = order[np.repeat(first, count) + nth]
    blocks = np.concatenate((rows[row], columns[column]), axis=1)
    if offsets is not None and band is not None:
        moved = [band.moved(int(offset)) for offset in offsets[rows[:, 0]]]
        bounds = np.array([bounds_of(each) for each in moved], dtype=np.int64).reshape(-1, 2)
        return Geometry(blocks=blocks, same=rules, bounds=bounds[row])
    whole = [[0, len(by_query), 0, len(by_key)]]
    if np.array_equal(blocks, whole):
        return Geometry()
    return Geometry(blocks=blocks, same=rules)


def _runs(*numbers: Ids) -> NDArray[np.int64]:
    """(n, 2): start and stop of the runs in which each of ``numbers`` stays equal."""
    n_tokens = len(numbers[0])
    if not n_tokens:
        return np.zeros((0, 2), np.int64)
    changes = np.any([ids[1:] != ids[:-1] for ids in numbers], axis=0)
    edges = np.concatenate(([0], np.flatnonzero(changes) + 1, [n_tokens]))
    return np.stack((edges[:-1], edges[1:]), axis=1).astype(np.int64)


def query_offsets(mask: Mask, shape: CallShape) -> Ids:
    """The place of queries among the keys, less their own numbers, (1 or batch, 1 or n_queries).

    Raises:
        ValueError: a tensor of the mask does not fit the call, by name.
    """
    if isinstance(mask.offset, torch.Tensor):
        return _offset_rows(mask.offset, shape)
    if not mask.counts_from_last:
        return np.full((1, 1), 0 if mask.offset is None else mask.offset, np.int64)
    lengths = _key_lengths(mask, shape)
    if mask.documents is None:
        return (lengths - shape.n_queries)[:, None]
    by_query, by_key = _ids(mask, shape)
    if mask.key_lengths is None and by_query is by_key:
        return np.zeros((1, 1), np.int64)
    entries = range(max(map(len, (by_query, by_key, lengths))))
    rows = [
        offsets_from_last(
            by_query[entry % len(by_query)],
            by_key[entry % len(by_key)][: lengths[entry % len(lengths)]],
        )
        for entry in entries
    ]
    return np.stack(rows) if rows else np.zeros((0, 1), np.int64)


def with_offsets(mask: Mask, shape: CallShape) -> Mask:
    """The mask with numbers in place of each "lower_right", also in the masks that it holds.

    Raises:
        ValueError: a tensor of the mask does not fit the call, by name.
    """
    changes: dict[str, Any] = {}
    for name in ("either", "every"):
        inner = getattr(mask, name)
        numbered = tuple(with_offsets(each, shape) for each in inner)
        if any(new is not old for new, old in zip(numbered, inner, strict=True)):
            changes[name] = numbered
    if mask.counts_from_last:
        with no_torch_modes():
            offsets = query_offsets(mask, shape)
            single = offsets.size == 1
            changes["offset"] = int(offsets[0, 0]) if single else torch.from_numpy(offsets)
    return replace(mask, **changes) if changes else mask


def _offset_rows(tensor: torch.Tensor, shape: CallShape) -> Ids:
    """``Mask.offset`` as a tensor, (1 or batch, 1 or n_queries)."""
    found: Ids = np.atleast_2d(tensor.detach().cpu().numpy()).astype(np.int64)
    batch, n = shape.batch, shape.n_queries
    if len(found) not in (1, batch) or found.shape[1] not in (1, n):
        raise ValueError(
            f"Mask.offset must have shape ({n},), ({batch}, {n}) or ({batch}, 1) for "
            f"{counted(batch, 'batch entry', 'batch entries')} of "
            f"{counted(n, 'query', 'queries')}, got {tuple(tensor.shape)}"
        )
    if found.size and max(-int(found.min()), int(found.max())) > FAR:
        raise ValueError(
            f"Mask.offset must be from {-FAR} to {FAR}, got {int(found.min())} to "
            f"{int(found.max())}"
        )
    return found


def _ids(mask: Mask, shape: CallShape) -> tuple[Ids, Ids]:
    """The ids of queries and keys, (1 or batch, n) each; 0 without documents."""
    if mask.documents is None:
        return np.zeros((1, shape.n_queries), np.int64), np.zeros((1, shape.n_keys), np.int64)
    both = mask.documents
    if not isinstance(both, tuple) and shape.n_queries != shape.n_keys:
        raise ValueError(
            f"Mask.documents must be two tensors, of "
            f"{counted(shape.n_queries, 'query', 'queries')} and of "
            f"{counted(shape.n_keys, 'key')}, where these differ, got one"
        )
    of_query, of_key = both if isinstance(both, tuple) else (both, both)
    queries = _rows_of(of_query, "Mask.documents", shape.batch, shape.n_queries, "queries")
    keys = queries
    if of_key is not of_query or shape.n_queries != shape.n_keys:
        keys = _rows_of(of_key, "Mask.documents", shape.batch, shape.n_keys, "keys")
    for ids in (queries, keys):
        if ids.size and int(ids.min()) <= _NO_QUERY:
            raise ValueError(f"Mask.documents must be above {_NO_QUERY}, got {int(ids.min())}")
    return queries, keys


def _key_lengths(mask: Mask, shape: CallShape) -> Ids:
    """How many keys there are, (1 or batch,)."""
    if mask.key_lengths is None:
        return np.full(1, shape.n_keys, np.int64)
    lengths: Ids = mask.key_lengths.detach().cpu().numpy().astype(np.int64)
    if lengths.shape != (shape.batch,):
        raise ValueError(f"Mask.key_lengths must have shape {(shape.batch,)}, got {lengths.shape}")
    if shape.batch and (lengths.min() < 0 or lengths.max() > shape.n_keys):
        raise ValueError(
            f"Mask.key_lengths must be from 0 to the {counted(shape.n_keys, 'key')}, got "
            f"{int(lengths.min())} to {int(lengths.max())}"
        )
    return lengths


def _kept_keys(mask: Mask, shape: CallShape) -> NDArray[np.bool_]:
    """Which keys padding and lengths keep, (1 or batch, n_keys)."""
    found = np.arange(shape.n_keys) < _key_lengths(mask, shape)[:, None]
    if mask.key_padding is not None:
        padding = mask.key_padding
        rows = _rows_of(padding, "Mask.key_padding", shape.batch, shape.n_keys, "keys") != 0
        found = found & rows
    return found


def _rows_of(tensor: torch.Tensor, name: str, batch: int, n: int, what: str) -> Ids:
    if tensor.shape not in ((n,), (1, n), (batch, n)):
        raise ValueError(
            f"{name} must have shape ({n},) or ({batch}, {n}) for {batch} batch entries (all batch "
            f"dimensions as one) of {n} {what}, got {tuple(tensor.shape)}"
        )
    found: Ids = np.atleast_2d(tensor.detach().cpu().numpy()).astype(np.int64)
    return found


def masks_in(mask: Mask) -> Iterator[Mask]:
    """A mask, and the masks that it holds."""
    yield mask
    for inner in (*mask.every, *mask.either):
        yield from masks_in(inner)


def tensors_of(mask: Mask) -> list[tuple[str, torch.Tensor]]:
    """The tensors that say which pairs are kept, by the names of their fields."""
    found: list[tuple[str, torch.Tensor | None]] = []
    for one in masks_in(mask):
        ids = one.documents if isinstance(one.documents, tuple) else (one.documents,)
        found += [("documents", each) for each in ids]
        found += [("key_lengths", one.key_lengths), ("key_padding", one.key_padding)]
        found += [("offset", one.offset if isinstance(one.offset, torch.Tensor) else None)]
    return [(name, tensor) for name, tensor in found if tensor is not None]


def described(mask: Mask) -> Hashable:
    """All of a mask but its tensors and functions."""
    documents = 2 if isinstance(mask.documents, tuple) else mask.documents is not None
    offset = "tensor" if isinstance(mask.offset, torch.Tensor) else mask.offset
    return (
        mask.causal, offset, mask.sides, mask.chunk, documents, mask.key_lengths is not None,
        mask.key_padding is not None, mask.keeps is not None, mask.softcap,
        tuple(map(described, mask.every)), tuple(map(described, mask.either)),
    )  # fmt: skip
