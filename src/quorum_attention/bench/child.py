"""One measurement in a process of its own, for ``bench`` and ``recover``.

A memory limit cannot be lifted again, kernels cache what they prepare, and a crash must not end the
other measurements. The process reads a ``Spec`` from its command line and writes an ``Answer``.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from quorum_attention.bench.methods import METHODS, RESULTS, Call, Method, differences, exact
from quorum_attention.errors import first_line, is_out_of_memory
from quorum_attention.execution.report import Report
from quorum_attention.files import open_tensors
from quorum_attention.limits import PeakMemory, ran_out, warm_up
from quorum_attention.progress import progress_bar

OK, OUT_OF_MEMORY, UNSUPPORTED, FAILED = "ok", "out of memory", "not supported", "failed"
INPUTS_TIMES = 0.05  # the paper's, where a kernel is compared with itself
# A small call first loads all code on the way, and makes libraries allocate what they keep.
WARM_TOKENS = 512
# ``end_with`` comes first: importing torch takes seconds.
CODE = """
import sys
from quorum_attention.lifetime import end_with

end_with(int(sys.argv[1]))
from quorum_attention.bench.child import main

main(*sys.argv[2:])
"""


@dataclass(frozen=True)
class Spec:
    """What to measure.

    Attributes:
        method: a name of ``methods.METHODS``.
        tokens, heads, kv_heads, head_dim, dtype, is_causal: a call on random inputs; batch 1.
        backward: whether gradients are computed as well.
        limit_bytes: enforced limit beyond the start (CPU: of the process, GPU: of the allocator).
        budget_bytes: what our methods are told.
        repeats: timed calls after a first one.
        patience: no further call after so many seconds.
        draws: how often errors against float64 are measured, each time with other inputs.
        itself: compare the kernel ``method`` with itself recovered, ``draws`` times.
        files: safetensors files in place of random inputs: with query, key, value; with grad_out;
            with the results, which are filled.
        progress: whether to show a progress bar.
    """

    method: str
    tokens: int = 0
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float16"
    is_causal: bool = True
    backward: bool = False
    device: str = "cuda"
    limit_bytes: int | None = None
    budget_bytes: int | None = None
    repeats: int = 3
    patience: float = float("inf")
    seed: int = 0
    draws: int = 0
    itself: bool = False
    files: tuple[str, str, str] | None = None
    progress: bool = False


@dataclass
class Answer:
    """The outcome of a measurement.

    Attributes:
        status: OK, OUT_OF_MEMORY, UNSUPPORTED or FAILED; ``reason`` says more.
        stage: what was being done when it failed.
        first_seconds: of the first call: forward, and backward if there is one.
        forward_seconds, backward_seconds: of the calls after it.
        peak_bytes: most memory beyond the inputs on the device (CPU: of the process).
        input_bytes: bytes of the inputs on the device.
        errors: by result ("out", "grad_query", ...), the relative error of every draw.
        differences: by result, the largest and the mean difference of every draw and depth.
        report: our method's own report.
    """

    status: str = OK
    reason: str = ""
    stage: str = ""
    first_seconds: list[float] = field(default_factory=list)
    forward_seconds: list[float] = field(default_factory=list)
    backward_seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    input_bytes: int = 0
    errors: dict[str, list[float]] = field(default_factory=dict)
    differences: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether it was measured."""
        return self.status == OK


