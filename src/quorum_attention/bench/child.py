"""One measurement in a process of its own, for ``bench`` and ``recover``.

A memory limit cannot be lifted again, kernels cache what they prepare, and a crash must not end the
other measurements. The process reads a ``Spec`` from its command line and writes a ``Measurement``.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from quorum_attention.api import attention_backward, attention_with_lse
from quorum_attention.bench.limits import PeakMemory, is_limit_error, warm_up
from quorum_attention.bench.verification import sampled_errors
from quorum_attention.errors import first_line, is_out_of_memory
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.report import Report
from quorum_attention.files.inputs import read_inputs
from quorum_attention.progress import load_bars, progress_bar
from quorum_attention.units import format_bytes

OK, OUT_OF_MEMORY, UNSUPPORTED, FAILED = "ok", "out of memory", "not supported", "failed"
RESULTS = ("out", "grad_query", "grad_key", "grad_value")
# A small call first loads all code on the way, and makes libraries allocate what they keep.
WARM_TOKENS = 512
# ``die_with_parent`` comes first: importing torch takes seconds.
CODE = """
import sys
from quorum_attention.bench.lifetime import die_with_parent

die_with_parent(int(sys.argv[1]))
from quorum_attention.bench.child import main

main(sys.argv[2])
"""


@dataclass(frozen=True)
class Spec:
    """What to measure.

    Attributes:
        method: a name of ``METHODS``.
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
    draws: int = 0
    inputs: str | None = None
    check: bool = False
    progress: bool = False


