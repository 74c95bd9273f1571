"""Which keys of a cache each of the last tokens sees, by positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch


class KeyRange(NamedTuple):
    """Consecutive keys.

    Attributes:
        start, stop: positions, [start, stop).
        is_mixed: some queries may see keys that others do not. Otherwise all queries
            see all keys.
    """

    start: int
    stop: int
    is_mixed: bool


@dataclass(frozen=True)
class KeyMask:
    """The pairs that attention of the last ``n_queries`` of ``n_keys`` tokens keeps.

    Attributes:
        n_queries, n_keys: query i stands at position ``n_keys - n_queries + i``.
        is_causal: keep keys at or before the query alone.
        window: keep keys less than this many tokens before the query; None: no limit.
        key_padding: (b, n_keys) bool: keep keys where it is True; None: no padding.
    """

    n_queries: int
    n_keys: int
    is_causal: bool = True
    window: int | None = None
    key_padding: torch.Tensor | None = None

    @property
    def first_position(self) -> int:
        """The position of the first query."""
        return self.n_keys - self.n_queries

    @property
    def first_visible(self) -> int:
        """The first key that the window lets any query see."""
        if self.window is None:
            return 0
        return max(0, self.first_position - self.window + 1)

    @cached_property
    def _mixed_spans(self) -> list[tuple[int, int]]:
        """Where queries, or batch entries, may differ in the keys that they see."""
        spans = []
        if self.is_causal:
            spans.append((self.first_position + 1, self.n_keys))
        if self.window is not None:
            spans.append((self.first_visible, self.n_keys - self.window))
        if self.key_padding is not None:
            is_kept = self.key_padding.all(dim=0)
            hidden = (~is_kept).nonzero().flatten().tolist()
            if hidden:
                spans.append((hidden[0], hidden[-1] + 1))
        return [(start, stop) for start, stop in spans if start < stop]

    def ranges(self, start: int, stop: int) -> Iterator[KeyRange]:
        """Cut the keys from ``start`` to ``stop`` (exclusive) into ranges that are
        mixed or not.

        Keys that no query sees because of the window are left out. The host waits for a
        padding that is on a device.
        """
        start = max(start, self.first_visible)
        cuts = {start, stop}
        for span in self._mixed_spans:
            cuts.update(span)
        edges = sorted(cut for cut in cuts if start <= cut <= stop)
        for low, high in pairwise(edges):
            yield KeyRange(low, high, self._is_mixed(low, high))

    def _is_mixed(self, start: int, stop: int) -> bool:
        for mixed_start, mixed_stop in self._mixed_spans:
            if mixed_start < stop and start < mixed_stop:
                return True
        return False

    def kept_pairs(self, start: int, stop: int, device: torch.device) -> torch.Tensor:
        """Return (b or 1, n_queries, stop - start) bool: True where a pair is kept."""
        shape = (self.n_queries, stop - start)
        keys = torch.arange(start, stop, device=device)
        queries = torch.arange(self.first_position, self.n_keys, device=device)
        queries = queries.unsqueeze(1)
        is_kept = torch.ones(shape, dtype=torch.bool, device=device)
        if self.is_causal:
            is_kept &= keys <= queries
        if self.window is not None:
            is_kept &= keys > queries - self.window
        if self.key_padding is None:
            return is_kept[None]
        key_padding = self.key_padding[:, start:stop].to(device)
        return is_kept & key_padding.unsqueeze(1)
