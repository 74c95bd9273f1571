"""Measures the rates of a device, and stores them in the user's cache directory.

The rates are those that a device holds for seconds: every figure is measured after the device has
been busy for a while. Other work on the machine only makes figures worse, so each is measured
several times and the best is kept; where even the two best differ a lot, nothing is stored. Without
a calibration plans are made with the assumed rates of ``machine.py``.
"""

from __future__ import annotations

import datetime
import math
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from quorum_attention.cache_files import cache_folder, load, private_folder, store
from quorum_attention.counts import shown
from quorum_attention.errors import CalibrationError
from quorum_attention.execution.device.backend import Backend
from quorum_attention.execution.device.lookup import backend_of, best_device, present
from quorum_attention.execution.workload import DTYPE_NAMES, ELEMENT_BYTES
from quorum_attention.kernels.fa4 import by_head_dim
from quorum_attention.kernels.merge import add_, merge_
from quorum_attention.kernels.protocol import Call, CallShape, InnerKernel, Saved
from quorum_attention.kernels.select import select_kernel
from quorum_attention.kernels.torch_private import outside
from quorum_attention.planner.machine import Machine
from quorum_attention.writing import check_target

_FILE = "calibration.json"
_HEAD_DIMS = (64, 128)
_COMMON = (
    "up_bytes_per_second", "down_bytes_per_second", "merge_bytes_per_second", "call_seconds",
    "backward_call_seconds", "plan_seconds",
)  # fmt: skip
_ROUNDS, _MOST_ROUNDS = 3, 6
# The largest factor between the two best measurements of a figure. Rates are measured over seconds,
# and are steadier than the others.
_RATE_SPREAD, _OTHER_SPREAD = 1.2, 1.5
# Share of a round that threads may wait for a core; more means that the machine is busy.
_WAITING = 0.1
# Not compared: a shape is new only once, so this cannot be measured twice.
_UNCHECKED = ("plan_seconds",)


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
    try:
        entry = _known()[_key(backend, model, dtype)]
        table = {int(d): (float(a), float(b)) for d, (a, b) in entry["flops"].items()}
        found = by_head_dim(table, head_dim)
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError):
        return None
    return found if all(math.isfinite(rate) and rate > 0 for rate in found) else None


@lru_cache(maxsize=1)
def rates_known() -> object:
    """Stands for the rates that are known: another object after each calibration. What is decided
    by rates is remembered together with it."""
    return object()


@lru_cache(maxsize=1)
def _known() -> dict[str, Any]:
    return _entries(load(_FILE))


def _entries(said: Any) -> dict[str, Any]:
    # Where there is none, or it is broken, the assumed rates are used.
    return said if isinstance(said, dict) else {}


