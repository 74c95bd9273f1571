"""Tensors as compiled FlexAttention reads them fastest: in words of 16 bytes.

It does so only where torch.compile knows every row to begin at a whole word. A tensor that begins
within its storage (a field of a slot, a part of the rows) it takes to begin anywhere, and a stride
that follows from no length to be any number; either costs 1.7 times the time of both passes
(kit.md). So tensors are handed over as if their storage began with them, and a free stride together
with a sixteenth of it (``told``): of ``stride == 16 * sixteenth`` the compiler makes use.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

Layout = Literal["rows", "tokens", "apart"]
"""(b, h, n, d) in memory: as it is written; (b, n, h, d); heads a stride of their own apart."""

_BYTES = 16
_ELEMENTS = 16


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` (b, h, n, d), detached, in a ``Layout``; copied where it is in none."""
    found = tensor.detach()
    if layout(found) is None:
        found = found.clone(memory_format=torch.contiguous_format)
    return from_dlpack(to_dlpack(found)) if found.storage_offset() else found


def layout(tensor: torch.Tensor) -> Layout | None:
    """How a tensor lies, if it begins at a word; None otherwise."""
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
    """What ``told`` is given of a tensor from ``laid_out``."""
    return tensor.stride(1) // _ELEMENTS if layout(tensor) == "apart" else None


def told(tensor: torch.Tensor, sixteenth: int | None) -> None:
    """Within compiled code: its heads are that many sixteenths apart."""
    if sixteenth is not None:
        torch._check(tensor.stride(1) == _ELEMENTS * sixteenth)


def always_in_words(*widths: int) -> bool:
    """Whether any range of rows of a field of a slot, of several heads or of one entry, is in a
    ``Layout``."""
    return all(width % _ELEMENTS == 0 for width in widths)
