"""Tensors as compiled FlexAttention reads them fastest: in words of 16 bytes.

FlexAttention does so only if torch.compile can tell that every row begins at a whole
word. torch.compile cannot tell that for a tensor that begins inside its storage (a
field of a slot, a part of the rows), nor for a stride that does not follow from the
sizes. Either makes both passes 1.7 times as long (docs/kit.md). So tensors are handed
over with a storage that begins where they begin. A free stride is handed over together
with a sixteenth of it: the compiler can use ``stride == 16 * sixteenth``
(``assume_stride_multiple``).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

WordLayout = Literal["rows", "tokens", "apart"]
"""Memory order of (b, h, n, d): contiguous; that of (b, n, h, d); or gaps between
heads."""

WORD_BYTES = 16
WORD_ELEMENTS = 16


def as_word_layout(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` (b, h, n, d), detached, in a ``WordLayout``; copied where it is in
    none."""
    tensor = tensor.detach()
    if word_layout(tensor) is None:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    if tensor.storage_offset() == 0:
        return tensor
    return from_dlpack(to_dlpack(tensor))


def word_layout(tensor: torch.Tensor) -> WordLayout | None:
    """The layout of a tensor; None if it has none of them or does not begin at a whole
    word."""
    if tensor.data_ptr() % WORD_BYTES:
        return None
    if tensor.is_contiguous():
        return "rows"
    if tensor.transpose(1, 2).is_contiguous():
        return "tokens"
    return "apart" if _has_gaps_between_heads(tensor) else None


def _has_gaps_between_heads(tensor: torch.Tensor) -> bool:
    """Whether each head is contiguous, and heads lie at equal distances of whole
    words."""
    batch, heads, _, width = tensor.shape
    entry_stride, head_stride, row_stride, element_stride = tensor.stride()
    if element_stride != 1 or row_stride != width:
        return False
    if heads == 1 or head_stride % WORD_ELEMENTS:
        return False
    return batch == 1 or entry_stride == heads * head_stride


def head_stride_sixteenth(tensor: torch.Tensor) -> int | None:
    """A sixteenth of the head stride if there are gaps between heads; None for other
    layouts."""
    if word_layout(tensor) != "apart":
        return None
    return tensor.stride(1) // WORD_ELEMENTS


def assume_stride_multiple(tensor: torch.Tensor, sixteenth: int | None) -> None:
    """In compiled code: tell the compiler that the head stride is 16 times
    ``sixteenth``."""
    if sixteenth is not None:
        torch._check(tensor.stride(1) == WORD_ELEMENTS * sixteenth)
