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


def test_nothing_yet() -> None:
    assert str(Report()) == "nothing has run yet"
    assert Report().to_dict() == {"forward": None, "backward": None}


def test_lines_say_what_happened() -> None:
    first, second, *rest = report().lines()
    assert first == (
        "kernel cpu; levels 7 x 7; 2 head group(s) of 4; 98 unit(s); n_cap 1; accumulators: host"
    )
    assert "planned peak 5.00 MiB" in second
    assert "moved 3.00 MiB in, 1.00 MiB out" in second
    assert "measured" not in second
    assert "budget" not in second
    assert not rest


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"levels": ()}, "levels none (monolithic)"),
        ({"peak_bytes": 4 << 20}, "measured 4.00 MiB"),
        ({"budget_bytes": 6 << 20}, "budget 6.00 MiB"),
        ({"left_out": 0.25}, "25% of the tasks' tokens left out"),
        ({"repeated_units": 3}, "3 unit(s) run again: a scaled gradient overflowed"),
        ({"recoveries": ["n_cap 2 -> 1"], "recovery_seconds": 2.0}, "recovered: n_cap 2 -> 1"),
        ({"recoveries": ["a"], "recovery_seconds": 2.0}, "recoveries cost 2"),
        ({"stages": {"compute": 1.0}}, "stages (s): compute 1.000"),
        ({"stages": {"h2d": 1.0, "compute": 1.5}}, "100% of transfers hidden"),
    ],
)
def test_lines_that_are_there_where_they_have_something_to_say(more, said: str) -> None:  # type: ignore[no-untyped-def]
    assert said in "\n".join(report(**more).lines())
    assert said not in "\n".join(report().lines())


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


def test_both_passes_for_people() -> None:
    text = str(Report(forward=report(), backward=report(kernel="dense")))
    assert text.startswith("forward: kernel cpu")
    assert "\nbackward: kernel dense" in text
