"""Measures the rates of a device once, and keeps them where the platform keeps caches.

Rates are those a device holds for seconds, not its first millisecond's: every figure is taken
after the device has been busy for a while. Without a calibration plans are made with the assumed
figures of ``machine.py``.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import platformdirs
import torch

from quorum_attention.counts import shown
from quorum_attention.devices import present
from quorum_attention.execution.workload import ELEMENT_BYTES
from quorum_attention.kernels.merge import add_, merge_
from quorum_attention.kernels.protocol import CallShape
from quorum_attention.kernels.rectangles import RectangleKernel
from quorum_attention.kernels.select import select_kernel
from quorum_attention.planner.machine import Machine, assumed, by_head_dim

_FILE = "calibration.json"
_HEAD_DIMS = (64, 128)
_COMMON = (
    "up_bytes_per_second", "down_bytes_per_second", "merge_bytes_per_second", "call_seconds",
    "backward_call_seconds", "plan_seconds",
)  # fmt: skip


def cache_file() -> Path:
    """Where calibrations are kept; ``QUORUM_ATTENTION_CACHE`` names another directory."""
    named = os.environ.get("QUORUM_ATTENTION_CACHE")
    return Path(named or platformdirs.user_cache_dir("quorum-attention")) / _FILE


def device_key(device: torch.device, dtype: torch.dtype) -> str:
    """What a calibration is valid for: the device model, torch, and the width of the dtype."""
    width = f"{dtype.itemsize * 8} bit"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return f"{name}, torch {torch.__version__}, {width}"
    return f"cpu, {torch.get_num_threads()} threads, torch {torch.__version__}, {width}"


@lru_cache(maxsize=1)
def _known() -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # None yet, or broken: then the assumed figures do.
        return {}
    return found if isinstance(found, dict) else {}


@lru_cache(maxsize=64)
def machine_of(device: torch.device, dtype: torch.dtype, head_dim: int) -> Machine:
    """The rates of ``device``: calibrated where it has been, assumed where not."""
    base = assumed(device.type, dtype, head_dim)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return base
        properties = torch.cuda.get_device_properties(device)
        base = replace(
            base,
            wave_rows=properties.multi_processor_count * 128,
            cache_bytes=int(properties.L2_cache_size) // 3,
        )
    entry = _known().get(device_key(device, dtype))
    if not isinstance(entry, dict):
        return base
    try:
        table = {int(d): (float(a), float(b)) for d, (a, b) in entry["flops"].items()}
        forward, backward = by_head_dim(table, head_dim)
        common: dict[str, Any] = {name: float(entry[name]) for name in (*_COMMON, "filling_causal")}
    except (KeyError, IndexError, TypeError, ValueError):
        return base  # of an older version
    return replace(base, flops=forward, backward_flops=backward, measured=True, **common)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured.

    Attributes:
        key: what it is valid for.
        figures: as in the file.
        path: the file.
        seconds: how long it took.
    """

    key: str
    figures: dict[str, Any]
    path: Path
    seconds: float


def calibrate(
    device: str | torch.device | None = None, dtype: torch.dtype = torch.float16
) -> Calibration:
    """Measure a device (well under 30 s on a GPU) and remember it.

    Args:
        device: None is the current CUDA device where there is one, else the CPU.
        dtype: fp16 and bf16 share a calibration; so do fp32 and other 32-bit types.

    Raises:
        NotImplementedError: no kernel that works on rectangles runs there in this dtype.
        ValueError, TypeError: ``device`` is not here; ``dtype`` is none that attention takes.
    """
    started = time.perf_counter()
    default = "cuda" if torch.cuda.is_available() else "cpu"
    where = present(default if device is None else device, "device")
    if dtype not in ELEMENT_BYTES:
        names = ", ".join(str(known).removeprefix("torch.") for known in ELEMENT_BYTES)
        raise TypeError(f"dtype must be one of torch's {names}, got {shown(dtype)}")
    bench = _Bench(where, dtype)
    flops = {str(d): bench.rates(d) for d in _HEAD_DIMS}
    figures = {
        "date": datetime.date.today().isoformat(),
        "kernel": bench.kernel(_HEAD_DIMS[0]).name,
        "flops": flops,
        "filling_causal": bench.filling_causal(flops["64"][0]),
        **bench.copies(),
        **bench.calls(),
    }
    path = cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    key = device_key(where, dtype)
    _known.cache_clear()
    # Written beside and moved over, so that another process never reads half a file.
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps({**_known(), key: figures}, indent=1), encoding="utf-8")
    fresh.replace(path)
    _known.cache_clear()
    machine_of.cache_clear()
    return Calibration(key, figures, path, time.perf_counter() - started)


