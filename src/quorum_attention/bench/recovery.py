"""At and beyond the memory boundary: which calls fail, which are recovered, and their cost."""

from __future__ import annotations

from quorum_attention.bench.methods import reference
from quorum_attention.bench.runner import Runner
from quorum_attention.bench.search import longest
from quorum_attention.bench.settings import Section, Settings, seconds, short, word
from quorum_attention.bench.spec import Answer
from quorum_attention.sizes import format_bytes


def run(settings: Settings, runner: Runner) -> list[Section]:
    """The reference's longest call under the budget, and lengths beyond it."""
    against = reference(settings.device)
    boundary = longest(settings, runner, against, backward=False, experiment="recovery")
    if not boundary:
        text = f"{against} does not run at {short(settings.min_tokens)} tokens in the budget."
        return [Section("recovery", "Recovery at the memory boundary", text, [], [])]
    rows = []
    lengths = [boundary * factor for factor in (1, 2, 4, 8)]
    for tokens in [n for n in lengths if n <= settings.max_tokens] or lengths[:1]:
        cells = [short(tokens)]
        for method in (against, *(m for m in ("quorum", "stream-cqsa") if m in settings.methods)):
            spec = settings.spec(
                method, tokens, budget_bytes=settings.budget_bytes, repeats=1, backward=True
            )
            cells.append(_cell(runner.measure(spec, "recovery")))
        rows.append(cells)
    names = [against, *(m for m in ("quorum", "stream-cqsa") if m in settings.methods)]
    text = (
        f"Forward and backward under a real limit of {format_bytes(settings.budget_bytes)} beyond "
        f"the inputs. {against}'s longest forward in it has {short(boundary)} tokens. Seconds, "
        f"peak memory, and how often ours recovered from a failure on the way."
    )
    title = "Recovery at the memory boundary"
    return [Section("recovery", title, text, ["tokens", *names], rows)]


def _cell(answer: Answer) -> str:
    spent = seconds(answer, True)
    if spent is None:
        return word(answer)
    recovered = sum(
        len((answer.report.get(name) or {}).get("recoveries", []))
        for name in ("forward", "backward")
    )
    again = f", recovered {recovered}x" if recovered else ""
    return f"{spent:.4g} s, {format_bytes(answer.peak_bytes or 0)}{again}"
