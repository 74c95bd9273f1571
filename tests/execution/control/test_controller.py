"""The recovery controller: every transition, and whole histories."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers_controller import Cuts, History, controller, through
from hypothesis import given
from hypothesis import strategies as st

from quorum_attention.decomposition import Decomposition
from quorum_attention.execution.control import controller as module
from quorum_attention.execution.control.controller import (
    Coarsen,
    Continue,
    Deepen,
    Event,
    FallBack,
    Fallback,
    GiveUp,
    Headroom,
    Limits,
    LowerCap,
    OutOfMemory,
    Overflow,
    PlanAnew,
    RecoveryController,
    Repeat,
    UnitDone,
)
from quorum_attention.execution.control.visits import visits

OOM, ROOM = OutOfMemory(), Headroom()


def state(made: RecoveryController) -> tuple[int, int, int, int]:
    return made.n_cap, made.depth, made.coarsenings, len(made.history)


@pytest.mark.parametrize(
    ("made", "event", "order", "after"),
    [
        pytest.param(controller(3), OOM, LowerCap(2), (2, 1), id="several-slots"),
        pytest.param(controller(2), OOM, LowerCap(1), (1, 1), id="two-slots"),
        pytest.param(controller(1), OOM, Deepen(1), (1, 2), id="one-slot"),
        pytest.param(controller(1, depth=3), OOM, GiveUp, (1, 3), id="nothing-finer"),
        pytest.param(controller(2, depth=3), OOM, LowerCap(1), (1, 3), id="finest"),
        pytest.param(controller(3, pinned=True), OOM, GiveUp, (3, 1), id="pinned"),
        pytest.param(controller(1, depth=2), ROOM, Coarsen(1), (1, 1), id="headroom"),
        pytest.param(controller(1, depth=1), ROOM, Continue, (1, 1), id="headroom-at-plan"),
        pytest.param(
            controller(1, depth=2, pinned=True), ROOM, Continue, (1, 2), id="headroom-pinned"
        ),
        pytest.param(
            controller(1, depth=2, coarsenings=2), ROOM, Continue, (1, 2), id="headroom-spent"
        ),
    ],
)
def test_every_transition(made: RecoveryController, event: Event, order, after) -> None:
    lines, where = len(made.history), made.where
    found = made.on(event)
    if isinstance(order, type):
        assert isinstance(found, order)
    else:
        assert found == order
    assert state(made)[:2] == after
    changed = isinstance(found, (LowerCap, Deepen, Coarsen))
    assert len(made.history) == lines + changed, "a change leaves one line"
    if changed and event is OOM:
        assert f"out of memory in {where}" in made.history[-1]


def test_a_guessed_plan_is_made_anew_and_nothing_else_is_tried() -> None:
    made = RecoveryController(
        ["all heads"], lambda: pytest.fail("cut"), Limits(0, 0, guessed=True), 1
    )
    made.start()
    made.next()
    order = made.on(OutOfMemory("so it said"))
    assert order == made.end == PlanAnew("monolithic call out of memory (so it said)")
    assert made.history == ["monolithic call out of memory (so it said): planned anew"]


def test_memory_that_comes_and_goes_cannot_make_a_call_swing_for_ever() -> None:
    made = controller(1, deepest=9)
    coarsened = 0
    for _ in range(20):
        order = made.on(OOM)
        if isinstance(order, GiveUp):
            break
        order = made.on(ROOM)
        coarsened += isinstance(order, Coarsen)
    assert coarsened == 2
    assert isinstance(order, GiveUp) or made.depth == made.limits.max_depth


@given(
    n_cap=st.integers(1, 5),
    floor=st.integers(0, 3),
    finer=st.integers(0, 4),
    pinned=st.booleans(),
    events=st.lists(st.sampled_from([OOM, ROOM]), max_size=40),
)
def test_any_history_stays_within_its_limits(
    n_cap: int, floor: int, finer: int, pinned: bool, events: list[Event]
) -> None:
    made = controller(n_cap, floor, floor, floor + finer, pinned=pinned)
    for event in events:
        before = state(made)
        order = made.on(event)
        here, limits = made, made.limits
        assert limits.depth <= here.depth <= limits.max_depth
        assert 1 <= here.n_cap <= n_cap
        assert here.coarsenings <= 2
        if isinstance(order, (GiveUp, Continue)):
            assert state(made) == before
        if isinstance(order, GiveUp):
            assert pinned or (here.n_cap == 1 and here.depth == limits.max_depth)
        if pinned:
            assert isinstance(order, (GiveUp, Continue))


def test_a_unit_is_told_by_its_name_not_by_its_turn() -> None:
    made = controller(3)
    made.start()
    units = [made.next() for _ in range(3)]
    made.on(UnitDone("a", units[2].visit.task.path))
    assert made.where == "task (0,) (2 head groups to go)"
    made.on(UnitDone("a", units[0].visit.task.path))
    made.on(OutOfMemory())
    assert made.history == ["out of memory in task (1,) (2 head groups to go): n_cap 3 -> 2"]
    made.start()
    assert [path for group, path in through(made) if group == "a"] == [
        (1,), (3,), (4,), (5,), (6,)
    ]  # fmt: skip


def test_only_what_is_left_of_the_group_in_work_is_cut_further() -> None:
    made = controller(1, groups="ab", cuts=Cuts(Decomposition(60, (3,), "balanced")))
    made.start()
    through(made, 2)
    made.next()
    assert made.on(OutOfMemory()) == Deepen(1)
    assert made.units_left == 7 + 21
    made.start()
    children = [[(i, j) for j in range(7)] for i in range(3)]
    assert through(made) == [
        *(("a", path) for path in children[2]),
        *(("b", path) for row in children for path in row),
    ]


def test_a_group_loaded_ahead_is_begun_anew_after_a_deepening() -> None:
    made = controller(
        1, groups="ab", cuts=Cuts(Decomposition(60, (), "balanced")), floor=0, depth=0
    )
    made.start()
    made.next()
    made.next()
    assert made.on(OutOfMemory()) == Deepen(1)
    made.start()
    assert through(made) == [(group, (i,)) for group in "ab" for i in range(7)]


def test_a_group_loaded_ahead_keeps_what_is_done_of_it() -> None:
    made = controller(2, groups="ab")
    made.start()
    through(made, 6)
    last, ahead = made.next(), made.next()
    assert (last.group, ahead.group) == ("a", "b")
    made.on(UnitDone("b", ahead.visit.task.path))
    assert made.on(OutOfMemory()) == LowerCap(1)
    assert made.on(OutOfMemory()) == Deepen(1)
    made.start()
    assert through(made) == [("a", (6, j)) for j in range(7)] + [
        ("b", (i, j)) for i in range(1, 7) for j in range(7)
    ]


def test_headroom_is_asked_about_between_groups_only() -> None:
    made = controller(1, groups="abc", depth=2)
    made.start()
    asked = []
    while not made.finished:
        asked.append(made.between_groups)
        through(made, 1)
    assert [number for number, asking in enumerate(asked) if asking] == [49, 98]
    assert asked.count(True) == 2


def test_whole_groups_that_are_too_large_are_cut() -> None:
    """Groups that are done stay done; the others begin with all tasks of the depth."""
    cuts = Cuts(Decomposition(60, (7,), "balanced"))
    made = RecoveryController(
        "abc", lambda: Fallback(cuts, Limits(1, 2), 1, "whole: out of memory", "depth 0 -> 1"),
        Limits(0, 0), 1,
    )  # fmt: skip
    made.start()
    assert through(made, 1) == [("a", ())]
    assert made.groups_left == ["b", "c"]
    made.next()
    assert made.on(OutOfMemory("no room")) == FallBack()
    assert made.history == ["whole: out of memory (no room, 1 of 3 head groups done): depth 0 -> 1"]
    made.start()
    assert made.units_left == 14
    assert through(made) == [(group, (i,)) for group in "bc" for i in range(7)]
    assert made.finished


def test_an_overflow_is_repeated_while_that_may_help() -> None:
    made = controller(2)
    made.start()
    path = made.next().visit.task.path
    both = Overflow("a", path, {(0, 0): 2, (0, 1): 1})
    assert made.on(both) == Repeat({(0, 0): 1, (0, 1): 1})
    assert made.on(both) == Repeat({(0, 0): 2, (0, 1): 1})
    assert made.on(both) == Continue()
    made.on(OutOfMemory())
    made.start()
    assert made.next().visit.task.path == path
    assert made.on(both) == Repeat({(0, 0): 1, (0, 1): 1}), "after a failure from the beginning"


def test_ten_thousand_histories() -> None:
    """In any order of events every pair is computed exactly once.

    At any moment memory may run out, there may be headroom, or a unit may overflow. The controller
    checks its invariants after every event.
    """
    ends: Counter[str] = Counter()
    for seed in range(10_000):
        history = History(seed)
        try:
            history.run()
            ends[history.end] += 1
            ends.update(history.seen)
        except Exception:
            print(f"seed {seed}: {history.told()}")
            raise
    # Every kind of recovery did happen, and most histories ended with all units done.
    assert ends["finished"] > 6_000
    assert ends["gave up"] > 100
    assert ends["planned anew"] > 50
    for order in (LowerCap, Deepen, Coarsen, FallBack, Repeat):
        assert ends[order.__name__] > 200, order


def test_visits_that_failed_to_be_worked_out_are_worked_out_again(monkeypatch) -> None:
    """A generator that raised says from then on that it has no more items; units would be lost."""
    made, failures = controller(1, groups="ab"), iter([2])

    def failing(tasks, *, carry):  # type: ignore[no-untyped-def]
        for number, visit in enumerate(visits(tasks, carry=carry)):
            if number == 2 and next(failures, None):
                raise MemoryError
            yield visit

    monkeypatch.setattr(module, "visits", failing)
    made.n_cap = 2
    made.start()
    with pytest.raises(MemoryError):
        through(made)
    made.on(OutOfMemory())
    made.start()
    monkeypatch.undo()
    through(made)
    assert made.finished
