"""Rates that are assumed: those of a device until it is calibrated, and of kernels.

The rates of a GPU are those of one, the H200, whatever GPU is there;
``devices/speeds.py`` has others by name. They are good enough to rank plans on machines
like those measured. Sources: docs/planner.md.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from quorum_attention.execution.device.lookup import on_host
from quorum_attention.kernels.speed import KernelSpeed, RatesByHeadDim
from quorum_attention.planner.hardware import HardwareModel

# Rows of a tile of cuDNN's.
_TILE_ROWS = 128

# FLOP/s of cuDNN on an H200.
_H200 = {
    64: (450e12, 446e12),
    96: (455e12, 430e12),
    128: (600e12, 530e12),
    192: (620e12, 315e12),
    256: (640e12, 370e12),
}
_H200_FP32 = (45e12, 35e12)
# FLOP/s of a thread of a server's CPU, forward and backward: fp16 has no matrix
# instructions there.
_CPU_THREAD = {
    torch.float64: (20e9, 18e9),
    torch.float32: (70e9, 65e9),
    torch.bfloat16: (50e9, 65e9),
    torch.float16: (25e9, 4.5e9),
}


def rates_at_head_dim(table: RatesByHeadDim, head_dim: int) -> tuple[float, float]:
    """Return the (forward, backward) rates of ``table`` for ``head_dim``.

    Between the table's entries they are interpolated linearly. Beyond them they are
    those of the nearest entry.
    """
    head_dims = sorted(table)
    forward_rates = [table[dim][0] for dim in head_dims]
    backward_rates = [table[dim][1] for dim in head_dims]
    forward = float(np.interp(head_dim, head_dims, forward_rates))
    backward = float(np.interp(head_dim, head_dims, backward_rates))
    return forward, backward


def assumed_hardware(
    device: torch.device, dtype: torch.dtype, head_dim: int
) -> HardwareModel:
    """Return the rates of a typical device of this kind: a server's CPU, or an H200."""
    if on_host(device):
        return _cpu_hardware(dtype)
    is_16_bit = dtype.itemsize == 2
    forward, backward = rates_at_head_dim(_H200, head_dim) if is_16_bit else _H200_FP32
    # The other rates of an H200 are the defaults.
    return HardwareModel(forward, backward)


def _cpu_hardware(dtype: torch.dtype) -> HardwareModel:
    """Return the rates of a CPU with as many threads as torch has."""
    threads = torch.get_num_threads()
    forward, backward = _CPU_THREAD[dtype]
    return HardwareModel(
        flops=forward * threads,
        backward_flops=backward * threads,
        wave_rows=0,
        filling_rows=200.0,
        filling_causal=300.0,
        backward_filling_causal=300.0,
        exposed_idle=1.0,
        throttle=0.0,
        cache_bytes=0,
        cache_penalty=0.0,
        call_device_seconds=0.0,
        merge_bytes_per_second=20e9,
        up_bytes_per_second=8e9,
        down_bytes_per_second=8e9,
        call_seconds=100e-6,
        backward_call_seconds=200e-6,
        copy_seconds=10e-6,
        unit_seconds=200e-6,
        backward_tensor_seconds=0.0,
        pass_seconds=300e-6,
        plan_seconds=0.0,
        overlaps=False,
        threads=threads,
    )


def hardware_at_speed(
    hardware: HardwareModel, speed: KernelSpeed, head_dim: int, *, backward: bool
) -> HardwareModel:
    """Return the rates of ``hardware`` as a kernel of this speed reaches them."""
    forward_share, backward_share = rates_at_head_dim(speed.over_cudnn, head_dim)
    return replace(
        hardware,
        flops=hardware.flops * forward_share,
        backward_flops=hardware.backward_flops * backward_share,
        wave_rows=_wave_rows(hardware, speed, head_dim, backward=backward),
        filling_causal=speed.filling_causal,
        cache_penalty=speed.cache_penalty,
        plan_seconds=speed.plan_seconds,
    )


def _wave_rows(
    hardware: HardwareModel, speed: KernelSpeed, head_dim: int, *, backward: bool
) -> int:
    """Return the rows that occupy every multiprocessor once."""
    if backward:
        return hardware.wave_rows
    for largest_head_dim in sorted(speed.tile_rows):
        if head_dim <= largest_head_dim:
            tile_rows = speed.tile_rows[largest_head_dim]
            return hardware.wave_rows * tile_rows // _TILE_ROWS
    return hardware.wave_rows
