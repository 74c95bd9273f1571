"""Rows of tensors (b, h, n, width) by the parts of a call: read for a kernel call, and
written back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quorum_attention.kernels.masked.cells import Bucket, CellSide
from quorum_attention.kernels.operator_call import Call
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

    def rows(self, heads: int, n_tokens: int) -> torch.Tensor:
        """The numbers (cells, heads, longest) of rows of (entries, heads, n_tokens)."""
        head_numbers = torch.arange(heads, device=self.entries.device)
        first_lanes = self.entries * heads
        lanes = first_lanes.unsqueeze(1) + head_numbers  # (cells, heads)
        first_rows = lanes.unsqueeze(2) * n_tokens  # (cells, heads, 1)
        tokens = self.tokens.unsqueeze(1)  # (cells, 1, longest)
        return first_rows + tokens


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
        rows = places.rows(heads, n_tokens)
        gathered = self._flat.index_select(0, rows.view(-1))
        return gathered.view(*rows.shape, width)


class Results:
    """Results (b, h, n, width) that are written part by part.

    Args:
        like: has the results' first three dimensions and device.
        fill: what rows of no part hold.
    """

    def __init__(self, like: torch.Tensor, width: int, fill: float = 0.0) -> None:
        self._like = like
        self._width = width
        self._fill = fill
        self._tensor: torch.Tensor | None = None
        # All rows, and one for those that are left out.
        self._flat: torch.Tensor | None = None

    def write(self, places: Places, part: torch.Tensor) -> None:
        """Write the rows of a part, (cells, h, longest, width)."""
        if places.run == slice(0, len(self._like)):
            self._tensor = part
            return
        results = self.tensor(part.dtype)
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
        _, heads, n_tokens = self._like.shape[:3]
        rows = places.rows(heads, n_tokens)
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
            self._tensor = self._flat[:-1].view(*shape, self._width)
        return self._tensor
