"""Views, layouts, padded forms, copies and blocks of the tensors that kernels are given.

Zero columns of query and key change no score; zero columns of value only add columns to the output,
which are cut off. Added queries have a grad_out of 0, so they add nothing to gradients, and their
outputs are cut off. Added keys have to be masked. What scores are made of is padded with its last
row, not with zeros: a score of 0 times infinity is NaN, and NaN times a grad_out of 0 too. Added
rows are then finite wherever the last one is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from quorum_attention.arithmetic import round_up
from quorum_attention.decomposition import Task
from quorum_attention.decomposition.rectangles import Batch
from quorum_attention.kernels.torch_private import capturing

Pick = Callable[[torch.Tensor], torch.Tensor]
"""Selects a part of a tensor (b, h, n, ...), as a view."""


def query_rows(tensor: torch.Tensor, batch: Batch, heads: slice = slice(None)) -> torch.Tensor:
    """The batch's query rows of some heads of (b, h, n, ...): (b, h, rows, ...), or
    (count, h, rows, ...)."""
    first = batch.first
    return _rows(tensor, heads, first.query_start, first.n_queries, batch.query_step, batch.count)


def key_rows(tensor: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The batch's key rows of (b, h, n, ...): (b, h, rows, ...), or (count, h, rows, ...)."""
    first = batch.first
    return _rows(tensor, slice(None), first.key_start, first.n_keys, batch.key_step, batch.count)


def _rows(
    tensor: torch.Tensor, heads: slice, start: int, rows: int, step: int, count: int
) -> torch.Tensor:
    if count == 1:
        return tensor[:, heads, start : start + rows]
    # Runs of rows at regular distances become batch entries.
    assert tensor.shape[0] == 1, "only a single batch entry leaves room for another"
    tensor = tensor[:, heads]
    row = tensor.stride(2)
    return tensor.as_strided(
        (count, tensor.shape[1], rows, *tensor.shape[3:]),
        (step * row, *tensor.stride()[1:]),
        tensor.storage_offset() + start * row,
    )


def zero_unit_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same view with stride 0 in dimensions of size 1 (the last one excepted).

    Some operators require every stride to fit 32 bits, even those that are never used.
    """
    strides = [0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    strides[-1] = tensor.stride(-1)
    return tensor.as_strided(tensor.shape, strides)


def in_layout_of(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """``tensor`` without gaps, its dimensions in the memory order of ``model``; copied if needed.

    Operators allocate the output for a query ``model`` in this layout.
    """
    order, back = _memory_order(model)
    return tensor.permute(order).contiguous().permute(back)


def empty_in_order_of(
    model: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """An empty tensor without gaps, its dimensions in the memory order of ``model``."""
    order, back = _memory_order(model)
    sizes = [shape[dim] for dim in order]
    return torch.empty(sizes, dtype=dtype, device=model.device).permute(back)


def _memory_order(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """The permutation of a tensor's dimensions to the order in memory, and the one back."""
    order = sorted(range(tensor.dim()), key=tensor.stride)[::-1]
    return order, [order.index(dim) for dim in range(tensor.dim())]


