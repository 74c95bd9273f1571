"""How long a schedule should take: a sum of few, named terms (docs/planner.md)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from quorum_attention.decomposition import Decomposition, Rectangle
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.workload import Workload, count_groups
from quorum_attention.planner.machine import Machine
from quorum_attention.quorums import quorum_size

_BACKWARD_WORK = 2.5  # five matrix products instead of two


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds by term.

    Attributes:
        arithmetic: the kernel calls, by the size of their rectangles.
        merge: merging statistics, or adding gradients.
        up, down: copies to the slots and back.
        issue: what the host takes to issue it all.
        exposed: copies that nothing hides: those of the first and of the last unit.
        overlaps: whether compute, copies and the host run side by side.
    """

    arithmetic: float
    merge: float
    up: float
    down: float
    issue: float
    exposed: float
    overlaps: bool

    @property
    def seconds(self) -> float:
        """The whole: the slowest of compute, copies and host where they overlap, else the sum."""
        compute = self.arithmetic + self.merge
        if self.overlaps:
            return max(compute, self.up, self.down, self.issue) + self.exposed
        return compute + self.up + self.down + self.issue


@lru_cache(maxsize=512)
def _sample(
    shape: Decomposition, is_causal: bool, n_queries: int, n_keys: int
) -> tuple[tuple[Rectangle, ...], int]:
    """The rectangles of a typical task, and its runs of tokens."""
    task = shape.task(tuple(c // 2 for c in shape.levels))
    return task.rectangles(is_causal, n_queries, n_keys), len(task.runs)


def _slowdown(
    rectangles: tuple[Rectangle, ...], lanes: tuple[int, int], machine: Machine, backward: bool
) -> float:
    """Seconds of the rectangles over what they would take at the full rate."""
    pairs = effective = 0.0
    for r in rectangles:
        if backward:
            rows, filling = r.n_keys * lanes[1], machine.filling_keys
        else:
            filling = machine.filling_causal if r.causal else machine.filling_queries
            rows = r.n_queries * lanes[0]
        pairs += r.pairs
        effective += r.pairs * (1 + filling / max(1, rows))
    return effective / pairs if pairs else 1.0


def cost(
    work: Workload, schedule: Schedule, machine: Machine, *, backward: bool, direct: bool
) -> Cost:
    """The predicted cost of a pass."""
    shape = schedule.decomposition
    heads = work.batch * work.heads
    rectangles, runs = _sample(shape, work.is_causal, work.n_queries, work.n_keys)
    key_lanes = schedule.group.batch * schedule.group.kv_heads
    lanes = (key_lanes * work.queries_per_key_head, key_lanes)
    flops = 2.0 * work.pairs * heads * (work.head_dim + work.value_dim)
    flops *= _BACKWARD_WORK if backward else 1.0
    rate = machine.backward_flops if backward else machine.flops
    arithmetic = flops / rate * _slowdown(rectangles, lanes, machine, backward)
    units = count_groups(work, schedule.group) * shape.n_tasks
    calls = machine.call_seconds * len(rectangles) * units
    if direct:
        return Cost(arithmetic, 0.0, 0.0, 0.0, calls, 0.0, machine.overlaps)

    inputs, states, tensors = _bytes_per_pass(work, backward)
    visits = 1
    for c in shape.levels:
        visits *= quorum_size(c)
    up, down = visits * inputs, states
    if schedule.accumulator == "host":
        up += (visits - 1) * states
        down = visits * states
    up_seconds = up / machine.up_bytes_per_second
    down_seconds = down / machine.down_bytes_per_second
    exposed = up_seconds + down_seconds
    if schedule.n_cap > 1:
        exposed /= max(1, units)
    copies = runs * tensors * schedule.group.batch
    issue = calls + units * (machine.unit_seconds + copies * machine.copy_seconds)
    merged = sum(r.n_queries for r in rectangles) * shape.n_tasks * heads
    width = work.value_dim * (2 * work.state_dtype.itemsize + work.element_bytes)
    merge = merged * width * (3 if backward else 1) / machine.merge_bytes_per_second
    return Cost(arithmetic, merge, up_seconds, down_seconds, issue, exposed, machine.overlaps)


def _bytes_per_pass(work: Workload, backward: bool) -> tuple[int, int, int]:
    """Bytes of all inputs once, of all states once, and how many copies a run of tokens takes."""
    query_rows = work.batch * work.heads * work.n_queries
    key_rows = work.batch * work.kv_heads * work.n_keys
    element, state = work.element_bytes, work.state_dtype.itemsize
    widths = work.head_dim + work.value_dim
    inputs = (query_rows * work.head_dim + key_rows * widths) * element
    if not backward:
        return inputs, query_rows * (work.value_dim + 1) * state, 3 + 2 * 2
    inputs += query_rows * (2 * work.value_dim * element + state)
    return inputs, (query_rows * work.head_dim + key_rows * widths) * state, 6 + 2 * 3
