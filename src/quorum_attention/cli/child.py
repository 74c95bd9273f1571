"""An attention call, made twice in a process of its own, under a real memory limit.

The process reads what to do from a file, and writes what happened to another. A limit on a
process cannot be taken back, and a failure should not take the command with it.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from quorum_attention.api import attention_backward, attention_with_lse
from quorum_attention.execution.memory import first_line, is_out_of_memory
from quorum_attention.execution.report import Report
from quorum_attention.files import open_tensors
from quorum_attention.files.inputs import read_qkv
from quorum_attention.limits import PeakMemory, ran_out, warm_up
from quorum_attention.progress import progress_bar

# What a child answers.
OK, OUT_OF_MEMORY, FAILED = "ok", "out of memory", "failed"
# As many tokens show it all code on the way, and make torch's libraries take what they keep.
WARM_TOKENS = 512
# There is no second call where the first takes longer than this.
PATIENCE_SECONDS = 45.0


@dataclass
class Spec:
    """What a child does.

    Attributes:
        method: "sdpa" or "quorum".
        inputs: safetensors file with query, key, value.
        gradient: safetensors file with grad_out; None is forward only.
        results: safetensors file that exists and is filled: out, lse, grad_query, grad_key,
            grad_value.
        limit_bytes: the process's, or the allocator's, limit beyond its start; None is none.
        budget_bytes: what quorum attention is told.
        answer: JSON file to write.
    """

    method: str
    inputs: str
    gradient: str | None
    results: str
    device: str
    is_causal: bool
    limit_bytes: int | None
    budget_bytes: int | None
    answer: str
    progress: bool = True


@dataclass
class Answer:
    """What happened.

    Attributes:
        result: ``OK`` or one of the others; ``error`` says more.
        stage: what was done last.
        forward_seconds, backward_seconds: of a first and a second call, as far as they came.
        peak_bytes: the most that both took.
        report: quorum attention's own, of its first call.
    """

    result: str = OK
    stage: str = ""
    error: str = ""
    forward_seconds: list[float] = field(default_factory=list)
    backward_seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    report: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Call:
    """The tensors of a call; the results are written to.

    ``device``: what computes. Inputs and results lie in files, mapped.
    """

    device: torch.device
    is_causal: bool
    budget_bytes: int | None
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_out: torch.Tensor | None
    results: dict[str, torch.Tensor]

    def small(self) -> _Call:
        """A call of the same kind on the first few tokens, in memory."""

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[..., :WARM_TOKENS, :].clone()

        return _Call(
            self.device,
            self.is_causal,
            1 << 30,
            cut(self.query),
            cut(self.key),
            cut(self.value),
            None if self.grad_out is None else cut(self.grad_out),
            {
                name: tensor[..., :WARM_TOKENS].clone() if name == "lse" else cut(tensor)
                for name, tensor in self.results.items()
            },
        )


def main(path: str) -> None:
    """Do what the file at ``path`` says."""
    spec = Spec(**json.loads(Path(path).read_text()))
    answer = Answer()
    device = torch.device(spec.device)
    call = _opened(spec, device)
    limited = spec.limit_bytes is not None
    # A thread that draws progress may be the one that gets no memory: that is no news.
    threading.excepthook = _quiet_where_memory_ran_out
    bar: AbstractContextManager[Any] = progress_bar() if spec.progress else nullcontext()
    peak = PeakMemory(device)
    with bar as progress:
        _warm_up(spec, call)
        try:
            answer.stage = "inputs"
            # What torch needs of them on the device is there before anything is limited.
            method = _METHODS[spec.method](call)
            with peak:
                if spec.limit_bytes is not None:
                    peak.limit(spec.limit_bytes)
                _make_calls(method, call, answer, progress)
        except Exception as error:
            on_cpu = limited and device.type == "cpu"
            without_memory = ran_out(error) if on_cpu else is_out_of_memory(error)
            answer.result = OUT_OF_MEMORY if without_memory else FAILED
            answer.error = _said(error)
    answer.peak_bytes = peak.peak_bytes
    Path(spec.answer).write_text(json.dumps(asdict(answer)))


def _opened(spec: Spec, device: torch.device) -> _Call:
    grad_out = None if spec.gradient is None else open_tensors(spec.gradient)["grad_out"]
    return _Call(
        device,
        spec.is_causal,
        spec.budget_bytes,
        *read_qkv(spec.inputs),
        grad_out,
        open_tensors(spec.results, writable=True),
    )


def _said(error: BaseException) -> str:
    """An error in a line, with its type."""
    text = str(error).strip()
    return f"{type(error).__name__}: {first_line(error)}" if text else type(error).__name__


def _quiet_where_memory_ran_out(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is None or not ran_out(failed.exc_value):
        threading.__excepthook__(failed)


def _warm_up(spec: Spec, call: _Call) -> None:
    """Threads, lazy imports, kernels' first calls and what libraries take for themselves once: all
    that is no attention call's, before anything is measured or limited."""
    if call.device.type == "cpu":
        warm_up()
    small = call.small()
    _make_calls(_METHODS[spec.method](small), small, Answer(), None)


