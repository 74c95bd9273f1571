"""Where our method spends its time (the paper's stage breakdown)."""

from __future__ import annotations

from typing import Any

from quorum_attention.bench.runner import Runner
from quorum_attention.bench.settings import Section, Settings, seconds, short, word
from quorum_attention.execution.device.clock import STAGES


def run(settings: Settings, runner: Runner) -> list[Section]:
    """Seconds by stage at the longest length, with the planner's choice and at depth 1."""
    tokens = settings.max_tokens
    rows: list[list[str]] = []
    bars: list[tuple[str, dict[str, float]]] = []
    for method in ("quorum", "quorum-depth-1"):
        # The planner gets the budget, because without one the call would have no stages.
        budget = settings.budget_bytes if method == "quorum" else None
        spec = settings.spec(method, tokens, backward=True, budget_bytes=budget, repeats=1)
        answer = runner.measure(spec, "stages")
        for name in ("forward", "backward"):
            part: dict[str, Any] = answer.report.get(name) or {}
            spent = part.get("stages") or {}
            label = f"{method} {name}"
            if seconds(answer, True) is None or not spent:
                rows.append([label, word(answer), *("" for _ in STAGES), ""])
                continue
            hidden = part.get("overlap")
            rows.append(
                [
                    label,
                    f"{part['seconds']:.4g}",
                    *(f"{spent[stage]:.4g}" for stage in STAGES),
                    "-" if hidden is None else f"{hidden:.0%}",
                ]
            )
            bars.append((label, spent))

    def draw(axes: Any) -> None:
        left = [0.0] * len(bars)
        for stage in STAGES:
            widths = [spent[stage] for _, spent in bars]
            axes.barh([label for label, _ in bars], widths, left=left, label=stage)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_xlabel("seconds of device time (stages run beside each other)")
        axes.legend()

    text = (
        f"{short(tokens)} tokens: wall-clock seconds, seconds by stage on the device, and the "
        f"share of the transfers that other work hides. With two kernel calls in flight, merge "
        f"counts the time it shares with the next call."
    )
    columns = ["pass", "wall", *STAGES, "transfers hidden"]
    figure = draw if bars else None
    return [Section("stages", "Stage breakdown", text, columns, rows, figure)]
