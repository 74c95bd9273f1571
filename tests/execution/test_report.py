"""What a report says of one call, and of many."""

from __future__ import annotations

import json

import pytest
import torch
from helpers_kernels import WatchedKernel
from helpers_plans import unpinned

import quorum_attention as qa
from quorum_attention.execution.report import PassReport


@pytest.mark.parametrize(
    ("seconds", "stages", "overlap"),
    [
        (3.0, {"h2d": 1.0, "compute": 2.0}, 0.0),
        (2.0, {"h2d": 1.0, "compute": 2.0}, 1.0),
        (2.5, {"h2d": 0.5, "d2h": 0.5, "compute": 2.0}, 0.5),
        (9.0, {"h2d": 1.0, "compute": 2.0}, 0.0),  # something else took time: not negative
        (1.0, {"h2d": 1.0, "compute": 2.0}, 1.0),  # enqueued only: no more than all
        (2.0, {"compute": 2.0}, None),
        (2.0, {}, None),
    ],
)
def test_overlap(seconds: float, stages: dict[str, float], overlap: float | None) -> None:
    report = qa.Report()
    q = torch.randn(1, 1, 9, 8)
    qa.attention(q, q, q, depth=1, report=report)
    made = report.forward
    made.seconds, made.stages = seconds, stages
    assert made.overlap == (None if overlap is None else pytest.approx(overlap))
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["backward"] is None
    assert plain["forward"]["levels"] == list(made.levels)
    assert plain["forward"].keys() == {*PassReport.__dataclass_fields__, "overlap"}


@pytest.mark.usefixtures("one_thread")
def test_of_calls_small_cut_and_failed() -> None:
    report, outer = qa.Report(), qa.Report()
    q = torch.randn(1, 4, 300, 16, requires_grad=True)
    with qa.using(report=outer):
        qa.attention(q, q, q).sum().backward()  # at once, without a plan
        assert "1 forward, 1 backward" in str(outer)
        qa.attention(q, q, q, report=report, depth=1).sum().backward()
        with pytest.raises(qa.BudgetError):
            qa.attention(q, q, q, budget=100)
    assert (report.total.forwards, report.total.backwards, report.total.cut) == (1, 1, 2)
    assert (outer.total.forwards, outer.total.backwards, outer.total.cut) == (2, 2, 2)
    assert outer.total.seconds > report.total.seconds > 0
    assert outer.total.peak_bytes == max(
        report.forward.planned_peak_bytes, report.backward.planned_peak_bytes
    )
    # One report given twice counts once.
    with qa.using(report=report):
        qa.attention(q.detach(), q, q, report=report)
    assert report.total.forwards == 2


def test_a_recovery_is_counted() -> None:
    kernel, report = WatchedKernel({0, 3}), qa.Report()
    sizes = {"heads": 2, "head_dim": 16, "dtype": torch.float32, "kernel": kernel}
    plan = unpinned(qa.plan(400, levels=(7,), n_cap=3, **sizes))
    q = torch.randn(1, 2, 400, 16)
    kernel.arm()
    qa.attention(q, q, q, plan=plan, kernel=kernel, report=report)
    assert report.total.recoveries == len(report.forward.recoveries) > 0
    assert report.total.recovery_seconds == report.forward.recovery_seconds