@lru_cache(maxsize=64)
def machine_of(device: torch.device, dtype: torch.dtype, head_dim: int) -> Machine:
    """The rates of ``device``: calibrated where it has been, assumed where not."""
    backend = backend_of(device)
    base = Machine(**backend.rates(device, dtype, head_dim))
    if not backend.is_here():
        return base
    entry = _known().get(device_key(device, dtype))
    if not isinstance(entry, dict):
        return base
    try:
        table = {int(d): (float(a), float(b)) for d, (a, b) in entry["flops"].items()}
        forward, backward = by_head_dim(table, head_dim)
        common: dict[str, Any] = {name: float(entry[name]) for name in (*_COMMON, "filling_causal")}
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError):
        return base  # written by an older version
    if not all(math.isfinite(rate) and rate > 0 for rate in (forward, backward, *common.values())):
        return base
    return replace(base, flops=forward, backward_flops=backward, measured=True, **common)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured.

    Attributes:
        key: the device, torch version and dtypes that it is valid for.
        figures: as in the file; the best of all rounds.
        path: the file.
        seconds: how long the calibration took.
        rounds: how many undisturbed rounds of measurements there were.
        spread: by figure, the factor between its largest and its smallest measurement.
        better_before: by figure, how many times as good it was in the calibration that this one
            replaces, of those that were better by more than measurements may differ. Other work
            that lasts makes figures worse and keeps them alike; so may a change of the machine.
    """

    key: str
    figures: dict[str, Any]
    path: Path
    seconds: float
    rounds: int
    spread: dict[str, float]
    better_before: dict[str, float]


def calibrate(
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float16,
    progress: Callable[[str], object] | None = None,
) -> Calibration:
    """Measure the rates of a device (half a minute) and store them.

    Everything is measured at least three times, and more often while the two best measurements of
    a figure differ a lot.

    Args:
        device: None is the current CUDA device where there is one, else the CPU.
        dtype: each has a calibration of its own; on a GPU fp16 and bf16 share one.
        progress: called with a text that says what is being done.

    Raises:
        NotImplementedError: no kernel that works on rectangles runs there in this dtype.
        ValueError, TypeError: ``device`` is not available; attention does not take ``dtype``.
        CalibrationError: measurements disagree with each other; nothing has been stored.
        OSError: the file cannot be written, or its folder is not to be trusted.
    """
    started = time.perf_counter()
    where = best_device() if device is None else present(device, "device")
    if dtype not in ELEMENT_BYTES:
        raise TypeError(f"dtype must be one of torch's {DTYPE_NAMES}, got {shown(dtype)}")
    path = cache_file()
    check_target(private_folder(path.parent) / _FILE)
    bench = _Bench(where, dtype)
    rounds = _measured(bench, progress or (lambda text: None))
    best = {name: _best(name, [found[name] for found in rounds]) for name in rounds[0]}
    figures = {
        "date": datetime.date.today().isoformat(),
        "kernel": bench.kernel(_HEAD_DIMS[0]).name,
        "flops": {str(d): [best[_rate(d, which)] for which in _PASSES] for d in _HEAD_DIMS},
        "filling_causal": _filling(best["causal"], best[_rate(_HEAD_DIMS[0], "forward")], bench),
        **{name: best[name] for name in _COMMON},
    }
    key = device_key(where, dtype)
    _known.cache_clear()
    earlier = _measurements(_known().get(key))
    store(_FILE, lambda said: {**_entries(said), key: figures}, durable=True)
    _known.cache_clear()
    machine_of.cache_clear()
    rates_known.cache_clear()
    spread = {
        name: max(found[name] for found in rounds) / min(found[name] for found in rounds)
        for name in best
    }
    better = {
        name: max(value, best[name]) / min(value, best[name])
        for name, value in earlier.items()
        if _best(name, [value, best[name]]) == value
        and _apart(name, [value, best[name]]) > _limit(name)
    }
    seconds = time.perf_counter() - started
    return Calibration(key, figures, path, seconds, len(rounds), spread, better)


_PASSES = ("forward", "backward")


def _rate(head_dim: int, which: str) -> str:
    """The name of a rate among the measurements of a round."""
    return f"head_dim {head_dim} {which}"


def _best(name: str, values: list[float]) -> float:
    """The smallest value of a time, the largest of a rate."""
    return min(values) if name.endswith("_seconds") else max(values)


def _apart(name: str, values: list[float]) -> float:
    """The factor between the two best values."""
    first = _best(name, values)
    others = list(values)
    others.remove(first)
    second = _best(name, others)
    return max(first, second) / min(first, second)


def _limit(name: str) -> float:
    """The largest factor that may be between two measurements of a figure."""
    if name in _UNCHECKED:
        return math.inf
    return _RATE_SPREAD if name.startswith("head_dim") else _OTHER_SPREAD


def _measurements(entry: Any) -> dict[str, float]:
    """The figures of a stored calibration by the names of a round, those that can be; {}: it is of
    another version."""
    try:
        rates = {
            _rate(d, which): float(rate)
            for d in _HEAD_DIMS
            for which, rate in zip(_PASSES, entry["flops"][str(d)], strict=True)
        }
        found = rates | {name: float(entry[name]) for name in _COMMON}
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError):
        return {}
    return {name: value for name, value in found.items() if math.isfinite(value) and value > 0}


def _measured(bench: _Bench, progress: Callable[[str], object]) -> list[dict[str, float]]:
    """Undisturbed rounds of measurements, until the two best of every figure agree.

    Raises:
        CalibrationError: they do not after ``_MOST_ROUNDS`` rounds.
    """
    rounds: list[dict[str, float]] = []
    busy: list[float] = []
    for number in range(_MOST_ROUNDS):
        progress(f"round {number + 1} of at least {_ROUNDS}")
        began, waited = time.perf_counter(), _waited_seconds()
        found = bench.round(number)
        share = (_waited_seconds() - waited) / (time.perf_counter() - began) / bench.sizes.threads
        broken = [name for name, value in found.items() if not (math.isfinite(value) and value > 0)]
        if broken:
            raise CalibrationError(
                f"{broken[0]} was measured as {found[broken[0]]}, which cannot be; nothing was "
                f"stored"
            )
        if share > _WAITING:
            # Not used, however often it is repeated: a process with half a core sees half the rate.
            busy.append(share)
            continue
        rounds.append(found)
        if len(rounds) >= _ROUNDS and not _disagreeing(rounds):
            return rounds
    why = []
    if busy:
        why.append(
            f"in {len(busy)} of {_MOST_ROUNDS} rounds this process waited for the CPU, up to "
            f"{max(busy):.0%} of the time"
        )
    if len(rounds) > 1 and _disagreeing(rounds):
        why.append(f"measurements disagree with each other: {'; '.join(_disagreeing(rounds))}")
    raise CalibrationError(
        f"nothing was stored: {'; '.join(why)}. Something else keeps the machine busy, or its "
        f"clock changes: try again when it is quiet"
    )


def _waited_seconds() -> float:
    """Seconds that this process's threads were ready to run but had no core; 0 where the system
    does not tell."""
    waited = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # the thread may have ended
            waited += int(thread.read_text(encoding="ascii").split()[1])
    return waited / 1e9


def _disagreeing(rounds: list[dict[str, float]]) -> list[str]:
    """The figures whose two best measurements are too far apart, each with all measurements."""
    wrong = []
    for name in rounds[0]:
        values = [found[name] for found in rounds]
        if _apart(name, values) > _limit(name):
            wrong.append(f"{name} ({', '.join(f'{value:.3g}' for value in values)})")
    return wrong


def _filling(causal: float, rate: float, bench: _Bench) -> float:
    """Rows at which a causal square reaches half of ``rate``, if one of ``bench.causal_rows`` rows
    reaches ``causal``."""
    share = causal / rate
    return float(bench.causal_rows * (1 / max(0.05, min(0.999, share)) - 1))


class _Bench:
    """The measurements on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.backend = backend_of(device)
        self.sizes = self.backend.trial_sizes(device)
        self.causal_rows = self.sizes.rows // 2
        # Not torch's own generator: its numbers are the caller's.
        self._generator = torch.Generator(device).manual_seed(0)

    @outside()
    def round(self, number: int) -> dict[str, float]:
        """Everything once, by name: FLOP/s, bytes per second, and seconds (``..._seconds``)."""
        found = {}
        for head_dim in _HEAD_DIMS:
            for which, rate in zip(_PASSES, self.rates(head_dim), strict=True):
                found[_rate(head_dim, which)] = rate
        return {**found, "causal": self.causal(), **self.copies(), **self.calls(number)}

    def kernel(self, head_dim: int) -> InnerKernel:
        call = CallShape(self.device.type, self.dtype, 1, 1, head_dim, head_dim, True, True)
        chosen = select_kernel("auto", call, self.device)
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
            lambda: kernel.rectangle_forward(Call(query, key, value, False, scale)), 0.3, warm
        )
        # A backward is parallel over keys, so here the keys are the long side.
        query, key = key, query
        grad, value = value, grad
        call = Call(query, key, value, False, scale)
        saved = Saved(grad, *kernel.rectangle_forward(call))
        backward = self.seconds(lambda: kernel.rectangle_backward(call, saved), 0.3, warm)
        return flops / spent, 2.5 * flops / backward

    def causal(self) -> float:
        """FLOP/s of a causal square."""
        rows = self.causal_rows
        kernel, scale = self.kernel(64), 0.125
        query, key, value = (self.random(rows, 64) for _ in range(3))
        call = Call(query, key, value, True, scale)
        spent = self.seconds(lambda: kernel.rectangle_forward(call), 0.2)
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

    def calls(self, number: int) -> dict[str, float]:
        """Seconds of the host for one call with its merge, and of a kernel's first call of a shape
        (other shapes in every round)."""
        kernel, count = self.kernel(64), 20
        query, key, value, grad = (self.random(128, 64) for _ in range(4))
        state = torch.zeros(1, 1, 128, 64, dtype=torch.float32, device=self.device)
        lse_state = torch.zeros(1, 1, 128, dtype=torch.float32, device=self.device)
        call = Call(query, key, value, False, 0.125)
        saved = Saved(grad, *kernel.rectangle_forward(call))

        def forward() -> None:
            for _ in range(count):
                part, part_lse = kernel.rectangle_forward(call)
                merge_(state, lse_state, part, part_lse)

        def backward() -> None:
            for _ in range(count):
                for part in kernel.rectangle_backward(call, saved):
                    add_(state, part)

        # The factors are for slicing, scaling and streams around a call.
        found = {
            "call_seconds": 2 * self.seconds(forward, 0.1) / count,
            "backward_call_seconds": 2.5 * self.seconds(backward, 0.1) / count,
        }
        fresh = [self.random(640 + 128 * (3 * number + i), 64) for i in range(3)]
        times = []
        for tensor in fresh:
            self._wait()
            started = time.perf_counter()
            kernel.rectangle_forward(Call(tensor, tensor, tensor, False, 0.125))
            self._wait()
            times.append(time.perf_counter() - started)
        return {**found, "plan_seconds": statistics.median(times)}
