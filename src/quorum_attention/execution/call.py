"""One attention call with its tensors, as the executor sees it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quorum_attention.decomposition import Rectangle, Rows, Task
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.workload import Group, Workload
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.protocol import Bias, InnerKernel, MaskShape


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

    def whole(
        self, dtype: torch.dtype, device: torch.device, batch_shape: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """The whole mask, additive: (b|1, heads|1, rows|1, columns|1), not expanded. Calls with
        several batch dimensions name them, because a mask may have to be copied there."""
        rest = self.mask.shape[-3:]
        mask = self.mask.expand(*batch_shape, *rest) if len(batch_shape) > 1 else self.mask
        mask = mask.reshape(-1, *rest).to(device)
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


Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """Checked inputs and what to run them with.

    Attributes:
        work: the call's sizes.
        query: (*batch, heads, n_queries, head_dim), on ``device`` or on the host, as key and value.
        key: (*batch, kv_heads, n_keys, head_dim).
        value: (*batch, kv_heads, n_keys, value_dim).
        mask: the call's mask; None if it has none.
        scale: the factor of the scores.
        device: the device that computes.
        kernel: the inner kernel.
        sinks: (heads,), on ``device``, of the state's dtype; None if the call has none.
        dropout: which probabilities are dropped; None: none.
    """

    work: Workload
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: MaskView | None
    scale: float
    device: torch.device
    kernel: InnerKernel
    sinks: torch.Tensor | None = None
    dropout: Dropout | None = None

    @property
    def in_place(self) -> bool:
        """Whether operators can read the inputs where they are, without a copy."""
        return self.query.device == self.device and lie_well(self.query, self.key, self.value)


def rows_are_dense(*tensors: torch.Tensor) -> bool:
    """Whether operators can read ``tensors``, all of one device, without a copy.

    The last dimension has to be contiguous. On a GPU every row also has to start at a multiple of
    a word (16 bytes): operators refuse other rows, or fail with misaligned addresses. Rows whose
    length is no multiple of a word may start anywhere, because they are padded, which copies them.
    On a CPU rows of 16 bits may not begin within the row before: torch's matrix products refuse
    them where the processor multiplies bf16.
    """
    word = backend_of(tensors[0].device).word_bytes
    for tensor in tensors:
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            return False
        if word > 1:
            if not _at_whole_words(tensor, word):
                return False
        elif tensor.element_size() == 2 and rows_overlap(tensor):
            return False
    return True


def lie_well(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether operators can read the inputs without a copy: their rows are dense, and results can
    have the query's strides."""
    if backend_of(query.device).word_bytes == 1:
        laid_out = results_are_dense(query)
    else:
        laid_out = all(n <= 1 or s > 0 for n, s in zip(query.shape, query.stride(), strict=True))
    return laid_out and rows_are_dense(query, key, value)


def results_are_dense(query: torch.Tensor) -> bool:
    """Whether torch's operator on a CPU gives its output, which it lays out as the query, dense
    rows; it fills them as if they were dense.

    They are not where another dimension than the last has steps of one number too, as ``unfold``
    makes them; of a dimension of size 1, beside one that is expanded.
    """
    steps = query.stride()
    if steps.count(1) < 2 or query.shape[-1] < 2:
        return True
    expanded = 0 in steps
    each = zip(query.shape[:-1], steps[:-1], strict=True)
    return not any(s == 1 and (n > 1 or expanded) for n, s in each)


def rows_overlap(tensor: torch.Tensor) -> bool:
    """Whether rows begin within the row before; not those that are all the same."""
    return tensor.shape[-2] > 1 and 0 < tensor.stride(-2) < tensor.shape[-1]


def _at_whole_words(tensor: torch.Tensor, word: int) -> bool:
    size = tensor.element_size()
    if tensor.shape[-1] * size % word:
        return True
    steps = (s for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1)
    return tensor.data_ptr() % word == 0 and not any(s * size % word for s in steps)


def is_operand(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether operators can read an upstream gradient or an output without a copy."""
    return tensor.dtype == dtype and 0 not in tensor.stride() and rows_are_dense(tensor)


def operand(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A part of an upstream gradient or of an output as operators can read it: of ``dtype``, in
    dense rows, not expanded (the gradient of a sum is). Copies it only if it is not so already."""
    if is_operand(tensor, dtype):
        return tensor
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


def flat_batch(tensor: torch.Tensor) -> torch.Tensor | None:
    """``tensor`` (*batch, heads, n, d) as a view (b, heads, n, d); None if it has none."""
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() == 3:
        return tensor.unsqueeze(0)
    try:
        return tensor.view(-1, *tensor.shape[-3:])
    except RuntimeError:
        return None
