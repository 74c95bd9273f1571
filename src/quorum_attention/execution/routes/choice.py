"""What a search lets the routes choose from."""

from __future__ import annotations

from dataclasses import dataclass

from quorum_attention.execution.device.residency import Home
from quorum_attention.execution.trimming import Tally


@dataclass(frozen=True, slots=True)
class Choice:
    """Values of the fields that routes have, those looked at first in front.

    Attributes:
        n_caps: slots.
        homes: of the travelling state.
        streams: kernel calls in flight at once.
        trimmed: what the tasks at hand come to.
    """

    n_caps: tuple[int, ...]
    homes: tuple[Home, ...]
    streams: tuple[int, ...]
    trimmed: Tally | None = None
