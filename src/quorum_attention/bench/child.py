"""One measurement in a process of its own, for ``bench`` and ``recover``.

A memory limit cannot be lifted again, kernels cache what they prepare, and a crash must
not end the other measurements. The process reads a ``Spec`` from its command line and
writes an ``Outcome``.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from quorum_attention.bench.limits import PeakMemory, is_limit_error, warm_up
from quorum_attention.bench.measurement import (
    FAILED,
    OUT_OF_MEMORY,
    UNSUPPORTED,
    Outcome,
    Spec,
)
from quorum_attention.bench.methods import (
    METHODS,
    RESULTS,
    CallTensors,
    ForwardResult,
    Method,
    exact_results,
)
from quorum_attention.bench.verification import relative_error, sampled_errors
from quorum_attention.errors import first_line, is_out_of_memory
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.report import Report
from quorum_attention.files.inputs import read_inputs
from quorum_attention.progress import load_bars, progress_bar

# A small call first loads all code on the way, and makes libraries allocate what they
# keep.
WARM_TOKENS = 512
_WARM_BUDGET = 1 << 30
# glibc keeps freed memory unless large blocks are mapped on their own.
_MAPPED_BYTES = 1 << 20
# The status of a shell whose command was interrupted.
_INTERRUPTED = 130
# ``die_with_parent`` comes first: importing torch takes seconds.
CODE = """
import sys
from quorum_attention.bench.lifetime import die_with_parent

die_with_parent(int(sys.argv[1]))
from quorum_attention.bench.child import main