def run_child(spec: Spec, timeout: float | None = None) -> Answer:
    """The answer of a new process; a crash or a timeout is an answer, too."""
    # glibc keeps freed memory unless told to map large blocks on their own. On a busy machine,
    # threads that spin while they wait take the cores from each other.
    environment = {
        **os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 20), "OMP_WAIT_POLICY": "PASSIVE",
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="quorum-attention-") as folder:
        path, log = Path(folder, "answer"), Path(folder, "log")
        asked = json.dumps(asdict(spec))
        command = [sys.executable, "-c", CODE, str(os.getpid()), asked, str(path)]
        with log.open("wb") as written:
            stderr = None if spec.progress else written
            try:
                # On Ctrl-C, which the child gets too, run() waits for it or kills it.
                status = subprocess.run(
                    command, env=environment, stdout=written, stderr=stderr, timeout=timeout,
                    check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                return Answer(FAILED, f"not done after {timeout:.4g} s")
        if status == 0 and path.exists():
            return Answer(**json.loads(path.read_text()))
        if status in (-signal.SIGINT, 130):
            raise KeyboardInterrupt
        said = log.read_text(errors="replace").strip().splitlines()[-1:]
    how = f"signal {-status}" if status < 0 else f"status {status}"
    return Answer(FAILED, ": ".join([f"its process ended with {how} and no answer", *said]))


def main(spec: str, path: str) -> None:
    """Measure what ``spec``, in JSON, says and write the answer to ``path``."""
    # A thread that draws progress may be the one that gets no memory: that is no news.
    threading.excepthook = _quiet_where_memory_ran_out
    Path(path).write_text(json.dumps(asdict(measure(Spec(**json.loads(spec))))))


def _quiet_where_memory_ran_out(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is None or not ran_out(failed.exc_value):
        threading.__excepthook__(failed)


def measure(spec: Spec) -> Answer:
    """Measure in this process; out of memory and all other failures are answers, too."""
    answer = Answer()
    bar: AbstractContextManager[Any] = progress_bar() if spec.progress else nullcontext()
    with bar as progress:
        try:
            _measure(spec, answer, progress)
        except Exception as error:
            limited = spec.limit_bytes is not None and spec.device == "cpu"
            without_memory = ran_out(error) if limited else is_out_of_memory(error)
            answer.status = OUT_OF_MEMORY if without_memory else FAILED
            if "No available kernel" in str(error):  # torch's words
                answer.status = UNSUPPORTED
            text = f": {first_line(error)}" if str(error).strip() else ""
            answer.reason = type(error).__name__ + text
    return answer


def _measure(spec: Spec, answer: Answer, progress: Any) -> None:
    if spec.itself:
        drawn = [_drawn(spec, True, spec.seed + draw) for draw in range(spec.draws)]
        for call in drawn:
            call.inputs = [(t.float() * INPUTS_TIMES).to(t.dtype) for t in call.inputs]
        answer.differences = differences(spec.method, drawn)
        return
    method = METHODS[spec.method]
    reason = method.refusal(spec) if spec.files is None else None
    if reason is not None:
        answer.status, answer.reason = UNSUPPORTED, reason
    elif spec.draws:
        _errors(spec, method, answer)
    else:
        _times(spec, method, answer, progress)


def _drawn(spec: Spec, on_device: bool, seed: int, writes: bool = False) -> Call:
    """A call on random inputs, on the device or in (page-locked) host memory."""
    generator = torch.Generator(spec.device).manual_seed(seed)
    pinned = not on_device and spec.device != "cpu"
    tensors = []
    for heads in (spec.heads, spec.kv_heads, spec.kv_heads, spec.heads):
        shape = (1, heads, spec.tokens, spec.head_dim)
        tensor = torch.randn(shape, generator=generator, device=spec.device)
        tensor = tensor.to(getattr(torch, spec.dtype))
        tensors.append(tensor.cpu().pin_memory() if pinned else tensor)
    # Results go to page-locked memory, as in a program that streams.
    like = zip(RESULTS, (tensors[0], *tensors[:3]), strict=True)
    results = {n: torch.empty_like(t, pin_memory=True) for n, t in like} if pinned * writes else {}
    grad = tensors[3] if spec.backward else None
    return Call(torch.device(spec.device), spec.is_causal, spec.budget_bytes, tensors[:3], grad,
                results)  # fmt: skip


def _opened(spec: Spec, on_device: bool) -> Call:
    """A call on tensors in files, which are mapped."""
    assert spec.files is not None
    files, device = spec.files, torch.device(spec.device)
    found = open_tensors(files[0])
    inputs = [found[n] if n in found else found[n[0]] for n in ("query", "key", "value")]
    grad = open_tensors(files[1])["grad_out"] if spec.backward else None
    if on_device:
        inputs = [tensor.to(device) for tensor in inputs]
        grad = None if grad is None else grad.to(device)
    results = open_tensors(files[2], writable=True)
    return Call(device, spec.is_causal, spec.budget_bytes, inputs, grad, results)


def _times(spec: Spec, method: Method, answer: Answer, progress: Any) -> None:
    device = torch.device(spec.device)
    if device.type == "cpu":
        warm_up()
    if method.begins_small:
        small = replace(spec, tokens=min(spec.tokens, WARM_TOKENS), repeats=min(spec.repeats, 1))
        call = _opened(spec, False).small(WARM_TOKENS, method.on_device) if spec.files else (
            _drawn(small, method.on_device, spec.seed))  # fmt: skip
        call.budget_bytes = None if spec.budget_bytes is None else 1 << 30
        _calls(small, method, call, Answer(), None)
    answer.stage = "inputs"
    # What torch needs on the device is there before anything is limited.
    if spec.files is None:
        call = _drawn(spec, method.on_device, spec.seed, method.writes)
        if method.on_device and device.type != "cpu":
            answer.input_bytes = sum(t.nbytes for t in (*call.inputs, call.inputs[0]))
    else:
        call = _opened(spec, method.on_device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    peak = PeakMemory(device)
    try:
        with peak:
            if spec.limit_bytes is not None:
                peak.limit(spec.limit_bytes)
            _calls(spec, method, call, answer, progress)
    finally:
        answer.peak_bytes = peak.peak_bytes
    answer.stage = ""


def _calls(spec: Spec, method: Method, call: Call, answer: Answer, progress: Any) -> None:
    """A first call and, as long as they do not take too long, ``repeats`` others."""
    began = time.perf_counter()
    for number in range(1 + spec.repeats):
        _call(spec, method, call, answer, progress, number)
        gc.collect()
        if time.perf_counter() - began > spec.patience:
            return


def _call(spec: Spec, method: Method, call: Call, answer: Answer, show: Any, nth: int) -> None:
    """One call. No tensor of it outlives it: the next one has all memory for itself."""
    again = "second " if nth else ""
    # A report times every stage: of a call on files only the first has one.
    report = None if nth and spec.files else Report()
    call.show(show, again, report)
    answer.stage = f"{again}forward"
    seconds, state = _timed(call.device, method.forward, call)
    (answer.forward_seconds if nth else answer.first_seconds).append(seconds)
    found = [state[0].detach()]
    if call.grad is not None:
        answer.stage = f"{again}backward"
        seconds, grads = _timed(call.device, method.backward, call, state)
        (answer.backward_seconds if nth else answer.first_seconds).append(seconds)
        found += grads
    if spec.files is not None:
        lse = [("lse", state[1])] if method.writes else []
        for name, tensor in [*zip(RESULTS, found, strict=False), *lse]:
            if tensor is not call.results[name]:
                call.results[name].copy_(tensor)
    if report is not None:
        answer.report = report.to_dict() if method.writes else {}


def _timed(device: torch.device, run: Callable[..., Any], *given: Any) -> tuple[float, Any]:
    """Seconds, the device idle at both ends, and what is returned."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    began = now()
    made = run(*given)
    return now() - began, made


def _errors(spec: Spec, method: Method, answer: Answer) -> None:
    for draw in range(spec.draws):
        answer.stage = f"draw {draw}"
        call = _drawn(spec, method.on_device, spec.seed + draw)
        for name, tensor, right in zip(RESULTS, method.results(call), exact(call), strict=False):
            error = (tensor.to(right.device).double() - right).norm() / right.norm()
            answer.errors.setdefault(name, []).append(float(error))
    answer.stage = ""
