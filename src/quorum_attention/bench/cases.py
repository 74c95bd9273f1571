"""The paper's experiments: what each measures, and the tables that it makes."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

import quorum_attention
from quorum_attention.bench.child import FAILED, INPUTS_TIMES, OUT_OF_MEMORY, Answer, Spec
from quorum_attention.bench.methods import ITSELF, RESULTS, reference
from quorum_attention.sizes import format_bytes

Measure = Callable[[str, Spec], Answer]


@dataclass(frozen=True)
class Settings:
    """The choices of one ``bench`` run.

    Attributes:
        device, heads, kv_heads, head_dim, dtype: sizes of every call; causal, batch 1.
        methods: names, in the order of the tables.
        min_tokens, max_tokens: shortest and longest call of a sweep, which doubles its length.
        accuracy_tokens: length of the calls of the accuracy tables.
        repeats: timed runs of a measurement.
        draws: number of random inputs for the accuracy tables.
        method_seconds: a sweep of a method ends if its next length is expected to take longer.
        quick: whether to measure fewer passes, dtypes, lengths and steps.
    """

    device: str
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    methods: tuple[str, ...]
    min_tokens: int
    max_tokens: int
    accuracy_tokens: int
    repeats: int
    draws: int
    method_seconds: float
    quick: bool = False

    def spec(self, method: str, tokens: int, **others: Any) -> Spec:
        """A measurement of ``method``."""
        fields: dict[str, Any] = {
            "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim,
            "dtype": self.dtype, "device": self.device, "repeats": self.repeats,
            **others,
        }  # fmt: skip
        return Spec(method, tokens, **fields)

    def lengths(self) -> list[int]:
        """The lengths of a sweep."""
        found = [self.min_tokens]
        while found[-1] * 2 <= self.max_tokens:
            found.append(found[-1] * 2)
        return found


@dataclass
class Section:
    """A table of the report."""

    title: str
    text: str
    columns: list[str]
    rows: list[list[str]]


def accuracy(settings: Settings, measure: Measure) -> list[Section]:
    """Forward and backward errors of every method in both 16-bit dtypes (fp32 on a CPU too)."""
    dtypes = ["float16", "bfloat16", *(["float32"] if settings.device == "cpu" else [])]
    dtypes = [settings.dtype] if settings.quick else dtypes
    rows = []
    for method in settings.methods:
        cells = [method]
        for dtype in dtypes:
            answer = measure("accuracy", settings.spec(
                method, settings.accuracy_tokens, dtype=dtype, backward=True,
                draws=settings.draws, repeats=0,
            ))  # fmt: skip
            errors = [mean(answer.errors.get(name) or [0.0]) for name in RESULTS]
            shown = [f"{e:.2e}" for e in (errors[0], mean(errors[1:]), *errors[1:])]
            cells += shown if answer.ok else [status_label(answer)] * 5
        rows.append(cells)
    text = (
        f"{short(settings.accuracy_tokens)} tokens, relative error (norm of the difference over "
        f"the norm) against float64, mean of {settings.draws} draws. gradients: mean of the three."
    )
    names = ("out", "gradients", "dQ", "dK", "dV")
    columns = ["method", *(f"{name} {dtype}" for dtype in dtypes for name in names)]
    return [Section("Accuracy against float64", text, columns, rows)]


def cost(settings: Settings, measure: Measure) -> list[Section]:
    """Time and memory over sequence length, forward and forward+backward."""
    against, sections = reference(settings.device), []
    for backward in (True,) if settings.quick else (False, True):
        answers = _sweep(settings, measure, backward)
        rows = []
        for tokens in settings.lengths():
            other = seconds(answers.get((against, tokens)))
            cells = (_cost_cell(answers.get((m, tokens)), other) for m in settings.methods)
            rows.append([short(tokens), *cells])
        text = (
            f"Seconds (median of {settings.repeats}), time over {against}'s, and peak device "
            f"memory with the inputs that are there. oom: out of memory; empty: not run, because a "
            f"shorter length failed or this one would take too long."
        )
        title = "Cost, forward+backward" if backward else "Cost, forward"
        sections.append(Section(title, text, ["tokens", *settings.methods], rows))
    return sections


def _sweep(settings: Settings, measure: Measure, backward: bool) -> dict[tuple[str, int], Answer]:
    """Answers by (method, tokens). A method ends at its first length that fails, or if its next one
    is expected to take longer than ``settings.method_seconds``."""
    answers: dict[tuple[str, int], Answer] = {}
    for method in settings.methods:
        for tokens in settings.lengths():
            answer = measure("cost", settings.spec(method, tokens, backward=backward))
            answers[method, tokens] = answer
            # Work grows with the square of the length.
            expected = 4 * (settings.repeats + 1) * (seconds(answer) or 0.0)
            if not answer.ok or expected > settings.method_seconds:
                break
    return answers


def _cost_cell(answer: Answer | None, other: float | None) -> str:
    spent = seconds(answer)
    if answer is None or spent is None:
        return "" if answer is None else status_label(answer)
    memory = format_bytes((answer.peak_bytes or 0) + answer.input_bytes)
    return f"{spent:.4g} ({spent / other:.3g}x, {memory})" if other else f"{spent:.4g} ({memory})"


def wrapped(settings: Settings, measure: Measure) -> list[Section]:
    """Dense and LongNet kernels recovered: what that changes."""
    tokens = 2 * settings.accuracy_tokens if settings.device == "cpu" else 4096
    draws = settings.draws if settings.quick else 2 * settings.draws
    rows = []
    for name in ITSELF:
        for dtype in (settings.dtype,) if settings.quick else ("float32", "bfloat16", "float16"):
            answer = measure("wrapped", settings.spec(
                name, tokens, dtype=dtype, backward=True, draws=draws, repeats=0, itself=True
            ))  # fmt: skip
            cells = []
            for result in RESULTS:
                found = answer.differences.get(result)
                most, average = zip(*found, strict=True) if found else ((0,), (0,))
                shown = f"{max(most):.1e}, {mean(average):.1e}"
                cells.append(shown if found else status_label(answer))
            rows.append([name, dtype, *cells])
    text = (
        f"{short(tokens)} tokens, causal, inputs times {INPUTS_TIMES}, {draws} draws, depths 1 and "
        "2: the largest and the mean absolute difference between a kernel and itself recovered."
    )
    columns = ["kernel", "dtype", "out", "dQ", "dK", "dV"]
    return [Section("Recovered against itself", text, columns, rows)]


EXPERIMENTS: dict[str, Callable[[Settings, Measure], list[Section]]] = {
    "accuracy": accuracy, "cost": cost, "wrapped": wrapped,
}  # fmt: skip


def seconds(answer: Answer | None) -> float | None:
    """Median seconds of a measurement, both passes together; None if there is none."""
    if answer is None or not answer.ok or not answer.forward_seconds:
        return None
    backward = answer.backward_seconds or [0.0] * len(answer.forward_seconds)
    return median(a + b for a, b in zip(answer.forward_seconds, backward, strict=True))


def status_label(answer: Answer) -> str:
    """A table's cell for an answer without numbers."""
    return {OUT_OF_MEMORY: "oom", FAILED: "failed"}.get(answer.status, "-")


