"""Time and memory over sequence length (the paper's cost tables)."""

from __future__ import annotations

from typing import Any

from quorum_attention.bench.methods import reference
from quorum_attention.bench.runner import Runner
from quorum_attention.bench.search import sweep
from quorum_attention.bench.settings import Section, Settings, ratio, seconds, short, word
from quorum_attention.bench.spec import Answer
from quorum_attention.sizes import format_bytes


def run(settings: Settings, runner: Runner) -> list[Section]:
    """A doubling sweep of every method, forward and forward+backward."""
    return [_sweep(settings, runner, backward) for backward in settings.passes]


def _sweep(settings: Settings, runner: Runner, backward: bool) -> Section:
    answers = sweep(
        settings, runner, "cost", settings.methods, settings.lengths(), backward=backward
    )
    against = reference(settings.device)
    rows = [
        [
            short(tokens),
            *(_cell(answers, method, against, tokens, backward) for method in settings.methods),
        ]
        for tokens in settings.lengths()
    ]
    name = "forward+backward" if backward else "forward"
    text = (
        f"Seconds (median of {settings.repeats}), time ratio to {against}, and peak device memory "
        f"(inputs on the device included). oom: out of memory; empty: not run, because a shorter "
        f"length ended or the next would have taken too long."
    )
    return Section(
        f"cost-{'both' if backward else 'forward'}", f"Cost, {name}", text,
        ["tokens", *settings.methods], rows, _figure(settings, answers, against, backward),
    )  # fmt: skip


def _cell(
    answers: dict[tuple[str, int], Answer], method: str, against: str, tokens: int, backward: bool
) -> str:
    answer = answers.get((method, tokens))
    if answer is None:
        return ""
    spent = seconds(answer, backward)
    if spent is None:
        return word(answer)
    other = answers.get((against, tokens))
    times = ratio(spent, None if other is None else seconds(other, backward))
    memory = format_bytes((answer.peak_bytes or 0) + answer.input_bytes)
    return f"{spent:.4g} ({times}x, {memory})"


def _figure(
    settings: Settings, answers: dict[tuple[str, int], Answer], against: str, backward: bool
) -> Any:
    def draw(axes: Any) -> None:
        for method in settings.methods:
            points = []
            for tokens in settings.lengths():
                mine, other = answers.get((method, tokens)), answers.get((against, tokens))
                if mine is None or other is None:
                    continue
                a, b = seconds(mine, backward), seconds(other, backward)
                if a is not None and b:
                    points.append((tokens, a / b))
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=method)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        lengths = settings.lengths()
        axes.set_xticks(lengths, [short(tokens) for tokens in lengths])
        low, high = axes.get_ylim()
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}" if high < 10 * low else "")
        axes.set_xlabel("tokens of the sequence")
        axes.set_ylabel(f"time, in times of {against} (lower is faster)")
        axes.grid(alpha=0.25)
        axes.legend()

    return draw
