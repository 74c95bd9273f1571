"""What can happen while a pass runs, as its machine is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quorum_attention.execution.workload import Group

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UnitDone:
    """The results of a unit are where they belong, or on their way."""

    device: int
    group: Group
    path: Path


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """``device`` ran out of memory; units that it has not reported done have to run again.

    ``said`` is what the allocator said. ``where`` names the place; without it, it is the first
    unit that is not done.
    """

    device: int
    said: str = ""
    where: str | None = None


@dataclass(frozen=True, slots=True)
class Overflow:
    """Gradients of a unit of the scaled backward are not finite.

    ``most`` gives, for each head at fault, how many steps down its numbers allow at most.
    """

    device: int
    group: Group
    path: Path
    most: Mapping[tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class Headroom:
    """Slots of one level less would fit twice; nothing is in flight on ``device``."""

    device: int


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """Nothing more comes from ``device``; what it reported done is in host memory."""

    device: int


@dataclass(frozen=True, slots=True)
class DeviceJoined:
    """``device`` takes part from here on, with ``n_cap`` slots at most."""

    device: int
    n_cap: int


Event = UnitDone | OutOfMemory | Overflow | Headroom | DeviceLost | DeviceJoined
