"""Tensors as compiled FlexAttention reads them fastest: in words of 16 bytes.

It does so only if torch.compile can tell that every row begins at a whole word. It cannot tell that
for a tensor that begins inside its storage (a field of a slot, a part of the rows), nor for a
stride that does not follow from the sizes; either makes both passes 1.7 times as long (kit.md). So
tensors are handed over with a storage that begins where they begin. A free stride is handed over
together with a sixteenth of it: the compiler can use ``stride == 16 * sixteenth``
(``assume_stride_multiple``).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

Layout = Literal["rows", "tokens", "apart"]
"""Memory order of (b, h, n, d): contiguous; that of (b, n, h, d); or gaps between heads."""

_BYTES = 16
_ELEMENTS = 16


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` (b, h, n, d), detached, in a ``Layout``; copied where it is in none."""
    found = tensor.detach()
    if layout(found) is None:
        found = found.clone(memory_format=torch.contiguous_format)
    return from_dlpack(to_dlpack(found)) if found.storage_offset() else found


def layout(tensor: torch.Tensor) -> Layout | None:
    """The layout of a tensor; None if it has none of them or does not begin at a whole word."""
    if tensor.data_ptr() % _BYTES:
        return None
    if tensor.is_contiguous():
        return "rows"
    if tensor.transpose(1, 2).is_contiguous():
        return "tokens"
    batch, heads, _, width = tensor.shape
    entry, head, row, element = tensor.stride()
    rows = element == 1 and row == width and heads > 1 and head % _ELEMENTS == 0
    return "apart" if rows and (batch == 1 or entry == heads * head) else None


def sixteenth(tensor: torch.Tensor) -> int | None:
    """A sixteenth of the head stride if there are gaps between heads; None for other layouts."""
    return tensor.stride(1) // _ELEMENTS if layout(tensor) == "apart" else None


def assume_stride_multiple(tensor: torch.Tensor, sixteenth: int | None) -> None:
    """In compiled code: tell the compiler that the head stride is 16 times ``sixteenth``."""
    if sixteenth is not None:
        torch._check(tensor.stride(1) == _ELEMENTS * sixteenth)


def always_in_words(*widths: int) -> bool:
    """Whether every range of rows of a slot's field has a ``Layout``, for columns of ``widths``.

    (It may not have one if the field holds one head of several entries.)
    """
    return all(width % _ELEMENTS == 0 for width in widths)
