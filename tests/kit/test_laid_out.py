"""What compiled FlexAttention is handed begins with its storage, in words, and is copied rarely."""

from __future__ import annotations

import pytest
import torch

from quorum_attention.kernels.kit.flex import (
    assume_stride_multiple,
    laid_out,
    layout,
    sixteenth,
)

BATCH, HEADS, TOKENS, WIDTH = 2, 4, 100, 32


def base(batch: int = BATCH, width: int = WIDTH) -> torch.Tensor:
    return torch.arange(batch * HEADS * TOKENS * width).view(batch, HEADS, TOKENS, width).half()


def field() -> torch.Tensor:
    """Dense, and within another storage, as a field of a slot is."""
    whole = base()
    arena = torch.zeros(whole.numel() + 256, dtype=whole.dtype)
    arena[128 : 128 + whole.numel()] = whole.flatten()
    return arena[128 : 128 + whole.numel()].view(whole.shape)


@pytest.mark.parametrize(
    ("make", "lies"),
    [
        (base, "rows"),
        (field, "rows"),
        (lambda: base()[:, :, 16:80], "apart"),
        (lambda: field()[:, :, 16:80], "apart"),
        (lambda: base()[:1, 1:3, :50], "apart"),
        (lambda: base().transpose(1, 2).contiguous().transpose(1, 2), "tokens"),
        # Copied into words:
        (lambda: base()[..., 1:], None),
        (lambda: base().mT.contiguous().mT, None),
        (lambda: base(width=5)[:, :, 1:], None),
        (lambda: base()[:, 1:3, 16:80], None),  # entries that lie otherwise than their heads
    ],
)
def test_what_lies_in_words_is_not_copied(make, lies: str | None) -> None:  # type: ignore[no-untyped-def]
    tensor = make()
    found = laid_out(tensor)
    assert (found.data_ptr() == tensor.data_ptr()) == (lies is not None)
    assert found.storage_offset() == 0
    assert torch.equal(found, tensor)
    assert layout(found) == (lies or "rows")
    assert (sixteenth(found) is None) == (lies != "apart")
    assume_stride_multiple(found, sixteenth(found))
