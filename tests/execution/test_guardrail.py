"""The guardrail as a pure state machine: every transition, and whole histories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorum_attention.execution.guardrail import (
    Coarsen,
    Continue,
    Deepen,
    Event,
    GiveUp,
    Guardrail,
    LowerCap,
)

OOM, ROOM = Event.OUT_OF_MEMORY, Event.HEADROOM


def guard(n_cap: int = 2, depth: int = 1, floor: int = 1, deepest: int = 3, **more) -> Guardrail:
    return Guardrail(n_cap=n_cap, depth=depth, floor_depth=floor, max_depth=deepest, **more)


@pytest.mark.parametrize(
    ("state", "event", "order", "after"),
    [
        pytest.param(guard(3), OOM, LowerCap(2), (2, 1), id="several-slots"),
        pytest.param(guard(2), OOM, LowerCap(1), (1, 1), id="two-slots"),
        pytest.param(guard(1), OOM, Deepen(1), (1, 2), id="one-slot"),
        pytest.param(guard(1, deepened_n_cap=2), OOM, Deepen(2), (2, 2), id="one-slot-to-two"),
        pytest.param(guard(1, depth=3), OOM, GiveUp, (1, 3), id="nothing-finer"),
        pytest.param(guard(2, depth=3), OOM, LowerCap(1), (1, 3), id="finest-but-two-slots"),
        pytest.param(guard(3, pinned=True), OOM, GiveUp, (3, 1), id="pinned"),
        pytest.param(guard(1, depth=2), ROOM, Coarsen(1), (1, 1), id="headroom-after-recovery"),
        pytest.param(guard(1, depth=1), ROOM, Continue, (1, 1), id="headroom-at-plan"),
        pytest.param(guard(1, depth=2, pinned=True), ROOM, Continue, (1, 2), id="headroom-pinned"),
        pytest.param(guard(1, depth=2, coarsenings=2), ROOM, Continue, (1, 2), id="headroom-spent"),
    ],
)
def test_every_transition(state: Guardrail, event: Event, order, after) -> None:
    following, found = state.on(event, where="task (3,)")
    if isinstance(order, type):
        assert isinstance(found, order)
    else:
        assert found == order
    assert (following.n_cap, following.depth) == after
    changed = isinstance(found, (LowerCap, Deepen, Coarsen))
    assert len(following.history) == len(state.history) + changed, "a change leaves one line"
    if changed and event is OOM:
        assert "task (3,)" in following.history[-1]


def test_a_whole_history_down_to_giving_up() -> None:
    """Slots first, then depth, and the reasons are kept."""
    state, orders = guard(3, deepest=3), []
    for _ in range(5):
        state, order = state.on(OOM, where="x")
        orders.append(order)
    assert orders[:4] == [LowerCap(2), LowerCap(1), Deepen(1), Deepen(1)]
    assert isinstance(orders[4], GiveUp)
    assert "depth 3" in orders[4].reason
    assert len(state.history) == 4


def test_memory_that_comes_and_goes_cannot_make_a_call_swing_for_ever() -> None:
    state = guard(1, deepest=9)
    coarsened = 0
    for _ in range(20):
        state, order = state.on(OOM)
        if isinstance(order, GiveUp):
            break
        state, order = state.on(ROOM)
        coarsened += isinstance(order, Coarsen)
    assert coarsened == 2
    assert isinstance(order, GiveUp) or state.depth == state.max_depth


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
    state = guard(n_cap, floor, floor, floor + finer, pinned=pinned)
    for event in events:
        before = state
        state, order = state.on(event)
        assert state.floor_depth <= state.depth <= state.max_depth
        assert 1 <= state.n_cap <= n_cap
        assert state.coarsenings <= 2
        if isinstance(order, (GiveUp, Continue)):
            assert state == before
        if isinstance(order, GiveUp):
            assert pinned or (state.n_cap == 1 and state.depth == state.max_depth)
        if pinned:
            assert isinstance(order, (GiveUp, Continue))


def test_failures_alone_end_after_finitely_many_steps() -> None:
    """Every failure makes progress: slots times depth bounds the retries."""
    state, steps = guard(4, deepest=6), 0
    order: object = None
    while not isinstance(order, GiveUp):
        state, order = state.on(OOM)
        steps += 1
        assert steps <= 4 + 6
