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
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from quorum_attention.bench.methods import ITSELF, METHODS, RESULTS, Call, Method, Quorum, exact
from quorum_attention.errors import first_line, is_out_of_memory
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.report import Report
from quorum_attention.files.inputs import read_inputs
from quorum_attention.limits import PeakMemory, ran_out, warm_up
from quorum_attention.progress import progress_bar
from quorum_attention.verification import Problem, compare, expect

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

main(sys.argv[2])
"""


@dataclass(frozen=True)
class Spec:
    """What to measure.

    Attributes:
        method: a name of ``methods.METHODS``; or of ``ITSELF``, a kernel to be compared with
            itself recovered.
        tokens, heads, kv_heads, head_dim, dtype, is_causal: a call on random inputs; batch 1.
        backward: whether gradients are computed as well.
        limit_bytes: enforced limit beyond the start (CPU: of the process, GPU: of the allocator).
        budget_bytes: what our methods are told.
        repeats: timed calls after a first one.
        patience: no further call after so many seconds.
        draws: how often errors against float64 are measured, each time with other inputs.
        inputs: a safetensors file with query, key and value in place of random ones.
        check: whether sampled rows of our results are compared with float64.
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
    inputs: str | None = None
    check: bool = False
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
    command = [sys.executable, "-c", CODE, str(os.getpid()), json.dumps(asdict(spec))]
    try:
        # On Ctrl-C, which the child gets too, run() waits for it or kills it.
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, errors="replace",
            stderr=None if spec.progress else subprocess.PIPE, timeout=timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Answer(FAILED, f"not done after {timeout:.4g} s")
    status, lines = done.returncode, done.stdout.splitlines()
    if status == 0 and lines:
        return Answer(**json.loads(lines[-1]))
    if status in (-signal.SIGINT, 130):
        raise KeyboardInterrupt
    how = f"signal {-status}" if status < 0 else f"status {status}"
    said = (done.stderr or "").strip().splitlines()[-1:]
    return Answer(FAILED, ": ".join([f"its process ended with {how} and no answer", *said]))


def main(spec: str) -> None:
    """Measure what ``spec``, in JSON, says and print the answer."""
    # A thread that draws progress may be the one that gets no memory: that is no news.
    threading.excepthook = lambda failed: None
    print("\n" + json.dumps(asdict(measure(Spec(**json.loads(spec))))))


def measure(spec: Spec) -> Answer:
    """Measure in this process; out of memory and all other failures are answers, too."""
    answer = Answer()
    bar: AbstractContextManager[Any] = progress_bar() if spec.progress else nullcontext()
    with bar as progress:
        try:
            if not spec.draws:
                _times(spec, METHODS[spec.method], answer, progress)
            for draw in range(spec.draws):
                answer.stage = f"draw {draw}"
                _errors(spec, spec.seed + draw, answer)
            answer.stage = ""
        except Exception as error:
            limited = spec.limit_bytes is not None and spec.device == "cpu"
            without_memory = ran_out(error) if limited else is_out_of_memory(error)
            answer.status = OUT_OF_MEMORY if without_memory else FAILED
            # In torch's words, and in ours.
            if "No available kernel" in str(error) or isinstance(error, NotImplementedError):
                answer.status = UNSUPPORTED
            text = f": {first_line(error)}" if str(error).strip() else ""
            answer.reason = type(error).__name__ + text
    return answer


def _errors(spec: Spec, seed: int, answer: Answer) -> None:
    """Errors of one draw against float64; of a kernel of ``ITSELF`` its differences from itself."""
    if spec.method not in ITSELF:
        method = METHODS[spec.method]
        call = _drawn(spec, method.on_device, seed)
        for name, mine, right in zip(RESULTS, method.results(call), exact(call), strict=False):
            error = (mine.to(right.device).double() - right).norm() / right.norm()
            answer.errors.setdefault(name, []).append(float(error))
        return
    call = _drawn(spec, True, seed)
    call.inputs = [(t.float() * INPUTS_TIMES).to(t.dtype) for t in call.inputs]
    depths = [Quorum(True, kernel=ITSELF[spec.method], depth=depth) for depth in (0, 1, 2)]
    whole, *cut = (method.results(call) for method in depths)
    for results in cut:
        for name, mine, right in zip(RESULTS, results, whole, strict=True):
            apart = (mine.double() - right.double()).abs()
            found = (float(apart.max()), float(apart.mean()))
            answer.differences.setdefault(name, []).append(found)


