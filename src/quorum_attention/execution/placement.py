"""Where a call's tensors live, as far as what a pass takes depends on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quorum_attention.execution.device.backend import Backend
from quorum_attention.execution.device.lookup import BACKENDS


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a call's tensors live, as far as the budget counts them.

    Attributes:
        device_type: of the computing device. On the CPU, host memory is what the budget counts.
        resident: the inputs are on the computing device.
        results_given: the caller passed preallocated results, which the budget does not count.
        result_dtype: of the output (forward) or of the gradients (backward).
        dense_rows: the inputs' last dimension is contiguous, so a kernel can take them in place.
        copied: how many of the upstream gradient and the output operators cannot take as they lie
            (expanded, or of another dtype): without slots they are copied, a head group at a time.
        divided: of an upstream gradient that the inputs' dtype cannot hold, the bytes of the
            divided copy made before anything else (execution/upstream.py); None: it is not divided.
        lse_here: a backward's lse lies where it is computed, as a plan takes it.
    """

    device_type: str
    resident: bool
    results_given: bool
    result_dtype: torch.dtype
    dense_rows: bool = True
    copied: int = 0
    divided: int | None = None
    lse_here: bool = True

    @property
    def in_place(self) -> bool:
        """Whether operators can take the inputs as they lie."""
        return self.resident and self.dense_rows

    @property
    def is_divided(self) -> bool:
        """Whether the upstream gradient is divided."""
        return self.divided is not None

    @property
    def backend(self) -> Backend:
        """Of the computing device."""
        return BACKENDS[self.device_type]

    def counts(self, home: str) -> bool:
        """Whether the budget counts what lies on the "device", or on the "host"."""
        return home == "device" or not self.backend.own_memory
