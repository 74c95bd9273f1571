"""What a report says, for people and for machines."""

from __future__ import annotations

import json

import pytest

from quorum_attention.execution.report import PassReport, Report


def report(**more) -> PassReport:  # type: ignore[no-untyped-def]
    known = {
        "kernel": "cpu", "levels": (7, 7), "planned_levels": (7,), "n_groups": 2,
        "heads_per_group": 4, "n_cap": 1, "accumulator": "host", "units": 98, "seconds": 1.5,
        "loaded_bytes": 3 << 20, "stored_bytes": 1 << 20, "planned_peak_bytes": 5 << 20,
    }  # fmt: skip
    return PassReport(**{**known, **more})


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
    found = report(seconds=seconds, stages=stages).overlap
    assert found == (None if overlap is None else pytest.approx(overlap))


def test_for_machines() -> None:
    made = Report(forward=report(stages={"h2d": 1.0}))
    plain = json.loads(json.dumps(made.to_dict()))
    assert plain["backward"] is None
    assert plain["forward"]["levels"] == [7, 7]
    assert plain["forward"]["overlap"] == made.forward.overlap
    assert plain["forward"].keys() == {*PassReport.__dataclass_fields__, "overlap"}
