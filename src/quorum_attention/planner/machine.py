"""What the planner assumes of a machine: a few named rates.

Defaults only; they rank plans, they do not promise seconds. Sources: docs/planner.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one device and its link to the host.

    A kernel call reaches ``n / (n + filling)`` of the full rate, n the rows (all heads together)
    it is parallel over: queries in the forward, keys in the backward.

    Attributes:
        flops: attention arithmetic per second of a large plain rectangle, forward.
        backward_flops: the same of the backward.
        filling_queries, filling_causal, filling_keys: rows at which a plain forward call, a
            causal one, and a backward call reach half the rate.
        merge_bytes_per_second: device memory traffic of merging.
        up_bytes_per_second, down_bytes_per_second: host to device and back; on the CPU, copies.
        call_seconds: of one inner kernel call, on the host.
        copy_seconds: of issuing one copy, on the host.
        unit_seconds: of one unit of work beside its calls and copies, on the host.
        overlaps: whether copies run beside compute, and the host runs ahead.
    """

    flops: float
    backward_flops: float
    filling_queries: float
    filling_causal: float
    filling_keys: float
    merge_bytes_per_second: float
    up_bytes_per_second: float
    down_bytes_per_second: float
    call_seconds: float
    copy_seconds: float
    unit_seconds: float
    overlaps: bool


def assumed(device_type: str, dtype: torch.dtype) -> Machine:
    """The default figures for a device type; CUDA's are an H200's."""
    wide = dtype in (torch.float32, torch.float64)
    if device_type == "cuda":
        return Machine(
            flops=45e12 if wide else 520e12,
            backward_flops=35e12 if wide else 510e12,
            filling_queries=14_000,
            filling_causal=20_000,
            filling_keys=11_000,
            merge_bytes_per_second=2.5e12,
            up_bytes_per_second=48e9,
            down_bytes_per_second=48e9,
            call_seconds=80e-6,
            copy_seconds=8e-6,
            unit_seconds=200e-6,
            overlaps=True,
        )
    threads = torch.get_num_threads()
    return Machine(
        flops=(70e9 if wide else 35e9) * threads,
        backward_flops=(65e9 if wide else 15e9) * threads,
        filling_queries=200.0,
        filling_causal=300.0,
        filling_keys=200.0,
        merge_bytes_per_second=20e9,
        up_bytes_per_second=8e9,
        down_bytes_per_second=8e9,
        call_seconds=100e-6,
        copy_seconds=10e-6,
        unit_seconds=200e-6,
        overlaps=False,
    )
