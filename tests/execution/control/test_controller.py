"""The recovery controller: every transition, whole histories; and where rows come
from."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers.controller import History, controller
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition import Decomposition, Rows, Task
from quorum_attention.decomposition.decomposition import tokens_of
from quorum_attention.execution.control.controller import RecoveryController
from quorum_attention.execution.control.visits import visits

GIVES_UP, NOTHING = "gives up", "nothing"


def state(made: RecoveryController) -> tuple[int, int, int, int]:
    return made.n_cap, made.depth, made.coarsenings, len(made.history)


def happens(made: RecoveryController, memory: bool) -> str:
    """Memory runs out, or there is some; what becomes of that."""
    before = state(made)
    made.headroom() if memory else made.out_of_memory()
    if made.given_up or state(made) == before:
        assert state(made) == before, "it gave up and changed something"
        return GIVES_UP if made.given_up else NOTHING
    assert len(made.history) == before[3] + 1, "a change leaves one line"
    return made.history[-1].rpartition(": ")[2]


@pytest.mark.parametrize(
    ("made", "memory", "change", "after"),
    [
        pytest.param(controller(3), False, "slots 3 -> 2", (2, 1), id="several-slots"),
        pytest.param(controller(2), False, "slots 2 -> 1", (1, 1), id="two-slots"),
        pytest.param(controller(1), False, "depth 1 -> 2", (1, 2), id="one-slot"),
        pytest.param(
            controller(1, depth=3), False, GIVES_UP, (1, 3), id="nothing-finer"
        ),
        pytest.param(
            controller(2, depth=3), False, "slots 2 -> 1", (1, 3), id="finest"
        ),
        pytest.param(controller(3, pinned=True), False, GIVES_UP, (3, 1), id="pinned"),
        pytest.param(
            controller(1, depth=2), True, "depth 2 -> 1", (1, 1), id="headroom"
        ),
        pytest.param(
            controller(1, depth=1), True, NOTHING, (1, 1), id="headroom-at-plan"
        ),
        pytest.param(
            controller(1, depth=2, pinned=True),
            True,
            NOTHING,
            (1, 2),
            id="headroom-pinned",
        ),
        pytest.param(
            controller(1, depth=2, coarsenings=2),
            True,
            NOTHING,
            (1, 2),
            id="headroom-spent",
        ),
    ],
)
def test_every_transition(
    made: RecoveryController, memory: bool, change: str, after
) -> None:
    where = made.where
    assert happens(made, memory) == change
    assert state(made)[:2] == after
    if not memory:
        assert f"out of memory in {where}" in (made.given_up or made.history[-1])


@pytest.mark.slow
def test_three_thousand_histories() -> None:
    """In any order of events every pair is computed exactly once.

    At any moment memory may run out, or there may be headroom.
    """
    ends: Counter[str] = Counter()
    for seed in range(3_000):
        history = History(seed)
        try:
            history.run()
            ends[history.end] += 1
            ends.update(history.seen)
        except Exception:
            print(f"seed {seed}: {history.told()}")
            raise
    # Every kind of recovery did happen, and most histories ended with all units done.
    assert ends["finished"] > 1_800
    assert ends["gave up"] > 30
    for kind in ("one slot less", "deepened", "coarsened", "fell back"):
        assert ends[kind] > 60, kind


LEVELS = st.sampled_from([(), (3,), (7,), (13,), (3, 3), (7, 3), (3, 7), (7, 7)])
SHAPES = st.builds(
    Decomposition,
    st.integers(0, 400),
    LEVELS,
    st.sampled_from(["aligned", "balanced"]),
    st.integers(1, 40),
)


def positions(rows: Rows) -> list[tuple[int, int]]:
    """(global, local) of every row of a run."""
    return [(rows.start + i, rows.local + i) for i in range(rows.stop - rows.start)]


def every(pieces) -> list[tuple[int, int]]:
    return [position for piece in pieces for position in positions(piece)]


def layout(task: Task) -> dict[int, int]:
    return {
        start + i: local + i
        for start, stop, local in task.runs
        for i in range(stop - start)
    }


@st.composite
def orders(draw) -> list[Task]:
    tasks = list(draw(SHAPES).tasks())
    return (
        draw(st.permutations(tasks))
        if len(tasks) <= 21
        else tasks[:: draw(st.integers(1, 3))]
    )


@settings(max_examples=60, deadline=None)
@given(tasks=orders(), carry=st.booleans(), data=st.data())
def test_state_is_made_once_handed_on_and_finished_once(tasks, carry, data) -> None:
    """Also after ``done`` completed tasks, whose rows exist already."""
    done = data.draw(st.integers(0, len(tasks)))
    finished_before, left = tasks[:done], tasks[done:]
    touched = tokens_of(*finished_before)
    exists = {row for task in finished_before for row in layout(task)}
    assert exists == {row for start, stop in touched for row in range(start, stop)}

    fresh, finished = Counter(), Counter()
    last_visit = {
        row: number for number, task in enumerate(left) for row in layout(task)
    }
    previous: dict[int, int] = {}
    turns = list(visits(left, touched=touched, carry=carry))
    assert [turn.task.path for turn in turns] == [task.path for task in left]
    for number, turn in enumerate(turns):
        here = layout(turn.task)
        carried = every(c.rows for c in turn.carried)
        come = every(turn.fresh) + carried + every(turn.loaded)
        gone = every(turn.stored) + every(turn.finished)
        assert sorted(come) == sorted(here.items()), (
            "every row comes from exactly one place"
        )
        assert sorted(gone) == sorted(here.items()), "and goes to exactly one"
        for piece in turn.carried:
            for i in range(piece.rows.stop - piece.rows.start):
                assert previous[piece.rows.start + i] == piece.previous_local + i
        if carry:
            assert not {row for row, _ in every(turn.loaded)} & previous.keys(), (
                "no needless load"
            )
        else:
            assert not turn.carried
        for row, _ in every(turn.fresh):
            fresh[row] += 1
            assert row not in exists
        for row, _ in carried + every(turn.loaded):
            assert row in exists
        for row, _ in every(turn.finished):
            finished[row] += 1
            assert last_visit[row] == number
        exists |= here.keys()
        previous = here
    assert set(finished) == set(last_visit)
    assert set(finished.values()) <= {1}
    assert set(fresh.values()) <= {1}
