"""Measures the rates of a device, and stores them in the user's cache directory.

The rates are those that a device holds for seconds: every figure is measured after the device has
been busy for a while, three times, and the median is kept. Where the three differ a lot, nothing is
stored. Without a calibration plans are made with the assumed rates of ``hardware.py``.
"""

from __future__ import annotations

import datetime
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from quorum_attention.errors import CalibrationError
from quorum_attention.execution.device.backend import Backend
from quorum_attention.execution.device.lookup import available_device, backend_of, best_device
from quorum_attention.execution.dtypes import check_dtype
from quorum_attention.kernels.cache_files import cache_folder, load, private_folder, store
from quorum_attention.kernels.merge import add_, merge_
from quorum_attention.kernels.protocol import Call, CallShape, InnerKernel, Saved
from quorum_attention.kernels.select import select_kernel
from quorum_attention.kernels.torch_private import no_torch_modes
from quorum_attention.keywords import helps_with_names
from quorum_attention.planner.hardware import HardwareModel
from quorum_attention.planner.rates import assumed_hardware, rates_at_head_dim
from quorum_attention.writing import check_target

_FILE = "calibration.json"
_HEAD_DIMS = (64, 128)
_COMMON = (
    "up_bytes_per_second", "down_bytes_per_second", "merge_bytes_per_second", "call_seconds",
    "backward_call_seconds",
)  # fmt: skip
_ROUNDS = 3
# The largest factor between the measurements of a figure.
_SPREAD = 1.5


def cache_file() -> Path:
    """The file of calibrations; ``QUORUM_ATTENTION_CACHE`` names another directory for it."""
    return cache_folder() / _FILE


def device_key(device: torch.device, dtype: torch.dtype) -> str:
    """What a calibration is valid for: the device model, torch, and dtypes that are as fast."""
    backend = backend_of(device)
    return _key(backend, backend.model(device), dtype)


def _key(backend: Backend, model: str, dtype: torch.dtype) -> str:
    return f"{model}, torch {torch.__version__}, {backend.rates_of(dtype)}"


def calibrated_flops(
    backend: Backend, model: str, dtype: torch.dtype, head_dim: int
) -> tuple[float, float] | None:
    """FLOP/s of a forward and of a backward of a device model, whether or not such a device is
    here; None where none has been calibrated."""
    rates = _measured_rates(_key(backend, model, dtype), head_dim)
    return None if rates is None else (rates["flops"], rates["backward_flops"])


def _measured_rates(key: str, head_dim: int) -> dict[str, Any] | None:
    """The fields of a ``HardwareModel`` that were measured; None: not measured, or the entry is
    broken or of an older version."""
    try:
        entry = _known()[key]
        table = {int(d): (float(a), float(b)) for d, (a, b) in entry["flops"].items()}
        forward, backward = rates_at_head_dim(table, head_dim)
        rates = {name: float(entry[name]) for name in (*_COMMON, "filling_causal")}
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError):
        return None
    rates |= {"flops": forward, "backward_flops": backward}
    return rates if all(math.isfinite(r) and r > 0 for r in rates.values()) else None


@lru_cache(maxsize=1)
def rates_known() -> object:
    """Stands for the rates that are known: another object after each calibration. What is decided
    by rates is remembered together with it."""
    return object()


@lru_cache(maxsize=1)
def _known() -> dict[str, Any]:
    return _entries(load(_FILE))


def _entries(said: Any) -> dict[str, Any]:
    """Calibrations as stored; none where the file is broken."""
    return said if isinstance(said, dict) else {}


