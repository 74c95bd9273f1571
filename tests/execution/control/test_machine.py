"""The machine: every transition, and whole histories of one device and of several."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers_machine import Cuts, History, machine, through
from hypothesis import given
from hypothesis import strategies as st

from quorum_attention.decomposition import Decomposition
from quorum_attention.execution.control.events import (
    Coarsen,
    Continue,
    Deepen,
    DeviceJoined,
    DeviceLost,
    Event,
    FallBack,
    GiveUp,
    Headroom,
    LowerCap,
    NeedsPlan,
    OutOfMemory,
    Overflow,
    PlanAnew,
    Repeat,
    Requeue,
    UnitDone,
)
from quorum_attention.execution.control.machine import (
    Fallback,
    Limits,
    Machine,
    _Replay,
    without_a_plan,
)

OOM, ROOM = OutOfMemory(0), Headroom(0)


def state(made: Machine) -> tuple[int, int, int, int]:
    here = made.devices[0]
    return here.n_cap, here.depth, here.coarsenings, len(made.history)


@pytest.mark.parametrize(
    ("made", "event", "order", "after"),
    [
        pytest.param(machine(3), OOM, LowerCap(2), (2, 1), id="several-slots"),
        pytest.param(machine(2), OOM, LowerCap(1), (1, 1), id="two-slots"),
        pytest.param(machine(1), OOM, Deepen(1), (1, 2), id="one-slot"),
        pytest.param(machine(1, depth=3), OOM, GiveUp, (1, 3), id="nothing-finer"),
        pytest.param(machine(2, depth=3), OOM, LowerCap(1), (1, 3), id="finest-but-two-slots"),
        pytest.param(machine(3, pinned=True), OOM, GiveUp, (3, 1), id="pinned"),
        pytest.param(machine(1, depth=2), ROOM, Coarsen(1), (1, 1), id="headroom-after-recovery"),
        pytest.param(machine(1, depth=1), ROOM, Continue, (1, 1), id="headroom-at-plan"),
        pytest.param(
            machine(1, depth=2, pinned=True), ROOM, Continue, (1, 2), id="headroom-pinned"
        ),
        pytest.param(
            machine(1, depth=2, coarsenings=2), ROOM, Continue, (1, 2), id="headroom-spent"
        ),
    ],
)
def test_every_transition(made: Machine, event: Event, order, after) -> None:
    lines, where = len(made.history), made.where(0)
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
    made = Machine(["all heads"], lambda: pytest.fail("cut"), Limits(0, 0, guessed=True), {0: 1})
    made.start(0)
    made.next(0)
    order = made.on(OutOfMemory(0, "so it said"))
    assert order == made.end == PlanAnew("monolithic call out of memory (so it said)")
    assert made.history == ["monolithic call out of memory (so it said): planned anew"]


def test_a_call_without_a_plan_gets_one_when_it_fails() -> None:
    made = without_a_plan("all heads")
    assert made.on(NeedsPlan(0, "not finite")) == made.end == PlanAnew("not finite")


def test_a_whole_history_down_to_giving_up() -> None:
    """First slots are taken away, then levels are added; each step leaves a line."""
    made = machine(3, deepest=3)
    orders = [made.on(OOM) for _ in range(5)]
    assert orders[:4] == [LowerCap(2), LowerCap(1), Deepen(1), Deepen(1)]
    assert isinstance(orders[4], GiveUp)
    assert "depth 3" in orders[4].reason
    assert orders[4].where == made.where(0)
    assert len(made.history) == 4


def test_memory_that_comes_and_goes_cannot_make_a_call_swing_for_ever() -> None:
    made = machine(1, deepest=9)
    coarsened = 0
    for _ in range(20):
        order = made.on(OOM)
        if isinstance(order, GiveUp):
            break
        order = made.on(ROOM)
        coarsened += isinstance(order, Coarsen)
    assert coarsened == 2
    assert isinstance(order, GiveUp) or made.devices[0].depth == made.limits.max_depth


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
    made = machine(n_cap, floor, floor, floor + finer, pinned=pinned)
    for event in events:
        before = state(made)
        order = made.on(event)
        here, limits = made.devices[0], made.limits
        assert limits.depth <= here.depth <= limits.max_depth
        assert 1 <= here.n_cap <= n_cap
        assert here.coarsenings <= 2
        if isinstance(order, (GiveUp, Continue)):
            assert state(made) == before
        if isinstance(order, GiveUp):
            assert pinned or (here.n_cap == 1 and here.depth == limits.max_depth)
        if pinned:
            assert isinstance(order, (GiveUp, Continue))


def test_failures_alone_end_after_finitely_many_steps() -> None:
    """Every failure takes a slot or adds a level, which bounds the number of retries."""
    made, steps = machine(4, deepest=6), 0
    order: object = None
    while not isinstance(order, GiveUp):
        order = made.on(OOM)
        steps += 1
        assert steps <= 4 + 6


def test_turns_are_groups_in_order_and_their_tasks_in_order() -> None:
    made = machine(2, groups="ab")
    paths = [(i,) for i in range(7)]
    assert made.units_left == 14
    assert made.start(0) == 2
    assert through(made) == [("a", path) for path in paths] + [("b", path) for path in paths]
    assert made.finished
    assert made.next(0) is None


def test_no_more_slots_than_units() -> None:
    assert machine(50, groups="ab").start(0) == 14


def test_a_unit_is_told_by_its_name_not_by_its_turn() -> None:
    made = machine(3)
    made.start(0)
    units = [made.next(0) for _ in range(3)]
    made.on(UnitDone(0, "a", units[2].visit.task.path))
    assert made.where(0) == "task (0,) (2 head group(s) to go)"
    made.on(UnitDone(0, "a", units[0].visit.task.path))
    made.on(OutOfMemory(0))
    assert made.history == ["out of memory in task (1,) (2 head group(s) to go): n_cap 3 -> 2"]
    made.start(0)
    assert [path for group, path in through(made) if group == "a"] == [
        (1,), (3,), (4,), (5,), (6,)
    ]  # fmt: skip


def test_only_what_is_left_of_the_group_in_work_is_cut_further() -> None:
    made = machine(1, groups="ab", cuts=Cuts(Decomposition(60, (3,), "balanced")))
    made.start(0)
    through(made, 2)
    made.next(0)
    assert made.on(OutOfMemory(0)) == Deepen(1)
    assert made.units_left == 7 + 21
    made.start(0)
    children = [[(i, j) for j in range(7)] for i in range(3)]
    assert through(made) == [
        *(("a", path) for path in children[2]),
        *(("b", path) for row in children for path in row),
    ]


def test_a_group_loaded_ahead_is_begun_anew_after_a_deepening() -> None:
    made = machine(1, groups="ab", cuts=Cuts(Decomposition(60, (), "balanced")), floor=0, depth=0)
    made.start(0)
    made.next(0)
    made.next(0)
    assert made.on(OutOfMemory(0)) == Deepen(1)
    made.start(0)
    assert through(made) == [(group, (i,)) for group in "ab" for i in range(7)]


def test_a_group_loaded_ahead_keeps_what_is_done_of_it() -> None:
    made = machine(2, groups="ab")
    made.start(0)
    through(made, 6)
    last, ahead = made.next(0), made.next(0)
    assert (last.group, ahead.group) == ("a", "b")
    made.on(UnitDone(0, "b", ahead.visit.task.path))
    assert made.on(OutOfMemory(0)) == LowerCap(1)
    assert made.on(OutOfMemory(0)) == Deepen(1)
    made.start(0)
    assert through(made) == [("a", (6, j)) for j in range(7)] + [
        ("b", (i, j)) for i in range(1, 7) for j in range(7)
    ]


def test_headroom_is_asked_about_between_groups_only() -> None:
    made = machine(1, groups="abc", depth=2)
    made.start(0)
    asked = []
    while not made.finished:
        asked.append(made.between_groups(0))
        through(made, 1)
    assert [number for number, asking in enumerate(asked) if asking] == [49, 98]
    assert asked.count(True) == 2


def test_a_group_is_finished_with_its_last_unit() -> None:
    """A failure in the next group is reported there, and does not reopen the finished one."""
    made = machine(2, groups="ab")
    made.start(0)
    through(made, 7)
    made.next(0)
    assert made.on(OutOfMemory(0, "no room")) == LowerCap(1)
    assert made.history[-1].startswith("out of memory in task (0,) (1 head group(s) to go)")


def test_a_group_without_tasks_is_finished() -> None:
    class Nothing(Cuts):
        def tasks(self, depth: int) -> list:  # type: ignore[type-arg]
            return []

    made = machine(1, groups="ab", cuts=Nothing(Decomposition(60, (7,))))
    made.start(0)
    assert made.next(0) is None
    assert made.finished


def test_whole_groups_that_are_too_large_are_cut() -> None:
    """Groups that are done stay done; the others begin with all tasks of the depth."""
    cuts = Cuts(Decomposition(60, (7,), "balanced"))
    made = Machine(
        "abc", lambda: Fallback(cuts, Limits(1, 2), 1, "whole: out of memory", "depth 0 -> 1"),
        Limits(0, 0), {0: 1},
    )  # fmt: skip
    made.start(0)
    assert through(made, 1) == [("a", ())]
    assert made.groups_left == ["b", "c"]
    made.next(0)
    assert made.on(OutOfMemory(0, "no room")) == FallBack()
    assert made.history == ["whole: out of memory (no room, 1 of 3 head groups done): depth 0 -> 1"]
    made.start(0)
    assert made.units_left == 14
    assert through(made) == [(group, (i,)) for group in "bc" for i in range(7)]
    assert made.finished


def test_pinned_whole_groups_are_not_cut() -> None:
    made = Machine("a", lambda: pytest.fail("not asked"), Limits(0, 0, pinned=True), {0: 1})
    made.start(0)
    made.next(0)
    assert isinstance(made.on(OutOfMemory(0)), GiveUp)


def test_a_device_at_work_on_a_whole_group_finishes_it_and_then_starts_anew() -> None:
    cuts = Cuts(Decomposition(60, (7,), "balanced"))
    made = Machine(
        "abc", lambda: Fallback(cuts, Limits(1, 2), 1, "whole: out of memory", "depth 0 -> 1"),
        Limits(0, 0), {0: 1, 1: 1},
    )  # fmt: skip
    for device in (0, 1):
        made.start(device)
        made.next(device)
    made.on(OutOfMemory(0))
    made.on(UnitDone(1, "b", ()))
    assert made.next(1) is None
    made.start(1)
    assert through(made, device=1) == [(group, (i,)) for group in "ac" for i in range(7)]


def test_an_overflow_is_repeated_while_that_may_help() -> None:
    made = machine(2)
    made.start(0)
    path = made.next(0).visit.task.path
    both = Overflow(0, "a", path, {(0, 0): 2, (0, 1): 1})
    assert made.on(both) == Repeat({(0, 0): 1, (0, 1): 1})
    assert made.on(both) == Repeat({(0, 0): 2, (0, 1): 1})
    assert made.on(both) == Continue()
    made.on(OutOfMemory(0))
    made.start(0)
    assert made.next(0).visit.task.path == path
    assert made.on(both) == Repeat({(0, 0): 1, (0, 1): 1}), "after a failure from the beginning"


def test_a_lost_devices_group_is_gone_on_with_by_another() -> None:
    made = machine({0: 2, 1: 1}, groups="ab")
    made.start(0)
    made.start(1)
    through(made, 3)
    made.next(0)
    assert made.on(DeviceLost(0)) == Requeue((("a", (3,)),))
    assert through(made, device=1)[7:] == [("a", (i,)) for i in range(3, 7)]
    assert made.finished
    assert made.history == ["device 0: lost: 1 unit(s) go to others"]


def test_a_device_that_is_too_small_leaves_its_work_to_others() -> None:
    made = machine({0: 1, 1: 1}, groups="ab", deepest=1)
    made.start(0)
    made.next(0)
    assert isinstance(made.on(OutOfMemory(0)), Requeue)
    made.start(1)
    made.next(1)
    assert isinstance(made.on(OutOfMemory(1)), GiveUp)


def test_without_any_device_it_gives_up_and_with_a_new_one_it_need_not() -> None:
    made = machine({0: 1})
    made.on(DeviceJoined(1, 2))
    assert isinstance(made.on(DeviceLost(0)), Requeue)
    assert made.start(1) == 2
    assert isinstance(made.on(DeviceLost(1)), GiveUp)


def test_ten_thousand_histories_of_up_to_eight_devices() -> None:
    """In any order of events every pair is computed exactly once.

    Devices differ in speed and memory. At any moment one may be lost, join, run out of memory,
    find headroom or report an overflow. The machine checks its invariants after every event.
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
    assert ends["finished"] > 7_000
    assert ends["gave up"] > 100
    assert ends["planned anew"] > 50
    for order in (LowerCap, Deepen, Coarsen, FallBack, Requeue, Repeat):
        assert ends[order.__name__] > 200, order


def test_visits_that_failed_to_be_worked_out_are_worked_out_again() -> None:
    """A generator that raised says that it has no more items; units would be lost."""
    failures = iter([2])

    def numbers():  # type: ignore[no-untyped-def]
        for number in range(5):
            if number == 2 and next(failures, None):
                raise MemoryError
            yield number

    replay = _Replay(numbers)
    reader = iter(replay)
    with pytest.raises(MemoryError):
        list(reader)
    assert list(replay) == list(range(5))
    assert list(replay) == list(range(5))
