"""The recovery controller: every transition, and whole histories."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers_controller import History, controller

from quorum_attention.execution.control.controller import RecoveryController

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
        pytest.param(controller(1, depth=3), False, GIVES_UP, (1, 3), id="nothing-finer"),
        pytest.param(controller(2, depth=3), False, "slots 2 -> 1", (1, 3), id="finest"),
        pytest.param(controller(3, pinned=True), False, GIVES_UP, (3, 1), id="pinned"),
        pytest.param(controller(1, depth=2), True, "depth 2 -> 1", (1, 1), id="headroom"),
        pytest.param(controller(1, depth=1), True, NOTHING, (1, 1), id="headroom-at-plan"),
        pytest.param(
            controller(1, depth=2, pinned=True), True, NOTHING, (1, 2), id="headroom-pinned"
        ),
        pytest.param(
            controller(1, depth=2, coarsenings=2), True, NOTHING, (1, 2), id="headroom-spent"
        ),
    ],
)
def test_every_transition(made: RecoveryController, memory: bool, change: str, after) -> None:
    where = made.where
    assert happens(made, memory) == change
    assert state(made)[:2] == after
    if not memory:
        assert f"out of memory in {where}" in (made.given_up or made.history[-1])


def test_ten_thousand_histories() -> None:
    """In any order of events every pair is computed exactly once.

    At any moment memory may run out, or there may be headroom.
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
    for kind in ("one slot less", "deepened", "coarsened", "fell back"):
        assert ends[kind] > 200, kind
