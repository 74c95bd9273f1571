"""Tensors of some rows of some heads, cut, put together and added up by positions in
the call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from quorum_attention.decomposition.intervals import Interval, below, counted, union
from quorum_attention.distributed.assignment import HeadSlice, Operand
from quorum_attention.kernels.merge import add_, merge_
from quorum_attention.kernels.tensors import NamedTensors


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """Tensors of some rows, and of none between them, in ascending order.

    Attributes:
        head_slice: heads, numbered in the whole call.
        rows: positions in the whole call, ascending and disjoint.
        tensors: by name, each (batch, heads, rows, ...).
    """

    head_slice: HeadSlice
    rows: tuple[Interval, ...]
    tensors: NamedTensors

    @classmethod
    def empty_like(
        cls, head_slice: HeadSlice, rows: tuple[Interval, ...], tensors: NamedTensors
    ) -> GatheredRows:
        """Return uninitialised rows; batch, dtypes and sizes of a row are those of
        ``tensors``."""
        n_heads = head_slice.heads.length
        n_rows = counted(rows)
        allocated: NamedTensors = {}
        for name, tensor in tensors.items():
            batch, _, _, *row_sizes = tensor.shape
            allocated[name] = tensor.new_empty((batch, n_heads, n_rows, *row_sizes))
        return cls(head_slice, rows, allocated)

    @property
    def heads(self) -> Interval:
        """The heads, numbered in the whole call."""
        return self.head_slice.heads

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return next(iter(self.tensors.values())).device

    def at(self, heads: Interval, runs: Sequence[Interval]) -> NamedTensors:
        """Return the tensors of some rows of some heads, ``runs`` one after the other.

        The tensors are views where nothing lies between the runs here.
        """
        places = _places(self.rows, tuple(runs))
        first_head = heads.start - self.heads.start
        parts: NamedTensors = {}
        for name, tensor in self.tensors.items():
            of_heads = tensor
            if heads != self.heads:
                of_heads = tensor.narrow(1, first_head, heads.length)
            views = [of_heads.narrow(2, place.start, place.length) for place in places]
            parts[name] = joined_rows(views)
        return parts

    def write(self, heads: Interval, rows: Interval, parts: NamedTensors) -> None:
        """Copy ``parts`` to some rows of some heads."""
        for name, target in self.at(heads, [rows]).items():
            target.copy_(parts[name])

    def add(self, part: GatheredRows) -> None:
        """Add some of the rows; an output and its log-sum-exp are merged."""
        for run in part.rows:
            targets = self.at(part.heads, [run])
            sources = part.at(part.heads, [run])
            if "lse" in sources:
                merge_(
                    targets["out"],
                    targets["lse"],
                    sources["out"],
                    sources["lse"],
                )
                continue
            for name, target in targets.items():
                add_(target, sources[name])


def joined_rows(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return rows one behind the other, without a copy if there is one part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


RowsByHeads = dict[HeadSlice, GatheredRows]
Shards = dict[Operand, GatheredRows]
"""The rows of this rank."""


def add_rows(sums: RowsByHeads, rows: tuple[Interval, ...], part: GatheredRows) -> None:
    """Add some rows to the sum of their heads, which is made where it is missing.

    Args:
        rows: all rows of the sum.
    """
    head_slice = part.head_slice
    if head_slice not in sums:
        total = GatheredRows.empty_like(head_slice, rows, part.tensors)
        _clear(total.tensors)
        sums[head_slice] = total
    sums[head_slice].add(part)


def _clear(tensors: NamedTensors) -> None:
    """Make tensors those of no pairs."""
    for name, tensor in tensors.items():
        tensor.fill_(-torch.inf if name == "lse" else 0.0)


@lru_cache(maxsize=4096)
def _places(rows: tuple[Interval, ...], runs: tuple[Interval, ...]) -> list[Interval]:
    """Return where ``runs`` lie among ``rows``, which are stored without gaps."""
    places: list[Interval] = []
    for run in runs:
        start = counted(below(rows, run.start))
        places.append(Interval(start, start + run.length))
    return union(places)
