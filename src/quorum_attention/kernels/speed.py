"""How fast a kernel's calls are, for the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RatesByHeadDim = Mapping[int, tuple[float, float]]
"""Rates of a forward and of a backward, by head dimension."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelSpeed:
    """How a kernel's calls differ from cuDNN's, of which the planner knows the rates of
    a device.

    Attributes:
        over_cudnn: rates as shares of cuDNN's.
        tile_rows: rows of a tile of its forward, by the largest head dimension that has
            them; other tiles have 128 rows.
        filling_causal: rows at which a causal call reaches half the rate.
        cache_penalty: share of the rate lost with every doubling of an inner operand
            beyond the cache.
        plan_seconds: extra time of a first call of a shape.
    """

    over_cudnn: RatesByHeadDim
    tile_rows: Mapping[int, int]
    filling_causal: float
    cache_penalty: float = 0.0
    plan_seconds: float = 0.0
