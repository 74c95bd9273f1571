"""Answers the experiments' questions from stored results, or by measuring."""

from __future__ import annotations

from statistics import median
from typing import Protocol

from quorum_attention.bench.processes import Processes
from quorum_attention.bench.results import Results
from quorum_attention.bench.settings import short
from quorum_attention.bench.spec import Answer, Spec
from quorum_attention.sizes import format_bytes, format_seconds


class Told(Protocol):
    """Shows progress."""

    def __call__(self, text: str) -> None:
        """Show what is being done."""

    def done(self, text: str) -> None:
        """Show what has been done."""


class NotKeptError(Exception):
    """A result is not stored, and the runner may not measure."""


class Runner:
    """Measures what is not stored yet.

    Args:
        results: the stored measurements; they are not made again.
        processes: carries out measurements; None: what is not stored is a ``NotKeptError``.
        told: is told of every measurement before and after it is made.
    """

    def __init__(
        self, results: Results, processes: Processes | None = None, told: Told | None = None
    ) -> None:
        self.results = results
        self._processes = processes
        self._told = told

    def measure(self, spec: Spec, experiment: str) -> Answer:
        """The answer to ``spec``; a crash or a timeout is an answer."""
        kept = self.results.find(spec, failed=self._processes is None)
        if kept is not None:
            return kept
        if self._processes is None:
            raise NotKeptError
        what = _asked(spec, experiment)
        if self._told is not None:
            self._told(what)
        answer = self._processes.measure(spec)
        # Printed first, so that it is not lost if it cannot be written.
        if self._told is not None:
            self._told.done(f"{what}: {_answered(answer)}")
        self.results.add(experiment, spec, answer)
        return answer


def _asked(spec: Spec, experiment: str) -> str:
    passes = "forward+backward" if spec.backward else "forward"
    within = "" if spec.budget_bytes is None else f" within {format_bytes(spec.budget_bytes)}"
    return f"{experiment}: {spec.method}, {short(spec.tokens)} {spec.dtype}, {passes}{within}"


def _answered(answer: Answer) -> str:
    """An answer in one line."""
    if not answer.ok:
        return f"{answer.status}: {answer.reason}" if answer.reason else answer.status
    parts = []
    if answer.forward_seconds:
        times = [answer.forward_seconds, answer.backward_seconds]
        parts.append(" + ".join(format_seconds(median(t)) for t in times if t))
    elif answer.first_seconds is not None:
        parts.append("completes")
    if answer.peak_bytes is not None:
        parts.append(f"peak {format_bytes(answer.peak_bytes)}")
    for name, errors in answer.errors.items():
        parts.append(f"{name} {sum(errors) / len(errors):.1e}")
    for name, apart in answer.differences.items():
        parts.append(f"{name} {max(largest for largest, _ in apart):.1e}")
    return ", ".join(parts) or answer.status
