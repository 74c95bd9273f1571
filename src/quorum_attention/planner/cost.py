"""How long a schedule should take: a sum of few, named terms (docs/planner.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from quorum_attention.decomposition import Decomposition, Task
from quorum_attention.decomposition.batches import Batch, batches
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.workload import Workload, count_groups
from quorum_attention.planner.machine import Machine
from quorum_attention.quorums import quorum_size

# Copies within a device are not issued in batches: one takes the time of so many.
_DEVICE_COPIES = 6
# What keeping two streams in order costs the host with every call.
_STREAM_SECONDS = 30e-6
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
        fixed: what a pass takes whatever its size.
        preparation: what the kernel takes once, the first time it sees the shapes of its calls;
            not part of ``seconds``.
        even: whether all units are alike, so that what runs side by side hides completely.
        overlaps: whether compute, copies and the host run side by side.
    """

    arithmetic: float
    merge: float
    up: float
    down: float
    issue: float
    exposed: float
    fixed: float
    preparation: float
    even: bool
    overlaps: bool

    @property
    def seconds(self) -> float:
        """The whole: the slowest of compute, copies and host where they overlap, else the sum."""
        compute = self.arithmetic + self.merge
        if self.overlaps:
            side_by_side = (compute, self.up, self.down, self.issue)
            longest = max(side_by_side)
            if not self.even and longest > 0:
                # Where one unit computes longer and the next copies longer, two slots do not
                # hide all of it (fitted: docs/planner.md).
                longest *= sum((part / longest) ** 2.5 for part in side_by_side) ** 0.4
            return longest + self.exposed + self.fixed
        return compute + self.up + self.down + self.issue + self.fixed


@dataclass(frozen=True, slots=True)
class _Sample:
    """The operator calls of a few typical tasks, and what they come to.

    Attributes:
        calls: of all of them together.
        pairs: query-key pairs of all of them, of one head.
        merged: query rows (forward) that their calls merge, of one head.
        runs: runs of tokens of a task.
        tasks: how many.
        rows: tokens of a task.
        shapes: different calls among them.
    """

    calls: tuple[Batch, ...]
    pairs: int
    merged: int
    runs: float
    tasks: int
    shapes: int
    rows: float


