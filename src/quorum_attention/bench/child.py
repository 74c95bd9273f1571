"""Carries out one measurement in a process of its own (``server.py``).

It has a process of its own because a memory limit cannot be lifted again, kernels cache what they
have prepared, and a crash must not end the other measurements.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import torch

from quorum_attention.bench.exact import exact, relative
from quorum_attention.bench.itself import differences
from quorum_attention.bench.methods import METHODS, Method, Tensors
from quorum_attention.bench.spec import FAILED, OUT_OF_MEMORY, UNSUPPORTED, Answer, Spec
from quorum_attention.execution.memory import first_line, is_out_of_memory
from quorum_attention.limits import PeakMemory, ran_out, warm_up

_NAMES = ("grad_query", "grad_key", "grad_value")


def measure(spec: Spec) -> Answer:
    """Measure what ``spec`` asks for; out of memory and all other failures are answers, too."""
    answer = Answer()
    if spec.itself:
        try:
            answer.differences = differences(spec)
        except Exception as error:
            _failed(spec, error, answer)
        return answer
    method = METHODS[spec.method]
    reason = method.refusal(spec)
    if reason is not None:
        answer.status, answer.reason = UNSUPPORTED, reason
        return answer
    try:
        if spec.draws:
            _errors(spec, method, answer)
        else:
            _times(spec, method, answer)
    except Exception as error:
        _failed(spec, error, answer)
    answer.report = method.report()
    return answer


def _failed(spec: Spec, error: Exception, answer: Answer) -> None:
    answer.reason = f"{type(error).__name__}: {first_line(error)}"
    limited = spec.budget_bytes is not None and spec.device == "cpu"
    without_memory = ran_out(error) if limited else is_out_of_memory(error)
    answer.status = OUT_OF_MEMORY if without_memory else FAILED


def _inputs(spec: Spec, on_device: bool, seed: int) -> Tensors:
    generator = torch.Generator(spec.device).manual_seed(seed)
    dtype = getattr(torch, spec.dtype)
    tensors = []
    for heads in (spec.heads, spec.kv_heads, spec.kv_heads, spec.heads):
        shape = (1, heads, spec.tokens, spec.head_dim)
        tensor = torch.randn(shape, generator=generator, device=spec.device).to(dtype)
        if not on_device and spec.device == "cuda":
            tensor = tensor.cpu().pin_memory()
        tensors.append(tensor)
    return tensors


def _synchronize(spec: Spec) -> None:
    if spec.device == "cuda":
        torch.cuda.synchronize()


def _once(spec: Spec, method: Method, inputs: Tensors, answer: Answer) -> tuple[float, float]:
    answer.stage = "forward"
    _synchronize(spec)
    started = time.perf_counter()
    state = method.forward(spec, inputs)
    _synchronize(spec)
    between = time.perf_counter()
    if spec.backward:
        answer.stage = "backward"
        grads = method.backward(spec, inputs, state)
        _synchronize(spec)
        del grads
    return between - started, time.perf_counter() - between


def _times(spec: Spec, method: Method, answer: Answer) -> None:
    device = torch.device(spec.device)
    answer.stage = "inputs"
    inputs = _inputs(spec, method.on_device, spec.seed)
    if method.on_device and spec.device == "cuda":
        answer.input_bytes = sum(t.numel() * t.element_size() for t in inputs)
    if spec.device == "cpu":
        warm_up()
    if method.begins_small:
        small = replace(spec, tokens=min(spec.tokens, 256))
        _once(small, method, _inputs(small, method.on_device, spec.seed), answer)
        method.forget()
    gc.collect()
    if spec.device == "cuda":
        torch.cuda.empty_cache()
    with PeakMemory(device) as peak:
        if spec.budget_bytes is not None:
            peak.limit(spec.budget_bytes)
        answer.first_seconds = sum(_once(spec, method, inputs, answer))
        for _ in range(spec.repeats):
            forward, backward = _once(spec, method, inputs, answer)
            answer.forward_seconds.append(forward)
            if spec.backward:
                answer.backward_seconds.append(backward)
    answer.peak_bytes = peak.peak_bytes
    answer.stage = ""


def _errors(spec: Spec, method: Method, answer: Answer) -> None:
    for draw in range(spec.draws):
        inputs = _inputs(spec, method.on_device, spec.seed + draw)
        answer.stage = f"draw {draw}"
        state = method.forward(spec, inputs)
        near = [t.to(spec.device) for t in inputs]
        grad = near[3] if spec.backward else None
        scale = spec.head_dim**-0.5
        right = exact(near[0], near[1], near[2], grad, is_causal=spec.is_causal, scale=scale)
        got = {"out": state[0].detach()}
        if spec.backward:
            grads = method.backward(spec, inputs, state)
            got.update(zip(_NAMES, grads, strict=True))
        for name, tensor in got.items():
            answer.errors.setdefault(name, []).append(relative(tensor, right[name]))
    answer.stage = ""
