"""The events that a machine is told about while a pass runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Path = tuple[int, ...]
# What is handed out: a head group of a pass on one device, a part of a call on several, or anything
# else that can be hashed. The machine only compares them.
Group: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class UnitDone:
    """The results of a unit are stored, or their copies are issued."""

    device: int
    group: Group
    path: Path


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """``device`` ran out of memory; units that it has not reported done have to run again.

    ``said`` is the allocator's message.
    """

    device: int
    said: str = ""


@dataclass(frozen=True, slots=True)
class NeedsPlan:
    """A call that ``device`` ran without a plan failed; ``why``, in words."""

    device: int
    why: str


@dataclass(frozen=True, slots=True)
class Overflow:
    """Gradients of a unit of the scaled backward are not finite.

    ``most`` maps each (entry, key/value head) at fault to the most steps down that its numbers
    allow (see execution/scaling.py).
    """

    device: int
    group: Group
    path: Path
    most: Mapping[tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class Headroom:
    """Free memory holds the slots of one level less twice; nothing is in flight on ``device``."""

    device: int


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """``device`` is gone; the results that it reported done are in host memory."""

    device: int


@dataclass(frozen=True, slots=True)
class DeviceJoined:
    """``device`` joins the pass, with ``n_cap`` slots at most."""

    device: int
    n_cap: int


Event = UnitDone | OutOfMemory | NeedsPlan | Overflow | Headroom | DeviceLost | DeviceJoined
