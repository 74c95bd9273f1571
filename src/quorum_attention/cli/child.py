"""One attention call in a process of its own, under a real memory limit.

The process reads what to do from a file, and writes what happened to another. A limit on a
process cannot be taken back, and a failure should not take the command with it.
"""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from quorum_attention.api import attention_backward, attention_with_lse
from quorum_attention.cli.run import read_qkv
from quorum_attention.execution.memory import is_out_of_memory
from quorum_attention.execution.report import Report
from quorum_attention.files import open_tensors
from quorum_attention.limits import PeakMemory, limit_cuda_memory, limit_data_size, warm_up
from quorum_attention.progress import progress_bar


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
    """What happened: "ok" or "out of memory", in which stage, in how many seconds."""

    result: str = "ok"
    stage: str = ""
    error: str = ""
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    peak_bytes: int = 0
    report: dict[str, Any] = field(default_factory=dict)


def main(path: str) -> None:
    """Do what the file at ``path`` says."""
    spec = Spec(**json.loads(Path(path).read_text()))
    answer = Answer()
    device = torch.device(spec.device)
    _warm_up(device)
    bar: AbstractContextManager[Any] = progress_bar() if spec.progress else nullcontext()
    with bar as progress:
        try:
            with PeakMemory(device) as peak:
                if spec.limit_bytes is not None:
                    if device.type == "cuda":
                        limit_cuda_memory(spec.limit_bytes, device)
                    else:
                        limit_data_size(spec.limit_bytes)
                run = _sdpa if spec.method == "sdpa" else _quorum
                run(spec, device, answer, progress)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            answer.result = "out of memory"
            lines = [line.strip() for line in str(error).split("\n") if line.strip()]
            answer.error = ": ".join([type(error).__name__, *lines[:1]])
    answer.peak_bytes = peak.peak_bytes
    Path(spec.answer).write_text(json.dumps(asdict(answer)))


def _warm_up(device: torch.device) -> None:
    """Threads, lazy imports and kernels' first calls, before anything is measured or limited."""
    if device.type == "cpu":
        warm_up()
    small = torch.randn(1, 1, 64, 16, device=device)
    out, lse = attention_with_lse(small, small, small)
    attention_backward(out, small, small, small, out, lse)


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


def _sdpa(spec: Spec, device: torch.device, answer: Answer, progress: Any) -> None:
    answer.stage = "inputs"
    tensors = [t.to(device) for t in read_qkv(spec.inputs)]
    for tensor in tensors:
        tensor.requires_grad_(spec.gradient is not None)
    query, key, value = tensors
    answer.stage = "forward"
    clock = _Clock(device)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=spec.is_causal, enable_gqa=query.shape[-3] != key.shape[-3]
    )
    answer.forward_seconds = clock.seconds()
    results = open_results(spec.results)
    results["out"].copy_(out.detach())
    if spec.gradient is None:
        return
    answer.stage = "backward"
    grad_out = open_tensors(spec.gradient)["grad_out"].to(device)
    clock = _Clock(device)
    grads = torch.autograd.grad(out, (query, key, value), grad_out)
    answer.backward_seconds = clock.seconds()
    for name, grad in zip(("grad_query", "grad_key", "grad_value"), grads, strict=True):
        results[name].copy_(grad)


def _quorum(spec: Spec, device: torch.device, answer: Answer, progress: Any) -> None:
    query, key, value = read_qkv(spec.inputs)
    results = open_results(spec.results)
    report = Report()
    answer.stage = "forward"
    clock = _Clock(device)
    out, lse = attention_with_lse(
        query, key, value, is_causal=spec.is_causal, enable_gqa=True, budget=spec.budget_bytes,
        devices=device, out=results["out"], report=report, progress=progress,
    )  # fmt: skip
    answer.forward_seconds = clock.seconds()
    results["lse"].copy_(lse)
    if spec.gradient is not None:
        answer.stage = "backward"
        grad_out = open_tensors(spec.gradient)["grad_out"]
        clock = _Clock(device)
        attention_backward(
            grad_out, query, key, value, out, lse, is_causal=spec.is_causal, enable_gqa=True,
            budget=spec.budget_bytes, devices=device, report=report, progress=progress,
            grads=(results["grad_query"], results["grad_key"], results["grad_value"]),
        )  # fmt: skip
        answer.backward_seconds = clock.seconds()
    answer.report = report.to_dict()


def open_results(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a results file, mapped for writing."""
    return open_tensors(path, writable=True)
