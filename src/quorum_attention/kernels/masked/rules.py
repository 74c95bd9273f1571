"""Rules that keep or mask single pairs, and know the verdict on blocks of positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.decomposition import (
    EMPTY,
    FULL,
    PARTIAL,
    Interval,
    Ranges,
    Verdict,
)
from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.masked.pair_functions import MaskMod
from quorum_attention.kernels.torch_private import no_torch_modes
from quorum_attention.units import counted


class Rule(ABC):
    """A rule that has to be evaluated on pairs where its verdict is PARTIAL.

    Attributes:
        functions: the users' functions in it, which say nothing of blocks.
        placed_bytes: device bytes of what it reads, once it is evaluated there.
    """

    functions: tuple[MaskMod, ...] = ()
    placed_bytes: int = 0

    @abstractmethod
    def verdict(self, block: Ranges) -> Verdict:
        """The verdict on a block of positions; PARTIAL for users' functions."""

    @abstractmethod
    def mask_mod(self, device: torch.device) -> MaskMod:
        """The rule as FlexAttention's ``mask_mod`` over tensors on ``device``; can be
        traced."""


class FunctionRule(Rule):
    """A user's function as a rule."""

    def __init__(self, keeps: MaskMod) -> None:
        self._keeps = keeps
        self.functions = (keeps,)

    def verdict(self, block: Ranges) -> Verdict:
        """See ``Rule``."""
        return PARTIAL

    def mask_mod(self, device: torch.device) -> MaskMod:
        """See ``Rule``."""
        return self._keeps


class EqualIds(Rule):
    """The rule that the ids of query and key are equal, (n,) and (m,) int64."""

    def __init__(self, by_query: NDArray[np.int64], by_key: NDArray[np.int64]) -> None:
        self._by_query = by_query
        self._by_key = by_key
        self.placed_bytes = by_query.nbytes + by_key.nbytes
        self._on_devices: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def verdict(self, block: Ranges) -> Verdict:
        """EMPTY where no id of the queries can be one of the keys.

        Raises:
            ValueError: a token has no id.
        """
        query_ids, key_ids = self._ids_of(block)
        queries = _spanned(query_ids)
        keys = _spanned(key_ids)
        if queries.start >= keys.stop or keys.start >= queries.stop:
            return EMPTY
        is_one_id = queries == keys and queries.length == 1
        return FULL if is_one_id else PARTIAL

    def _ids_of(self, block: Ranges) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids of a block's queries and of its keys."""
        query_ids = _ids_within(self._by_query, *block.queries)
        key_ids = _ids_within(self._by_key, *block.keys)
        return query_ids, key_ids

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids on a device."""
        if device not in self._on_devices:
            with no_torch_modes():
                by_query = torch.from_numpy(self._by_query.copy()).to(device)
                by_key = torch.from_numpy(self._by_key.copy()).to(device)
            self._on_devices[device] = (by_query, by_key)
        return self._on_devices[device]

    def mask_mod(self, device: torch.device) -> MaskMod:
        """See ``Rule``."""
        by_query, by_key = self._on(device)
        return lambda b, h, q, k: by_query[q] == by_key[k]


def _ids_within(ids: NDArray[np.int64], start: int, stop: int) -> NDArray[np.int64]:
    if stop > len(ids):
        raise ValueError(
            f"there are ids of {counted(len(ids), 'token')}, not of token {stop - 1}"
        )
    return ids[start:stop]


def _spanned(ids: NDArray[np.int64]) -> Interval:
    """The numbers from the least to the largest of some."""
    return Interval(int(ids.min()), int(ids.max()) + 1)


class GroupBits(EqualIds):
    """The rule that query and key have no group bit in common (paper, section 4).

    The verdict on a block follows from the bitwise OR and AND of both sides.
    """

    def verdict(self, block: Ranges) -> Verdict:
        """EMPTY where all queries share a bit with all keys."""
        query_bits, key_bits = self._ids_of(block)
        bits_of_all_queries = np.bitwise_and.reduce(query_bits)
        bits_of_all_keys = np.bitwise_and.reduce(key_bits)
        if bits_of_all_queries & bits_of_all_keys:
            return EMPTY
        bits_of_any_query = np.bitwise_or.reduce(query_bits)
        bits_of_any_key = np.bitwise_or.reduce(key_bits)
        may_share = bits_of_any_query & bits_of_any_key
        return PARTIAL if may_share else FULL

    def mask_mod(self, device: torch.device) -> MaskMod:
        """See ``Rule``."""
        by_query, by_key = self._on(device)
        return lambda b, h, q, k: (by_query[q] & by_key[k]) == 0


class PlacesInBand(EqualIds):
    """The rule that ``key - place`` lies in a band, where queries stand at places of
    their own.

    Args:
        places: (n,) int64, of the queries, in numbers of keys.
        n_keys: how many keys there are.
    """

    def __init__(self, places: NDArray[np.int64], n_keys: int, band: Band) -> None:
        super().__init__(places, np.arange(n_keys))
        self._band = band

    def verdict(self, block: Ranges) -> Verdict:
        """FULL or EMPTY where the band is at every place between the first and the
        last."""
        places, keys = self._ids_of(block)
        ranges = Ranges(_spanned(places), _spanned(keys))
        return self._band.verdict(ranges)

    def mask_mod(self, device: torch.device) -> MaskMod:
        """See ``Rule``."""
        places, keys = self._on(device)
        in_band = mask_mod_of_band(self._band)
        return lambda b, h, q, k: in_band(
            b,
            h,
            places[q],
            keys[k],
        )


def mask_mod_of_band(band: Band) -> MaskMod:
    """A band, with a bound at least, as FlexAttention's ``mask_mod``."""
    low = band.low
    high = band.high
    if low is None:
        return lambda b, h, q, k: k - q <= high
    if high is None:
        return lambda b, h, q, k: k - q >= low
    return lambda b, h, q, k: (k - q >= low) & (k - q <= high)


def all_of(mask_mods: list[MaskMod]) -> MaskMod:
    """The ``mask_mod`` of pairs that all of some keep; none keeps every pair."""
    if not mask_mods:
        return lambda b, h, q, k: q >= 0
    return reduce(_and, mask_mods)


def any_of(mask_mods: list[MaskMod]) -> MaskMod:
    """The ``mask_mod`` of pairs that at least one of some keeps."""
    return reduce(_or, mask_mods)


def _and(first: MaskMod, second: MaskMod) -> MaskMod:
    return lambda b, h, q, k: first(b, h, q, k) & second(b, h, q, k)


def _or(first: MaskMod, second: MaskMod) -> MaskMod:
    return lambda b, h, q, k: first(b, h, q, k) | second(b, h, q, k)
