"""What the planner assumes of a machine: a few named rates.

Defaults only; they rank plans, they do not promise seconds. Sources: docs/planner.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one device and its link to the host.

    Attributes:
        flops: attention arithmetic per second of a large plain rectangle, forward.
        backward_flops: the same of the backward.
        merge_bytes_per_second: device memory traffic of merging.
        up_bytes_per_second, down_bytes_per_second: host to device and back; on the CPU, copies.
        call_seconds: fixed cost of one inner kernel call.
        unit_seconds: fixed cost of one unit of work.
        workers: what a kernel call's query tiles are spread over (multiprocessors, threads).
        overlaps: whether copies run beside compute.
    """

    flops: float
    backward_flops: float
    merge_bytes_per_second: float
    up_bytes_per_second: float
    down_bytes_per_second: float
    call_seconds: float
    unit_seconds: float
    workers: int
    overlaps: bool


def assumed(device_type: str, dtype: torch.dtype) -> Machine:
    """The default figures for a device type; CUDA's are an H200's."""
    wide = dtype in (torch.float32, torch.float64)
    if device_type == "cuda":
        return Machine(
            flops=40e12 if wide else 450e12,
            backward_flops=30e12 if wide else 440e12,
            merge_bytes_per_second=2.5e12,
            up_bytes_per_second=48e9,
            down_bytes_per_second=48e9,
            call_seconds=60e-6,
            unit_seconds=400e-6,
            workers=132,
            overlaps=True,
        )
    threads = torch.get_num_threads()
    return Machine(
        flops=(40e9 if wide else 20e9) * threads,
        backward_flops=(35e9 if wide else 10e9) * threads,
        merge_bytes_per_second=8e9,
        up_bytes_per_second=6e9,
        down_bytes_per_second=6e9,
        call_seconds=50e-6,
        unit_seconds=300e-6,
        workers=threads,
        overlaps=False,
    )
