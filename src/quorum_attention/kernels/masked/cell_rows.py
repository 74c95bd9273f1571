"""Rows of tensors (b, h, n, width) by the parts of a call: read for a kernel call, and
written back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quorum_attention.kernels.masked.cells import Bucket, CellSide
from quorum_attention.kernels.operator_call import Call
from quorum_attention.kernels.result_layout import result_strides
from quorum_attention.kernels.torch_private import no_torch_modes


@dataclass(frozen=True)
class EntryRun:
    """The rows of whole batch entries, one after the other.

    Attributes:
        run: the entries, counted from the call's first one.
    """

    run: slice


class CellPlaces:
    """Where the tokens of cells are, of one side.

    Attributes:
        entries: of each cell, counted from the call's first one, (cells,).
        tokens: positions, (cells, longest).
        run: the entries, if the cells are whole entries one after the other; otherwise
            None.
        is_all: whether the cells are whole entries.
        is_copy: which tokens are copies of a cell's last one, (cells, longest).
    """

    def __init__(self, cells: Bucket, side: CellSide, call: Call) -> None:
        device = call.query.device
        entries = cells.entries - call.first_entry
        first = int(entries[0])
        stop = int(entries[-1]) + 1
        self.is_all = side.is_all
        self.run: slice | None = None
        if self.is_all and stop - first == len(entries):
            self.run = slice(first, stop)
        with no_torch_modes():
            self.entries = torch.from_numpy(entries).to(device)
            self.tokens = torch.from_numpy(side.tokens).to(device)
            counts = torch.from_numpy(side.counts).to(device)
        self.is_filled = side.is_filled
        columns = torch.arange(side.longest, device=device)
        self.is_copy = columns >= counts.unsqueeze(1)

    def rows(self, heads: int, steps: Sequence[int]) -> torch.Tensor:
        """The numbers (cells, heads, longest) of rows in memory.

        Args:
            steps: from an entry, a head and a token to the next, in rows.
        """
        entry_step, head_step, token_step = steps
        head_numbers = torch.arange(heads, device=self.entries.device)
        first_rows = self.entries.unsqueeze(1) * entry_step
        first_rows = first_rows + head_numbers * head_step  # (cells, heads)
        tokens = self.tokens.unsqueeze(1)  # (cells, 1, longest)
        if token_step != 1:
            tokens = tokens * token_step
        return first_rows.unsqueeze(2) + tokens


Places = EntryRun | CellPlaces


class RowReader:
    """Reads rows of a tensor (b, h, n, width)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._flat: torch.Tensor | None = None

    def at(self, places: Places) -> torch.Tensor:
        """The rows of a part, (cells, h, longest, width)."""
        tensor = self._tensor
        if places.run is not None:
            is_all = places.run == slice(0, len(tensor))
            return tensor if is_all else tensor[places.run]
        assert isinstance(places, CellPlaces)
        if places.is_all:
            return tensor.index_select(0, places.entries)
        _, heads, n_tokens, width = tensor.shape
        if self._flat is None:
            self._flat = tensor.reshape(-1, width)
        rows = places.rows(heads, (heads * n_tokens, n_tokens, 1))
        gathered = self._flat.index_select(0, rows.view(-1))
        return gathered.view(*rows.shape, width)


class Results:
    """Results (b, h, n, width) that are written part by part.

    Args:
        like: has the results' first three dimensions, their order in memory and device.
        fill: what rows of no part hold.
    """

    def __init__(self, like: torch.Tensor, width: int, fill: float = 0.0) -> None:
        self._like = like
        # From an entry, a head and a token to the next, in rows.
        self._steps = result_strides(like, (*like.shape[:3], 1))[:3]
        self._width = width
        self._fill = fill
        self._tensor: torch.Tensor | None = None
        # All rows, and one for those that are left out.
        self._flat: torch.Tensor | None = None

    def write(self, places: Places, part: torch.Tensor) -> None:
        """Write the rows of a part, (cells, h, longest, width).

        The first part's dtype is the results': a kernel may return some parts unrounded
        and others not, as one that cuts a call beyond its operator's limits.
        """
        if places.run == slice(0, len(self._like)):
            self._tensor = part
            return
        results = self.tensor(part.dtype)
        part = part.to(results.dtype)
        if places.run is not None:
            results[places.run] = part
            return
        assert isinstance(places, CellPlaces)
        if places.is_all:
            results.index_copy_(0, places.entries, part)
        else:
            self._write_rows(places, part)

    def _write_rows(self, places: CellPlaces, part: torch.Tensor) -> None:
        assert self._flat is not None
        rows = places.rows(self._like.shape[1], self._steps)
        if places.is_filled:
            spare_row = len(self._flat) - 1
            rows.masked_fill_(places.is_copy[:, None], spare_row)
        self._flat.index_copy_(
            0,
            rows.view(-1),
            part.reshape(-1, self._width),
        )

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """The results; of ``dtype`` if there was no part."""
        if self._tensor is None:
            shape = self._like.shape[:3]
            size = (shape.numel() + 1, self._width)
            self._flat = torch.full(
                size, self._fill, dtype=dtype, device=self._like.device
            )
            strides = [step * self._width for step in self._steps]
            self._tensor = self._flat.as_strided((*shape, self._width), (*strides, 1))
        return self._tensor
