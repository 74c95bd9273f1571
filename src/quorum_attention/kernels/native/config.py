"""Block sizes, warps and pipeline stages by head dimension and element size.

They are few and fixed, because a search at run time would cost every first call more than it gains.
docs/native.md says how they were measured.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

import torch

Half = Literal["forward", "query", "key"]


@dataclass(frozen=True, slots=True)
class Config:
    """How a Triton kernel is tiled and compiled.

    Attributes:
        block_m, block_n: queries and keys of a tile.
        warps, stages: warps and pipeline stages of a program.
        descriptors: whether blocks are read by tensor descriptors, if device and tensors allow it.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    descriptors: bool = False

    def rows(self, axis: Literal["query", "key"]) -> int:
        """Queries, or keys, of a tile."""
        return self.block_m if axis == "query" else self.block_n


def padded(width: int) -> int:
    """Columns of a tile: the smallest power of two from 16 (a matrix unit's) that holds ``width``.

    Never 32: the one case that failed on a GPU had a tile of 32 columns (docs/native.md).
    """
    if width <= 16:
        return 16
    return max(64, 1 << (width - 1).bit_length())


# For 16-bit inputs, by the largest padded head dimension; above 256 there is only the forward.
# Those for 64 and 128 are the fastest of some forty on an H200, the others have the fewest spills.
_NARROW: dict[Half, dict[int, Config]] = {
    "forward": {
        64: Config(128, 64, 4, 3),
        128: Config(128, 64, 4, 2, descriptors=True),
        256: Config(64, 32, 4, 2, descriptors=True),
        1024: Config(64, 16, 8, 1),
    },
    "query": {
        64: Config(64, 64, 4, 3, descriptors=True),
        128: Config(128, 64, 8, 3, descriptors=True),
        256: Config(64, 32, 8, 1, descriptors=True),
    },
    "key": {
        64: Config(64, 64, 4, 3, descriptors=True),
        128: Config(64, 128, 8, 3),
        256: Config(32, 64, 8, 2, descriptors=True),
    },
}
# Used instead without descriptors: four warps would spill registers.
_WITHOUT = {("forward", 128): Config(128, 64, 8, 3)}
# With dropout, whose random words take registers: four warps would spill hundreds of bytes.
_DROPPING: dict[tuple[Half, int], Config] = {
    ("forward", 64): Config(128, 64, 8, 3),
    ("forward", 128): Config(128, 64, 8, 2, descriptors=True),
}
# fp32 in IEEE arithmetic cannot use matrix units: small tiles, one stage.
_WIDE = Config(32, 32, 4, 1)
_WIDEST = Config(16, 16, 4, 1)


def config(
    half: Half,
    query: torch.Tensor,
    value: torch.Tensor,
    dropout: bool,
    *,
    wide_mask: bool = False,
) -> Config:
    """The config of a kernel.

    Args:
        half: the forward, or the backward by blocks of queries or of keys.
        dropout: whether it drops probabilities.
        wide_mask: whether it adds an fp32 mask to the scores of 16-bit inputs.
    """
    width, itemsize = max(padded(query.shape[-1]), padded(value.shape[-1])), query.element_size()
    if itemsize > 2:
        return _WIDE if width <= 128 else _WIDEST
    size = next(limit for limit in sorted(_NARROW[half]) if width <= limit)
    found = _NARROW[half][size]
    if dropout:
        found = _DROPPING.get((half, size), found)
    capability, shared = _device(query.device)
    if found.descriptors and capability < (9, 0):
        found = replace(_WITHOUT.get((half, size), found), descriptors=False)
    while found.stages > 1 and _shared_bytes(half, found, size, itemsize, wide_mask) > shared:
        found = replace(found, stages=found.stages - 1)
    return found


def _shared_bytes(half: Half, found: Config, width: int, itemsize: int, wide_mask: bool) -> int:
    """Estimate of a program's shared memory: the block that stays, and the blocks of all stages,
    tiles of an fp32 mask among them."""
    stays, moves = found.block_m, found.block_n
    if half == "key":
        stays, moves = moves, stays
    held = stays * width * (1 if half == "forward" else 2)
    mask_tile = 4 * found.block_m * found.block_n if wide_mask else 0
    return held * itemsize + found.stages * (2 * moves * width * itemsize + mask_tile)


@functools.cache
def _device(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability, and the most shared memory of a program in bytes."""
    if device.type != "cuda":
        return (0, 0), 1 << 30
    found = torch.cuda.get_device_properties(device)
    return (found.major, found.minor), getattr(found, "shared_memory_per_block_optin", 99 << 10)