def _tasks(shape: Decomposition, sweep: bool) -> list[Task]:
    if sweep:
        return [shape.whole()]
    # From the middle: the last chunk is shorter, and few tasks have it. Deeper levels take other
    # positions, because where a child lies in its parent decides how well it can be covered.
    paths = dict.fromkeys(
        tuple((part + 2 * level) % 5 * c // 5 for level, c in enumerate(shape.levels))
        for part in ((1, 2, 3) if shape.depth == 1 else (0, 1, 2, 3, 4))
    )
    return [shape.task(path) for path in paths]


@lru_cache(maxsize=1024)
def _sample(
    shape: Decomposition,
    is_causal: bool,
    n_queries: int,
    n_keys: int,
    together: tuple[int, int] | None,
    sweep: bool,
) -> _Sample:
    tasks = _tasks(shape, sweep)
    calls: list[Batch] = []
    runs = 0
    for task in tasks:
        rectangles = task.rectangles(is_causal, n_queries, n_keys)
        runs += len(task.runs)
        for batch in batches(rectangles):
            first = batch.first
            most = batch.count
            if together is None:
                most = 1
            else:
                limits = (together[0] // first.n_queries, together[1] // max(1, first.n_keys))
                most = max(1, min(most, *limits))
            whole, rest = divmod(batch.count, most)
            calls += [replace(batch, count=most)] * whole
            calls += [replace(batch, count=rest)] * (rest > 0)
    return _Sample(
        tuple(calls),
        sum(call.first.pairs * call.count for call in calls),
        sum(call.first.n_queries * call.count for call in calls),
        runs / len(tasks),
        len(tasks),
        len({(c.count, c.first.n_queries, c.first.n_keys, c.first.causal) for c in calls}),
        sum(task.n_tokens for task in tasks) / len(tasks),
    )


def _device_seconds(
    calls: tuple[Batch, ...],
    work: Workload,
    lanes: int,
    machine: Machine,
    *,
    backward: bool,
    streams: int,
    whole: bool,
) -> float:
    """Seconds of the calls of a head group of ``lanes`` query heads and batch entries."""
    flops_of_pair = 2.0 * (work.head_dim + work.value_dim) * (_BACKWARD_WORK if backward else 1.0)
    rate = machine.backward_flops if backward else machine.flops
    seconds = 0.0
    for call in calls:
        r = call.first
        rows = (r.n_keys if backward else r.n_queries) * call.count * lanes
        share = machine.share_of_rate(rows, r.n_queries if r.causal else 0, streams)
        if whole or r.causal:
            # Plain rectangles of a task are cut to what the cache takes.
            inner = r.n_queries if backward else r.n_keys
            bytes_of_row = (work.head_dim + work.value_dim) * work.element_bytes
            share *= machine.cached_share(inner * bytes_of_row)
        flops = flops_of_pair * r.pairs * call.count * lanes
        seconds += flops / (rate * share) + machine.call_device_seconds
    return seconds


def _launch_seconds(
    sample: _Sample, work: Workload, lanes: int, machine: Machine, *, backward: bool
) -> float:
    """Seconds of the sample's tasks, each in one launch that takes its longest rows first."""
    work_of_pair = 2.0 * (work.head_dim + work.value_dim) * (_BACKWARD_WORK if backward else 1.0)
    rate = machine.backward_flops if backward else machine.flops
    rows = max(1.0, sample.rows * lanes)
    # What is left of the last rows when the others are done: about a third of a wave.
    idle = machine.wave_rows / 3 if machine.wave_rows else machine.filling_rows
    flops = work_of_pair * sample.pairs * lanes
    return flops * (rows + idle) / (rate * rows) + machine.call_device_seconds * sample.tasks


def cost(
    work: Workload,
    schedule: Schedule,
    machine: Machine,
    *,
    backward: bool,
    direct: bool,
    resident: bool = False,
    launch_seconds: tuple[float, float] | None = None,
) -> Cost:
    """The predicted cost of a pass.

    Args:
        direct: the kernel runs on the inputs as they lie.
        resident: the inputs are on the device.
        launch_seconds: of a kernel that runs a task in one launch, what issuing a forward and a
            backward takes the host.
    """
    shape, group = schedule.decomposition, schedule.group
    lanes = group.batch * group.kv_heads * work.queries_per_key_head
    together = (schedule.max_queries, schedule.max_keys) if group.batch == 1 else None
    at_once = schedule.sweep and not schedule.one_by_one
    sample = _sample(shape, work.is_causal, work.n_queries, work.n_keys, together, at_once)
    heads = work.batch * work.heads
    # All pairs there are over those of the sample.
    scale = work.pairs * heads / max(1, sample.pairs * lanes)
    whole_tasks = launch_seconds is not None
    if whole_tasks:
        on_device = _launch_seconds(sample, work, lanes, machine, backward=backward)
    else:
        on_device = _device_seconds(
            sample.calls,
            work,
            lanes,
            machine,
            backward=backward,
            streams=schedule.streams,
            whole=direct,
        )
    arithmetic = on_device * scale
    units = count_groups(work, group) * (1 if at_once else schedule.n_tasks)
    call_seconds = machine.backward_call_seconds if backward else machine.call_seconds
    call_seconds += _STREAM_SECONDS * (schedule.streams > 1)
    calls = call_seconds * len(sample.calls) / sample.tasks * units
    prepare = sample.shapes * machine.plan_seconds
    if launch_seconds is not None:
        calls, prepare = launch_seconds[backward] * units, 0.0
    if direct:
        return Cost(arithmetic, 0.0, 0.0, 0.0, calls, 0.0, 0.0, prepare, True, machine.overlaps)

    width = work.value_dim * (2 * work.state_dtype.itemsize + work.element_bytes)
    merged = sample.merged * lanes * scale * width * (3 if backward else 1)
    if whole_tasks:
        merged = 0.0  # the kernel begins where the state is
    merge = merged / machine.merge_bytes_per_second
    visits = float(_visits(shape.levels))
    if schedule.trimmed is not None:
        visits = schedule.trimmed.tokens / max(1, work.n_tokens)
    if schedule.one_by_one:
        # Every task's results are written once more, and its copies issued.
        merge = visits * _bytes_per_pass(work, backward)[1] / machine.merge_bytes_per_second
        calls += units * (machine.unit_seconds + 4 * machine.copy_seconds)
    if schedule.sweep:
        issue = calls + units * machine.call_seconds
        return Cost(arithmetic, merge, 0.0, 0.0, issue, 0.0, 0.0, prepare, True, machine.overlaps)
    inputs, states, tensors = _bytes_per_pass(work, backward)
    up, down = visits * inputs, float(states)
    if schedule.accumulator == "host":
        # Trimmed tasks may leave out rows altogether.
        up += max(0.0, visits - 1.0) * states
        down = visits * states
    up_rate, down_rate = machine.up_bytes_per_second, machine.down_bytes_per_second
    if resident and machine.overlaps:
        # Nothing crosses the bus: read and written in device memory.
        up_rate = down_rate = machine.merge_bytes_per_second / 2
    up_seconds, down_seconds = up / up_rate, down / down_rate
    exposed = up_seconds + down_seconds
    if schedule.n_cap > 1:
        exposed /= max(1, units)
    copies = sample.runs * tensors * group.batch * group.kv_heads
    if resident:
        copies *= _DEVICE_COPIES
    issue = calls + units * (machine.unit_seconds + copies * machine.copy_seconds)
    return Cost(
        arithmetic, merge, up_seconds, down_seconds, issue, exposed, machine.pass_seconds,
        prepare, shape.depth < 2, machine.overlaps,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _visits(levels: tuple[int, ...]) -> int:
    """How often a row is in a task."""
    return math.prod(quorum_size(c) for c in levels)


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
