"""Other kernels recovered: what wrapping changes, and what it costs (the paper's appendix)."""

from __future__ import annotations

from statistics import mean
from typing import Any

import torch

from quorum_attention.api import attention_backward, attention_with_lse
from quorum_attention.bench.methods import WRAPPED
from quorum_attention.bench.runner import Runner
from quorum_attention.bench.settings import Section, Settings, ratio, seconds, short, word
from quorum_attention.bench.spec import Answer
from quorum_attention.kernels import InnerKernel, get_kernel
from quorum_attention.kernels.kit import LongNetKernel
from quorum_attention.planner import plan
from quorum_attention.sizes import format_bytes

_RESULTS = ("out", "dQ", "dK", "dV")
_INPUTS_TIMES = 0.05  # the paper's
_KERNELS: dict[str, str | InnerKernel] = {
    "dense": "dense",
    "LongNet": LongNetKernel([(512, 1), (1024, 2), (2048, 4)], full_precision=True),
}


def run(settings: Settings, runner: Runner) -> list[Section]:
    """Output preservation of dense and LongNet, and their recovery under the capped budget."""
    return [_preservation(settings), *(_recovery(settings, runner, b) for b in (False, True))]


def _preservation(settings: Settings) -> Section:
    tokens = 2 * settings.accuracy_tokens if settings.device == "cpu" else 4096
    draws = 2 * settings.draws
    rows = []
    for name, kernel in _KERNELS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            errors = _differences(settings, kernel, dtype, tokens, draws)
            rows.append([
                name, str(dtype).removeprefix("torch."),
                *(f"{max(e[0] for e in errors[r]):.1e}, {mean(e[1] for e in errors[r]):.1e}"
                  for r in _RESULTS),
            ])  # fmt: skip
    text = (
        f"{short(tokens)} tokens, causal, inputs times {_INPUTS_TIMES}, {draws} draws, depths 1 "
        "and 2: the largest absolute difference between a kernel run as it is and the same "
        "recovered, and the mean one."
    )
    columns = ["kernel", "dtype", *_RESULTS]
    return Section("wrapped", "Recovered against itself", text, columns, rows)


def _differences(
    settings: Settings, kernel: str | InnerKernel, dtype: torch.dtype, tokens: int, draws: int
) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in _RESULTS}
    for draw in range(draws):
        generator = torch.Generator(settings.device).manual_seed(draw)
        shape = (1, settings.heads, tokens, settings.head_dim)
        tensors = [
            (torch.randn(shape, generator=generator, device=settings.device)
             * (_INPUTS_TIMES if i < 3 else 1.0)).to(dtype)
            for i in range(4)
        ]  # fmt: skip
        whole = _both(settings, kernel, tensors, ())
        for levels in ((7,), (7, 7)):
            cut = _both(settings, kernel, tensors, levels)
            for name, mine, wanted in zip(_RESULTS, cut, whole, strict=True):
                apart = (mine.double() - wanted.double()).abs()
                found[name].append((float(apart.max()), float(apart.mean())))
    return found


def _both(
    settings: Settings,
    kernel: str | InnerKernel,
    tensors: list[torch.Tensor],
    levels: tuple[int, ...],
) -> list[torch.Tensor]:
    query, key, value, grad = tensors
    common: dict[str, Any] = {
        "heads": settings.heads, "head_dim": settings.head_dim, "dtype": query.dtype,
        "is_causal": True, "levels": levels, "kernel": get_kernel(kernel), "inputs": "device",
        "device": settings.device,
    }  # fmt: skip
    options: dict[str, Any] = {
        "is_causal": True, "kernel": kernel, "devices": settings.device,
    }  # fmt: skip
    n = query.shape[2]
    out, lse = attention_with_lse(query, key, value, plan=plan(n, **common), **options)
    grads = attention_backward(
        grad, query, key, value, out, lse, plan=plan(n, backward=True, **common), **options
    )
    return [out, *grads]


def _recovery(settings: Settings, runner: Runner, backward: bool) -> Section:
    answers: dict[tuple[str, int], Answer] = {}
    for method in WRAPPED:
        expected = 0.0
        for tokens in settings.lengths():
            if expected > settings.method_seconds:
                break
            spec = settings.spec(
                method.name, tokens, backward=backward, budget_bytes=settings.budget_bytes
            )
            answer = answers[method.name, tokens] = runner.measure(spec, "wrapped")
            if not answer.ok:
                break
            expected = 4 * (settings.repeats + 1) * (seconds(answer, backward) or 0.0)
    names = [method.name for method in WRAPPED]
    rows = [
        [short(tokens), *(_cell(answers, name, tokens, backward) for name in names)]
        for tokens in settings.lengths()
    ]
    kind = "forward+backward" if backward else "forward"
    text = (
        f"Within {format_bytes(settings.budget_bytes)} beyond the inputs: seconds (median of "
        f"{settings.repeats}), ratio to the kernel as it is, peak memory, and of that time the "
        "share that recovering from failures took (adaptation). oom: out of memory."
    )
    return Section(
        f"wrapped-{'both' if backward else 'forward'}", f"Kernels recovered, {kind}", text,
        ["tokens", *names], rows,
    )  # fmt: skip


def _cell(answers: dict[tuple[str, int], Answer], name: str, tokens: int, backward: bool) -> str:
    answer = answers.get((name, tokens))
    if answer is None:
        return ""
    spent = seconds(answer, backward)
    if spent is None:
        return word(answer)
    text = f"{spent:.4g}"
    if name.startswith("recovered-"):
        plain = answers.get((name.removeprefix("recovered-"), tokens))
        text += f" ({ratio(spent, None if plain is None else seconds(plain, backward))}x)"
        passes = [part for part in answer.report.values() if part]
        total = sum(part["seconds"] for part in passes)
        lost = sum(part["recovery_seconds"] for part in passes)
        text += f", adaptation {lost / total if total else 0.0:.0%}"
    return f"{text}, {format_bytes(answer.peak_bytes or 0)}"
