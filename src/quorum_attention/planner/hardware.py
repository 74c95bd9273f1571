"""What the planner knows of a machine: a few named rates, assumed or measured.

The assumed rates rank plans well on the machines where they were measured. For
predictions in seconds, ``quorum-attention calibrate`` measures the device at hand
(calibration.py). Sources: docs/planner.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class HardwareModel:
    """Rates of one device for one dtype and head dimension, and its link to the host;
    by default an H200's.

    Attributes:
        flops: FLOP/s that a plain forward call holds for seconds when it fills the
            device evenly.
        backward_flops: the same for a backward.
        wave_rows: rows (all heads and batch entries together; queries in a forward,
            keys in a backward) that occupy every multiprocessor once. The last wave of
            a call takes as long as a full one. 0: the device has no waves.
        filling_rows: rows at which a call reaches half the rate, where there are no
            waves.
        filling_causal: rows at which a causal forward reaches half the rate (its last
            tiles are its longest).
        backward_filling_causal: the same for a backward (its first tiles are its
            longest).
        exposed_idle: share of a call's idle time that remains when two calls are in
            flight.
        throttle: a device at full rate lowers its clock, so a call that fills a share s
            of it reaches the share s**(1 - throttle) of the rate.
        cache_bytes: bytes of one head's inner operand (keys and values in a forward)
            that the cache holds.
        cache_penalty: share of the rate lost with every doubling beyond that.
        call_device_seconds: of starting and ending one call on the device.
        merge_bytes_per_second: device memory traffic of merging.
        up_bytes_per_second, down_bytes_per_second: host to device and back, both at
            once; on the CPU, of copies.
        call_seconds, backward_call_seconds: of issuing one inner kernel call with its
            merge.
        copy_seconds: of issuing one copy.
        unit_seconds: of the host for one unit, its calls and copies not counted.
        backward_tensor_seconds: of the host, in a backward, for each tensor that a unit
            copies in or out, besides the copy: casts, additions and checks of scales
            are kernels that it launches.
        pass_seconds: of one pass, independent of its size.
        plan_seconds: extra time of a kernel's first call of a shape.
        overlaps: whether copies run beside compute, and the host runs ahead.
        threads: of a CPU.
        measured: whether the rates were measured on the device at hand.
    """

    flops: float
    backward_flops: float
    wave_rows: int = 132 * 128
    filling_rows: float = 0
    filling_causal: float = 20_000
    backward_filling_causal: float = 2_000
    exposed_idle: float = 0.35
    throttle: float = 0.1
    cache_bytes: int = 20 << 20
    cache_penalty: float = 0.045
    call_device_seconds: float = 20e-6
    merge_bytes_per_second: float = 2.5e12
    up_bytes_per_second: float = 46e9
    down_bytes_per_second: float = 46e9
    call_seconds: float = 140e-6
    backward_call_seconds: float = 270e-6
    copy_seconds: float = 1.5e-6
    unit_seconds: float = 400e-6
    backward_tensor_seconds: float = 140e-6
    pass_seconds: float = 2e-3
    plan_seconds: float = 40e-3
    overlaps: bool = True
    threads: int = 1
    measured: bool = False

    def share_of_rate(
        self,
        rows: int,
        causal_side: int = 0,
        streams: int = 1,
        *,
        backward: bool = False,
    ) -> float:
        """The share of the full rate that a call of ``rows`` parallel rows reaches.

        Args:
            causal_side: rows of one causal square, 0 for a plain rectangle.
            streams: calls in flight at once: one fills what another's last wave leaves
                idle.
        """
        rows = max(1, rows)
        if causal_side:
            filling = self.backward_filling_causal if backward else self.filling_causal
            share = rows / (rows + filling)
            if self.wave_rows:
                # The longest tile of a square has all its keys, and bounds the time of
                # the call.
                share = min(share, rows / (2 * self.wave_rows))
        elif self.wave_rows:
            share = rows / (self.wave_rows * math.ceil(rows / self.wave_rows))
        else:
            share = rows / (rows + self.filling_rows)
        if streams > 1:
            share = 1 - (1 - share) * self.exposed_idle
        return float(share ** (1 - self.throttle))

    def busy_share(self, n_heads: int, *, causal: bool, backward: bool) -> float:
        """The share of threads that an uncut call of ``n_heads`` heads of batch entries
        keeps busy, where each gets whole ones (backward), or the same number of rows
        (forward)."""
        heads_per_thread = max(1, n_heads) / self.threads
        if backward:
            return heads_per_thread / math.ceil(heads_per_thread)
        if not causal:
            return 1.0
        # A causal head's work up to a share x of its rows is x squared.
        work_up_to = []
        for thread in range(self.threads + 1):
            heads = heads_per_thread * thread
            work_up_to.append(int(heads) + (heads % 1) ** 2)
        longest = max(stop - start for start, stop in pairwise(work_up_to))
        return heads_per_thread / longest

    def cached_share(self, inner_bytes: int) -> float:
        """The share of the rate that is left when a head's inner operand has
        ``inner_bytes``."""
        if not self.cache_bytes or inner_bytes <= self.cache_bytes:
            return 1.0
        return max(
            0.75, 1 - self.cache_penalty * math.log2(inner_bytes / self.cache_bytes)
        )