def _drawn(spec: Spec, on_device: bool, seed: int) -> Call:
    """A call on random inputs, or those of a file, on the device or in (page-locked) memory of the
    host."""
    generator = torch.Generator(spec.device).manual_seed(seed)
    device, pinned = torch.device(spec.device), not on_device and spec.device != "cpu"

    def normal(*shape: int) -> torch.Tensor:
        found = torch.empty(shape, dtype=getattr(torch, spec.dtype), pin_memory=pinned,
                            device=device if on_device else "cpu")  # fmt: skip
        for head in found.view(-1, *shape[-2:]):  # a head at a time: no more memory than theirs
            head.copy_(torch.randn(head.shape, generator=generator, device=device))
        return found

    if spec.inputs is None:
        counts = (spec.heads, spec.kv_heads, spec.kv_heads)
        inputs = [normal(1, heads, spec.tokens, spec.head_dim) for heads in counts]
    else:
        given = read_inputs([spec.inputs]).tensors
        inputs = [given[name] for name in ("query", "key", "value")]
        inputs = [t.to(device) if on_device else t for t in inputs]
    grad = normal(*inputs[0].shape[:-1], inputs[2].shape[-1]) if spec.backward else None
    return Call(device, spec.is_causal, spec.budget_bytes, inputs, grad)


def _times(spec: Spec, method: Method, answer: Answer, progress: Any) -> None:
    device = torch.device(spec.device)
    if device.type == "cpu":
        warm_up()
    small = replace(spec, tokens=min(spec.tokens, WARM_TOKENS), repeats=min(spec.repeats, 1),
                    inputs=None)  # fmt: skip
    call = _drawn(small, method.on_device, spec.seed)
    call.budget_bytes = None if spec.budget_bytes is None else 1 << 30
    _calls(small, method, call, Answer(), None)
    answer.stage = "inputs"
    # What torch needs on the device is there before anything is limited, and what is written too.
    call = _drawn(spec, method.on_device, spec.seed)
    if method.on_device and device.type != "cpu":
        answer.input_bytes = sum(t.nbytes for t in (*call.inputs, call.inputs[0]))
    if method.writes and not method.on_device and (spec.check or device.type != "cpu"):
        call.make_results()
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
    if spec.check and method.writes:
        query, key, value = call.inputs
        problem = Problem(query, key, value, call.is_causal, query.shape[-1] ** -0.5)
        out, lse, *grads = call.results.values()
        expected = expect(problem, call.grad, out, lse)
        found = asdict(
            compare(expected, out, lse, (grads[0], grads[1], grads[2]) if grads else None)
        )
        answer.errors = {n: [found[n]] for n in ("lse", *RESULTS) if found[n] is not None}


def _calls(spec: Spec, method: Method, call: Call, answer: Answer, progress: Any) -> None:
    """A first call and, as long as they do not take too long, ``repeats`` others."""
    began = time.perf_counter()
    for number in range(1 + spec.repeats):
        _call(method, call, answer, progress, "second " if number else "")
        gc.collect()
        if time.perf_counter() - began > spec.patience:
            return


def _call(method: Method, call: Call, answer: Answer, progress: Any, again: str) -> None:
    """One call. No tensor of it outlives it: the next one has all memory for itself."""
    call.report = None if again else Report()  # it times every stage, which takes time
    call.progress = progress and (lambda done, total, label: progress(done, total, again + label))
    synchronize = partial(backend_of(call.device).synchronize, call.device)
    synchronize()
    answer.stage, began = f"{again}forward", time.perf_counter()
    state = method.forward(call)
    synchronize()
    (answer.forward_seconds if again else answer.first_seconds).append(time.perf_counter() - began)
    if call.results:
        call.results["lse"].copy_(state[1])
    if call.grad is not None:
        answer.stage, began = f"{again}backward", time.perf_counter()
        method.backward(call, state)
        synchronize()
        spent = time.perf_counter() - began
        (answer.backward_seconds if again else answer.first_seconds).append(spent)
    if method.writes and call.report is not None:
        answer.report = call.report.to_dict()
