"""Measuring at rising lengths: sweeps, and the longest call that completes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quorum_attention.bench.runner import Runner
from quorum_attention.bench.settings import Settings, seconds
from quorum_attention.bench.spec import OUT_OF_MEMORY, Answer

_STEPS = 2


def sweep(
    settings: Settings,
    runner: Runner,
    experiment: str,
    methods: Sequence[str],
    lengths: Sequence[int],
    *,
    backward: bool,
    **others: Any,
) -> dict[tuple[str, int], Answer]:
    """Answers by (method, tokens).

    A method ends at its first length that fails, or if its next one is expected to take longer
    than ``settings.method_seconds``. ``others`` are further fields of the specs.
    """
    answers: dict[tuple[str, int], Answer] = {}
    for method in methods:
        expected = 0.0
        for tokens in lengths:
            if expected > settings.method_seconds:
                break
            spec = settings.spec(method, tokens, backward=backward, **others)
            answer = answers[method, tokens] = runner.measure(spec, experiment)
            if not answer.ok:
                break  # longer ones would end the same way
            # Work grows with the square of the length.
            expected = 4 * (settings.repeats + 1) * (seconds(answer, backward) or 0.0)
    return answers


def longest(
    settings: Settings, runner: Runner, method: str, *, backward: bool, experiment: str
) -> int:
    """Tokens of the longest call of ``method`` in the budget.

    The length is doubled until a call fails; then two halvings of the interval follow (none if
    ``settings.quick``). 0 if the shortest call fails; the longest length if none does.
    """

    def completes(tokens: int) -> bool | None:
        spec = settings.spec(
            method, tokens, backward=backward, budget_bytes=settings.budget_bytes, repeats=0
        )
        answer = runner.measure(spec, experiment)
        if answer.ok:
            return True
        return False if answer.status == OUT_OF_MEMORY else None

    best = 0
    tokens = settings.min_tokens
    while tokens <= settings.max_tokens:
        done = completes(tokens)
        if not done:
            break
        best, tokens = tokens, 2 * tokens
    if best == 0 or 2 * best > settings.max_tokens or settings.quick:
        return best
    step = best // 2
    for _ in range(_STEPS):
        if completes(best + step):
            best += step
        step //= 2
    return best