class _Clock:
    """Seconds of a stage, the device idle at both ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.started = self._now()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def seconds(self) -> float:
        return self._now() - self.started


_Progress = Callable[[int, int, str], None] | None


class _Method(Protocol):
    """A way to make a call."""

    def forward(self, progress: _Progress) -> None: ...

    def backward(self, progress: _Progress) -> None: ...

    def keep(self) -> None:
        """Write what has not been written to the call's results, and let go of it."""

    def report(self) -> dict[str, Any]: ...


def _make_calls(method: _Method, call: _Call, answer: Answer, progress: _Progress) -> None:
    """A first call and, after one that did not take too long, a second."""
    for ordinal in ("", "second "):
        shown = _labelled(progress, ordinal)
        answer.stage = f"{ordinal}forward"
        clock = _Clock(call.device)
        method.forward(shown)
        answer.forward_seconds.append(clock.seconds())
        if call.grad_out is not None:
            answer.stage = f"{ordinal}backward"
            clock = _Clock(call.device)
            method.backward(shown)
            answer.backward_seconds.append(clock.seconds())
        method.keep()
        gc.collect()
        if not ordinal:
            answer.report = method.report()
        if sum(answer.forward_seconds + answer.backward_seconds) > PATIENCE_SECONDS:
            return


def _labelled(progress: _Progress, ordinal: str) -> _Progress:
    if progress is None or not ordinal:
        return progress
    return lambda done, total, label: progress(done, total, ordinal + label)


class _Sdpa:
    """torch's call: inputs on the device beforehand, results copied from there afterwards."""

    def __init__(self, call: _Call) -> None:
        self._results = call.results
        self._is_causal = call.is_causal
        self._grad_out = None if call.grad_out is None else call.grad_out.to(call.device)
        self._inputs = [t.to(call.device) for t in (call.query, call.key, call.value)]
        for tensor in self._inputs:
            tensor.requires_grad_(call.grad_out is not None)
        self._out: torch.Tensor | None = None
        self._grads: tuple[torch.Tensor, ...] = ()

    def forward(self, progress: _Progress) -> None:
        query, key, value = self._inputs
        self._out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=self._is_causal,
            enable_gqa=query.shape[-3] != key.shape[-3],
        )  # fmt: skip

    def backward(self, progress: _Progress) -> None:
        assert self._out is not None
        self._grads = torch.autograd.grad(self._out, self._inputs, self._grad_out)

    def keep(self) -> None:
        assert self._out is not None
        self._results["out"].copy_(self._out.detach())
        for name, grad in zip(("query", "key", "value"), self._grads, strict=False):
            self._results[f"grad_{name}"].copy_(grad)
        self._out, self._grads = None, ()

    def report(self) -> dict[str, Any]:
        return {}


class _Quorum:
    """Ours: inputs and results where they are, in files."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._lse: torch.Tensor | None = None
        self._report = Report()
        # A report times every stage, so only the first call is asked for one.
        self._asked: Report | None = self._report

    def _options(self, progress: _Progress) -> dict[str, Any]:
        call = self._call
        return {
            "is_causal": call.is_causal, "enable_gqa": True, "budget": call.budget_bytes,
            "devices": call.device, "report": self._asked, "progress": progress,
        }  # fmt: skip

    def forward(self, progress: _Progress) -> None:
        call = self._call
        _, self._lse = attention_with_lse(
            call.query, call.key, call.value, out=call.results["out"], **self._options(progress)
        )

    def backward(self, progress: _Progress) -> None:
        call, results = self._call, self._call.results
        assert call.grad_out is not None
        assert self._lse is not None
        attention_backward(
            call.grad_out, call.query, call.key, call.value, results["out"], self._lse,
            grads=(results["grad_query"], results["grad_key"], results["grad_value"]),
            **self._options(progress),
        )  # fmt: skip

    def keep(self) -> None:
        assert self._lse is not None
        self._call.results["lse"].copy_(self._lse)
        self._lse = None

    def report(self) -> dict[str, Any]:
        self._asked = None
        return self._report.to_dict()


_METHODS: dict[str, Callable[[_Call], _Method]] = {"sdpa": _Sdpa, "quorum": _Quorum}
