"""Rectangle limits allow the halves of a task and are bounded under a mask."""

from __future__ import annotations

import pytest
import torch

from quorum_attention.decomposition import Decomposition
from quorum_attention.execution.problem import GroupSize, Workload
from quorum_attention.execution.routes.over_inputs import Blockwise, Whole
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.schedule import Route, Schedule, schedule_of

SHAPES = [
    Decomposition(n, levels, layout, tile)
    for n in (1, 50, 1000, 5000)
    for levels in ((), (7,), (13,), (7, 7), (13, 3))
    for layout, tile in (("aligned", 16), ("balanced", 128))
]
IDS = [f"{s.n_tokens}-{'x'.join(map(str, s.levels)) or '1'}-{s.layout}" for s in SHAPES]


def schedule(shape: Decomposition, max_pairs: int | None = None) -> tuple[Schedule, Workload]:
    n = shape.n_tokens
    work = Workload((1,), 2, 2, n, n, 8, 8, torch.float32, True)
    slots = Slots(1, "host")
    return schedule_of(work, shape, GroupSize(1, 2), slots, max_pairs=max_pairs), work


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("max_pairs", [None, 900])
def test_no_rectangle_exceeds_the_limits_that_the_workspace_is_sized_by(
    shape: Decomposition, is_causal: bool, max_pairs: int | None
) -> None:
    limited, work = schedule(shape, max_pairs)
    assert limited.max_queries >= 1
    assert limited.max_keys >= 1
    if max_pairs is not None:
        assert limited.max_queries * limited.max_keys <= max_pairs
    extent = limited.extent(work)
    for task in list(shape.tasks())[:14]:
        assert task.n_tokens <= extent.n_tokens
        for r in task.rectangles(
            is_causal, work.n_queries, work.n_keys, limited.max_queries, limited.max_keys
        ):
            assert r.n_queries <= extent.max_queries
            assert r.n_keys <= extent.max_keys


CUT, UNCUT = Decomposition(1000, (7,), "aligned", 16), Decomposition(1000)


@pytest.mark.parametrize(
    "route", [Whole(2, "host"), Blockwise(streams=2), Slots(3, "host", 2)], ids=repr
)
def test_every_route_goes_through_slots_where_it_cannot_run(route: Route) -> None:
    """Through slots it has the same levels; a whole call that ran out of memory gets one more. It
    has one slot, unless more were planned."""
    _, work = schedule(CUT)
    made = schedule_of(work, UNCUT if isinstance(route, Whole) else CUT, GroupSize(1, 1), route)
    slots = made.through_slots(work)
    assert isinstance(slots.route, Slots)
    assert slots.decomposition == made.decomposition
    assert (slots.n_cap, slots.accumulator) == (made.n_cap, made.accumulator)
    fallback = made.route.fallback(made, work)
    if isinstance(route, Slots):
        return
    assert fallback.n_cap == 1
    deeper = fallback.decomposition.depth - made.decomposition.depth
    assert deeper == isinstance(route, Whole)
