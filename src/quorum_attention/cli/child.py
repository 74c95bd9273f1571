"""One attention call in a process of its own, under a real memory limit.

The process reads what to do from a file, and writes what happened to another. A limit on a
process cannot be taken back, and a failure should not take the command with it.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from quorum_attention.api import attention_backward, attention_with_lse
from quorum_attention.cli.run import read_qkv
from quorum_attention.execution.memory import first_line, is_out_of_memory
from quorum_attention.execution.report import Report
from quorum_attention.files import open_tensors
from quorum_attention.limits import PeakMemory, ran_out, warm_up
from quorum_attention.progress import progress_bar

# What a child answers.
OK, OUT_OF_MEMORY, FAILED = "ok", "out of memory", "failed"
# As many tokens show it all code on the way, and make torch's libraries take what they keep.
_WARM_TOKENS = 512


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
    """What happened (``OK`` or one of the others), in which stage, in how many seconds."""

    result: str = OK
    stage: str = ""
    error: str = ""
    forward_seconds: float | None = None
    backward_seconds: float | None = None
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
            return tensor[..., :_WARM_TOKENS, :].clone()

        return _Call(
            self.device,
            self.is_causal,
            1 << 30,
            cut(self.query),
            cut(self.key),
            cut(self.value),
            None if self.grad_out is None else cut(self.grad_out),
            {
                name: tensor[..., :_WARM_TOKENS].clone() if name == "lse" else cut(tensor)
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
    with bar as progress:
        _warm_up(spec, call)
        try:
            with PeakMemory(device) as peak:
                if spec.limit_bytes is not None:
                    peak.limit(spec.limit_bytes)
                _METHODS[spec.method](call, answer, progress)
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
    for _ in range(2):
        _METHODS[spec.method](call.small(), Answer(), None)
    gc.collect()


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


def _sdpa(call: _Call, answer: Answer, progress: Any) -> None:
    answer.stage = "inputs"
    tensors = [t.to(call.device) for t in (call.query, call.key, call.value)]
    for tensor in tensors:
        tensor.requires_grad_(call.grad_out is not None)
    query, key, value = tensors
    answer.stage = "forward"
    clock = _Clock(call.device)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=call.is_causal, enable_gqa=query.shape[-3] != key.shape[-3]
    )
    answer.forward_seconds = clock.seconds()
    call.results["out"].copy_(out.detach())
    if call.grad_out is None:
        return
    answer.stage = "backward"
    grad_out = call.grad_out.to(call.device)
    clock = _Clock(call.device)
    grads = torch.autograd.grad(out, (query, key, value), grad_out)
    answer.backward_seconds = clock.seconds()
    for name, grad in zip(("grad_query", "grad_key", "grad_value"), grads, strict=True):
        call.results[name].copy_(grad)


def _quorum(call: _Call, answer: Answer, progress: Any) -> None:
    query, key, value, results = call.query, call.key, call.value, call.results
    report = Report()
    answer.stage = "forward"
    clock = _Clock(call.device)
    out, lse = attention_with_lse(
        query, key, value, is_causal=call.is_causal, enable_gqa=True, budget=call.budget_bytes,
        devices=call.device, out=results["out"], report=report, progress=progress,
    )  # fmt: skip
    answer.forward_seconds = clock.seconds()
    results["lse"].copy_(lse)
    if call.grad_out is not None:
        answer.stage = "backward"
        clock = _Clock(call.device)
        attention_backward(
            call.grad_out, query, key, value, out, lse, is_causal=call.is_causal, enable_gqa=True,
            budget=call.budget_bytes, devices=call.device, report=report, progress=progress,
            grads=(results["grad_query"], results["grad_key"], results["grad_value"]),
        )  # fmt: skip
        answer.backward_seconds = clock.seconds()
    answer.report = report.to_dict()


_METHODS = {"sdpa": _sdpa, "quorum": _quorum}
