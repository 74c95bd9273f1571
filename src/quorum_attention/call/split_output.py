"""An fp32 output as two numbers of 16 bits: the output as it is returned, and the rest.

The rest is a difference of bits: how many numbers of fp32 lie between the rounded
output and the output itself. Beside bf16 that is at most 2**15, beside a normal number
of fp16 at most 2**12, so the two numbers hold all bits of the output.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_LARGEST_REST = 2**15
# Numbers that are split or joined at a time: temporaries have 4 bytes for each.
_BLOCK_NUMBERS = 1 << 24


def rest_of(unrounded: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Return what rounding to 16 bits took from an output.

    Args:
        unrounded: (*batch, heads, n_queries, value_dim), fp32.
        rounded: the same in fp16 or bf16.

    Returns:
        The rest, int16; 0 where ``rounded`` is not finite.
    """
    rest = torch.empty_like(unrounded, dtype=torch.int16)
    for part, rounded_part, rest_part in _blocks(unrounded, rounded, rest):
        bits = part.view(torch.int32)
        rounded_in_fp32 = rounded_part.float()
        rounded_bits = rounded_in_fp32.view(torch.int32)
        difference = bits - rounded_bits
        is_too_large = difference.abs() > _LARGEST_REST
        difference.masked_fill_(is_too_large, 0)
        difference.clamp_(max=_LARGEST_REST - 1)
        rest_part.copy_(difference)
    return rest


def joined(rounded: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Return an output in fp32, of its two parts in 16 bits (``rest_of``)."""
    unrounded = torch.empty_like(rounded, dtype=torch.float32)
    for part, rounded_part, rest_part in _blocks(unrounded, rounded, rest):
        part.copy_(rounded_part)
        bits = part.view(torch.int32)
        bits.add_(rest_part)
    return unrounded


def _blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield views of tensors of one shape (..., n, d), by blocks of rows of all
    heads."""
    like = tensors[0]
    n_rows = max(1, like.shape[-2])
    numbers_of_a_row = max(1, like.numel() // n_rows)
    n_rows_of_a_block = max(1, _BLOCK_NUMBERS // numbers_of_a_row)
    blocks = [tensor.split(n_rows_of_a_block, dim=-2) for tensor in tensors]
    return zip(*blocks, strict=True)
