"""Resolves a ``Mask`` for the sizes of a call, and remembers it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.masked.captured_tensors import TensorVersion
from quorum_attention.kernels.masked.geometries import geometries
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.masked.mask_fields import (
    fields_key,
    is_of_tokens,
    masks_in,
    relative_band,
    tensors_of,
)
from quorum_attention.kernels.masked.mask_numbers import (
    document_ids,
    kept_key_ids,
    query_offsets,
)
from quorum_attention.kernels.masked.packing import Packing
from quorum_attention.kernels.masked.pair_bias import PairBias
from quorum_attention.kernels.masked.pair_functions import MaskMod
from quorum_attention.kernels.masked.token_rules import PlaceRule, TokenRules
from quorum_attention.kernels.masked.ways import fastest_way
from quorum_attention.kernels.protocol import Kernel
from quorum_attention.kernels.torch_private import no_torch_modes
from quorum_attention.mask import Mask, map_tensors

# As many calls as take the host less time than the device.
_FEW_BANDS = 16
_FEW_ENTRIES = 8


class ResolvedMask:
    """A mask with the sizes of a call, its bias and its sinks left aside.

    Args:
        mask: for calls of ``shape``, of any heads and dtype.
        packs: whether whole calls may be run in another way than by blocks.
        biases: whether that may be with a bias.

    Attributes:
        shape: of a call that it is for; the others have its batch entries and lengths.
        softcap: of scores, or None.
        kernels: those made for it (``choose.py``), by what they were made with.
        rules: of a mask with a way.
        way: in which whole calls are run: by a bias, or packed, for which kept pairs
            are gathered for few calls; None: by blocks.
        without_bias: of a mask with a bias, the mask without it.
        by_blocks: of a mask with a way, the mask without one, for calls that are cut
            into tasks.
        functions: the user's, in the geometries.
        is_causal: whether no query keeps a later key (counted from the first query and
            the first key), so that tasks need not have them.
        keeps_all: whether nothing else is masked.
    """

    def __init__(
        self, mask: Mask, shape: CallShape, *, packs: bool = True, biases: bool = True
    ) -> None:
        self.shape = shape
        self.softcap = mask.softcap
        self.kernels: dict[Hashable, Kernel] = {}
        self.rules: TokenRules | None = None
        self.way: PairBias | Packing | None = None
        self.functions: tuple[MaskMod, ...] = ()
        self.is_causal = False
        self.keeps_all = False
        has_pairs = 0 not in (shape.batch, shape.heads, shape.n_queries, shape.n_keys)
        if packs and has_pairs and is_of_tokens(mask):
            self._find_whole_calls(mask, biases=biases)
        if not self.is_whole:
            self._find_geometries(mask)

    def _find_whole_calls(self, mask: Mask, *, biases: bool) -> None:
        """Find the way to run whole calls: with a bias, packed, or (neither) by
        blocks."""
        shape = self.shape
        # The caller's tensors may have changed when they are read again.
        copied = map_tensors(replace(mask, bias=None, sinks=None), _copy)
        with no_torch_modes():
            by_query, key_ids = document_ids(copied, shape)
            by_key = kept_key_ids(copied, shape, key_ids)
            places = np.arange(shape.n_queries) + query_offsets(copied, shape)
        rule = PlaceRule(
            relative_band(copied),
            places,
            copied.chunk,
            shape.is_causal,
        )
        self.rules = TokenRules(copied, shape.n_keys, rule)
        self.way = fastest_way(
            self.rules,
            by_query,
            by_key,
            shape,
            biases=biases,
        )
        if self.is_whole:
            resolve_copy = partial(ResolvedMask, copied, shape)
            self.without_bias = cache(partial(resolve_copy, biases=False))
            self.by_blocks = cache(partial(resolve_copy, packs=False))

    def _find_geometries(self, mask: Mask) -> None:
        self._geometries = geometries(mask, self.shape, self.shape.is_causal)
        # By their ids: a callable may have no hash.
        by_id: dict[int, MaskMod] = {}
        for geometry in self._geometries:
            by_id |= {id(function): function for function in geometry.functions}
        self.functions = tuple(by_id.values())
        self.is_causal = all(map(_is_causal, self._geometries))
        plain = Band(high=0) if self.is_causal else Band()
        self.keeps_all = all(
            geometry.is_band and geometry.band == plain for geometry in self._geometries
        )

    @property
    def is_whole(self) -> bool:
        """Whether whole calls are run in another way than by blocks."""
        return self.way is not None

    @property
    def geometries(self) -> tuple[Geometry, ...]:
        """One for each batch entry, or one for all of them."""
        return self.by_blocks().geometries if self.is_whole else self._geometries

    @property
    def kept_pairs(self) -> float:
        """Pairs of a head that a batch entry keeps, with those that rules leave out;
        the mean."""
        shape = self.shape
        counts = [
            geometry.count(shape.n_queries, shape.n_keys)
            for geometry in self.geometries
        ]
        return sum(counts) / len(counts)

    @property
    def few_bands(self) -> bool:
        """Whether it is a band within a few large blocks."""
        if self.is_whole:
            return False
        for geometry in self.geometries:
            n_blocks = 0 if geometry.blocks is None else len(geometry.blocks)
            if geometry.rules or n_blocks > _FEW_BANDS:
                return False
        return True


def many_with_more_keys(shape: CallShape) -> bool:
    """Whether there are many batch entries, with more keys than queries.

    No operator takes such a call as one causal rectangle. Cut into tasks it would be
    several calls for each batch entry, so its causal mask is one of this package's.
    """
    return shape.batch > _FEW_ENTRIES and shape.n_keys > shape.n_queries


def _is_causal(geometry: Geometry) -> bool:
    """Whether no query of a batch entry keeps a later key."""
    for band in geometry.block_bands:
        if band.high is None or band.high > 0:
            return False
    return True


def _copy(tensor: torch.Tensor, name: str) -> torch.Tensor:
    with no_torch_modes():
        return tensor.detach().clone()


class _Resolution(NamedTuple):
    """A resolved mask, and what its tensors held."""

    contents: list[Hashable]
    mask: ResolvedMask


_BY_MASK: WeakKeyDictionary[Mask, Cache[_Resolution]] = WeakKeyDictionary()
_SHARED: Cache[_Resolution] = Cache(64)
# Masks of so many entries, whose tables of tokens may take hundreds of megabytes.
_MANY_ENTRIES = 1024
_OF_MANY_ENTRIES: Cache[_Resolution] = Cache(4)


def resolve(mask: Mask, shape: CallShape) -> ResolvedMask:
    """``mask`` for a call, without its bias and its sinks; remembered as long as none
    of its tensors changes, and shared by masks of the same tensors.

    Raises:
        ValueError: a tensor of the mask does not fit the call, by name.
    """
    tensors = [tensor for _, tensor in tensors_of(mask)]
    key = (
        fields_key(mask),
        shape.device_type,
        shape.batch,
        shape.lengths,
        tuple(map(id, tensors)),
    )
    # Before they are read: what another thread writes meanwhile is a change.
    contents = list(map(_contents, tensors))

    def resolve_now() -> _Resolution:
        return _Resolution(contents, ResolvedMask(mask, shape))

    resolutions = _resolutions_of(mask, shape)
    resolution = resolutions.get(key, resolve_now)
    if resolution.contents != contents:  # an id may be used again, too
        resolution = resolve_now()
        resolutions.put(key, resolution)
    return resolution.mask


def _resolutions_of(mask: Mask, shape: CallShape) -> Cache[_Resolution]:
    """Where the resolution of a mask is remembered."""
    if any(inner.keeps is not None for inner in masks_in(mask)):
        # The geometries hold them: in the shared cache they would outlive their mask.
        return _BY_MASK.setdefault(mask, Cache(1))
    return _SHARED if shape.batch < _MANY_ENTRIES else _OF_MANY_ENTRIES


def _contents(tensor: torch.Tensor) -> Hashable:
    """A key of the numbers in a tensor, as far as they can be told.

    On a GPU that is its version: the host would have to wait for its numbers. torch
    counts what is written, but not through ``.data``, nor by NumPy or another library
    in memory that it shares. In
    host memory numbers are compared: 0.2 ms for the ids of 262,144 tokens.
    """
    if tensor.is_cpu or tensor.is_inference():  # which has no version
        with no_torch_modes():  # a transformation or a mode would take part in that
            return tensor.shape, tensor.dtype, tensor.cpu().numpy().tobytes()
    return TensorVersion(tensor)
