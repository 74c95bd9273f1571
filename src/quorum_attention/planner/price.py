"""What a schedule takes: device bytes, and predicted seconds as a sum of a few named terms
(docs/planner.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from quorum_attention.decomposition import Decomposition, Rectangle, Task
from quorum_attention.decomposition.layouts import Pieces, pieces_of
from quorum_attention.decomposition.pairs import kept_share
from quorum_attention.decomposition.rectangles import Batch, batches
from quorum_attention.execution.head_groups import count_groups
from quorum_attention.execution.pass_spec import PassSpec
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.work_counts import WorkCounts
from quorum_attention.kernels.protocol import CallShape, Lengths
from quorum_attention.planner.hardware import HardwareModel
from quorum_attention.planner.plan import Cost, Plan
from quorum_attention.planner.rates import fa4_hardware
from quorum_attention.quorums import interest_set, quorum_size

# A copy within a device takes the host as long as so many others: those are issued in batches.
_DEVICE_COPIES = 6
# Host time per call for keeping two streams in order.
_STREAM_SECONDS = 30e-6


@dataclass(frozen=True)
class _Sample:
    """A few typical tasks of a decomposition, for one head.

    Attributes:
        calls: the operator calls of all these tasks, and how many there are of each size.
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
        return sum(call.first.pairs * call.count * times for call, times in self.calls)

    @cached_property
    def merged(self) -> int:
        """Query rows that all calls merge."""
        return sum(call.first.n_queries * call.count * times for call, times in self.calls)


