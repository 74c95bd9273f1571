"""Rectangle limits: never below what the halving of a task needs, and bounded under a mask."""

from __future__ import annotations

import pytest
import torch

from quorum_attention.decomposition import Decomposition
from quorum_attention.execution.schedule import Schedule, with_limits
from quorum_attention.execution.workload import GroupSize, Workload

SHAPES = [
    Decomposition(n, levels, layout, tile)
    for n in (1, 50, 1000, 5000)
    for levels in ((), (7,), (13,), (7, 7), (13, 3))
    for layout, tile in (("aligned", 16), ("balanced", 128))
]
IDS = [f"{s.n_tokens}-{'x'.join(map(str, s.levels)) or '1'}-{s.layout}" for s in SHAPES]


def schedule(shape: Decomposition) -> tuple[Schedule, Workload]:
    n = shape.n_tokens
    work = Workload((1,), 2, 2, n, n, 8, 8, torch.float32, True)
    return Schedule(shape, GroupSize(1, 2), 1, "host", 1, 1), work


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("max_pairs", [None, 900])
def test_no_rectangle_exceeds_the_limits_that_the_workspace_is_sized_by(
    shape: Decomposition, is_causal: bool, max_pairs: int | None
) -> None:
    made, work = schedule(shape)
    limited = with_limits(made, work, max_pairs)
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


@pytest.mark.parametrize("levels", [(), (7,), (13, 7)])
def test_deeper_is_one_level_of_smaller_tasks(levels: tuple[int, ...]) -> None:
    made, work = schedule(Decomposition(9000, levels, "aligned", 16))
    made = with_limits(made, work)
    deeper = made.deeper(work)
    assert deeper.decomposition.levels == (*levels, 7)
    assert deeper.decomposition.max_task_tokens < made.decomposition.max_task_tokens
    assert (deeper.group, deeper.n_cap) == (made.group, made.n_cap)
