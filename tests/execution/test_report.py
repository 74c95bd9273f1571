"""What a report says of one call, and of many."""

from __future__ import annotations

import json

import pytest
import torch

import quorum_attention as qa
from quorum_attention.execution.report import PassReport


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


def test_overlap_is_what_the_longest_stage_hides_of_the_others() -> None:
    for seconds, stages, overlap in (
        (2.5, {"h2d": 0.5, "d2h": 0.5, "compute": 2.0}, 0.5),
        (9.0, {"h2d": 1.0, "compute": 2.0}, 0.0),  # something else took time: not negative
        (2.0, {"compute": 2.0}, None),
    ):
        made = PassReport("dense", seconds=seconds, stages=stages)
        assert made.overlap == (None if overlap is None else pytest.approx(overlap))
    plain = json.loads(json.dumps(qa.Report(forward=made).to_dict()))
    assert plain["backward"] is None
    assert plain["forward"].keys() == {*PassReport.__dataclass_fields__, "overlap"}
