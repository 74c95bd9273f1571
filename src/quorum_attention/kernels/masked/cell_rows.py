"""Rows of tensors (b, h, n, width) by cells: gathered for a packed call, and written back."""

from __future__ import annotations

import torch

from quorum_attention.kernels.masked.cells import Bucket, CellSide
from quorum_attention.kernels.operator_call import Call
from quorum_attention.kernels.torch_private import no_torch_modes


class CellPlaces:
    """Where the tokens of cells are, of one side.

    Attributes:
        entries: of each cell, counted from the call's first one, (cells,).
        tokens: positions, (cells, longest).
        run: the entries, if the cells are whole entries one after the other; otherwise None.
        is_all: whether the cells are whole entries.
        is_copy: which tokens are copies of a cell's last one, (cells, longest).
    """

    def __init__(self, cells: Bucket, side: CellSide, call: Call) -> None:
        device = call.query.device
        numbers = cells.entries - call.first_entry
        first = int(numbers[0])
        last = int(numbers[-1])
        self.is_all = side.is_all
        self.run: slice | None = None
        if self.is_all and last - first + 1 == len(numbers):
            self.run = slice(first, last + 1)
        with no_torch_modes():
            self.entries = torch.from_numpy(numbers).to(device)
            self.tokens = torch.from_numpy(side.tokens).to(device)
            counts = torch.from_numpy(side.counts).to(device)
        self._is_filled = side.is_filled
        self.is_copy = torch.arange(side.longest, device=device) >= counts[:, None]

    def rows(self, heads: int, n_tokens: int) -> torch.Tensor:
        """The numbers (cells, heads, longest) of rows of (entries, heads, n_tokens)."""
        head_numbers = torch.arange(heads, device=self.entries.device)
        lanes = self.entries[:, None] * heads + head_numbers  # (cells, heads)
        return lanes[:, :, None] * n_tokens + self.tokens[:, None]

    def target_rows(self, heads: int, n_tokens: int, spare_row: int) -> torch.Tensor:
        """The numbers of rows as of ``rows``; of copies that of the row that is left out."""
        rows = self.rows(heads, n_tokens)
        if self._is_filled:
            rows.masked_fill_(self.is_copy[:, None], spare_row)
        return rows


class RowReader:
    """Reads rows of a tensor (b, h, n, width)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._flat: torch.Tensor | None = None

    def at(self, places: CellPlaces) -> torch.Tensor:
        """The rows of cells, (cells, h, longest, width)."""
        if places.run is not None:
            return self._tensor[places.run]
        if places.is_all:
            return self._tensor.index_select(0, places.entries)
        _, heads, n_tokens, width = self._tensor.shape
        if self._flat is None:
            self._flat = self._tensor.reshape(-1, width)
        rows = places.rows(heads, n_tokens)
        gathered = self._flat.index_select(0, rows.view(-1))
        return gathered.view(*rows.shape, width)


class CellResults:
    """Results (b, h, n, width) that are written by cells.

    Args:
        like: has the results' first three dimensions and device.
        fill: what rows of no cell hold.
    """

    def __init__(self, like: torch.Tensor, width: int, fill: float = 0.0) -> None:
        self._like = like
        self._width = width
        self._fill = fill
        self._flat: torch.Tensor | None = None

    def write(self, places: CellPlaces, part: torch.Tensor) -> None:
        """Write the rows of cells, (cells, h, longest, width)."""
        flat = self._all_rows(part.dtype)
        if places.run is not None:
            self.tensor(part.dtype)[places.run] = part
            return
        if places.is_all:
            self.tensor(part.dtype).index_copy_(0, places.entries, part)
            return
        _, heads, n_tokens = self._like.shape[:3]
        rows = places.target_rows(heads, n_tokens, spare_row=len(flat) - 1)
        flat.index_copy_(0, rows.view(-1), part.reshape(-1, self._width))

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """The results; of ``dtype`` if there was no cell."""
        rows = self._all_rows(dtype)[:-1]
        return rows.view(*self._like.shape[:3], self._width)

    def _all_rows(self, dtype: torch.dtype) -> torch.Tensor:
        """All rows, and one that is left out; of ``dtype`` if they are new."""
        if self._flat is None:
            n_rows = self._like.shape[:3].numel() + 1
            device = self._like.device
            self._flat = torch.full((n_rows, self._width), self._fill, dtype=dtype, device=device)
        return self._flat
