"""What the planner knows of a machine: a few named rates, assumed or measured.

The assumed ones are good for ranking plans on the machines they were taken from; for seconds,
``quorum-attention calibrate`` measures the device at hand (calibration.py). Sources:
docs/planner.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import pairwise

import torch


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one device for one dtype and head dimension, and its link to the host.

    Attributes:
        flops: attention arithmetic per second, held for seconds, of a plain forward call that fills
            the device evenly.
        backward_flops: the same of a backward.
        wave_rows: rows (all heads and batch entries together; queries in a forward, keys in a
            backward) that occupy every multiprocessor once. A call works in whole waves: the last
            one takes as long as a full one. 0: no waves.
        filling_rows: rows at which a call reaches half the rate, where there are no waves.
        filling_causal: rows at which a causal call reaches half the rate: its last tiles are its
            longest.
        exposed_idle: share of a call's idle time that is left when two calls are in flight.
        throttle: a device that computes at full rate runs at a lower clock; what a share s of the
            rate should take, it takes s**(1 - throttle) of.
        cache_bytes: of one head's inner operand (keys and values in a forward) that stay in cache.
        cache_penalty: share of the rate lost with every doubling beyond that.
        call_device_seconds: of starting and ending one call on the device.
        merge_bytes_per_second: device memory traffic of merging.
        up_bytes_per_second, down_bytes_per_second: host to device and back, both at once; on the
            CPU, copies.
        call_seconds, backward_call_seconds: of issuing one inner kernel call with its merge.
        copy_seconds: of issuing one copy.
        unit_seconds: of one unit of work beside its calls and copies, on the host.
        pass_seconds: of one pass, whatever its size.
        plan_seconds: what a kernel takes to prepare for a shape it sees for the first time.
        overlaps: whether copies run beside compute, and the host runs ahead.
        measured: whether these are figures of the device at hand.
    """

    flops: float
    backward_flops: float
    wave_rows: int
    filling_rows: float
    filling_causal: float
    exposed_idle: float
    throttle: float
    cache_bytes: int
    cache_penalty: float
    call_device_seconds: float
    merge_bytes_per_second: float
    up_bytes_per_second: float
    down_bytes_per_second: float
    call_seconds: float
    backward_call_seconds: float
    copy_seconds: float
    unit_seconds: float
    pass_seconds: float
    plan_seconds: float
    overlaps: bool
    measured: bool = False

    def share_of_rate(self, rows: int, causal_side: int = 0, streams: int = 1) -> float:
        """Which share of the full rate a call of ``rows`` parallel rows reaches.

        Args:
            causal_side: rows of one causal square, 0 for a plain rectangle.
            streams: calls in flight at once: one fills what another's last wave leaves idle.
        """
        rows = max(1, rows)
        if causal_side:
            share = rows / (rows + self.filling_causal)
            if self.wave_rows:
                # A square's longest tile has all its keys: nothing ends before that does.
                share = min(share, rows / (2 * self.wave_rows))
        elif self.wave_rows:
            share = rows / (self.wave_rows * math.ceil(rows / self.wave_rows))
        else:
            share = rows / (rows + self.filling_rows)
        if streams > 1:
            share = 1 - (1 - share) * self.exposed_idle
        return float(share ** (1 - self.throttle))

    def cached_share(self, inner_bytes: int) -> float:
        """Which share of it is left when the inner operand of a head takes so many bytes."""
        if not self.cache_bytes or inner_bytes <= self.cache_bytes:
            return 1.0
        return max(0.75, 1 - self.cache_penalty * math.log2(inner_bytes / self.cache_bytes))


# TFLOP/s of cuDNN on an H200, forward and backward, by head dimension.
_H200 = {64: (450e12, 446e12), 128: (600e12, 530e12)}


def by_head_dim(table: dict[int, tuple[float, float]], head_dim: int) -> tuple[float, float]:
    """Between the entries of a table in a straight line, beyond them the nearest."""
    known = sorted(table)
    for low, high in pairwise(known):
        if low <= head_dim <= high:
            part = (head_dim - low) / (high - low)
            (a, b), (c, d) = table[low], table[high]
            return a + part * (c - a), b + part * (d - b)
    return table[known[0] if head_dim < known[0] else known[-1]]


def assumed(device_type: str, dtype: torch.dtype, head_dim: int = 64) -> Machine:
    """The default figures for a device type; CUDA's are an H200's."""
    wide = dtype in (torch.float32, torch.float64)
    if device_type == "cuda":
        forward, backward = (45e12, 35e12) if wide else by_head_dim(_H200, head_dim)
        return Machine(
            flops=forward,
            backward_flops=backward,
            wave_rows=132 * 128,
            filling_rows=0,
            filling_causal=20_000,
            exposed_idle=0.35,
            throttle=0.1,
            cache_bytes=20 << 20,
            cache_penalty=0.045,
            call_device_seconds=20e-6,
            merge_bytes_per_second=2.5e12,
            up_bytes_per_second=46e9,
            down_bytes_per_second=46e9,
            call_seconds=140e-6,
            backward_call_seconds=270e-6,
            copy_seconds=1.5e-6,
            unit_seconds=400e-6,
            pass_seconds=2e-3,
            plan_seconds=40e-3,
            overlaps=True,
        )
    threads = torch.get_num_threads()
    return Machine(
        flops=(70e9 if wide else 35e9) * threads,
        backward_flops=(65e9 if wide else 15e9) * threads,
        wave_rows=0,
        filling_rows=200.0,
        filling_causal=300.0,
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
        pass_seconds=300e-6,
        plan_seconds=0.0,
        overlaps=False,
    )


FIELDS = tuple(field.name for field in fields(Machine))