class _Bench:
    """Times things on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.on_cuda = device.type == "cuda"
        base = assumed(device.type, dtype)
        # Whole waves, so that what is timed is the rate and not the last wave.
        self.rows = 8 * base.wave_rows if self.on_cuda else 2048
        if self.on_cuda:
            self.rows = 8 * 128 * torch.cuda.get_device_properties(device).multi_processor_count
        self.other = 65_536 if self.on_cuda else 2048

    def kernel(self, head_dim: int) -> RectangleKernel:
        call = CallShape(self.device.type, self.dtype, 1, 1, head_dim, head_dim, True, True)
        found = select_kernel("auto", call, self.device)
        if not isinstance(found, RectangleKernel):
            raise NotImplementedError(
                f"only kernels that work on rectangles can be calibrated, not {found.name!r}"
            )
        return found

    def random(self, rows: int, head_dim: int) -> torch.Tensor:
        return torch.randn(1, 1, rows, head_dim, device=self.device).to(self.dtype)

    def seconds(self, run: Callable[[], object], at_least: float) -> float:
        """Median of runs that together take ``at_least`` seconds, as long again for warming up."""
        for _ in range(2):
            times: list[float] = []
            while sum(times) < at_least or len(times) < 3:
                self._wait()
                started = time.perf_counter()
                run()
                self._wait()
                times.append(time.perf_counter() - started)
        return statistics.median(times)

    def _wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def rates(self, head_dim: int) -> tuple[float, float]:
        """FLOP/s of a large plain rectangle, forward and backward."""
        kernel, scale = self.kernel(head_dim), head_dim**-0.5
        flops = 4.0 * head_dim * self.rows * self.other
        query, grad = self.random(self.rows, head_dim), self.random(self.rows, head_dim)
        key, value = self.random(self.other, head_dim), self.random(self.other, head_dim)
        spent = self.seconds(
            lambda: kernel.rectangle_forward(query, key, value, False, scale, None), 0.7
        )
        # A backward is parallel over keys: the long side is theirs.
        query, key = key, query
        grad, value = value, grad
        out, lse = kernel.rectangle_forward(query, key, value, False, scale, None)
        backward = self.seconds(
            lambda: kernel.rectangle_backward(
                grad, query, key, value, out, lse, False, scale, None
            ),
            0.7,
        )
        return flops / spent, 2.5 * flops / backward

    def filling_causal(self, rate: float) -> float:
        """Rows at which a causal square reaches half of ``rate``."""
        rows = self.rows // 2
        kernel, scale = self.kernel(64), 0.125
        query, key, value = (self.random(rows, 64) for _ in range(3))
        spent = self.seconds(
            lambda: kernel.rectangle_forward(query, key, value, True, scale, None), 0.2
        )
        share = 2.0 * 64 * rows * rows / spent / rate
        return rows * (1 / max(0.05, min(0.999, share)) - 1)

    def copies(self) -> dict[str, float]:
        """Bytes a second up and down, both at once, and through device memory."""
        n_bytes = 256 << 20 if self.on_cuda else 32 << 20
        rows = n_bytes // 256
        state = torch.zeros(1, 1, rows, 64, device=self.device)
        lse = torch.zeros(1, 1, rows, device=self.device)
        part = torch.ones(1, 1, rows, 64, device=self.device).to(self.dtype)
        spent = self.seconds(lambda: merge_(state, lse, part, lse + 1), 0.1)
        merged = part.numel() * (2 * state.element_size() + part.element_size())
        found = {"merge_bytes_per_second": merged / spent}
        host = [torch.empty(n_bytes, dtype=torch.uint8) for _ in range(2)]
        near = [torch.empty(n_bytes, dtype=torch.uint8, device=self.device) for _ in range(2)]
        if not self.on_cuda:
            rate = n_bytes / self.seconds(lambda: near[0].copy_(host[0]), 0.1)
            return {**found, "up_bytes_per_second": rate, "down_bytes_per_second": rate}
        host = [tensor.pin_memory() for tensor in host]
        streams = [torch.cuda.Stream(self.device) for _ in range(2)]

        def both() -> None:
            with torch.cuda.stream(streams[0]):
                near[0].copy_(host[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                host[1].copy_(near[1], non_blocking=True)

        rate = n_bytes / self.seconds(both, 0.2)
        return {**found, "up_bytes_per_second": rate, "down_bytes_per_second": rate}

    def calls(self) -> dict[str, float]:
        """What the host takes for one call with its merge, and a kernel for a new shape."""
        kernel, count = self.kernel(64), 20
        query, key, value, grad = (self.random(128, 64) for _ in range(4))
        state = torch.zeros(1, 1, 128, 64, device=self.device)
        lse_state = torch.zeros(1, 1, 128, device=self.device)
        out, lse = kernel.rectangle_forward(query, key, value, False, 0.125, None)

        def forward() -> None:
            for _ in range(count):
                part, part_lse = kernel.rectangle_forward(query, key, value, False, 0.125, None)
                merge_(state, lse_state, part, part_lse)

        def backward() -> None:
            for _ in range(count):
                for part in kernel.rectangle_backward(
                    grad, query, key, value, out, lse, False, 0.125, None
                ):
                    add_(state, part)

        # Slicing, scaling and streams around a call take about as long again as its merge.
        found = {
            "call_seconds": 2 * self.seconds(forward, 0.1) / count,
            "backward_call_seconds": 2.5 * self.seconds(backward, 0.1) / count,
        }
        fresh = [self.random(640 + 128 * i, 64) for i in range(3)]
        times = []
        for tensor in fresh:
            self._wait()
            started = time.perf_counter()
            kernel.rectangle_forward(tensor, tensor, tensor, False, 0.125, None)
            self._wait()
            times.append(time.perf_counter() - started)
        return {**found, "plan_seconds": statistics.median(times)}