def token_major(tensor: torch.Tensor) -> torch.Tensor:
    """A (b, h, rows, d) tensor that is stored as (b, rows, h, d); copied if needed."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def pad_last(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """``tensor`` with zero columns up to ``width``; not copied if it has that many."""
    missing = width - tensor.shape[-1]
    if missing <= 0:
        return tensor
    # torch keeps the layout of what it takes for images, channels last: rows of one number may be.
    return torch.nn.functional.pad(tensor, (0, missing)).contiguous()


def pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """``tensor`` (..., n, d) with rows of zeros up to ``rows``; not copied if it has them."""
    missing = rows - tensor.shape[-2]
    if missing <= 0:
        return tensor
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing))


def repeat_last(tensor: torch.Tensor, rows: int, dim: int = -2) -> torch.Tensor:
    """``tensor`` with its last row along ``dim`` repeated up to ``rows``; not copied if it has
    them. It has one at least."""
    have = tensor.shape[dim]
    if have >= rows:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = rows - have
    return torch.cat((tensor, tensor.narrow(dim, have - 1, 1).expand(shape)), dim)


def bias_for_padding(
    bias: torch.Tensor | None,
    query: torch.Tensor,
    n_keys: int,
    least: tuple[int, int],
    causal: bool,
) -> torch.Tensor | None:
    """The additive mask of a rectangle padded to at least ``least`` (queries, keys), or None.

    It masks the added keys. A causal rectangle needs no mask: its added keys lie after every query.
    Added queries have the mask of the last one.

    Args:
        bias: (b or 1, h or 1, lq or 1, lk or 1), or None.
        query: (b, h, lq, d), before padding.
    """
    missing_keys = max(0, least[1] - n_keys)
    if not missing_keys and query.shape[2] >= least[0]:
        return bias
    if bias is None:
        if causal or not missing_keys:
            return None
        bias = query.new_zeros((1, 1, 1, n_keys))
    bias = bias.expand(*bias.shape[:-1], n_keys)
    bias = torch.nn.functional.pad(bias, (0, missing_keys), value=-torch.inf)
    return repeat_last(bias, least[0]) if bias.shape[2] > 1 else bias


_WORD = 16
# Below this the host takes longer than the device.
_LARGE_BYTES = 8 << 20


def copy_on_device(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)``, large tensors in words of 16 bytes where both allow it.

    With gaps between heads torch copies element by element, which takes up to 1.6 times as long.
    """
    if target.is_cuda and target.numel() * target.element_size() >= _LARGE_BYTES:
        target, source = in_words(target, source)
    # A copy to host memory has to be waited for: it would be read before it is complete.
    target.copy_(source, non_blocking=target.is_cuda)


