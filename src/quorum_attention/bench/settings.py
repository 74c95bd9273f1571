"""What the experiments share: their settings, and the sections of the report that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from quorum_attention.bench.spec import FAILED, OUT_OF_MEMORY, Answer, Spec

_QUICK_WRAPPED = 4_096


@dataclass(frozen=True)
class Settings:
    """The choices of one ``bench`` run.

    Attributes:
        device, heads, kv_heads, head_dim, dtype: sizes of every call; causal, batch 1.
        methods: names, in the order of the tables.
        min_tokens, max_tokens: shortest and longest call of a sweep, which doubles its length.
        accuracy_tokens: length of the calls of the accuracy tables.
        budget_bytes: the capped budget of ``recovery``, ``boundary`` and ``wrapped``.
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
    budget_bytes: int
    repeats: int
    draws: int
    method_seconds: float
    quick: bool = False

    def spec(self, method: str, tokens: int, **others: Any) -> Spec:
        """A measurement of ``method``."""
        fields: dict[str, Any] = {
            "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim,
            "dtype": self.dtype, "device": self.device, "repeats": self.repeats, **others,
        }  # fmt: skip
        return Spec(method, tokens, **fields)

    @property
    def passes(self) -> tuple[bool, ...]:
        """The passes to measure: forward alone (False), forward and backward (True)."""
        return (True,) if self.quick else (False, True)

    def wrapped_lengths(self) -> list[int]:
        """The lengths for kernels that materialise their scores."""
        return [_QUICK_WRAPPED] if self.quick else self.lengths()

    def lengths(self) -> list[int]:
        """The lengths of a sweep."""
        found = [self.min_tokens]
        while found[-1] * 2 <= self.max_tokens:
            found.append(found[-1] * 2)
        return found


@dataclass
class Section:
    """A table of the report, perhaps with a figure.

    Attributes:
        name: name of the experiment, and of the figure's file.
        title, text, columns, rows: heading, paragraph, and table.
        draw: draws the figure on matplotlib axes; None is no figure.
    """

    name: str
    title: str
    text: str
    columns: list[str]
    rows: list[list[str]]
    draw: Callable[[Any], None] | None = None


def seconds(answer: Answer, backward: bool) -> float | None:
    """Median seconds of a measurement, of both passes with ``backward``; None if there is none."""
    if not answer.ok or not answer.forward_seconds:
        return None
    if not backward:
        return median(answer.forward_seconds)
    pairs = zip(answer.forward_seconds, answer.backward_seconds, strict=True)
    return median(a + b for a, b in pairs)


def word(answer: Answer) -> str:
    """A table's cell for an answer without numbers."""
    if answer.status == OUT_OF_MEMORY:
        return "oom"
    return "failed" if answer.status == FAILED else "-"


def ratio(a: float | None, b: float | None) -> str:
    """A table's cell for ``a / b``."""
    return "-" if a is None or not b else f"{a / b:.3g}"


def short(tokens: int) -> str:
    """8192 as 8K, 1048576 as 1M."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)
