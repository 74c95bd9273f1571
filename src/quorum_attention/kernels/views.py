"""Views of the parts of a task's tensors that a kernel call gets."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quorum_attention.decomposition.rectangles import Batch

Pick = Callable[[torch.Tensor], torch.Tensor]
"""Selects some heads, as a view, of a tensor whose dimension 1 is all query heads."""


def query_rows(tensor: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The batch's query rows of (b, h, n, ...): (b, h, rows, ...), or (count, h, rows, ...)."""
    first = batch.first
    return _rows(tensor, first.query_start, first.n_queries, batch.query_step, batch.count)


def key_rows(tensor: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The batch's key rows of (b, h, n, ...): (b, h, rows, ...), or (count, h, rows, ...)."""
    first = batch.first
    return _rows(tensor, first.key_start, first.n_keys, batch.key_step, batch.count)


def _rows(tensor: torch.Tensor, start: int, rows: int, step: int, count: int) -> torch.Tensor:
    if count == 1:
        return tensor[:, :, start : start + rows]
    # Runs of rows at regular distances become batch entries.
    assert tensor.shape[0] == 1, "only a single batch entry leaves room for another"
    row = tensor.stride(2)
    return tensor.as_strided(
        (count, tensor.shape[1], rows, *tensor.shape[3:]),
        (step * row, *tensor.stride()[1:]),
        tensor.storage_offset() + start * row,
    )


def jth_of_group(key_heads: int, j: int, tensor: torch.Tensor) -> torch.Tensor:
    """The j-th query head of every key head, a view."""
    batch, heads, *rest = tensor.shape
    return tensor.view(batch, key_heads, heads // key_heads, *rest)[:, :, j]


def runs_as_batch(parts: int, tensor: torch.Tensor) -> torch.Tensor:
    """(1, h, rows, ...) as (parts, h, rows / parts, ...), a view."""
    _, heads, rows, *rest = tensor.shape
    return tensor[0].view(heads, parts, rows // parts, *rest).transpose(0, 1)