def in_words(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as views in words of 16 bytes, if both have one dtype and consist of whole words."""
    if target.dtype != source.dtype or not (_whole_words(target) and _whole_words(source)):
        return target, source
    return target.view(torch.complex128), source.view(torch.complex128)


def _whole_words(tensor: torch.Tensor) -> bool:
    size = tensor.element_size()
    *strides, last = tensor.stride()
    counts = (tensor.shape[-1], tensor.storage_offset(), *strides)
    aligned = tensor.data_ptr() % _WORD == 0
    return last == 1 and aligned and all(count * size % _WORD == 0 for count in counts)


# Tensors that captured CUDA graphs copy from, by their ids. Nobody says when a graph is gone.
_READ_BY_GRAPHS: dict[int, torch.Tensor] = {}


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor``, in page-locked memory, on ``device``; the host does not wait.

    A CUDA graph that is being captured will copy it at every replay. So it is kept for good then:
    else its memory could be given to another tensor, which the graph would read.
    """
    if capturing(device):
        _READ_BY_GRAPHS[id(tensor)] = tensor
    return tensor.to(device, non_blocking=True)


Block = tuple[slice, slice, slice]

BLOCK_BYTES = 2 * 1024 * 1024
"""Bytes of one block in fp32 (or fp64); an elementwise step holds a few blocks at a time."""


def row_blocks(batch: int, heads: int, rows: int, row_bytes: int) -> Iterator[Block]:
    """Yield index triples that cover (batch, heads, rows) once.

    Each block holds at most ``BLOCK_BYTES`` at ``row_bytes`` bytes a row, or one row if a single
    row is larger. The batch is cut first, then the heads, then the rows, so that a block consists
    of few, long contiguous runs.
    """
    if batch == 0 or heads == 0 or rows == 0:
        return
    fit = max(1, BLOCK_BYTES // max(1, row_bytes))
    n_rows = min(rows, fit)
    n_heads = min(heads, fit // n_rows) if n_rows == rows else 1
    n_batch = min(batch, fit // (n_rows * n_heads)) if n_heads == heads and n_rows == rows else 1
    for b in range(0, batch, n_batch):
        for h in range(0, heads, n_heads):
            for r in range(0, rows, n_rows):
                yield slice(b, b + n_batch), slice(h, h + n_heads), slice(r, r + n_rows)


def positions(
    task: Task, start: int, stop: int, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Global positions (stop - start,) of the local positions ``start`` to ``stop``."""
    segments = task.segments(start, stop)
    if len(segments) == 1:
        return torch.arange(*segments[0][:2], dtype=dtype, device=device)
    found = torch.empty(stop - start, dtype=dtype, device=device)
    for first, last, local in segments:
        at = local - start
        torch.arange(first, last, device=device, out=found[at : at + last - first])
    return found


# --- Masks ------------------------------------------------------------------------------------

BASE_TWO_LOWEST = torch.finfo(torch.float32).min * math.log(2.0)
"""Kernels that compute exponentials to base 2 in fp32 treat this score, and lower ones, as -inf.
Masks in bf16 and fp32 that hold their dtype's lowest number instead of -inf reach it."""


def dead_rows(
    bias: torch.Tensor, n_rows: int, causal: bool, lowest: float = -math.inf
) -> torch.Tensor:
    """Rows that ``bias`` (together with the causal mask, if any) leaves no key.

    Args:
        bias: additive mask (b or 1, h or 1, n_rows or 1, n_keys or 1), at least one key; -inf
            masks a pair.
        n_rows: query rows of the rectangle.
        causal: the rectangle is a causal square.
        lowest: a value this low or lower masks a pair as well.

    Returns:
        bool tensor broadcastable to (b, h, n_rows), True where a row has no key.
    """
    if not causal:
        # NaN is not -inf: a row whose mask holds NaN is not dead, and its result is NaN.
        return bias.amax(dim=-1) <= lowest
    return _first_key(bias, lowest) > torch.arange(n_rows, device=bias.device)


def dead_rows_bytes(batch: int, heads: int, rows: int, keys: int, causal: bool) -> int:
    """Upper bound of the bytes that ``dead_rows`` takes, result and temporaries, for fp64."""
    block = min(BLOCK_BYTES, batch * heads * rows * keys)
    return batch * heads * rows * 9 + (rows * 8 + 2 * block if causal else 0)


def _first_key(bias: torch.Tensor, lowest: float) -> torch.Tensor:
    """Index of the first key each row keeps, int64 (b, h, rows); the largest int64 if none."""
    batch, heads, rows, keys = bias.shape
    never = torch.iinfo(torch.int64).max
    first = torch.empty((batch, heads, rows), dtype=torch.int64, device=bias.device)
    for block in row_blocks(batch, heads, rows, keys):
        alive = (bias[block] <= lowest).logical_not_()
        # argmax returns the first of several ones.
        first[block] = alive.view(torch.uint8).argmax(dim=-1)
        first[block].masked_fill_(~alive.any(dim=-1), never)
    return first


def aligned_bias(bias: torch.Tensor, n_keys: int) -> torch.Tensor:
    """``bias`` as operators with vector loads need it; copied only where it is not so already.

    It has all ``n_keys`` columns, its last dimension is contiguous, its address and all other
    strides are multiples of 16 bytes, and its strides fit 32 bits.
    """
    step = max(1, 16 // bias.element_size())
    strides = [s for s, n in zip(bias.stride()[:-1], bias.shape[:-1], strict=True) if n > 1]
    if (
        bias.shape[-1] == n_keys
        and bias.stride(-1) == 1
        and bias.data_ptr() % 16 == 0
        and all(s % step == 0 and s < 2**31 for s in strides)
    ):
        return bias
    rows = bias.shape[:-1]
    padded = torch.empty((*rows, round_up(n_keys, step)), dtype=bias.dtype, device=bias.device)
    padded[..., :n_keys].copy_(bias.expand(*rows, n_keys))
    return padded[..., :n_keys]
