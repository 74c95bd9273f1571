"""Errors against float64 (the paper's accuracy table, and one by gradient)."""

from __future__ import annotations

from statistics import mean

from quorum_attention.bench.runner import Runner
from quorum_attention.bench.settings import Section, Settings, short, word
from quorum_attention.bench.spec import Answer

_GRADIENTS = ("grad_query", "grad_key", "grad_value")


def run(settings: Settings, runner: Runner) -> list[Section]:
    """Forward and backward errors of every method in both 16-bit dtypes (fp32 on a CPU too)."""
    dtypes = ["float16", "bfloat16", *(["float32"] if settings.device == "cpu" else [])]
    if settings.quick:
        dtypes = [settings.dtype]
    answers: dict[tuple[str, str], Answer] = {}
    for method in settings.methods:
        for dtype in dtypes:
            spec = settings.spec(
                method, settings.accuracy_tokens, dtype=dtype, backward=True,
                draws=settings.draws, repeats=0,
            )  # fmt: skip
            answers[method, dtype] = runner.measure(spec, "accuracy")
    tokens = short(settings.accuracy_tokens)
    note = (
        f"{tokens} tokens, relative error (norm of the difference over the norm) against float64 "
        f"on the same inputs, mean of {settings.draws} draws."
    )
    overall = [
        [
            method,
            *(_cell(answers[method, dtype], ("out",)) for dtype in dtypes),
            *(_cell(answers[method, dtype], _GRADIENTS) for dtype in dtypes),
        ]
        for method in settings.methods
    ]
    by_gradient = [
        [method, *(_cell(answers[method, d], (name,)) for d in dtypes for name in _GRADIENTS)]
        for method in settings.methods
    ]
    return [
        Section(
            "accuracy", "Accuracy against float64", note + " Backward: mean of three gradients.",
            ["method", *(f"forward {d}" for d in dtypes), *(f"backward {d}" for d in dtypes)],
            overall,
        ),
        Section(
            "accuracy-by-gradient", "Accuracy by gradient", note,
            ["method", *(f"{g} {d}" for d in dtypes for g in ("dQ", "dK", "dV"))], by_gradient,
        ),
    ]  # fmt: skip


def _cell(answer: Answer, names: tuple[str, ...]) -> str:
    if not answer.ok or any(name not in answer.errors for name in names):
        return word(answer)
    return f"{mean(mean(answer.errors[name]) for name in names):.3e}"
