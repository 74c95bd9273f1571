"""The clock and the streams of a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quorum_attention.execution.device.clock import Clock
from quorum_attention.kernels.protocol import Lanes

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Tools:
    """A clock for stages, and streams (lanes) for several kernel calls at once."""

    clock: Clock
    lanes: Lanes | None = None
