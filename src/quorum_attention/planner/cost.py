"""How long a schedule should take: a sum of few, named terms (docs/planner.md)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from quorum_attention.decomposition import Decomposition
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.workload import Workload, count_groups
from quorum_attention.planner.machine import Machine
from quorum_attention.quorums import quorum_size

# Rows of a kernel's query tile, which sets how evenly a call spreads over the device.
_TILE_ROWS = 128


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds by term."""

    arithmetic: float
    calls: float
    merge: float
    up: float
    down: float
    exposed: float
    overlaps: bool

    @property
    def seconds(self) -> float:
        """The whole: copies hide behind compute where the device overlaps them."""
        compute = self.arithmetic + self.calls + self.merge
        if self.overlaps:
            return max(compute, self.up, self.down) + self.exposed
        return compute + self.up + self.down


@lru_cache(maxsize=512)
def _sample(
    shape: Decomposition, is_causal: bool, n_queries: int, n_keys: int
) -> tuple[int, int, int]:
    """Calls, rows merged and query rows of the largest rectangle, of a typical task."""
    task = shape.task(tuple(c // 2 for c in shape.levels))
    rectangles = task.rectangles(is_causal, n_queries, n_keys)
    rows = sum(r.n_queries for r in rectangles)
    largest = max(rectangles, key=lambda r: r.pairs, default=None)
    return len(rectangles), rows, largest.n_queries if largest else 0


def cost(
    work: Workload, schedule: Schedule, machine: Machine, *, backward: bool, direct: bool
) -> Cost:
    """The predicted cost of a pass."""
    shape = schedule.decomposition
    n_groups = count_groups(work, schedule.group)
    heads = work.batch * work.heads
    flops = 2.0 * work.pairs * heads * (work.head_dim + work.value_dim)
    rate = machine.flops
    if backward:
        flops *= 2.5
        rate = machine.backward_flops
    calls, merged_rows, largest = _sample(shape, work.is_causal, work.n_queries, work.n_keys)
    pieces = schedule.group.batch * schedule.group.kv_heads * work.queries_per_key_head
    tiles = max(1.0, largest / _TILE_ROWS) * pieces
    waves = -(-tiles // machine.workers)
    uneven = waves * machine.workers / tiles
    arithmetic = flops / rate * uneven
    units = n_groups * shape.n_tasks
    call_seconds = machine.call_seconds * calls * units
    if direct:
        return Cost(arithmetic, call_seconds, 0.0, 0.0, 0.0, 0.0, machine.overlaps)
    state = work.state_dtype.itemsize
    visits = 1
    for c in shape.levels:
        visits *= quorum_size(c)
    query_rows = heads * work.n_queries
    key_rows = work.batch * work.kv_heads * work.n_keys
    element = work.element_bytes
    loads = visits * (
        query_rows * work.head_dim + key_rows * (work.head_dim + work.value_dim)
    ) * element
    if backward:
        loads += visits * query_rows * (2 * work.value_dim * element + state)
        width = query_rows * work.head_dim + key_rows * (work.head_dim + work.value_dim)
        states = width * state
    else:
        states = query_rows * (work.value_dim + 1) * state
    merges = merged_rows * shape.n_tasks * heads * (work.value_dim * (2 * state + element))
    if backward:
        merges *= 3
    up = loads + max(0, visits - 1) * states
    down = visits * states
    up_seconds = up / machine.up_bytes_per_second
    down_seconds = down / machine.down_bytes_per_second
    if schedule.accumulator == "device":
        up_seconds = loads / machine.up_bytes_per_second
        down_seconds = states / machine.down_bytes_per_second
    exposed = (up_seconds + down_seconds) / max(1, units)
    if schedule.n_cap == 1:
        exposed = up_seconds + down_seconds
    call_seconds += machine.unit_seconds * units
    return Cost(
        arithmetic,
        call_seconds,
        merges / machine.merge_bytes_per_second,
        up_seconds,
        down_seconds,
        exposed,
        machine.overlaps,
    )
