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
    ("more", "label", "text"),
    [
        ({}, "levels", "7 x 7"),
        ({"levels": ()}, "levels", "none (monolithic)"),
        ({}, "units", "98 (2 head groups of 4, n_cap 1)"),
        ({}, "moved", "3.00 MiB in, 1.00 MiB out"),
        ({"peak_bytes": 4 << 20}, "measured peak", "4.00 MiB"),
        ({"budget_bytes": 6 << 20}, "budget", "6.00 MiB"),
        ({"left_out": 0.25}, "tokens left out, without a partner in their task", "25%"),
        ({"repeated_units": 3}, "units run again after an overflow", "3"),
        ({"recoveries": ["n_cap 2 -> 1", "b"]}, "recovered", "n_cap 2 -> 1; b"),
        ({"recoveries": ["a"], "recovery_seconds": 2.0}, "recoveries cost", "2.00 s"),
        ({"stages": {"h2d": 1.0, "compute": 1.5}}, "transfers hidden", "100%"),
        ({"dropout_p": 0.25, "dropout_seed": 11}, "dropout", "0.25 of seed 11"),
    ],
)
def test_what_is_said_and_only_where_it_applies(more, label: str, text: str) -> None:  # type: ignore[no-untyped-def]
    assert report(**more).cells()[label] == text
    assert f"{label}: {text}" in report(**more).lines()
    assert not more or report().cells().get(label) != text


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
