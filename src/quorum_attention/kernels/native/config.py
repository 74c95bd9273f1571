"""Block sizes, warps and pipeline stages by head dimension and element size.

They are few and fixed, because a search at run time would cost every first call more than it gains.
docs/native.md says how they were measured.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

import torch

from quorum_attention.counts import real_number, shown, whole_number
from quorum_attention.kernels.torch_private import outside

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
    head_dim: int,
    value_dim: int,
    itemsize: int,
    device: torch.device,
    *,
    dropout: bool = False,
) -> Config:
    """The config of a kernel: the forward's, or the backward's by blocks of queries or of keys;
    ``dropout``: whether it drops probabilities."""
    width = max(padded(head_dim), padded(value_dim))
    if itemsize > 2:
        return _WIDE if width <= 128 else _WIDEST
    size = next(limit for limit in sorted(_NARROW[half]) if width <= limit)
    found = _NARROW[half][size]
    if dropout:
        found = _DROPPING.get((half, size), found)
    capability, shared = _device(device)
    if found.descriptors and capability < (9, 0):
        found = replace(_WITHOUT.get((half, size), found), descriptors=False)
    while found.stages > 1 and _shared_bytes(half, found, size, itemsize) > shared:
        found = replace(found, stages=found.stages - 1)
    return found


def _shared_bytes(half: Half, found: Config, width: int, itemsize: int) -> int:
    """Estimate of a program's shared memory: the block that stays, and the blocks of all stages."""
    stays, moves = found.block_m, found.block_n
    if half == "key":
        stays, moves = moves, stays
    held = stays * width * (1 if half == "forward" else 2)
    return (held + found.stages * 2 * moves * width) * itemsize


@functools.cache
def _device(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability, and the most shared memory of a program in bytes."""
    if device.type != "cuda":
        return (0, 0), 1 << 30
    found = torch.cuda.get_device_properties(device)
    return (found.major, found.minor), getattr(found, "shared_memory_per_block_optin", 99 << 10)


# The changes that a native kernel makes to scores, by global positions.

UNLIMITED = (1 << 31) - 1
"""A distance that none exceeds; sums with it need 64 bits."""


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Changes to the scores of a call; none by default.

    Attributes:
        left, right: a query at position i sees keys from ``i - left`` to ``i + right``; -1 is no
            limit.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 is none.
        slopes: (query heads,) fp32, ALiBi: ``slope * |i - j|`` is subtracted; None is none.
        signed: ``left`` and ``right`` may be below 0 (a band that begins beyond the query, or ends
            before it), and UNLIMITED is no limit.
    """

    left: int = -1
    right: int = -1
    softcap: float = 0.0
    slopes: torch.Tensor | None = None
    signed: bool = False

    @classmethod
    def of(
        cls,
        window: int | tuple[int, int] | None,
        softcap: float | None,
        alibi_slopes: torch.Tensor | None,
    ) -> ScoreOptions:
        """The options for the arguments that users give.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: a value that makes no sense.
        """
        pair = (-1, -1) if window is None else _pair(window)
        cap = 0.0 if softcap is None else real_number(softcap, "softcap")
        if softcap is not None and not cap > 0:
            raise ValueError(f"softcap must be a finite number above 0 or None, got {softcap!r}")
        if alibi_slopes is not None:
            if not isinstance(alibi_slopes, torch.Tensor):
                raise TypeError(
                    f"alibi_slopes must be a tensor or None, got {type(alibi_slopes).__name__}"
                )
            if alibi_slopes.ndim != 1 or not alibi_slopes.is_floating_point():
                raise ValueError(
                    "alibi_slopes must be floating-point, one for each query head, got "
                    f"{alibi_slopes.dtype} of shape {tuple(alibi_slopes.shape)}"
                )
            # Copied, because the backward has to read the same slopes as its forward.
            with outside():
                alibi_slopes = alibi_slopes.detach().to(torch.float32, copy=True)
        return cls(*pair, cap, alibi_slopes)

    @property
    def plain(self) -> bool:
        """Whether scores are unchanged."""
        return not self.windowed and self.softcap == 0.0 and self.slopes is None

    @property
    def windowed(self) -> bool:
        """Whether there is a sliding window. (A band with ``left`` below 0 has ``right`` above.)"""
        return self.left >= 0 or self.right >= 0

    @property
    def bounds(self) -> tuple[int, int]:
        """``left`` and ``right``, UNLIMITED where there is no limit."""
        if self.signed:
            return self.left, self.right
        return UNLIMITED if self.left < 0 else self.left, (
            UNLIMITED if self.right < 0 else self.right
        )

    @property
    def positional(self) -> bool:
        """Whether global positions matter."""
        return self.windowed or self.slopes is not None


def _pair(window: object) -> tuple[int, int]:
    both = window if isinstance(window, (tuple, list)) else (window, window)
    try:
        left, right = (whole_number(n, "window", -1) for n in both)
    except (TypeError, ValueError):
        raise ValueError(
            "window must be a number of tokens or (left, right), whole numbers from -1 "
            f"(no limit), got {shown(window)}"
        ) from None
    return left, right
