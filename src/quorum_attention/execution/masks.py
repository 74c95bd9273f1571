"""The attention mask of one rectangle, gathered from the call's mask and never expanded."""

from __future__ import annotations

import torch

from quorum_attention.decomposition import Rectangle, Task
from quorum_attention.execution.workload import Group
from quorum_attention.kernels.protocol import Bias, MaskShape


def mask_shape(mask: torch.Tensor, batch_dims: int) -> MaskShape:
    """What of (*batch, heads, rows, columns) a broadcastable ``mask`` spans."""
    sizes = (1,) * (batch_dims + 3 - mask.dim()) + tuple(mask.shape)
    return MaskShape(
        boolean=mask.dtype == torch.bool,
        batch=any(n > 1 for n in sizes[:batch_dims]),
        heads=sizes[batch_dims] > 1,
        rows=sizes[batch_dims + 1] > 1,
        columns=sizes[batch_dims + 2] > 1,
    )


class MaskView:
    """A call's mask, boolean or additive, cut to one head group.

    Args:
        mask: broadcastable to (*batch, heads, n_queries, n_keys), on any device.
        batch_dims: number of batch dimensions of the call.
    """

    def __init__(self, mask: torch.Tensor, batch_dims: int) -> None:
        missing = batch_dims + 3 - mask.dim()
        self.mask = mask.reshape((1,) * missing + tuple(mask.shape)) if missing else mask

    def bias(self, group: Group, task: Task, dtype: torch.dtype, device: torch.device) -> Bias:
        """The function a kernel asks for the additive mask of a rectangle of ``task``."""
        blocks = self._blocks(group)

        def of(rectangle: Rectangle) -> torch.Tensor:
            rows = task.segments(rectangle.query_start, rectangle.query_stop)
            columns = task.segments(rectangle.key_start, rectangle.key_stop)
            pieces = [_gather(_gather(block, 1, rows), 2, columns) for block in blocks]
            part = pieces[0].unsqueeze(0) if len(pieces) == 1 else torch.stack(pieces)
            part = part.to(device)
            if part.dtype != torch.bool:
                return part.to(dtype)
            bias = torch.zeros(part.shape, dtype=dtype, device=device)
            return bias.masked_fill_(part.logical_not(), float("-inf"))

        return of

    def _blocks(self, group: Group) -> list[torch.Tensor]:
        """(heads|1, rows|1, columns|1) views: one per batch entry, or one for all of them."""
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


def _gather(block: torch.Tensor, dim: int, segments: list[tuple[int, int, int]]) -> torch.Tensor:
    if block.shape[dim] == 1:
        return block
    parts = [block.narrow(dim, start, stop - start) for start, stop, _ in segments]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def no_bias(rectangle: Rectangle) -> None:
    """The bias of a call without a mask."""
    return
