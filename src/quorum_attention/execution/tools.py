"""The clock and the streams of a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quorum_attention.execution.device.clock import Clock, NoClock
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.kernels.lanes import Lanes

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Tools:
    """A clock for stages, and streams (lanes) for several kernel calls at once."""

    clock: Clock
    lanes: Lanes | None = None


def make_tools(device: torch.device, streams: int, *, timed: bool) -> Tools:
    """The tools of one pass on ``device``."""
    backend = backend_of(device)
    return Tools(backend.clock() if timed else NoClock(), backend.lanes(device, streams))