def _sampled(
    decomposition: Decomposition, is_causal: bool, n_queries: int, n_keys: int
) -> tuple[list[Task], list[tuple[Rectangle, ...]]]:
    """A few typical tasks, and their rectangles; tasks without any are not run."""
    sets = [(interest_set(quorum_size(c)), c) for c in decomposition.levels]
    # From the middle, since only few tasks hold the last chunk, which is shorter. Each level takes
    # other positions: the rectangles of a child depend on its position in its parent.
    parts = (1, 2, 3) if decomposition.depth == 1 else (0, 1, 2, 3, 4)
    paths = [tuple((p + 2 * at) % 5 * c // 5 for at, (_, c) in enumerate(sets)) for p in parts]
    # Where queries or keys are few, many tasks hold none of them: some that hold the first; the
    # first of these owns its chunk, and so keeps its pairs in any case.
    first = [
        tuple(-offsets[turn * (at + 1) % len(offsets)] % c for at, (offsets, c) in enumerate(sets))
        for turn in range(5)
    ]
    paths = first if 4 * min(n_queries, n_keys) < 3 * decomposition.n_tokens else paths + first[:1]
    tasks = [decomposition.task(path) for path in dict.fromkeys(paths)]
    cuts = [(task, task.rectangles(is_causal, n_queries, n_keys)) for task in tasks]
    held = [one for one in cuts if one[1]][: len(parts)] or [(tasks[0], ())]
    return [task for task, _ in held], [rectangles for _, rectangles in held]


@lru_cache(maxsize=1024)
def _sample(
    decomposition: Decomposition,
    lengths: Lengths,
    together: tuple[int, int] | None,
    pieces: Pieces | None,
) -> _Sample:
    n_queries, n_keys, is_causal = lengths
    if pieces is None:
        tasks, cuts = _sampled(decomposition, is_causal, n_queries, n_keys)
    else:
        task, rectangles = pieces_of(decomposition, pieces, is_causal, n_queries, n_keys)
        tasks, cuts = [task], [rectangles]
    calls = _calls_of(cuts, together, pieces)
    return _Sample(
        tuple(calls.items()),
        sum(len(task.runs) for task in tasks) / len(tasks),
        len(tasks),
        sum(task.n_tokens for task in tasks) / len(tasks),
    )


def _calls_of(
    cuts: Iterable[tuple[Rectangle, ...]], together: tuple[int, int] | None, pieces: Pieces | None
) -> Counter[Batch]:
    """The operator calls of tasks that are cut into these rectangles."""
    calls: Counter[Batch] = Counter()
    for rectangles in cuts:
        # Halves may be batches, as far as limits let them.
        joined = pieces in (None, "halves")
        for batch in batches(rectangles) if joined else map(Batch, rectangles):
            first = batch.first
            most = 1
            if together is not None:
                limits = (together[0] // first.n_queries, together[1] // max(1, first.n_keys))
                most = max(1, min(batch.count, *limits))
            whole, rest = divmod(batch.count, most)
            calls[_alike(batch, most)] += whole
            if rest:
                calls[_alike(batch, rest)] += 1
    return calls


def _alike(batch: Batch, count: int) -> Batch:
    """One batch for all that take as long as ``count`` rectangles of ``batch``."""
    r = batch.first
    return Batch(Rectangle(0, r.n_queries, 0, r.n_keys, r.causal), count)


def _device_seconds(
    sample: _Sample, problem: Problem, schedule: Schedule, hardware: HardwareModel, *, uncut: bool
) -> float:
    """Seconds of the sample's calls for a head group."""
    shape, spec, n_heads = problem.shape, problem.spec, schedule.n_query_heads(problem.shape)
    seconds = 0.0
    for call, times in sample.calls:
        r = call.first
        rows = (r.n_keys if spec.backward else r.n_queries) * call.count * n_heads
        side = r.n_queries if r.causal else 0
        share = hardware.share_of_rate(rows, side, schedule.route.streams)
        if uncut or r.causal:
            # The plain rectangles of a task are cut so that the cache holds their inner operand.
            inner = r.n_queries if spec.backward else r.n_keys
            bytes_of_row = (shape.head_dim + shape.value_dim) * shape.dtype.itemsize
            share *= hardware.cached_share(inner * bytes_of_row)
        if uncut and problem.kernel.thread_per_head:
            share *= hardware.busy_share(n_heads, causal=r.causal, backward=spec.backward)
        flops = _flops_of_pair(shape, spec) * r.pairs * call.count * n_heads
        seconds += times * (flops / (_rate(hardware, spec) * share) + hardware.call_device_seconds)
    return seconds


def _launch_seconds(
    sample: _Sample, problem: Problem, n_heads: int, hardware: HardwareModel
) -> float:
    """Seconds of the sample's tasks, each in one launch that takes its longest rows first."""
    shape, spec = problem.shape, problem.spec
    rows = max(1.0, sample.rows * n_heads)
    # While its last rows finish, a part of the device is idle: about a third of a wave.
    idle = hardware.wave_rows / 3 if hardware.wave_rows else hardware.filling_rows
    flops = _flops_of_pair(shape, spec) * sample.pairs * n_heads
    whole = flops * (rows + idle) / (_rate(hardware, spec) * rows)
    return whole + hardware.call_device_seconds * sample.tasks


def least_seconds(problem: Problem, hardware: HardwareModel) -> float:
    """Seconds that no schedule's cost is below: the arithmetic alone, at the full rate."""
    shape = problem.shape
    flops = _flops_of_pair(shape, problem.spec) * shape.pairs * shape.batch * shape.heads
    return flops / _rate(hardware, problem.spec)


def kernel_hardware(problem: Problem, hardware: HardwareModel) -> HardwareModel:
    """``hardware`` with the rates that the problem's kernel reaches.

    Costs count all pairs of a call: a kernel whose own mask leaves out some of them reaches a
    higher rate of counted pairs.
    """
    kernel = problem.kernel
    share = kept_share(problem.pairs)
    forward, backward = kernel.rates
    if kernel.name == "fa4":
        is_backward = problem.spec.backward
        hardware = fa4_hardware(hardware, problem.shape.head_dim, backward=is_backward)
    return replace(
        hardware,
        flops=hardware.flops * forward / share,
        backward_flops=hardware.backward_flops * backward / share,
    )


def forward_flops(shape: CallShape) -> float:
    """Operations of the two products of a forward; a kernel's own mask is not counted."""
    return 2.0 * (shape.head_dim + shape.value_dim) * shape.pairs * shape.batch * shape.heads


# What a pair's random word costs, in operations of a matrix product that take as long. (Counted:
# about five integer instructions on a GPU; a backward makes each word twice.)
_DROPOUT_FLOPS = 256.0


def _flops_of_pair(shape: CallShape, spec: PassSpec) -> float:
    products = 2.0 * (shape.head_dim + shape.value_dim) * (spec.products / 2)
    return products + _DROPOUT_FLOPS * (1 + spec.backward) * shape.dropout


def _rate(hardware: HardwareModel, spec: PassSpec) -> float:
    return hardware.backward_flops if spec.backward else hardware.flops


def cost(schedule: Schedule, problem: Problem, hardware: HardwareModel) -> Cost:
    """The predicted cost of a pass run by ``schedule``."""
    shape, spec, kernel = problem.shape, problem.spec, problem.kernel
    group, load = schedule.group, schedule.route.work_counts(schedule, problem)
    n_heads = schedule.n_query_heads(shape)
    together = schedule.limits if group.batch == 1 else None
    if load.calls is None:
        sample = _sample(schedule.decomposition, shape.lengths, together, load.pieces)
    else:
        # The calls of a head come one by one; each unit copies one run.
        units = load.units // max(1, count_groups(shape, group))
        sample = _Sample(load.calls, 1.0, max(1, units), 0.0)
    # Pairs of the whole pass over those of the sample.
    scale = shape.pairs * (shape.batch * shape.heads) / max(1, sample.pairs * n_heads)
    call_seconds = hardware.backward_call_seconds if spec.backward else hardware.call_seconds
    call_seconds += _STREAM_SECONDS * (schedule.route.streams > 1)
    merged = 0.0
    if kernel.whole_tasks:
        on_device = _launch_seconds(sample, problem, n_heads, hardware)
        calls, preparation = kernel.launch_seconds[spec.backward] * load.units, 0.0
    else:
        on_device = _device_seconds(sample, problem, schedule, hardware, uncut=load.uncut)
        calls = call_seconds * sum(n for _, n in sample.calls) / sample.tasks * load.units
        preparation = len(sample.calls) * hardware.plan_seconds
        if load.merges:
            width = shape.value_dim * (2 * shape.state_dtype.itemsize + shape.dtype.itemsize)
            merged = sample.merged * n_heads * scale * width * spec.combined
    up, down = _copy_seconds(load, hardware)
    copies = sample.runs * load.run_copies * group.batch * group.kv_heads
    if load.resident:
        copies *= _DEVICE_COPIES
    calls += (load.pieces is not None) * load.units * hardware.call_seconds
    set_up = load.units * (hardware.unit_seconds + copies * hardware.copy_seconds)
    return Cost(
        arithmetic=on_device * scale,
        merge=merged / hardware.merge_bytes_per_second,
        up=up,
        down=down,
        issue=calls + load.in_slots * set_up,
        exposed=(up + down) / load.overlapping_units,
        fixed=load.in_slots * hardware.pass_seconds,
        preparation=preparation,
        uniform_units=load.uniform_units,
        overlaps=hardware.overlaps,
    )


def _copy_seconds(load: WorkCounts, hardware: HardwareModel) -> tuple[float, float]:
    """Seconds of the copies to the slots and back."""
    up_rate, down_rate = hardware.up_bytes_per_second, hardware.down_bytes_per_second
    if load.resident and hardware.overlaps:
        # Nothing crosses the bus: copies read and write device memory.
        up_rate = down_rate = hardware.merge_bytes_per_second / 2
    return load.up / up_rate, load.down / down_rate


def least_cost(schedule: Schedule, problem: Problem, hardware: HardwareModel) -> float:
    """Seconds that the cost of a schedule is not below, found without a look at its tasks."""
    load = schedule.route.work_counts(schedule, problem)
    issue = load.in_slots * load.units * hardware.unit_seconds
    return max(least_seconds(problem, hardware), issue, *_copy_seconds(load, hardware))


def price(schedule: Schedule, problem: Problem, hardware: HardwareModel, why: str = "") -> Plan:
    """A schedule with its bytes and seconds; ``why``: as that of a plan."""
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
