"""Where a call's tensors are, and how they are laid out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quorum_attention.execution.device.backend import Backend
from quorum_attention.execution.device.lookup import BACKENDS


@dataclass(frozen=True, slots=True)
class Placement:
    """What a plan has to know about where a call's tensors are.

    Attributes:
        device_type: of the device that computes. If it is the CPU, the budget counts host memory.
        resident: whether the inputs are on the device that computes.
        results_given: whether the caller passed the results, which the budget then does not count.
        result_dtype: of the output (forward) or of the gradients (backward).
        dense_rows: whether operators can read the inputs without a copy, if they are resident.
        copied: how many of upstream gradient and output operators cannot read (because they are
            expanded or of another dtype). Routes without slots copy them a head group at a time.
        divided: bytes of the divided copy of an upstream gradient that the inputs' dtype cannot
            hold, which is made first (execution/upstream.py). None: it is not divided.
        lse_here: whether the lse of a backward is on the device that computes; plans assume it.
        lse_given: whether the caller passed the lse of a forward too.
    """

    device_type: str
    resident: bool
    results_given: bool
    result_dtype: torch.dtype
    dense_rows: bool = True
    copied: int = 0
    divided: int | None = None
    lse_here: bool = True
    lse_given: bool = False

    @property
    def in_place(self) -> bool:
        """Whether operators can read the inputs where they are, without a copy."""
        return self.resident and self.dense_rows

    @property
    def is_divided(self) -> bool:
        """Whether the upstream gradient is divided."""
        return self.divided is not None

    @property
    def backend(self) -> Backend:
        """The backend of the device that computes."""
        return BACKENDS[self.device_type]

    def counts(self, home: str) -> bool:
        """Whether the budget counts memory at ``home``, which is "device" or "host"."""
        return home == "device" or not self.backend.own_memory