@dataclass
class Measurement:
    """The outcome of a measurement.

    Attributes:
        status: OK, OUT_OF_MEMORY, UNSUPPORTED or FAILED; ``reason`` says more.
        stage: what was being done when it failed.
        first_seconds: of the first call: forward, and backward if there is one.
        forward_seconds, backward_seconds: of the calls after it.
        peak_bytes: most memory beyond the inputs on the device (CPU: of the process).
        errors: by result ("out", "grad_query", ...), the relative error of every draw.
        report: our method's own report.
    """

    status: str = OK
    reason: str = ""
    stage: str = ""
    first_seconds: list[float] = field(default_factory=list)
    forward_seconds: list[float] = field(default_factory=list)
    backward_seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    errors: dict[str, list[float]] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether it was measured."""
        return self.status == OK

    @property
    def memory(self) -> str:
        """The peak of memory, in words."""
        return "not measured" if self.peak_bytes is None else format_bytes(self.peak_bytes)


@dataclass
class CallTensors:
    """The tensors of a call.

    Attributes:
        inputs, grad: query, key, value; the upstream gradient, None without a backward.
        options: of our functions.
        results: where our method writes; by name, empty where it makes them.
    """

    device: torch.device
    inputs: list[torch.Tensor]
    grad: torch.Tensor | None
    options: dict[str, Any] = field(default_factory=dict)
    results: dict[str, torch.Tensor] = field(default_factory=dict)

    def make_results(self) -> None:
        """Allocate results in (page-locked) host memory, as in a program that streams."""
        query, _, value = self.inputs
        rows, pin = query.shape[:-1], self.device.type != "cpu"
        state = torch.promote_types(query.dtype, torch.float32)
        out = torch.empty((*rows, value.shape[-1]), dtype=query.dtype, pin_memory=pin)
        self.results = {"out": out, "lse": torch.empty(rows, dtype=state, pin_memory=pin)}
        if self.grad is not None:
            grads = [torch.empty_like(t, pin_memory=pin) for t in self.inputs]
            self.results |= dict(zip(RESULTS[1:], grads, strict=True))


@dataclass(frozen=True)
class Method:
    """One way to compute a call: torch's function, with its gradient by autograd, or ours.

    Attributes:
        on_device: whether inputs are on the device, or else in (page-locked) host memory.
        backend: torch's kernel; None is torch's choice.
        ours: options of ours, which writes into results that are given and fills a report; None is
            torch's function.
    """

    on_device: bool = True
    backend: SDPBackend | None = None
    ours: dict[str, Any] | None = None

    def forward(self, call: CallTensors) -> Any:
        """What ``backward`` needs; its first element is the output."""
        query, key, value = call.inputs
        if self.ours is not None:
            out = call.results.get("out")
            return attention_with_lse(query, key, value, out=out, **call.options, **self.ours)
        if call.device.type == "cpu" and self.backend is not None:
            raise NotImplementedError("measured on CUDA only")
        query, key, value = leaves = [
            t.detach().requires_grad_(call.grad is not None) for t in call.inputs
        ]
        grouped = query.shape[-3] != key.shape[-3]
        kernel = nullcontext() if self.backend is None else sdpa_kernel(self.backend)
        with kernel, torch.set_grad_enabled(call.grad is not None):
            out = scaled_dot_product_attention(
                query, key, value, is_causal=call.options["is_causal"], enable_gqa=grouped
            )
        return out, leaves

    def backward(self, call: CallTensors, state: Any) -> Any:
        """The gradients of query, key and value."""
        grad, (out, other) = call.grad, state
        assert grad is not None
        if self.ours is None:
            return torch.autograd.grad(out, other, grad.to(device=out.device, dtype=out.dtype))
        query, key, value = call.inputs
        grads: Any = tuple(call.results[name] for name in RESULTS[1:]) if call.results else None
        options = {**call.options, **self.ours, "grads": grads}
        return attention_backward(grad, query, key, value, out, other, **options)


METHODS = {
    "sdpa": Method(),
    "flash": Method(backend=SDPBackend.FLASH_ATTENTION),
    "cudnn": Method(backend=SDPBackend.CUDNN_ATTENTION),
    "efficient": Method(backend=SDPBackend.EFFICIENT_ATTENTION),
    "quorum": Method(False, ours={}),
    "quorum-device": Method(ours={}),
    "quorum-depth-1": Method(False, ours={"depth": 1, "accumulator": "device"}),
    "quorum-depth-2": Method(False, ours={"depth": 2, "accumulator": "device"}),
}


def run_child(spec: Spec, timeout: float | None = None) -> Measurement:
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
        return Measurement(FAILED, f"not done after {timeout:.4g} s")
    status, lines = done.returncode, done.stdout.splitlines()
    if status == 0 and lines:
        return Measurement(**json.loads(lines[-1]))
    if status in (-signal.SIGINT, 130):
        raise KeyboardInterrupt
    how = f"signal {-status}" if status < 0 else f"status {status}"
    said = (done.stderr or "").strip().splitlines()[-1:]
    return Measurement(FAILED, ": ".join([f"its process ended with {how} and no answer", *said]))


def main(spec: str) -> None:
    """Measure what ``spec``, in JSON, says and print the answer."""
    print("\n" + json.dumps(asdict(measure(Spec(**json.loads(spec))))))


def measure(spec: Spec) -> Measurement:
    """Measure in this process; out of memory and all other failures are answers, too."""
    answer = Measurement()
    bar: AbstractContextManager[Any] = nullcontext()
    if spec.progress:
        load_bars()  # now, while memory is not limited
        bar = progress_bar()
    with bar as progress:
        try:
            if not spec.draws:
                _times(spec, METHODS[spec.method], answer, progress)
            for draw in range(spec.draws):
                answer.stage = f"draw {draw}"
                _errors(spec, draw, answer)
            answer.stage = ""
        except Exception as error:
            limited = spec.limit_bytes is not None and spec.device == "cpu"
            without_memory = is_limit_error(error) if limited else is_out_of_memory(error)
            answer.status = OUT_OF_MEMORY if without_memory else FAILED
            # In torch's words, and in ours.
            if "No available kernel" in str(error) or isinstance(error, NotImplementedError):
                answer.status = UNSUPPORTED
            answer.reason = f"{type(error).__name__}: {first_line(error)}"
    return answer


def _errors(spec: Spec, seed: int, answer: Measurement) -> None:
    """Errors of one draw against float64."""
    method = METHODS[spec.method]
    call = _drawn(spec, method.on_device, seed)
    state = method.forward(call)
    found = [state[0].detach(), *method.backward(call, state)]
    for name, mine, right in zip(RESULTS, found, exact(call), strict=True):
        error = (mine.to(right.device).double() - right).norm() / right.norm()
        answer.errors.setdefault(name, []).append(float(error))


def _drawn(spec: Spec, on_device: bool, seed: int = 0) -> CallTensors:
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
    options = {"is_causal": spec.is_causal, "enable_gqa": True, "devices": device,
               "budget": spec.budget_bytes}  # fmt: skip
    return CallTensors(device, inputs, grad, options)


def _times(spec: Spec, method: Method, answer: Measurement, progress: Any) -> None:
    device = torch.device(spec.device)
    if device.type == "cpu":
        warm_up()
    small = replace(spec, tokens=min(spec.tokens, WARM_TOKENS), repeats=min(spec.repeats, 1),
                    inputs=None)  # fmt: skip
    call = _drawn(small, method.on_device)
    call.options["budget"] = None if spec.budget_bytes is None else 1 << 30
    _calls(small, method, call, Measurement(), None)
    answer.stage = "inputs"
    # What torch needs on the device is there before anything is limited, and what is written too.
    call = _drawn(spec, method.on_device)
    ours = method.ours is not None
    if ours and not method.on_device and (spec.check or device.type != "cpu"):
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
    if spec.check and ours:
        out, lse, *grads = call.results.values()
        errors = sampled_errors(call.inputs, out, lse, call.grad, grads, is_causal=spec.is_causal)
        answer.errors = {name: [error] for name, error in errors.items()}


def _calls(
    spec: Spec, method: Method, call: CallTensors, answer: Measurement, progress: Any
) -> None:
    """A first call and, as long as they do not take too long, ``repeats`` others."""
    began = time.perf_counter()
    for number in range(1 + spec.repeats):
        _call(method, call, answer, progress, "second " if number else "")
        gc.collect()
        if time.perf_counter() - began > spec.patience:
            return


def _call(method: Method, call: CallTensors, answer: Measurement, show: Any, again: str) -> None:
    """One call. No tensor of it outlives it: the next one has all memory for itself."""
    report = None if again else Report()  # it times every stage, which takes time
    call.options["report"] = report
    call.options["progress"] = show and (lambda done, of, label: show(done, of, again + label))
    state: Any = None
    synchronize = backend_of(call.device).synchronize
    passes = {"forward": answer.forward_seconds, "backward": answer.backward_seconds}
    for name in ("forward", "backward") if call.grad is not None else ("forward",):
        synchronize(call.device)
        answer.stage, began = again + name, time.perf_counter()
        if name == "backward":
            method.backward(call, state)
        else:
            state = method.forward(call)
        synchronize(call.device)
        (passes[name] if again else answer.first_seconds).append(time.perf_counter() - began)
    if call.results:
        call.results["lse"].copy_(state[1])
    if method.ours is not None and report is not None:
        answer.report = report.to_dict()


def exact(call: CallTensors) -> list[torch.Tensor]:
    """Output and gradients in float64, head by head, on the call's device."""
    assert call.grad is not None
    query, key, value = leaves = [
        t.detach().to(call.device).double().requires_grad_() for t in call.inputs
    ]
    shared = query.shape[1] // key.shape[1]
    outs = []
    with sdpa_kernel(SDPBackend.MATH):
        for head in range(query.shape[1]):
            q, k, v = query[:, head], key[:, head // shared], value[:, head // shared]
            out = scaled_dot_product_attention(q, k, v, is_causal=call.options["is_causal"])
            out.backward(call.grad[:, head].to(out))
            outs.append(out.detach())
    grads = [t.grad for t in leaves if t.grad is not None]
    return [torch.stack(outs, 1), *grads]
