"""What a pass works with beside its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quorum_attention.execution.clock import Clock, CudaClock, HostClock, NoClock
from quorum_attention.execution.schedule import Schedule
from quorum_attention.kernels.lanes import Lanes

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Tools:
    """A clock, and streams for several kernel calls at once."""

    clock: Clock
    lanes: Lanes | None = None


def make_tools(device: torch.device, schedule: Schedule, *, timed: bool) -> Tools:
    """The tools of one pass on ``device``."""
    on_cuda = device.type == "cuda"
    clock: Clock = NoClock()
    if timed:
        clock = CudaClock() if on_cuda else HostClock()
    several = on_cuda and schedule.streams > 1
    return Tools(clock, Lanes(device, schedule.streams) if several else None)
