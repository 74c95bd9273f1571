"""Layouts of tensors that operators read as they are, and copies of those that they do
not."""

from __future__ import annotations

import torch

from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.kernels.call_shape import CallShape


def has_readable_rows(tensor: torch.Tensor) -> bool:
    """Whether operators can read the rows of ``tensor`` without a copy.

    The last dimension has to be contiguous, and no row may begin within another:
    torch's operators refuse such rows on some processors, and write their output as if
    it were not so. On a GPU every row also has to start at a multiple of a word (16
    bytes): operators refuse other rows, or fail with misaligned addresses. Rows whose
    length is no multiple of a word may start anywhere, because they are padded, which
    copies them.
    """
    if not tensor.is_contiguous() and not _has_separate_rows(tensor):
        return False
    word_bytes = backend_of(tensor.device).word_bytes
    return word_bytes == 1 or _begins_at_words(tensor, word_bytes)


def _has_separate_rows(tensor: torch.Tensor) -> bool:
    """Whether each row is contiguous, and begins outside of all others, or where others
    begin."""
    *sizes, width = tensor.shape
    *steps, step = tensor.stride()
    if width > 1 and step != 1:
        return False
    for n_positions, stride in zip(sizes, steps, strict=True):
        # Rows may be all the same: a stride of 0.
        if n_positions > 1 and 0 < stride < width:
            return False
    return True


def _begins_at_words(tensor: torch.Tensor, word_bytes: int) -> bool:
    """Whether each row starts at a multiple of a word, or is padded anyway."""
    itemsize = tensor.element_size()
    *sizes, width = tensor.shape
    *steps, _ = tensor.stride()
    if width * itemsize % word_bytes:
        return True
    if tensor.data_ptr() % word_bytes:
        return False
    for n_positions, stride in zip(sizes, steps, strict=True):
        if n_positions > 1 and stride * itemsize % word_bytes:
            return False
    return True


def unreadable_inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[str, ...]:
    """The names of the inputs that operators cannot read without a copy: their rows are
    not readable, or results cannot have the query's strides."""
    names: list[str] = []
    if not (_can_lay_out_results(query) and has_readable_rows(query)):
        names.append("query")
    if not has_readable_rows(key):
        names.append("key")
    if not has_readable_rows(value):
        names.append("value")
    return tuple(names)


def _can_lay_out_results(query: torch.Tensor) -> bool:
    """Whether operators give results dense rows if they lay them out as ``query``."""
    steps = query.stride()
    if backend_of(query.device).word_bytes == 1:
        # torch's operator on a CPU lays its output out as the query, and gives it no
        # dense rows where a dimension of one entry has steps of one number, beside an
        # expanded one.
        return steps.count(1) < 2 or 0 not in steps
    for n_positions, stride in zip(query.shape, steps, strict=True):
        if n_positions > 1 and stride == 0:
            return False
    return True


def is_kernel_readable(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether operators can read an upstream gradient, an output or a copied input
    without a copy."""
    if tensor.dtype != dtype or 0 in tensor.stride():
        return False
    return has_readable_rows(tensor)


def as_kernel_readable(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A part of an upstream gradient, of an output or of an unreadable input as
    operators can read it: of ``dtype``, in dense rows, not expanded (the gradient of a
    sum is). Copies only what is not so already."""
    if is_kernel_readable(tensor, dtype):
        return tensor
    copy = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    return copy.copy_(tensor)


def flatten_batch(tensor: torch.Tensor, shape: CallShape) -> torch.Tensor:
    """``tensor`` (*batch, heads, ...) as (b, heads, ...); copied only where it has no
    such view."""
    n_batch_dims = len(shape.batch_shape)
    if n_batch_dims == 0:
        return tensor.unsqueeze(0)
    if n_batch_dims == 1:
        return tensor
    sizes = tensor.shape[n_batch_dims:]
    return tensor.reshape(shape.batch, *sizes)


def have_flattened_views(*tensors: torch.Tensor) -> bool:
    """Whether all tensors (*batch, heads, n, d) have views (b, heads, n, d)."""
    return all(map(_has_flattened_view, tensors))


def _has_flattened_view(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` (*batch, heads, n, d) has a view (b, heads, n, d)."""
    if tensor.dim() <= 4:
        return True
    sizes = tensor.shape[-3:]
    try:
        tensor.view(-1, *sizes)
    except RuntimeError:
        return False
    return True
