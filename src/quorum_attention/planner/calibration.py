"""The calibration of a device: rates that were measured, stored in the user's cache
directory.

The rates are those that a device holds for seconds: every figure is measured after the
device has been busy for a while, three times, and the median is kept. Where the three
differ a lot, nothing is stored. Without a calibration plans are made with the assumed
rates of ``rates.py``.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from quorum_attention.errors import CalibrationError
from quorum_attention.execution.device.backend import Backend
from quorum_attention.execution.device.lookup import (
    available_device,
    backend_of,
    best_device,
)
from quorum_attention.execution.dtypes import check_dtype
from quorum_attention.kernels.cache_files import (
    cache_folder,
    load,
    private_folder,
    store,
)
from quorum_attention.keywords import helps_with_names
from quorum_attention.plain_types import JsonObject
from quorum_attention.planner.hardware import HardwareModel
from quorum_attention.planner.rate_measurements import HEAD_DIMS, RateMeasurements
from quorum_attention.planner.rates import assumed_hardware, rates_at_head_dim
from quorum_attention.writing import check_target

_FILE = "calibration.json"
# Rates that do not depend on the head dimension.
_COMMON_RATES = (
    "up_bytes_per_second",
    "down_bytes_per_second",
    "merge_bytes_per_second",
    "call_seconds",
    "backward_call_seconds",
)
_ROUNDS = 3
# The largest factor between the measurements of a figure.
_SPREAD = 1.5


def cache_file() -> Path:
    """Return the file of calibrations; ``QUORUM_ATTENTION_CACHE`` names its
    directory."""
    return cache_folder() / _FILE


def device_key(device: torch.device, dtype: torch.dtype) -> str:
    """Return the key of a calibration: the device model, torch, and dtypes that are as
    fast."""
    backend = backend_of(device)
    return _key(backend, backend.model(device), dtype)


def _key(backend: Backend, model: str, dtype: torch.dtype) -> str:
    return f"{model}, torch {torch.__version__}, {backend.rates_of(dtype)}"


def calibrated_flops(
    backend: Backend, model: str, dtype: torch.dtype, head_dim: int
) -> tuple[float, float] | None:
    """Return the FLOP/s of a forward and of a backward of a device model.

    No such device has to be here. None where none has been calibrated.
    """
    rates = _measured_rates(_key(backend, model, dtype), head_dim)
    return None if rates is None else (rates["flops"], rates["backward_flops"])


def _measured_rates(key: str, head_dim: int) -> JsonObject | None:
    """Return the fields of a ``HardwareModel`` that were measured.

    None: not measured, or the entry is broken or of an older version.
    """
    try:
        entry = _stored_entries()[key]
        flops_by_head_dim = {
            int(measured_head_dim): (float(forward), float(backward))
            for measured_head_dim, (forward, backward) in entry["flops"].items()
        }
        forward_flops, backward_flops = rates_at_head_dim(flops_by_head_dim, head_dim)
        rates = {
            name: float(entry[name]) for name in (*_COMMON_RATES, "filling_causal")
        }
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError):
        return None
    rates["flops"] = forward_flops
    rates["backward_flops"] = backward_flops
    is_usable = all(math.isfinite(rate) and rate > 0 for rate in rates.values())
    return rates if is_usable else None


@lru_cache(maxsize=1)
def rates_known() -> object:
    """Return an object that stands for the rates that are known, another one after a
    calibration.

    What is decided by rates is remembered together with this object.
    """
    return object()


@lru_cache(maxsize=1)
def _stored_entries() -> JsonObject:
    return _entries_of(load(_FILE))


def _entries_of(content: Any) -> JsonObject:
    """Return calibrations as stored; none where the file is broken."""
    return content if isinstance(content, dict) else {}


@lru_cache(maxsize=64)
def hardware_of(
    device: torch.device, dtype: torch.dtype, head_dim: int
) -> HardwareModel:
    """Return the rates of ``device``: calibrated where it has been, assumed where
    not."""
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
    """The rates of a device, as measured and stored.

    Attributes:
        key: the device, torch version and dtypes that it is valid for.
        figures: as in the file; medians of all rounds.
        path: the file.
        seconds: how long the calibration took.
        rounds: how many rounds of measurements there were.
        spread: by figure, the factor between its largest and its smallest measurement.
    """

    key: str
    figures: JsonObject
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
        NotImplementedError: no kernel that works on rectangles runs there in this
            dtype.
        ValueError, TypeError: ``device`` is not available; attention does not take
            ``dtype``.
        CalibrationError: measurements differ too much; nothing has been stored.
        OSError: the file cannot be written, or other users may write to its folder.
    """
    started = time.perf_counter()
    where = best_device() if device is None else available_device(device, "device")
    check_dtype(dtype, "dtype")
    path = cache_file()
    check_target(private_folder(path.parent) / _FILE)
    measurements = RateMeasurements(where, dtype)
    rounds = []
    for number in range(_ROUNDS):
        if progress is not None:
            progress(f"round {number + 1} of {_ROUNDS}")
        rounds.append(measurements.round())
    values = {name: [figures[name] for figures in rounds] for name in rounds[0]}
    _check_agreement(values)
    import statistics  # takes longer to import than all files of the planner

    medians = {name: statistics.median(measured) for name, measured in values.items()}
    figures: JsonObject = {
        "date": datetime.date.today().isoformat(),
        "kernel": measurements.kernel(HEAD_DIMS[0]).name,
        "flops": {
            str(head_dim): [
                medians[f"head_dim {head_dim} forward"],
                medians[f"head_dim {head_dim} backward"],
            ]
            for head_dim in HEAD_DIMS
        },
        "filling_causal": _filling_causal(medians, measurements.causal_rows),
        **{name: medians[name] for name in _COMMON_RATES},
    }
    key = device_key(where, dtype)
    store(
        _FILE,
        lambda content: {**_entries_of(content), key: figures},
        durable=True,
    )
    for cached in (_stored_entries, hardware_of, rates_known):
        cached.cache_clear()
    spread = {name: max(measured) / min(measured) for name, measured in values.items()}
    return Calibration(
        key, figures, path, time.perf_counter() - started, _ROUNDS, spread
    )


def _filling_causal(medians: dict[str, float], causal_rows: int) -> float:
    """Return the rows at which a causal call reaches half the rate (see
    ``HardwareModel``)."""
    share_of_rate = medians["causal"] / medians[f"head_dim {HEAD_DIMS[0]} forward"]
    share_of_rate = max(0.05, min(0.999, share_of_rate))
    return float(causal_rows * (1 / share_of_rate - 1))


def _check_agreement(values: dict[str, list[float]]) -> None:
    """Refuse measurements that cannot be, or that differ by more than ``_SPREAD``.

    Raises:
        CalibrationError: names the figure.
    """
    for name, measured in values.items():
        is_possible = all(math.isfinite(value) and value > 0 for value in measured)
        if not is_possible or max(measured) > _SPREAD * min(measured):
            texts = ", ".join(f"{value:.3g}" for value in measured)
            raise CalibrationError(
                f"nothing was stored: measurements disagree with each other: {name} "
                f"({texts}). Something else keeps the machine busy, or its clock "
                "changes: try again when it is quiet"
            )
