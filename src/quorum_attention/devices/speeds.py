"""How fast devices are expected to be, to share a call among them.

The planner predicts the time of one device by ``planner/rates.py``.
"""

from __future__ import annotations

import torch

from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.planner.calibration import calibrated_flops
from quorum_attention.planner.rates import assumed_hardware

# Relative to an H200, whose rates the planner assumes (docs/planner.md).
# FlashAttention's published forward at head dimension 128 over cuDNN's there: 740
# TFLOP/s on an H100 (version 3), 225 on an A100 (version 2); an H20 by its peak.
SPEEDS = {"H200": 1.0, "H100": 0.95, "H800": 0.95, "A100": 0.36, "H20": 0.15}


def expected_speed(
    device_name: str, model: str, dtype: torch.dtype, head_dim: int, *, backward: bool
) -> float:
    """Return the pairs a second of a device, calibrated where it has been, else
    assumed.

    Args:
        device_name: the device as torch writes it.
        model: the device's own name.
    """
    device = torch.device(device_name)
    measured = calibrated_flops(backend_of(device), model, dtype, head_dim)
    if measured is not None:
        forward_flops, backward_flops = measured
        flops = backward_flops if backward else forward_flops
        return flops / head_dim
    hardware = assumed_hardware(device, dtype, head_dim)
    flops = hardware.backward_flops if backward else hardware.flops
    return _relative_speed(model) * flops / head_dim


def _relative_speed(model: str) -> float:
    """Return the speed of a device relative to an H200; 1 if it is not known."""
    for name, speed in SPEEDS.items():
        if name in model:
            return speed
    return 1.0
