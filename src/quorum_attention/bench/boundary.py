"""The longest call in a capped budget (the paper's memory boundary)."""

from __future__ import annotations

from typing import Any

from quorum_attention.bench.runner import Runner
from quorum_attention.bench.search import longest
from quorum_attention.bench.settings import Section, Settings, short
from quorum_attention.sizes import format_bytes


def run(settings: Settings, runner: Runner) -> list[Section]:
    """The longest forward and forward+backward of every method in the budget."""
    found: dict[str, list[int]] = {}
    for method in settings.methods:
        found[method] = [
            longest(settings, runner, method, backward=backward, experiment="boundary")
            for backward in settings.passes
        ]
    rows = [
        [method, *(_cell(tokens, settings) for tokens in lengths)]
        for method, lengths in found.items()
    ]
    how = ", by doubling" if settings.quick else ""
    text = (
        f"The longest call that completes with {format_bytes(settings.budget_bytes)} beyond its "
        f"inputs, which the allocator enforces; tried up to {short(settings.max_tokens)}{how}."
    )

    def draw(axes: Any) -> None:
        axes.barh(list(found), [max(1, lengths[-1]) for lengths in found.values()])
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda tokens, _: short(round(tokens)))
        axes.set_xlabel("longest sequence in tokens, forward and backward")

    columns = ["method"]
    columns += ["forward+backward" if backward else "forward" for backward in settings.passes]
    return [Section("boundary", "Boundary of a capped budget", text, columns, rows, draw)]


def _cell(tokens: int, settings: Settings) -> str:
    if tokens == 0:
        return f"< {short(settings.min_tokens)}"
    beyond = 2 * tokens > settings.max_tokens and tokens in settings.lengths()
    return f">= {short(tokens)}" if beyond else short(tokens)