def short(tokens: int) -> str:
    """8192 as 8K, 1048576 as 1M."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def about(device: str) -> dict[str, str]:
    """What is measured on: device, versions and date, nothing that names a particular machine."""
    source = hashlib.sha256()  # tells apart versions with the same number
    for path in sorted(Path(quorum_attention.__file__).parent.rglob("*.py")):
        source.update(path.read_bytes())
    found = {"device": f"{platform.machine()}, {torch.get_num_threads()} threads"}
    if device != "cpu":
        found = {"device": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda),
                 "cudnn": str(torch.backends.cudnn.version()),
                 "triton": importlib.metadata.version("triton")}  # fmt: skip
    return found | {
        "quorum-attention": quorum_attention.__version__, "source": source.hexdigest()[:12],
        "torch": torch.__version__, "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def summary(answer: Answer) -> str:
    """What a measurement found, for a status line."""
    if not answer.ok:
        return f"{answer.status}: {answer.reason}" if answer.reason else answer.status
    errors = {name: max(found) for name, found in answer.errors.items()}
    errors |= {name: max(found)[0] for name, found in answer.differences.items()}
    parts = [f"{name} {most:.1e}" for name, most in errors.items()]
    if answer.peak_bytes is not None:
        parts.append(f"{sum(answer.first_seconds):.3g} s, peak {format_bytes(answer.peak_bytes)}")
    return ", ".join(parts) or answer.status
