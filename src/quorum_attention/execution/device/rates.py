"""Rates that are assumed for a device until it is calibrated.

They are good enough to rank plans on machines like those measured. Sources: docs/planner.md.
"""

from __future__ import annotations

from typing import Any

import torch

from quorum_attention.kernels.fa4 import by_head_dim

# FLOP/s of cuDNN on an H200, forward and backward, by head dimension.
_H200 = {
    64: (450e12, 446e12), 96: (455e12, 430e12), 128: (600e12, 530e12), 192: (620e12, 315e12),
    256: (640e12, 370e12),
}  # fmt: skip
_WIDE = (torch.float32, torch.float64)
# FLOP/s of a thread of a server's CPU, forward and backward: fp16 has no matrix instructions there.
_CPU = {
    torch.float64: (20e9, 18e9),
    torch.float32: (70e9, 65e9),
    torch.bfloat16: (50e9, 65e9),
    torch.float16: (25e9, 4.5e9),
}


def h200_rates(dtype: torch.dtype, head_dim: int) -> dict[str, Any]:
    """The rates of an H200, as fields of ``planner.machine.Machine``."""
    forward, backward = (45e12, 35e12) if dtype in _WIDE else by_head_dim(_H200, head_dim)
    return {
        "flops": forward,
        "backward_flops": backward,
        "wave_rows": 132 * 128,
        "filling_rows": 0,
        "filling_causal": 20_000,
        "exposed_idle": 0.35,
        "throttle": 0.1,
        "cache_bytes": 20 << 20,
        "cache_penalty": 0.045,
        "call_device_seconds": 20e-6,
        "merge_bytes_per_second": 2.5e12,
        "up_bytes_per_second": 46e9,
        "down_bytes_per_second": 46e9,
        "call_seconds": 140e-6,
        "backward_call_seconds": 270e-6,
        "copy_seconds": 1.5e-6,
        "unit_seconds": 400e-6,
        "pass_seconds": 2e-3,
        "plan_seconds": 40e-3,
        "overlaps": True,
    }


def cpu_rates(dtype: torch.dtype) -> dict[str, Any]:
    """The rates of a CPU with as many threads as torch has, as fields of
    ``planner.machine.Machine``."""
    threads = torch.get_num_threads()
    forward, backward = _CPU[dtype]
    return {
        "flops": forward * threads,
        "backward_flops": backward * threads,
        "wave_rows": 0,
        "filling_rows": 200.0,
        "filling_causal": 300.0,
        "exposed_idle": 1.0,
        "throttle": 0.0,
        "cache_bytes": 0,
        "cache_penalty": 0.0,
        "call_device_seconds": 0.0,
        "merge_bytes_per_second": 20e9,
        "up_bytes_per_second": 8e9,
        "down_bytes_per_second": 8e9,
        "call_seconds": 100e-6,
        "backward_call_seconds": 200e-6,
        "copy_seconds": 10e-6,
        "unit_seconds": 200e-6,
        "pass_seconds": 300e-6,
        "plan_seconds": 0.0,
        "overlaps": False,
        "threads": threads,
    }
