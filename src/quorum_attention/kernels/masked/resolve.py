"""Resolves a ``Mask`` for the sizes of a call: one geometry for each batch entry."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import cache
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.masked.functions import TensorVersion
from quorum_attention.kernels.masked.geometry import AnyOf, Blocks, EqualIds, Geometry, geometry_of
from quorum_attention.kernels.protocol import CallShape, Kernel
from quorum_attention.kernels.torch_private import outside
from quorum_attention.mask import Mask

Ids = NDArray[np.int64]

# Ids whose runs make more blocks than this many times the runs are compared pair by pair instead.
_MOST_BLOCKS = 8
_FEW_BLOCKS = 4096
# So many calls take the host less than the device.
_FEW_BANDS = 16
# A key that no query has, and a query that no key has.
_NO_KEY, _NO_QUERY = np.iinfo(np.int64).min, np.iinfo(np.int64).min + 1


class ResolvedMask:
    """A mask with the sizes of a call, its bias and its sinks left aside.

    Attributes:
        geometries: one for each batch entry, or one for all of them.
        sizes: of a call that it is for; the others have its batch entries and lengths.
        softcap: of scores, or None.
        functions: the user's, in the geometries.
        is_causal: whether no query keeps a later key (counted from the first query and the first
            key), so that tasks need not have them.
        keeps_all: whether nothing else is masked.
        kernels: those made for it (``kernel.py``), by the id of the kernel that each computes with.
    """

    def __init__(self, mask: Mask, call: CallShape) -> None:
        self.geometries = geometries(mask, call, call.is_causal)
        self.sizes, self.softcap = call, mask.softcap
        # By their ids: a callable may have no hash.
        self.functions = tuple({id(f): f for g in self.geometries for f in g.functions}.values())
        bands = [g.band for g in self.geometries]
        self.is_causal = all(band.high is not None and band.high <= 0 for band in bands)
        below = Band(None, 0) if self.is_causal else Band()
        self.keeps_all = all(
            g.band == below and g.blocks is None and not g.rules for g in self.geometries
        )
        self.kernels: dict[int, Kernel] = {}

    @property
    def kept_pairs(self) -> float:
        """Pairs of a head that a batch entry keeps, with those that rules leave out; the mean."""
        counts = [g.count(self.sizes.n_queries, self.sizes.n_keys) for g in self.geometries]
        return sum(counts) / len(counts)

    @property
    def few_bands(self) -> bool:
        """Whether it is a band within a few large blocks."""
        return all(
            not g.rules and (g.blocks is None or len(g.blocks) <= _FEW_BANDS)
            for g in self.geometries
        )


def resolve(mask: Mask, call: CallShape) -> ResolvedMask:
    """``mask`` for a call, without its bias and its sinks; remembered as long as none of its
    tensors changes, and shared by masks of the same tensors.

    Raises:
        ValueError: a tensor of the mask does not fit the call, by name.
    """
    tensors = [tensor for _, tensor in tensors_of(mask)]
    key = (described(mask), call.batch, call.lengths, tuple(map(id, tensors)))

    # Before they are read: what another thread writes meanwhile is a change.
    held = list(map(_contents, tensors))
    known = _SHARED
    if any(one.keeps is not None for one in masks_in(mask)):
        # The geometries hold them: in the shared cache they would outlive their mask.
        known = _BY_MASK.setdefault(mask, Cache(1))
    then, resolved = known.get(key, lambda: (held, ResolvedMask(mask, call)))
    if then != held:  # an id may be used again, too
        resolved = ResolvedMask(mask, call)
        known.put(key, (held, resolved))
    return resolved


_Known = tuple[list[Hashable], ResolvedMask]
_BY_MASK: WeakKeyDictionary[Mask, Cache[_Known]] = WeakKeyDictionary()
_SHARED: Cache[_Known] = Cache(64)


def _contents(tensor: torch.Tensor) -> Hashable:
    """What a tensor holds, as far as it can be told.

    On a GPU that is its version: the host would have to wait for its numbers. torch counts what is
    written, but not through ``.data``, nor by NumPy or another library in memory that it shares. In
    host memory numbers are compared: 0.2 ms for the ids of 262,144 tokens.
    """
    if tensor.is_cpu or tensor.is_inference():  # which has no version
        with outside():  # a transformation or a mode would take part in that
            return tensor.shape, tensor.dtype, tensor.cpu().numpy().tobytes()
    return TensorVersion(tensor)


def _band(mask: Mask, sizes: CallShape, is_causal: bool) -> Band:
    """The band of a mask's own causal rule and window, and of ``is_causal``."""
    shift = _offset(mask, sizes)
    left, right = mask.sides
    highs = [shift + right] if right >= 0 else []
    highs += [shift] if mask.causal else []
    highs += [0] if is_causal else []
    # Bounds that cut nothing are none.
    high = min(highs, default=sizes.n_keys)
    low = shift - left if left >= 0 else -sizes.n_queries
    return Band(
        None if low <= 1 - sizes.n_queries else low, None if high >= sizes.n_keys - 1 else high
    )


