"""Block sizes, warps and pipeline stages by head dimension and element size.

They are few and fixed, because a search at run time would cost every first call more
than it gains. docs/native.md says how they were measured.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

KernelKind = Literal["forward", "query", "key"]
"""A Triton kernel: the forward, or the backward by blocks of queries or of keys."""

Axis = Literal["query", "key"]
"""What a kernel's blocks of rows are made of."""


@dataclass(frozen=True, slots=True)
class Config:
    """How a Triton kernel is tiled and compiled.

    Attributes:
        block_m, block_n: queries and keys of a tile.
        warps, stages: warps and pipeline stages of a program.
        descriptors: whether blocks are read by tensor descriptors, if device and
            tensors allow it.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    descriptors: bool = False


class Tiling(NamedTuple):
    """The blocks of rows that a table is for, and the kernel that reads it.

    Attributes:
        axis: the side whose rows stay in a program.
        config: of the kernel that reads the table.
    """

    axis: Axis
    config: Config

    @property
    def block(self) -> int:
        """Rows of a block, which stay in a program."""
        return self.config.block_m if self.axis == "query" else self.config.block_n

    @property
    def step(self) -> int:
        """Rows of the other side in a tile."""
        return self.config.block_n if self.axis == "query" else self.config.block_m


def padded(width: int) -> int:
    """Columns of a tile: the smallest power of two from 16 (a matrix unit's) that holds
    ``width``.

    Never 32: the one case that failed on a GPU had a tile of 32 columns
    (docs/native.md).
    """
    if width <= 16:
        return 16
    return max(64, 1 << (width - 1).bit_length())


# For 16-bit inputs, by the largest padded head dimension; above 256 there is only the
# forward. The configs for 64 and 128 are the fastest of some forty on an H200, the
# others have the fewest spills.
_NARROW: dict[KernelKind, dict[int, Config]] = {
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
_WITHOUT_DESCRIPTORS = {("forward", 128): Config(128, 64, 8, 3)}
# With dropout, whose random words take registers: four warps would spill hundreds of
# bytes.
_WITH_DROPOUT: dict[tuple[KernelKind, int], Config] = {
    ("forward", 64): Config(128, 64, 8, 3),
    ("forward", 128): Config(128, 64, 8, 2, descriptors=True),
}
# fp32 in IEEE arithmetic cannot use matrix units: small tiles, one stage.
_WIDE = Config(32, 32, 4, 1)
_WIDEST = Config(16, 16, 4, 1)


def choose_config(
    kind: KernelKind,
    query: torch.Tensor,
    value: torch.Tensor,
    dropout: bool,
    *,
    wide_mask: bool = False,
) -> Config:
    """The config of a kernel.

    Args:
        dropout: whether it drops probabilities.
        wide_mask: whether it adds an fp32 mask to the scores of 16-bit inputs.
    """
    width = max(padded(query.shape[-1]), padded(value.shape[-1]))
    itemsize = query.element_size()
    if itemsize > 2:
        return _WIDE if width <= 128 else _WIDEST
    configs = _NARROW[kind]
    size = min(limit for limit in configs if width <= limit)
    config = configs[size]
    if dropout:
        config = _WITH_DROPOUT.get((kind, size), config)
    capability, device_bytes = _device_limits(query.device)
    if config.descriptors and capability < (9, 0):
        config = _WITHOUT_DESCRIPTORS.get((kind, size), config)
        config = replace(config, descriptors=False)
    while (
        config.stages > 1
        and _shared_bytes(kind, config, size, itemsize, wide_mask) > device_bytes
    ):
        config = replace(config, stages=config.stages - 1)
    return config


def _shared_bytes(
    kind: KernelKind, config: Config, width: int, itemsize: int, wide_mask: bool
) -> int:
    """Estimate a program's shared memory: the block that stays, and the tiles of all
    stages.

    Tiles of an fp32 mask are among them.
    """
    tiling = Tiling("key" if kind == "key" else "query", config)
    row_bytes = width * itemsize
    # A forward keeps the queries, a backward two tensors.
    staying_bytes = tiling.block * row_bytes * (1 if kind == "forward" else 2)
    stage_bytes = 2 * tiling.step * row_bytes
    if wide_mask:
        stage_bytes += 4 * config.block_m * config.block_n
    return staying_bytes + config.stages * stage_bytes


@functools.cache
def _device_limits(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability, and the most shared memory of a program in bytes."""
    if device.type != "cuda":
        return (0, 0), 1 << 30
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    return capability, getattr(properties, "shared_memory_per_block_optin", 99 << 10)
