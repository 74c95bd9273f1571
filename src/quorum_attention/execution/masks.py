"""The mask of one rectangle, gathered from the call's mask, which is never expanded."""

from __future__ import annotations

import torch

from quorum_attention.decomposition import Rectangle, Rows, Task
from quorum_attention.execution.workload import Group
from quorum_attention.kernels.protocol import Bias, MaskShape


def mask_shape(mask: torch.Tensor, batch_dims: int) -> MaskShape:
    """Which dimensions of (*batch, heads, rows, columns) a broadcastable ``mask`` varies over."""
    sizes = (1,) * (batch_dims + 3 - mask.dim()) + tuple(mask.shape)
    return MaskShape(
        boolean=mask.dtype == torch.bool,
        batch=any(n > 1 for n in sizes[:batch_dims]),
        heads=sizes[batch_dims] > 1,
        rows=sizes[batch_dims + 1] > 1,
        columns=sizes[batch_dims + 2] > 1,
    )


class MaskView:
    """A call's mask, boolean or additive.

    Args:
        mask: broadcastable to (*batch, heads, n_queries, n_keys), on any device.
        batch_dims: number of batch dimensions of the call.
    """

    def __init__(self, mask: torch.Tensor, batch_dims: int) -> None:
        missing = batch_dims + 3 - mask.dim()
        self.mask = mask.reshape((1,) * missing + tuple(mask.shape)) if missing else mask

    def bias(self, group: Group, task: Task, dtype: torch.dtype, device: torch.device) -> Bias:
        """The function that gives a kernel the additive mask of a rectangle of ``task``: (b|1,
        heads|1, queries|1, keys|1) of ``dtype`` on ``device``."""
        blocks = self._blocks(group)

        def of(rectangle: Rectangle) -> torch.Tensor:
            rows = task.segments(rectangle.query_start, rectangle.query_stop)
            columns = task.segments(rectangle.key_start, rectangle.key_stop)
            if self.mask.dtype == dtype and len(blocks) == 1:
                view = _view(blocks[0], rows, columns)
                if view is not None:
                    return view.unsqueeze(0).to(device)
            return _gathered(blocks, rows, columns, dtype).to(device)

        return of

    def whole(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The whole mask, additive, not expanded: (b|1, heads|1, rows|1, columns|1). For calls with
        at most one batch dimension."""
        mask = self.mask if self.mask.dim() == 4 else self.mask.unsqueeze(0)
        mask = mask.to(device)
        if mask.dtype != torch.bool:
            return mask.to(dtype)
        kept = torch.zeros((), dtype=dtype, device=device)
        return torch.where(mask, kept, torch.full_like(kept, -torch.inf))

    def _blocks(self, group: Group) -> list[torch.Tensor]:
        """Views (heads|1, rows|1, columns|1), one for each batch entry or one for all of them."""
        batch_sizes = self.mask.shape[:-3]
        entries = group.entries
        if all(n == 1 for n in batch_sizes):
            entries = entries[:1]
        blocks = []
        for entry in entries:
            index = tuple(0 if n == 1 else i for i, n in zip(entry, batch_sizes, strict=True))
            block = self.mask[index]
            blocks.append(block if block.shape[0] == 1 else block[group.query_heads])
        return blocks


Segments = list[Rows]


def _pieces(block: torch.Tensor, dim: int, segments: Segments) -> Segments:
    """``segments``, or the only position of a dimension that the mask broadcasts over."""
    return segments if block.shape[dim] > 1 else [Rows(0, 1, segments[0].local)]


def _view(block: torch.Tensor, rows: Segments, columns: Segments) -> torch.Tensor | None:
    """A view of one rectangle of a block; None if its rows or columns have gaps."""
    rows, columns = _pieces(block, 1, rows), _pieces(block, 2, columns)
    if len(rows) > 1 or len(columns) > 1:
        return None
    return block[:, slice(*rows[0][:2]), slice(*columns[0][:2])]


def _gathered(
    blocks: list[torch.Tensor], rows: Segments, columns: Segments, dtype: torch.dtype
) -> torch.Tensor:
    """One rectangle of all blocks, additive; allocates only the result."""
    first = blocks[0]
    rows, columns = _pieces(first, 1, rows), _pieces(first, 2, columns)
    heights, widths = ([stop - start for start, stop, _ in part] for part in (rows, columns))
    shape = (len(blocks), first.shape[0], sum(heights), sum(widths))
    bias = torch.empty(shape, dtype=dtype, device=first.device)
    kept = torch.zeros((), dtype=dtype, device=first.device)
    masked = torch.full((), float("-inf"), dtype=dtype, device=first.device)
    for target, block in zip(bias, blocks, strict=True):
        for (top, bottom, local), height in zip(rows, heights, strict=True):
            down = local - rows[0][2]
            for (left, right, local_column), width in zip(columns, widths, strict=True):
                across = local_column - columns[0][2]
                source = block[:, top:bottom, left:right]
                piece = target[:, down : down + height, across : across + width]
                if source.dtype == torch.bool:
                    torch.where(source, kept, masked, out=piece)
                else:
                    piece.copy_(source)
    return bias


def no_bias(rectangle: Rectangle) -> None:
    """The bias of a call without a mask."""
    return
