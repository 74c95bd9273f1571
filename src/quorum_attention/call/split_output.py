"""An fp32 output as two numbers of 16 bits: the output as it is returned, and the rest.

The rest is a difference of bits: how many numbers of fp32 lie between the rounded
output and the output itself. Beside bf16 that is at most 2**15, beside a normal number
of fp16 at most 2**12, so the two numbers hold all bits of the output.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_LARGEST_REST = 2**15
# Most numbers that are split or joined at a time: on a GPU so many that launches do not
# count.
_BLOCK_NUMBERS = 1 << 22
# Bytes of temporaries for each of them: the difference, its size, and whether that is
# too large.
_TEMPORARY_BYTES = 4 + 4 + 1


def rest_of(
    unrounded: torch.Tensor, rounded: torch.Tensor, most_bytes: int | None = None
) -> torch.Tensor:
    """Return what rounding to 16 bits took from an output.

    Args:
        unrounded: (*batch, heads, n_queries, value_dim), fp32.
        rounded: the same in fp16 or bf16.
        most_bytes: of temporaries, as far as a slice of the output allows; None: any.

    Returns:
        The rest, int16; 0 where ``rounded`` is not finite.
    """
    rest = torch.empty_like(unrounded, dtype=torch.int16)
    for block in _blocks(most_bytes, unrounded, rounded, rest):
        _write_rest(*block)
    return rest


def _write_rest(
    unrounded: torch.Tensor, rounded: torch.Tensor, rest: torch.Tensor
) -> None:
    """Write the rest of a block of an output."""
    bits = unrounded.view(torch.int32)
    rounded_in_fp32 = rounded.float()
    difference = rounded_in_fp32.view(torch.int32)
    torch.sub(bits, difference, out=difference)
    is_too_large = difference.abs() > _LARGEST_REST
    difference.masked_fill_(is_too_large, 0)
    difference.clamp_(max=_LARGEST_REST - 1)
    rest.copy_(difference)


def joined(
    rounded: torch.Tensor, rest: torch.Tensor, most_bytes: int | None = None
) -> torch.Tensor:
    """Return an output in fp32, of its two parts in 16 bits; see ``rest_of``."""
    unrounded = torch.empty_like(rounded, dtype=torch.float32)
    for part, rounded_part, rest_part in _blocks(most_bytes, unrounded, rounded, rest):
        part.copy_(rounded_part)
        bits = part.view(torch.int32)
        bits.add_(rest_part)
    return unrounded


def _blocks(
    most_bytes: int | None, *tensors: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield views of tensors of one shape (..., n, d), by blocks along its longest
    dimension."""
    most_numbers = _BLOCK_NUMBERS
    if most_bytes is not None:
        most_numbers = min(most_numbers, most_bytes // _TEMPORARY_BYTES)
    sizes = tensors[0].shape[:-1]
    longest = max(sizes)
    numbers_of_a_slice = tensors[0].numel() // max(1, longest)
    n_slices = most_numbers // max(1, numbers_of_a_slice)
    dim = sizes.index(longest)
    blocks = [tensor.split(max(1, n_slices), dim=dim) for tensor in tensors]
    return zip(*blocks, strict=True)