@lru_cache(maxsize=64)
def hardware_of(device: torch.device, dtype: torch.dtype, head_dim: int) -> HardwareModel:
    """The rates of ``device``: calibrated where it has been, assumed where not."""
    hardware = assumed_hardware(device, dtype, head_dim)
    backend = backend_of(device)
    if not backend.is_here():
        return hardware
    hardware = replace(hardware, **backend.known_rates(device))
    measured = _measured_rates(device_key(device, dtype), head_dim)
    if measured is None:
        return hardware
    return replace(hardware, **measured, measured=True)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured.

    Attributes:
        key: the device, torch version and dtypes that it is valid for.
        figures: as in the file; medians of all rounds.
        path: the file.
        seconds: how long the calibration took.
        rounds: how many rounds of measurements there were.
        spread: by figure, the factor between its largest and its smallest measurement.
    """

    key: str
    figures: dict[str, Any]
    path: Path
    seconds: float
    rounds: int
    spread: dict[str, float]


@helps_with_names
def calibrate(
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float16,
    progress: Callable[[str], object] | None = None,
) -> Calibration:
    """Measure the rates of a device (half a minute) and store them.

    Everything is measured three times; the median is kept.

    Args:
        device: None is the current CUDA device if there is one, else the CPU.
        dtype: each dtype has its own calibration; on a GPU fp16 and bf16 share one.
        progress: called with a text that says what is being measured.

    Raises:
        NotImplementedError: no kernel that works on rectangles runs there in this dtype.
        ValueError, TypeError: ``device`` is not available; attention does not take ``dtype``.
        CalibrationError: measurements differ too much; nothing has been stored.
        OSError: the file cannot be written, or other users may write to its folder.
    """
    started = time.perf_counter()
    where = best_device() if device is None else available_device(device, "device")
    check_dtype(dtype, "dtype")
    path = cache_file()
    check_target(private_folder(path.parent) / _FILE)
    bench = _Bench(where, dtype)
    rounds = []
    for number in range(_ROUNDS):
        if progress is not None:
            progress(f"round {number + 1} of {_ROUNDS}")
        rounds.append(bench.round())
    values = {name: [measured[name] for measured in rounds] for name in rounds[0]}
    _check_agreement(values)
    median = {name: statistics.median(measured) for name, measured in values.items()}
    # A causal square of ``causal_rows`` reaches this share of the rate.
    share = median["causal"] / median[f"head_dim {_HEAD_DIMS[0]} forward"]
    figures = {
        "date": datetime.date.today().isoformat(),
        "kernel": bench.kernel(_HEAD_DIMS[0]).name,
        "flops": {
            str(d): [median[f"head_dim {d} {which}"] for which in ("forward", "backward")]
            for d in _HEAD_DIMS
        },
        "filling_causal": float(bench.causal_rows * (1 / max(0.05, min(0.999, share)) - 1)),
        **{name: median[name] for name in _COMMON},
    }
    key = device_key(where, dtype)
    store(_FILE, lambda said: {**_entries(said), key: figures}, durable=True)
    for cached in (_known, hardware_of, rates_known):
        cached.cache_clear()
    spread = {name: max(measured) / min(measured) for name, measured in values.items()}
    return Calibration(key, figures, path, time.perf_counter() - started, _ROUNDS, spread)


def _check_agreement(values: dict[str, list[float]]) -> None:
    """Refuse measurements that cannot be, or that differ by more than ``_SPREAD``.

    Raises:
        CalibrationError: names the figure.
    """
    for name, measured in values.items():
        known = all(math.isfinite(value) and value > 0 for value in measured)
        if not known or max(measured) > _SPREAD * min(measured):
            texts = ", ".join(f"{value:.3g}" for value in measured)
            raise CalibrationError(
                f"nothing was stored: measurements disagree with each other: {name} ({texts}). "
                f"Something else keeps the machine busy, or its clock changes: try again when it "
                f"is quiet"
            )


class _Bench:
    """The measurements on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.backend = backend_of(device)
        self.sizes = self.backend.trial_sizes(device)
        self.causal_rows = self.sizes.rows // 2
        # Not torch's own generator: its numbers are the caller's.
        self._generator = torch.Generator(device).manual_seed(0)

    @no_torch_modes()
    def round(self) -> dict[str, float]:
        """Everything once, by name: FLOP/s, bytes per second, and seconds (``..._seconds``)."""
        found = {}
        for head_dim in _HEAD_DIMS:
            forward, backward = self.rates(head_dim)
            found[f"head_dim {head_dim} forward"] = forward
            found[f"head_dim {head_dim} backward"] = backward
        return {**found, "causal": self.causal(), **self.copies(), **self.calls()}

    def kernel(self, head_dim: int) -> InnerKernel:
        shape = CallShape(self.device.type, self.dtype, 1, 1, head_dim, head_dim, True, True)
        chosen = select_kernel("auto", shape, self.device)
        if not chosen.operator:
            raise NotImplementedError(
                f"only kernels that work on rectangles can be calibrated, not {chosen.name!r}"
            )
        return chosen

    def random(self, rows: int, head_dim: int) -> torch.Tensor:
        shape, generator = (1, 1, rows, head_dim), self._generator
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device=self.device)
        return drawn.to(self.dtype)

    def seconds(self, run: Callable[[], object], at_least: float, warm: float = 0.0) -> float:
        """Median seconds of ``run``, over runs that together take ``at_least`` seconds. Before them
        the device is warmed up for as long, or for ``warm`` seconds if that is more."""
        for lasting in (max(warm, at_least), at_least):
            times: list[float] = []
            while sum(times) < lasting or len(times) < 3:
                self._wait()
                started = time.perf_counter()
                run()
                self._wait()
                times.append(time.perf_counter() - started)
        return statistics.median(times)

    def _wait(self) -> None:
        self.backend.synchronize(self.device)

    def rates(self, head_dim: int) -> tuple[float, float]:
        """FLOP/s of a large plain rectangle, forward and backward."""
        kernel, scale = self.kernel(head_dim), head_dim**-0.5
        rows, other, warm = self.sizes.rows, self.sizes.other_rows, self.sizes.warm_seconds
        flops = 4.0 * head_dim * rows * other
        query, grad = self.random(rows, head_dim), self.random(rows, head_dim)
        key, value = self.random(other, head_dim), self.random(other, head_dim)
        spent = self.seconds(
            lambda: kernel.whole_forward(Call(query, key, value, False, scale)), 0.3, warm
        )
        # A backward is parallel over keys, so here the keys are the long side.
        query, key = key, query
        grad, value = value, grad
        call = Call(query, key, value, False, scale)
        saved = Saved(grad, *kernel.whole_forward(call))
        backward = self.seconds(lambda: kernel.whole_backward(call, saved), 0.3, warm)
        return flops / spent, 2.5 * flops / backward

    def causal(self) -> float:
        """FLOP/s of a causal square."""
        rows = self.causal_rows
        kernel, scale = self.kernel(64), 0.125
        query, key, value = (self.random(rows, 64) for _ in range(3))
        call = Call(query, key, value, True, scale)
        spent = self.seconds(lambda: kernel.whole_forward(call), 0.2)
        return 2.0 * 64 * rows * rows / spent

    def copies(self) -> dict[str, float]:
        """Bytes per second: up and down, both at once, and of a merge in device memory."""
        n_bytes = self.sizes.copy_bytes
        rows = n_bytes // 256
        state = torch.zeros(1, 1, rows, 64, dtype=torch.float32, device=self.device)
        lse = torch.zeros(1, 1, rows, dtype=torch.float32, device=self.device)
        part = torch.ones(1, 1, rows, 64, dtype=self.dtype, device=self.device)
        spent = self.seconds(lambda: merge_(state, lse, part, lse + 1), 0.1)
        merged = part.numel() * (2 * state.element_size() + part.element_size())
        found = {"merge_bytes_per_second": merged / spent}
        rate = n_bytes / self.seconds(self.backend.both_ways(self.device, n_bytes), 0.2)
        return {**found, "up_bytes_per_second": rate, "down_bytes_per_second": rate}

    def calls(self) -> dict[str, float]:
        """Seconds of the host for one call with its merge."""
        kernel, count = self.kernel(64), 20
        query, key, value, grad = (self.random(128, 64) for _ in range(4))
        state = torch.zeros(1, 1, 128, 64, dtype=torch.float32, device=self.device)
        lse_state = torch.zeros(1, 1, 128, dtype=torch.float32, device=self.device)
        call = Call(query, key, value, False, 0.125)
        saved = Saved(grad, *kernel.whole_forward(call))

        def forward() -> None:
            for _ in range(count):
                part, part_lse = kernel.whole_forward(call)
                merge_(state, lse_state, part, part_lse)

        def backward() -> None:
            for _ in range(count):
                for part in kernel.whole_backward(call, saved):
                    add_(state, part)

        # The factors are for slicing, scaling and streams around a call.
        return {
            "call_seconds": 2 * self.seconds(forward, 0.1) / count,
            "backward_call_seconds": 2.5 * self.seconds(backward, 0.1) / count,
        }