def geometries(mask: Mask, sizes: CallShape, is_causal: bool) -> tuple[Geometry, ...]:
    """One geometry for each batch entry, or one for all of them.

    Raises:
        ValueError: a tensor of the mask does not fit the call, by name.
    """
    with outside():
        own = _own(mask, sizes, is_causal)
        if mask.keeps is not None:
            own = _both(own, (geometry_of(mask.keeps),))
        for nested in mask.every:
            own = _both(own, geometries(nested, sizes, False))
        if mask.either:
            each = [geometries(nested, sizes, False) for nested in mask.either]
            alternatives = (
                AnyOf(tuple(one[i % len(one)] for one in each)) for i in range(max(map(len, each)))
            )
            own = _both(own, tuple(Geometry(rules=(rule,)) for rule in alternatives))
    return own


def _both(one: tuple[Geometry, ...], other: tuple[Geometry, ...]) -> tuple[Geometry, ...]:
    """What two masks keep, entry by entry; the same objects give the same object."""
    meeting, count = cache(Geometry.__and__), max(len(one), len(other))
    return tuple(meeting(one[i % len(one)], other[i % len(other)]) for i in range(count))


def _own(mask: Mask, sizes: CallShape, is_causal: bool) -> tuple[Geometry, ...]:
    """The geometries of a mask's own fields, without the masks that it holds."""
    own = Geometry(_band(mask, sizes, is_causal))
    if mask.chunk is not None:
        places = np.arange(sizes.n_queries) + _offset(mask, sizes), np.arange(sizes.n_keys)
        own &= Geometry(Band(), *_blocks_or_rule(*(at // mask.chunk for at in places)))
    if not sizes.batch or not any(
        field is not None for field in (mask.documents, mask.key_lengths, mask.key_padding)
    ):
        return (own,)
    every = (*_ids(mask, sizes), _kept_keys(mask, sizes))
    known: dict[bytes, Geometry] = {}
    found = []
    for entry in range(max(map(len, every))):
        by_query, by_key, kept = (each[entry % len(each)] for each in every)
        by_key = np.where(kept, by_key, _NO_KEY)
        name = by_query.tobytes() + by_key.tobytes()
        if name not in known:
            known[name] = own & Geometry(Band(), *_blocks_or_rule(by_query, by_key))
        found.append(known[name])
    return tuple(found) if len(known) > 1 else (found[0],)


def _blocks_or_rule(
    by_query: Ids, by_key: Ids
) -> tuple[Blocks | None, tuple[EqualIds, ...], tuple[EqualIds, ...]]:
    """``Geometry.blocks`` of equal numbers, ``rules`` and ``same``; a rule where there would be
    too many blocks."""
    rows, columns = _runs(by_query), _runs(by_key)
    row_names, column_names = by_query[rows[:, 0]], by_key[columns[:, 0]]
    order = np.argsort(column_names, kind="stable")
    ordered = column_names[order]
    first = np.searchsorted(ordered, row_names, side="left")
    count = np.searchsorted(ordered, row_names, side="right") - first
    n = int(count.sum())
    if n > max(_FEW_BLOCKS, _MOST_BLOCKS * (len(rows) + len(columns))):
        return None, (EqualIds(by_query, by_key),), ()
    row = np.repeat(np.arange(len(rows)), count)
    nth = np.arange(n) - np.repeat(np.cumsum(count) - count, count)
    column = order[np.repeat(first, count) + nth]
    blocks = np.concatenate((rows[row], columns[column]), axis=1)
    whole = [[0, len(by_query), 0, len(by_key)]]
    if np.array_equal(blocks, whole):
        return None, (), ()
    return blocks, (), (EqualIds(by_query, by_key),)


def _runs(ids: Ids) -> NDArray[np.int64]:
    """(n, 2): start and stop of the runs of equal numbers."""
    if not len(ids):
        return np.zeros((0, 2), np.int64)
    edges = np.flatnonzero(ids[1:] != ids[:-1]) + 1
    edges = np.concatenate(([0], edges, [len(ids)]))
    return np.stack((edges[:-1], edges[1:]), axis=1).astype(np.int64)


def _offset(mask: Mask, sizes: CallShape) -> int:
    if mask.offset is not None:
        return int(mask.offset)
    return sizes.n_keys - sizes.n_queries if mask.causal == "lower_right" else 0


def _ids(mask: Mask, sizes: CallShape) -> tuple[Ids, Ids]:
    """The ids of queries and keys, (1 or batch, n) each; 0 without documents."""
    if mask.documents is None:
        return np.zeros((1, sizes.n_queries), np.int64), np.zeros((1, sizes.n_keys), np.int64)
    both = mask.documents
    if not isinstance(both, tuple) and sizes.n_queries != sizes.n_keys:
        raise ValueError(
            f"Mask.documents must be two tensors, of {sizes.n_queries} queries and of "
            f"{sizes.n_keys} keys, where these differ, got one"
        )
    of_query, of_key = both if isinstance(both, tuple) else (both, both)
    queries = _rows_of(of_query, "Mask.documents", sizes.batch, sizes.n_queries, "queries")
    keys = _rows_of(of_key, "Mask.documents", sizes.batch, sizes.n_keys, "keys")
    for ids in (queries, keys):
        if ids.size and int(ids.min()) <= _NO_QUERY:
            raise ValueError(f"Mask.documents must be above {_NO_QUERY}, got {int(ids.min())}")
    return queries, keys


def _kept_keys(mask: Mask, sizes: CallShape) -> NDArray[np.bool_]:
    """Which keys padding and lengths keep, (1 or batch, n_keys)."""
    found = np.ones((1, sizes.n_keys), np.bool_)
    if mask.key_lengths is not None:
        lengths = mask.key_lengths.cpu().numpy()
        if lengths.shape != (sizes.batch,):
            raise ValueError(
                f"Mask.key_lengths must have shape {(sizes.batch,)}, got {lengths.shape}"
            )
        if sizes.batch and (lengths.min() < 0 or lengths.max() > sizes.n_keys):
            raise ValueError(
                f"Mask.key_lengths must be from 0 to the {sizes.n_keys} keys, got "
                f"{int(lengths.min())} to {int(lengths.max())}"
            )
        found = np.arange(sizes.n_keys) < lengths[:, None]
    if mask.key_padding is not None:
        padding = mask.key_padding
        rows = _rows_of(padding, "Mask.key_padding", sizes.batch, sizes.n_keys, "keys") != 0
        found = found & rows
    return found


def _rows_of(tensor: torch.Tensor, name: str, batch: int, n: int, what: str) -> Ids:
    if tensor.shape not in ((n,), (1, n), (batch, n)):
        raise ValueError(
            f"{name} must have shape ({n},) or ({batch}, {n}) for {batch} batch entries of {n} "
            f"{what}, got {tuple(tensor.shape)}"
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
    return [(name, tensor) for name, tensor in found if tensor is not None]


def described(mask: Mask) -> Hashable:
    """All of a mask but its tensors and functions."""
    documents = 2 if isinstance(mask.documents, tuple) else mask.documents is not None
    return (
        mask.causal, mask.offset, mask.sides, mask.chunk, documents, mask.key_lengths is not None,
        mask.key_padding is not None, mask.keeps is not None, mask.softcap,
        tuple(map(described, mask.every)), tuple(map(described, mask.either)),
    )  # fmt: skip
