"""The longest call that completes."""

from __future__ import annotations

from quorum_attention.bench.runner import Runner
from quorum_attention.bench.settings import Settings
from quorum_attention.bench.spec import OUT_OF_MEMORY

_STEPS = 2


def longest(
    settings: Settings, runner: Runner, method: str, *, backward: bool, experiment: str
) -> int:
    """Tokens of the longest call of ``method`` in the budget: by doubling, then two halvings of
    what is left (none where it is to be quick); 0 where the shortest fails, ``max_tokens`` where
    nothing does."""

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
