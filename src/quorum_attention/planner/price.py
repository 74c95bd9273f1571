"""What a schedule takes: device bytes, and predicted seconds as a sum of a few named
terms (docs/planner.md)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from quorum_attention.decomposition import Decomposition, Rectangle, Task
from quorum_attention.decomposition.layouts import Pieces, pieces_of
from quorum_attention.decomposition.pairs import kept_share
from quorum_attention.decomposition.rectangles import Batch, batches
from quorum_attention.execution.head_groups import count_groups
from quorum_attention.execution.pass_spec import PassSpec
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.work_counts import WorkCounts
from quorum_attention.kernels.cache import remembered
from quorum_attention.kernels.call_shape import CallShape, Lengths
from quorum_attention.kernels.protocol import Launches
from quorum_attention.planner.hardware import HardwareModel
from quorum_attention.planner.plan import Cost, Plan
from quorum_attention.planner.rates import hardware_at_speed
from quorum_attention.quorums import interest_set, quorum_size

# A copy within a device takes the host as long as this many others, which are issued in
# batches.
_DEVICE_COPIES = 6
# Host time per call for keeping two streams in order.
_STREAM_SECONDS = 30e-6
# The time of a pair's random word, in operations of a matrix product that take as long.
# (Counted: about five integer instructions on a GPU; a backward makes each word twice.)
_DROPOUT_FLOPS = 256.0


def price(
    schedule: Schedule, problem: Problem, hardware: HardwareModel, why: str = ""
) -> Plan:
    """Return a schedule with its bytes and seconds.

    Args:
        why: the reason for the plan, in words.
    """
    return Plan(
        shape=problem.shape,
        place=problem.place,
        kernel=problem.kernel.name,
        backward=problem.spec.backward,
        schedule=schedule,
        footprint=schedule.route.memory_use(schedule, problem),
        cost=cost(schedule, problem, hardware),
        why=why,
    )


def cost(schedule: Schedule, problem: Problem, hardware: HardwareModel) -> Cost:
    """Return the predicted cost of a pass run by ``schedule``."""
    group = schedule.group
    counts = schedule.route.work_counts(schedule, problem)
    sample = _sample_of(schedule, counts, problem)
    kernel_cost = (
        _launch_cost if problem.kernel.launches is Launches.ONE else _operator_cost
    )
    computing = kernel_cost(sample, counts, schedule, problem, hardware)
    up, down = _copy_seconds(counts, hardware)
    issue = computing.issue
    if counts.pieces is not None:
        issue += counts.units * hardware.call_seconds
    if counts.in_slots:
        copies = sample.runs * counts.run_copies * group.batch * group.kv_heads
        if counts.resident:
            copies *= _DEVICE_COPIES
        copy_seconds = copies * hardware.copy_seconds
        unit_seconds = _unit_seconds(counts, problem.spec, hardware)
        issue += counts.units * (unit_seconds + copy_seconds)
    return Cost(
        arithmetic=computing.arithmetic,
        merge=computing.merge,
        up=up,
        down=down,
        issue=issue,
        exposed=(up + down) / counts.overlapping_units,
        fixed=hardware.pass_seconds if counts.in_slots else 0.0,
        preparation=computing.preparation,
        uniform_units=counts.uniform_units,
        overlaps=hardware.overlaps,
    )


def least_cost(schedule: Schedule, problem: Problem, hardware: HardwareModel) -> float:
    """Return seconds that a schedule's cost is not below, found without a look at its
    tasks."""
    counts = schedule.route.work_counts(schedule, problem)
    issue = 0.0
    if counts.in_slots:
        issue = counts.units * _unit_seconds(counts, problem.spec, hardware)
    up, down = _copy_seconds(counts, hardware)
    return max(least_seconds(problem, hardware), issue, up, down)


def least_seconds(problem: Problem, hardware: HardwareModel) -> float:
    """Return seconds that no schedule's cost is below: the arithmetic alone, at the
    full rate."""
    shape = problem.shape
    flops_of_pair = _flops_of_pair(shape, problem.spec)
    flops = flops_of_pair * shape.pairs * shape.batch * shape.heads
    return flops / _rate(hardware, problem.spec)


def forward_flops(shape: CallShape) -> float:
    """Count the operations of a forward's two products; a kernel's own mask is not
    counted."""
    flops_of_pair = 2.0 * shape.kv_width
    return flops_of_pair * shape.pairs * shape.batch * shape.heads


@remembered(256)
def kernel_hardware(problem: Problem, hardware: HardwareModel) -> HardwareModel:
    """Return ``hardware`` with the rates that the problem's kernel reaches.

    Costs count all pairs of a call: a kernel whose own mask leaves out some of them
    reaches a higher rate of counted pairs. Answers are remembered: to count what a mask
    keeps of a long sequence takes longer than a short call.
    """
    kernel = problem.kernel
    share_kept = kept_share(problem.pairs)
    forward_share, backward_share = kernel.rates
    if kernel.speed is not None:
        hardware = hardware_at_speed(
            hardware,
            kernel.speed,
            problem.shape.head_dim,
            backward=problem.spec.backward,
        )
    return replace(
        hardware,
        flops=hardware.flops * forward_share / share_kept,
        backward_flops=hardware.backward_flops * backward_share / share_kept,
    )


class _KernelCost(NamedTuple):
    """Seconds of a pass that depend on the kind of kernel; see ``Cost``."""

    arithmetic: float
    merge: float
    issue: float
    preparation: float


def _launch_cost(
    sample: _Sample,
    counts: WorkCounts,
    schedule: Schedule,
    problem: Problem,
    hardware: HardwareModel,
) -> _KernelCost:
    """Return the cost of a kernel of one launch a task, which takes its longest rows
    first."""
    n_heads = schedule.n_query_heads(problem.shape)
    rows = max(1.0, sample.rows * n_heads)
    # While its last rows finish, a part of the device is idle: about a third of a wave.
    idle_rows = hardware.wave_rows / 3 if hardware.wave_rows else hardware.filling_rows
    flops = _flops_of_pair(problem.shape, problem.spec) * sample.pairs * n_heads
    computing = flops * (rows + idle_rows) / (_rate(hardware, problem.spec) * rows)
    seconds = computing + hardware.call_device_seconds * sample.tasks
    forward_launch, backward_launch = problem.kernel.launch_seconds
    launch = backward_launch if problem.spec.backward else forward_launch
    return _KernelCost(
        arithmetic=seconds * _pass_over_sample(sample, problem.shape, n_heads),
        merge=0.0,
        issue=launch * counts.units,
        preparation=0.0,
    )


def _operator_cost(
    sample: _Sample,
    counts: WorkCounts,
    schedule: Schedule,
    problem: Problem,
    hardware: HardwareModel,
) -> _KernelCost:
    """Return the cost of a kernel of one operator call a rectangle, or a batch of
    them."""
    shape = problem.shape
    spec = problem.spec
    n_heads = schedule.n_query_heads(shape)
    scale = _pass_over_sample(sample, shape, n_heads)
    seconds = 0.0
    n_calls = 0
    for batch, times in sample.calls:
        seconds_of_one = _call_seconds(
            batch,
            schedule,
            problem,
            hardware,
            uncut=counts.uncut,
        )
        seconds += times * seconds_of_one
        n_calls += times
    call_seconds = hardware.call_seconds
    if spec.backward:
        call_seconds = hardware.backward_call_seconds
    if schedule.route.streams > 1:
        call_seconds += _STREAM_SECONDS
    merged_bytes = 0.0
    if counts.merges:
        number_bytes = 2 * shape.state_dtype.itemsize + shape.dtype.itemsize
        row_bytes = shape.value_dim * number_bytes
        merged_rows = sample.merged * n_heads * scale
        merged_bytes = merged_rows * row_bytes * spec.combined
    calls_per_unit = n_calls / sample.tasks
    return _KernelCost(
        arithmetic=seconds * scale,
        merge=merged_bytes / hardware.merge_bytes_per_second,
        issue=call_seconds * calls_per_unit * counts.units,
        preparation=len(sample.calls) * hardware.plan_seconds,
    )


def _call_seconds(
    batch: Batch,
    schedule: Schedule,
    problem: Problem,
    hardware: HardwareModel,
    *,
    uncut: bool,
) -> float:
    """Return the seconds of one operator call of all heads of a head group, on the
    device."""
    shape = problem.shape
    spec = problem.spec
    rectangle = batch.first
    n_heads = schedule.n_query_heads(shape)
    # A forward is parallel over queries, a backward over keys.
    n_parallel = rectangle.n_queries
    n_inner = rectangle.n_keys
    if spec.backward:
        n_parallel = rectangle.n_keys
        n_inner = rectangle.n_queries
    causal_side = rectangle.n_queries if rectangle.causal else 0
    rows = n_parallel * batch.count * n_heads
    share = hardware.share_of_rate(
        rows,
        causal_side,
        schedule.route.streams,
        backward=spec.backward,
    )
    if uncut or rectangle.causal:
        # The plain rectangles of a task are cut so that the cache holds their inner
        # operand.
        row_bytes = shape.kv_width * shape.dtype.itemsize
        share *= hardware.cached_share(n_inner * row_bytes)
    if uncut and problem.kernel.thread_per_head:
        share *= hardware.busy_share(
            n_heads,
            causal=rectangle.causal,
            backward=spec.backward,
        )
    flops = _flops_of_pair(shape, spec) * rectangle.pairs * batch.count * n_heads
    rate = _rate(hardware, spec) * share
    return flops / rate + hardware.call_device_seconds


def _unit_seconds(
    counts: WorkCounts,
    spec: PassSpec,
    hardware: HardwareModel,
) -> float:
    """Return the seconds of the host for one unit through slots; its kernel calls and
    copies are not counted."""
    if not spec.backward:
        return hardware.unit_seconds
    tensor_seconds = counts.run_copies * hardware.backward_tensor_seconds
    return hardware.unit_seconds + tensor_seconds


def _copy_seconds(counts: WorkCounts, hardware: HardwareModel) -> tuple[float, float]:
    """Return the seconds of the copies to the slots and back."""
    if counts.resident and hardware.overlaps:
        # Nothing crosses the bus: copies read and write device memory.
        rate = hardware.merge_bytes_per_second / 2
        return counts.up / rate, counts.down / rate
    up = counts.up / hardware.up_bytes_per_second
    down = counts.down / hardware.down_bytes_per_second
    return up, down


def _flops_of_pair(shape: CallShape, spec: PassSpec) -> float:
    """Count the operations of one pair of a head: matrix products and random words."""
    products = 2.0 * shape.kv_width * (spec.products / 2)
    if not shape.dropout:
        return products
    n_words = 2 if spec.backward else 1
    return products + _DROPOUT_FLOPS * n_words


def _rate(hardware: HardwareModel, spec: PassSpec) -> float:
    return hardware.backward_flops if spec.backward else hardware.flops


@dataclass(frozen=True)
class _Sample:
    """A few typical tasks of a decomposition, for one head.

    Attributes:
        calls: the operator calls of all these tasks, and how many there are of each
            size.
        runs: token runs of a task, on average.
        tasks: number of tasks.
        rows: tokens of a task, on average.
    """

    calls: tuple[tuple[Batch, int], ...]
    runs: float
    tasks: int
    rows: float

    @cached_property
    def pairs(self) -> int:
        """Query-key pairs of all calls."""
        return sum(batch.pairs * times for batch, times in self.calls)

    @cached_property
    def merged(self) -> int:
        """Query rows that all calls merge."""
        return sum(batch.n_queries * times for batch, times in self.calls)


def _pass_over_sample(sample: _Sample, shape: CallShape, n_heads: int) -> float:
    """Return the pairs of a whole pass over those of the sample, which has ``n_heads``
    heads."""
    n_pairs = shape.pairs * (shape.batch * shape.heads)
    n_sampled = max(1, sample.pairs * n_heads)
    return n_pairs / n_sampled


def _sample_of(schedule: Schedule, counts: WorkCounts, problem: Problem) -> _Sample:
    """Return typical tasks of a schedule, or the calls that its route counts by
    itself."""
    if counts.calls is None:
        # Rectangles of several batch entries are not batched.
        call_limits = schedule.limits if schedule.group.batch == 1 else None
        return _typical_sample(
            schedule.decomposition,
            problem.shape.lengths,
            call_limits,
            counts.pieces,
        )
    # The calls of a head come one by one; each unit copies one run.
    units_of_head = counts.units // max(1, count_groups(problem.shape, schedule.group))
    return _Sample(
        counts.calls(),
        runs=1.0,
        tasks=max(1, units_of_head),
        rows=0.0,
    )


@lru_cache(maxsize=1024)
def _typical_sample(
    decomposition: Decomposition,
    lengths: Lengths,
    call_limits: tuple[int, int] | None,
    pieces: Pieces | None,
) -> _Sample:
    """Return typical tasks of a decomposition, or all tasks as one if they are cut in
    ``pieces``.

    Args:
        call_limits: most queries and keys of an operator call; None: rectangles are not
            batched.
    """
    n_queries, n_keys, is_causal = lengths
    if pieces is None:
        cut_tasks = _typical_tasks(decomposition, is_causal, n_queries, n_keys)
    else:
        cut_tasks = [pieces_of(decomposition, pieces, is_causal, n_queries, n_keys)]
    # Halves may be batches, as far as limits let them.
    may_batch = pieces in (None, "halves")
    calls: Counter[Batch] = Counter()
    n_runs = 0
    n_rows = 0
    for task, rectangles in cut_tasks:
        n_runs += len(task.runs)
        n_rows += task.n_tokens
        for batch in batches(rectangles) if may_batch else map(Batch, rectangles):
            calls.update(_operator_calls(batch, call_limits))
    n_tasks = len(cut_tasks)
    return _Sample(
        calls=tuple(calls.items()),
        runs=n_runs / n_tasks,
        tasks=n_tasks,
        rows=n_rows / n_tasks,
    )


def _typical_tasks(
    decomposition: Decomposition, is_causal: bool, n_queries: int, n_keys: int
) -> list[tuple[Task, tuple[Rectangle, ...]]]:
    """Return a few typical tasks with their rectangles; tasks without any are not
    run."""
    n_wanted = 3 if decomposition.depth == 1 else 5
    paths_at_start = _paths_with_first_token(decomposition.levels)
    paths = [*_middle_paths(decomposition.levels), paths_at_start[0]]
    if 4 * min(n_queries, n_keys) < 3 * decomposition.n_tokens:
        # Queries or keys are few, so many tasks hold none of them.
        paths = paths_at_start
    cut_tasks: list[tuple[Task, tuple[Rectangle, ...]]] = []
    for path in dict.fromkeys(paths):
        task = decomposition.task(path)
        rectangles = task.rectangles(is_causal, n_queries, n_keys)
        if rectangles and len(cut_tasks) < n_wanted:
            cut_tasks.append((task, rectangles))
    return cut_tasks or [(decomposition.task(paths[0]), ())]


def _middle_paths(levels: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return paths from the middle, since only few tasks hold the last chunk, which is
    shorter.

    Each level takes other positions: the rectangles of a child depend on its position
    in its parent.
    """
    first_fifths = (1, 2, 3) if len(levels) == 1 else (0, 1, 2, 3, 4)
    paths = []
    for first_fifth in first_fifths:
        path = []
        for level, c in enumerate(levels):
            fifth = (first_fifth + 2 * level) % 5
            path.append(fifth * c // 5)
        paths.append(tuple(path))
    return paths


def _paths_with_first_token(levels: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return paths of tasks that hold the first token.

    The first of these tasks owns the first chunk, and so keeps its pairs in any case.
    """
    paths = []
    for turn in range(5):
        path = []
        for level, c in enumerate(levels, start=1):
            offsets = interest_set(quorum_size(c))
            path.append(-offsets[turn * level % len(offsets)] % c)
        paths.append(tuple(path))
    return paths


def _operator_calls(
    batch: Batch, call_limits: tuple[int, int] | None
) -> dict[Batch, int]:
    """Return the operator calls of a batch, which limits may cut into several, by their
    number."""
    rectangle = batch.first
    max_count = 1
    if call_limits is not None:
        max_queries, max_keys = call_limits
        fitting_queries = max_queries // rectangle.n_queries
        fitting_keys = max_keys // max(1, rectangle.n_keys)
        max_count = max(1, min(batch.count, fitting_queries, fitting_keys))
    n_full, rest = divmod(batch.count, max_count)
    calls = {_moved_to_origin(rectangle, max_count): n_full}
    if rest:
        calls[_moved_to_origin(rectangle, rest)] = 1
    return calls


def _moved_to_origin(rectangle: Rectangle, count: int) -> Batch:
    """Return one batch for all of ``count`` rectangles of this size: they take equally
    long."""
    size = Rectangle(
        0,
        rectangle.n_queries,
        0,
        rectangle.n_keys,
        rectangle.causal,
    )
    return Batch(size, count)
