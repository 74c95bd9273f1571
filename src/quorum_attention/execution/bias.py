"""What the mask of a call adds to the scores, cut for a rectangle of a task."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import torch

from quorum_attention.decomposition import Rectangle, Rows, Task
from quorum_attention.execution.head_groups import Group
from quorum_attention.kernels.call_shape import BiasShape, is_rounded


def bias_shape(mask: torch.Tensor, batch_dims: int, dtype: torch.dtype) -> BiasShape:
    """Which dimensions of (*batch, heads, rows, columns) a broadcastable ``mask``
    varies over, whether inputs of ``dtype`` would round it, and whether it gets a
    gradient."""
    *batch_sizes, n_heads, n_rows, n_columns = _all_sizes(mask, batch_dims)
    return BiasShape(
        batch=any(n > 1 for n in batch_sizes),
        heads=n_heads > 1,
        rows=n_rows > 1,
        columns=n_columns > 1,
        wide=is_rounded(mask.dtype, dtype),
        needs_grad=mask.requires_grad and torch.is_grad_enabled(),
    )


def _all_sizes(mask: torch.Tensor, batch_dims: int) -> tuple[int, ...]:
    """The sizes of a broadcastable ``mask`` in all dimensions of the scores."""
    n_missing = batch_dims + 3 - mask.dim()
    return (1,) * n_missing + tuple(mask.shape)


def no_bias(rectangle: Rectangle) -> None:
    """The bias of a call without a mask."""
    return


class BiasView:
    """The mask of a call, boolean or additive, as a bias of its rectangles.

    Args:
        mask: broadcastable to (*batch, heads, n_queries, n_keys), on any device.
        batch_dims: number of batch dimensions of the call.
    """

    def __init__(self, mask: torch.Tensor, batch_dims: int) -> None:
        self.mask = mask.reshape(_all_sizes(mask, batch_dims))

    def of_task(
        self, group: Group, task: Task, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Rectangle], torch.Tensor]:
        """The function that gives a kernel the bias of a rectangle of ``task``: (b|1,
        heads|1, queries|1, keys|1) of ``dtype`` on ``device``."""
        blocks = self._blocks(group)

        def of_rectangle(rectangle: Rectangle) -> torch.Tensor:
            rows = task.segments(rectangle.query_start, rectangle.query_stop)
            columns = task.segments(rectangle.key_start, rectangle.key_stop)
            rows = _positions(blocks[0], -2, rows)
            columns = _positions(blocks[0], -1, columns)
            n_parts = len(blocks) * len(rows) * len(columns)
            if n_parts == 1 and self.mask.dtype == dtype:
                bias = _cut(blocks[0], rows[0], columns[0])
                bias = bias.flatten(0, -4)  # several batch dimensions may be copied
            else:
                bias = _gather(blocks, rows, columns, dtype)
            return bias.to(device)

        return of_rectangle

    def of_call(
        self,
        dtype: torch.dtype,
        device: torch.device,
        batch_shape: tuple[int, ...] = (),
    ) -> torch.Tensor:
        """The bias of the whole call: (b|1, heads|1, rows|1, columns|1), not expanded.

        Args:
            batch_shape: of a call with several batch dimensions, where a mask may be
                copied.
        """
        sizes = self.mask.shape[-3:]
        mask = self.mask
        if len(batch_shape) > 1:
            mask = mask.expand(*batch_shape, *sizes)
        if mask.dim() != 4:
            mask = mask.reshape(-1, *sizes)
        mask = mask.to(device)
        # ``to`` takes the host microseconds even where nothing is converted.
        if mask.dtype == dtype:
            return mask
        if mask.dtype != torch.bool:
            return mask.to(dtype)
        zero = torch.zeros((), dtype=dtype, device=device)
        return torch.where(mask, zero, -torch.inf)

    def _blocks(self, group: Group) -> list[torch.Tensor]:
        """Views (*box, heads|1, rows|1, columns|1): one for each box of batch entries,
        or one of a single entry, (1, heads|1, ...), for all of them."""
        mask = self.mask
        if mask.shape[-3] > 1:
            mask = mask[..., group.query_heads, :, :]
        *batch_sizes, n_heads, n_rows, n_columns = mask.shape
        if all(n == 1 for n in batch_sizes):
            return [mask.reshape(1, n_heads, n_rows, n_columns)]
        of_entries = mask.expand(*group.batch_shape, -1, -1, -1)
        return [of_entries[box] for box in group.boxes]


def _positions(block: torch.Tensor, dim: int, segments: list[Rows]) -> list[Rows]:
    """``segments``, or the only position of a dimension that the mask broadcasts
    over."""
    if block.shape[dim] > 1:
        return segments
    return [Rows(0, 1, segments[0].local)]


def _cut(block: torch.Tensor, rows: Rows, columns: Rows) -> torch.Tensor:
    """The part of (*entries, heads, rows, columns) at some rows and columns, as a
    view."""
    return block[
        ...,
        rows.start : rows.stop,
        columns.start : columns.stop,
    ]


def _gather(
    blocks: list[torch.Tensor],
    rows: list[Rows],
    columns: list[Rows],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The bias (b, heads|1, rows, columns) of one rectangle of all blocks; allocates
    only the result."""
    first = blocks[0]
    n_entries = [math.prod(block.shape[:-3]) for block in blocks]
    n_rows = sum(piece.length for piece in rows)
    n_columns = sum(piece.length for piece in columns)
    sizes = (sum(n_entries), first.shape[-3], n_rows, n_columns)
    bias = torch.empty(sizes, dtype=dtype, device=first.device)
    zero = bias.new_zeros(())
    minus_infinity = bias.new_full((), -torch.inf)
    entry_parts = bias.split(n_entries)
    for part, block in zip(entry_parts, blocks, strict=True):
        box_part = part.view(*block.shape[:-3], *sizes[1:])
        for down, across in product(rows, columns):
            source = _cut(block, down, across)
            first_row = down.local - rows[0].local
            first_column = across.local - columns[0].local
            target = box_part.narrow(-2, first_row, down.length)
            target = target.narrow(-1, first_column, across.length)
            if source.dtype == torch.bool:
                torch.where(source, zero, minus_infinity, out=target)
            else:
                target.copy_(source)
    return bias