main(sys.argv[2])
"""

ReportProgress = Callable[[int, int, str], object]


def run_child(spec: Spec, timeout: float | None = None) -> Outcome:
    """The measurement of a new process; a crash or a timeout is a measurement, too."""
    environment = {
        **os.environ,
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": str(_MAPPED_BYTES),
        "MALLOC_TRIM_THRESHOLD_": str(_MAPPED_BYTES),
        # On a busy machine, threads that spin while they wait take the cores from each
        # other.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    command = [sys.executable, "-c", CODE, str(os.getpid()), json.dumps(asdict(spec))]
    try:
        # On Ctrl-C, which the child gets too, run() waits for it or kills it.
        process = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=None if spec.progress else subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(FAILED, f"not done after {timeout:.4g} s")
    lines = process.stdout.splitlines()
    if process.returncode == 0 and lines:
        return Outcome(**json.loads(lines[-1]))
    if process.returncode in (-signal.SIGINT, _INTERRUPTED):
        raise KeyboardInterrupt
    return _failure(process.returncode, process.stderr or "")


def _failure(status: int, stderr: str) -> Outcome:
    """The measurement of a process that ended without one."""
    ending = f"signal {-status}" if status < 0 else f"status {status}"
    reason = f"its process ended with {ending} and no answer"
    lines = stderr.strip().splitlines()
    if lines:
        reason = f"{reason}: {lines[-1]}"
    return Outcome(FAILED, reason)


def main(spec: str) -> None:
    """Measure what ``spec``, in JSON, says and print the measurement."""
    measurement = measure(Spec(**json.loads(spec)))
    print("\n" + json.dumps(asdict(measurement)))


def measure(spec: Spec) -> Outcome:
    """Measure in this process; out of memory and all other failures are measurements,
    too."""
    measurement = Outcome()
    bar: AbstractContextManager[Any] = nullcontext()
    if spec.progress:
        load_bars()  # now, while memory is not limited
        bar = progress_bar()
    with bar as report_progress:
        try:
            _measure_into(measurement, spec, report_progress)
        except Exception as error:
            measurement.status = _status_of(error, spec)
            measurement.reason = f"{type(error).__name__}: {first_line(error)}"
    return measurement


def _measure_into(
    measurement: Outcome, spec: Spec, report_progress: ReportProgress | None
) -> None:
    """Measure errors against float64, if ``spec`` asks for draws of them, or else
    times."""
    if not spec.draws:
        _Timing(spec, measurement, report_progress).run()
    for draw in range(spec.draws):
        measurement.stage = f"draw {draw}"
        _measure_errors(spec, draw, measurement)
    measurement.stage = ""


def _status_of(error: Exception, spec: Spec) -> str:
    # In torch's words, and in ours.
    if "No available kernel" in str(error) or isinstance(error, NotImplementedError):
        return UNSUPPORTED
    process_is_limited = spec.limit_bytes is not None and spec.device == "cpu"
    is_without_memory = is_limit_error if process_is_limited else is_out_of_memory
    return OUT_OF_MEMORY if is_without_memory(error) else FAILED


def _measure_errors(spec: Spec, seed: int, measurement: Outcome) -> None:
    """Measure the errors of one draw against float64."""
    method = METHODS[spec.method]
    call = _drawn_call(spec, method.on_device, seed)
    forward = method.forward(call)
    grads = method.backward(call, forward)
    results = [forward.out.detach(), *grads]
    named_results = zip(RESULTS, results, exact_results(call), strict=True)
    for name, result, exact in named_results:
        errors = measurement.errors.setdefault(name, [])
        errors.append(relative_error(result, exact))


def _drawn_call(spec: Spec, on_device: bool, seed: int = 0) -> CallTensors:
    """A call on random inputs, or those of a file, on the device or in (page-locked)
    memory of the host."""
    device = torch.device(spec.device)
    place = device if on_device else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(seed)
    draw = partial(
        _normal, dtype=getattr(torch, spec.dtype), place=place, generator=generator
    )
    if spec.inputs is None:
        head_counts = (spec.heads, spec.kv_heads, spec.kv_heads)
        inputs = [draw((1, heads, spec.tokens, spec.head_dim)) for heads in head_counts]
    else:
        tensors = read_inputs([spec.inputs]).tensors
        inputs = [tensors[name] for name in ("query", "key", "value")]
    if on_device:
        inputs = [tensor.to(device) for tensor in inputs]
    query, _, value = inputs
    grad = draw((*query.shape[:-1], value.shape[-1])) if spec.backward else None
    options = {
        "is_causal": spec.is_causal,
        "enable_gqa": True,
        "devices": device,
        "budget": spec.budget_bytes,
    }
    return CallTensors(device, inputs, grad, options)


def _normal(
    shape: Sequence[int],
    dtype: torch.dtype,
    place: torch.device,
    generator: torch.Generator,
) -> torch.Tensor:
    """Draw a tensor (b, h, n, d) on a device, or in (page-locked) host memory."""
    is_pinned = place.type != generator.device.type
    tensor = torch.empty(shape, dtype=dtype, device=place, pin_memory=is_pinned)
    # One head at a time takes no more of the device's memory than a head.
    for head in tensor.view(-1, *shape[-2:]):
        head.copy_(
            torch.randn(head.shape, generator=generator, device=generator.device)
        )
    return tensor


@dataclass(frozen=True)
class _Timing:
    """Times the calls of a measurement."""

    spec: Spec
    measurement: Outcome
    report_progress: ReportProgress | None

    @property
    def method(self) -> Method:
        """The method that computes the calls."""
        return METHODS[self.spec.method]

    @property
    def device(self) -> torch.device:
        """The device that computes the calls."""
        return torch.device(self.spec.device)

    def run(self) -> None:
        """Time the calls, under the limit of memory if there is one, and check sampled
        rows."""
        spec = self.spec
        measurement = self.measurement
        if self.device.type == "cpu":
            warm_up()
        self._run_small_calls()
        measurement.stage = "inputs"
        # Inputs that torch reads and results that are streamed are allocated before the
        # limit.
        call = _drawn_call(spec, self.method.on_device)
        streams = self.method.is_ours and not self.method.on_device
        if streams and (spec.check or self.device.type != "cpu"):
            call.allocate_results()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        peak = PeakMemory(self.device)
        try:
            with peak:
                if spec.limit_bytes is not None:
                    peak.limit(spec.limit_bytes)
                self._run_calls(call)
        finally:
            measurement.peak_bytes = peak.peak_bytes
        if spec.check and self.method.is_ours:
            measurement.errors = _sampled_errors(call, spec.is_causal)

    def _run_small_calls(self) -> None:
        """Make the call with few tokens, so that libraries are ready when it is
        timed."""
        spec = self.spec
        small = replace(
            spec,
            tokens=min(spec.tokens, WARM_TOKENS),
            repeats=min(spec.repeats, 1),
            inputs=None,
        )
        call = _drawn_call(small, self.method.on_device)
        call.options["budget"] = None if spec.budget_bytes is None else _WARM_BUDGET
        _Timing(small, Outcome(), None)._run_calls(call)

    def _run_calls(self, call: CallTensors) -> None:
        """Make a first call and, as long as they do not take too long, ``repeats``
        others."""
        start = time.perf_counter()
        self._run_first_call(call)
        for _ in range(self.spec.repeats):
            if time.perf_counter() - start > self.spec.patience:
                return
            seconds = self._run_call(call, "second ")
            self.measurement.forward_seconds += seconds[:1]
            self.measurement.backward_seconds += seconds[1:]

    def _run_first_call(self, call: CallTensors) -> None:
        """Make the first call. Its report times every stage, which takes time."""
        report = Report()
        call.options["report"] = report
        self.measurement.first_seconds = self._run_call(call, "")
        call.options["report"] = None
        if self.method.is_ours:
            self.measurement.report = report.to_dict()

    def _run_call(self, call: CallTensors, prefix: str) -> list[float]:
        """Make one call; the seconds of its forward and, if there is one, its backward.

        No tensor of the call outlives it: the next call has all memory for itself.

        Args:
            prefix: of the stages' names.
        """
        if self.report_progress is not None:
            show = self.report_progress
            call.options["progress"] = lambda done, total, label: show(
                done, total, prefix + label
            )
        stage = self._start_stage(f"{prefix}forward")
        result = self.method.forward(call)
        seconds = [self._seconds_since(stage)]
        if call.grad is not None:
            stage = self._start_stage(f"{prefix}backward")
            self.method.backward(call, result)
            seconds.append(self._seconds_since(stage))
        _store_lse(call, result)
        del result
        gc.collect()
        return seconds

    def _start_stage(self, name: str) -> float:
        backend_of(self.device).synchronize(self.device)
        self.measurement.stage = name
        return time.perf_counter()

    def _seconds_since(self, start: float) -> float:
        backend_of(self.device).synchronize(self.device)
        return time.perf_counter() - start


def _store_lse(call: CallTensors, result: ForwardResult) -> None:
    """Keep the log-sum-exp beside the results that are kept."""
    if call.results:
        assert result.lse is not None
        call.results["lse"].copy_(result.lse)


def _sampled_errors(call: CallTensors, is_causal: bool) -> dict[str, list[float]]:
    """The errors of sampled rows of our results against float64, by result."""
    out, lse, *grads = call.results.values()
    errors = sampled_errors(
        call.inputs, out, lse, call.grad, grads, is_causal=is_causal
    )
    return {name: [error] for name, error in errors.items()}
