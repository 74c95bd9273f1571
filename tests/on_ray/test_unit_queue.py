"""The units of a pass, in any order of ending: each is begun once, no chunk is merged
before all of its states exist, and a part is complete once, with its last result."""

from __future__ import annotations

import random

import pytest

from quorum_attention.quorums.interest import tasks_of_chunk
from quorum_attention.ray.chunks import FarmUnit
from quorum_attention.ray.unit_queue import UnitQueue


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("n_chunks", [1, 3, 7])
def test_units_in_any_order(seed: int, n_chunks: int) -> None:
    draw = random.Random(seed)
    # Heads of the same part are complete together.
    parts = {
        (entry, head): draw.randrange(3) for entry in range(2) for head in range(2)
    }
    queue = UnitQueue(parts, n_chunks)
    running: list[FarmUnit] = []
    done: list[FarmUnit] = []
    complete: list[int] = []
    while queue.waiting or running:
        while queue.waiting and draw.random() < 0.7:
            unit = queue.waiting.popleft()
            if unit.kind == "merge":
                tasks = tasks_of_chunk(unit.number, n_chunks)
                assert {
                    unit._replace(kind="task", number=task) for task in tasks
                } <= set(done)
            running.append(unit)
        if not running:
            continue
        unit = running.pop(draw.randrange(len(running)))
        done.append(unit)
        part = queue.finish(unit)
        if part is not None:
            complete.append(part)
            heads = [head for head, number in parts.items() if number == part]
            results = [one for one in done if one.kind != "task"]
            n_results = sum((one.entry, one.head) in heads for one in results)
            assert n_results == len(heads) * n_chunks
    assert len(set(done)) == len(done) == queue.n_units
    assert sorted(complete) == sorted(set(parts.values()))
