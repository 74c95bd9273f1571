"""A call in parts that are computed and kept one after the other: key/value heads with their query
heads, which no other part has anything to do with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from quorum_attention.decomposition.intervals import Interval


class Part(NamedTuple):
    """Some key/value heads of some batch entries, with their query heads.

    Attributes:
        number: of the part, from 0; the journal names it so.
        entries: batch entries, numbered through all batch dimensions.
        key_heads, query_heads: of each of them; all of them where there are several entries.
    """

    number: int
    entries: Interval
    key_heads: Interval
    query_heads: Interval

    @property
    def heads(self) -> int:
        """Query heads of all its entries."""
        return self.entries.length * self.query_heads.length


def parts_of(batch: int, kv_heads: int, share: int, heads: int) -> Iterator[Part]:
    """All parts of a call.

    Args:
        share: query heads of a key/value head.
        heads: key/value heads of a part, of one batch entry; from ``kv_heads`` on, a multiple of
            it: whole entries.
    """
    if not batch or not kv_heads:
        return
    number = 0
    entries, run = max(1, heads // kv_heads), min(heads, kv_heads)
    for entry in range(0, batch, entries):
        for head in range(0, kv_heads, run):
            stop = min(head + run, kv_heads)
            yield Part(
                number,
                Interval(entry, min(entry + entries, batch)),
                Interval(head, stop),
                Interval(head * share, stop * share),
            )
            number += 1


__all__ = ["Part", "parts_of"]
