"""Batch entries that share keys: their queries become rows of one attention.

So keys that several questions, beams or query heads share are read once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from quorum_attention.long_prompts.key_mask import KeyMask
from quorum_attention.long_prompts.segments import Segment


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Batch entries that read the same rows of a segment.

    Attributes:
        key, value: (rows, h_kv, n, d) and (rows, h_kv, n, d_v), views of a segment's.
        entries: the batch entries, ``len(entries) / rows`` neighbours for each row;
            None: all, one for each row.
    """

    key: torch.Tensor
    value: torch.Tensor
    entries: tuple[int, ...] | None

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the entries of a tensor (b, ...)."""
        if self._has_all(tensor):
            return tensor
        return tensor[self._indices(tensor.device)]

    def take_mask(self, mask: KeyMask) -> KeyMask:
        """Return the mask of the entries."""
        if mask.key_padding is None:
            return mask
        return replace(mask, key_padding=self.take(mask.key_padding))

    def put(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Write the entries of ``target`` (b, ...)."""
        if self._has_all(target):
            target.copy_(source)
        else:
            target[self._indices(target.device)] = source

    def _has_all(self, tensor: torch.Tensor) -> bool:
        """Whether the entries are all of a tensor's, in order."""
        if self.entries is None:
            return True
        n_rows = tensor.shape[0]
        return self.entries == tuple(range(n_rows))

    def _indices(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.entries, dtype=torch.int64, device=device)


def row_groups(segment: Segment, *, is_shared: bool = True) -> Iterator[RowGroup]:
    """Yield groups that together have each batch entry once.

    Args:
        is_shared: False: each batch entry is a group of its own.
    """
    if not is_shared:
        rows = range(segment.batch) if segment.entries is None else segment.entries
        for entry, row in enumerate(rows):
            yield _group_of_row(segment, row, (entry,))
        return
    if segment.entries is None:
        yield RowGroup(segment.key, segment.value, None)
        return
    entries_of_row: dict[int, list[int]] = defaultdict(list)
    for entry, row in enumerate(segment.entries):
        entries_of_row[row].append(entry)
    for row, entries in entries_of_row.items():
        yield _group_of_row(segment, row, entries)


def _group_of_row(segment: Segment, row: int, entries: Sequence[int]) -> RowGroup:
    key = segment.key[row : row + 1]
    value = segment.value[row : row + 1]
    return RowGroup(key, value, tuple(entries))


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How queries (entries, h_q, n_q, d) become rows (rows, h_kv, share * group * n_q,
    d).

    Attributes:
        rows: rows of keys.
        share: entries for each of them.
        heads: key heads.
        group: query heads for each of them.
        n_queries: queries of each head.
    """

    rows: int
    share: int
    heads: int
    group: int
    n_queries: int

    @classmethod
    def from_tensors(cls, query: torch.Tensor, key: torch.Tensor) -> RowLayout:
        """Return the layout of queries (entries, h_q, n_q, d) and keys (rows, h_kv, n,
        d)."""
        entries, query_heads, n_queries, _ = query.shape
        rows, heads = key.shape[:2]
        return cls(
            rows, entries // max(1, rows), heads, query_heads // heads, n_queries
        )

    @property
    def rows_per_head(self) -> int:
        """Rows of queries for each row and head of keys."""
        return self.share * self.group * self.n_queries

    def to_rows(self, query: torch.Tensor) -> torch.Tensor:
        """Return the queries of each key head as (rows, h_kv, rows_per_head, d)."""
        width = query.shape[3]
        grouped_shape = (self.rows, self.share, self.heads, self.group, -1, width)
        rows_shape = (self.rows, self.heads, self.rows_per_head, width)
        grouped = query.reshape(grouped_shape)
        return grouped.transpose(1, 2).reshape(rows_shape)

    def from_rows(self, out: torch.Tensor) -> torch.Tensor:
        """Undo ``to_rows`` for a tensor (rows, h_kv, rows_per_head, *)."""
        rest = out.shape[3:]
        n_entries = self.rows * self.share
        n_query_heads = self.heads * self.group
        rows_shape = (self.rows, self.heads, self.share, self.group, self.n_queries)
        entries_shape = (n_entries, n_query_heads, self.n_queries)
        grouped = out.reshape(*rows_shape, *rest)
        return grouped.transpose(1, 2).reshape(*entries_shape, *rest)

    def mask_of_rows(self, is_kept: torch.Tensor) -> torch.Tensor:
        """Return a mask (entries or 1, n_q, n) for rows: (rows or 1, 1, rows_per_head,
        n)."""
        if is_kept.shape[0] == 1:
            per_entry = is_kept[:, None, None, None]
        else:
            per_entry = is_kept.reshape(self.rows, 1, self.share, 1, *is_kept.shape[1:])
        n_keys = is_kept.shape[2]
        n_rows = per_entry.shape[0]
        shape = (n_rows, 1, self.share, self.group, self.n_queries, n_keys)
        expanded = per_entry.expand(shape)
        return expanded.reshape(n_rows, 1, self.rows_per_head, n_keys)
