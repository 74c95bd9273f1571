"""How quick devices are, before they have done anything."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.planner.calibration import calibrated_flops
from quorum_attention.planner.machine import assumed

# Relative to an H200, whose rates the planner assumes (docs/planner.md). FlashAttention's published
# forward at head dimension 128 over cuDNN's there: 740 TFLOP/s on an H100 (version 3), 225 on an
# A100 (version 2); an H20 by its peak.
SPEEDS = {"H200": 1.0, "H100": 0.95, "H800": 0.95, "A100": 0.36, "H20": 0.15}


def expected_paces(
    devices: Sequence[tuple[str, str]], dtype: torch.dtype, head_dim: int, *, backward: bool
) -> list[float]:
    """Seconds a pair of each device: calibrated where it has been, else assumed.

    Args:
        devices: what torch calls each, and its own name.
    """
    return [head_dim / _flops(device, name, dtype, head_dim, backward) for device, name in devices]


def _flops(device: str, name: str, dtype: torch.dtype, head_dim: int, backward: bool) -> float:
    place = torch.device(device)
    # A CPU's worker has no name of its own.
    backend = backend_of(place)
    model = name if backend.own_memory else backend.model(place)
    measured = calibrated_flops(backend, model, dtype, head_dim)
    if measured is not None:
        return measured[backward]
    usual = assumed(place.type, dtype, head_dim)
    relative = next((speed for known, speed in SPEEDS.items() if known in name), 1.0)
    return relative * (usual.backward_flops if backward else usual.flops)


__all__ = ["SPEEDS", "expected_paces"]
