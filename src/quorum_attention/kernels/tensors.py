"""Rows, blocks and positions of the tensors that kernels are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch

from quorum_attention.decomposition import Task
from quorum_attention.decomposition.rectangles import Batch
from quorum_attention.kernels.limits import runs

Pick = Callable[[torch.Tensor], torch.Tensor]
"""Selects a part of a tensor (b, h, n, ...), as a view."""

NamedTensors = dict[str, torch.Tensor]
"""Tensors by the names of what they are: "query", "grad_key" ..."""


def query_rows(
    tensor: torch.Tensor, batch: Batch, heads: slice = slice(None)
) -> torch.Tensor:
    """Return the batch's query rows of some heads of (b, h, n, ...): (b, h, rows, ...),
    or (count, h, rows, ...)."""
    first = batch.first
    rows = slice(first.query_start, first.query_stop)
    if batch.count == 1:
        return tensor[:, heads, rows]
    return _runs_as_entries(
        tensor[:, heads],
        rows,
        batch.query_step,
        batch.count,
    )


def key_rows(tensor: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the batch's key rows of (b, h, n, ...): (b, h, rows, ...), or
    (count, h, rows, ...)."""
    first = batch.first
    rows = slice(first.key_start, first.key_stop)
    if batch.count == 1:
        return tensor[:, :, rows]
    return _runs_as_entries(tensor, rows, batch.key_step, batch.count)


def _runs_as_entries(
    tensor: torch.Tensor, rows: slice, step: int, count: int
) -> torch.Tensor:
    """Return ``count`` runs of rows, each ``step`` after the one before it, as batch
    entries."""
    assert tensor.shape[0] == 1, "only a single batch entry leaves room for another"
    row_stride = tensor.stride(2)
    return tensor.as_strided(
        (count, tensor.shape[1], rows.stop - rows.start, *tensor.shape[3:]),
        (step * row_stride, *tensor.stride()[1:]),
        tensor.storage_offset() + rows.start * row_stride,
    )


def broadcast_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, 0 in dimensions of size 1."""
    return tuple(
        0 if size == 1 else stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


Block = tuple[slice, slice, slice]

BLOCK_BYTES = 2 * 1024 * 1024
"""Bytes of one block in fp32 (or fp64); an elementwise step holds a few blocks at a
time."""


def row_blocks(batch: int, heads: int, rows: int, row_bytes: int) -> Iterator[Block]:
    """Yield index triples that cover (batch, heads, rows) once.

    Each block holds at most ``BLOCK_BYTES`` at ``row_bytes`` bytes a row, or one row if
    a single row is larger. The batch is cut first, then the heads, then the rows, so
    that a block consists of few, long contiguous runs.
    """
    if batch == 0 or heads == 0 or rows == 0:
        return
    fitting_rows = max(1, BLOCK_BYTES // max(1, row_bytes))
    n_rows = min(rows, fitting_rows)
    n_heads = 1
    n_entries = 1
    if n_rows == rows:
        n_heads = min(heads, fitting_rows // n_rows)
        if n_heads == heads:
            n_entries = min(batch, fitting_rows // (n_rows * n_heads))
    yield from product(
        runs(slice(0, batch), n_entries),
        runs(slice(0, heads), n_heads),
        runs(slice(0, rows), n_rows),
    )


def positions(
    task: Task,
    start: int,
    stop: int,
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """Return the global positions (stop - start,) of the local positions ``start`` to
    ``stop``."""
    segments = task.segments(start, stop)
    if len(segments) == 1:
        first, last, _ = segments[0]
        return torch.arange(first, last, dtype=dtype, device=device)
    numbers = torch.empty(stop - start, dtype=dtype, device=device)
    for first, last, local in segments:
        index = local - start
        torch.arange(
            first, last, device=device, out=numbers[index : index + last - first]
        )
    return numbers
