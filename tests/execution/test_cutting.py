"""Tasks at the depth of a plan and deeper, and schedules with slots for them."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition import Decomposition, Task
from quorum_attention.execution.problem import GroupSize, Placement, Problem, Workload, spec_of
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.schedule import Cutting, schedule_of
from quorum_attention.kernels import DenseKernel
from quorum_attention.kernels.kit import from_score_mod, sliding_window


def cut(n: int, window: int | None, levels: tuple[int, ...], *, backward: bool = False) -> Cutting:
    kernel = DenseKernel()
    if window is not None:
        kernel = from_score_mod(None, sliding_window(window), compiled=False)
    work = Workload((1,), 2, 2, n, n, 8, 8, torch.float32, True)
    shape = Decomposition(n, levels, "aligned", 8)
    planned = schedule_of(work, shape, GroupSize(1, 2), Slots(1, "device"))
    place = Placement("cpu", True, False, torch.float32)
    return Cutting(planned, Problem(work, kernel, spec_of(backward), place))


def kept(tasks: list[Task], n: int, window: int | None) -> Counter[tuple[int, int]]:
    """How often the tasks compute each pair of the window."""
    found: Counter[tuple[int, int]] = Counter()
    for task in tasks:
        tokens = [t for start, stop, _ in task.runs for t in range(start, stop)]
        for r in task.rectangles(True, n, n):
            for i in range(r.query_start, r.query_stop):
                stop = min(i + 1, r.key_stop) if r.causal else r.key_stop
                for j in range(r.key_start, stop):
                    q, k = tokens[i], tokens[j]
                    if q < n and k < n and (window is None or q - k < window):
                        found[q, k] += 1
    return found


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 160),
    window=st.none() | st.integers(1, 80),
    levels=st.sampled_from([(), (3,), (7,)]),
    done=st.integers(0, 7),
    backward=st.booleans(),
)
def test_every_pair_once_however_it_is_cut(n, window, levels, done, backward) -> None:  # type: ignore[no-untyped-def]
    """The first tasks are done; the others are cut further, as after a failure."""
    cutting, depth = cut(n, window, levels, backward=backward), len(levels)
    tasks = cutting.tasks(depth)
    parts = cutting.further(tasks[done:], depth + 1)
    wanted = {(i, j) for i in range(n) for j in range(i + 1) if window is None or i - j < window}
    for every in (tasks, [*tasks[:done], *parts], cutting.tasks(depth + 1)):
        counted = kept(every, n, window)
        assert counted.keys() == wanted
        assert set(counted.values()) <= {1}
    for at, some in ((depth, tasks), (depth + 1, parts)):
        slot = max(cutting.schedule(at).task_rows(cutting.work))
        assert all(task.n_tokens <= slot for task in some)
