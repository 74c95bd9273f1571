"""The schedules that a search looks at: which decompositions, and the routes of each.

Each kind of candidate is one function. The search (``search.py``) prices them and picks
one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush
from itertools import product

from quorum_attention.arithmetic import round_up
from quorum_attention.decomposition import Decomposition, Pairs
from quorum_attention.decomposition.layouts import Pieces
from quorum_attention.execution.device.allocate import Home
from quorum_attention.execution.head_groups import (
    Axis,
    GroupSize,
    count_groups,
    group_sizes,
)
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.routes.blockwise import Blockwise
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.routes.streaming import Streaming
from quorum_attention.execution.routes.whole import Whole
from quorum_attention.execution.schedule import Schedule, schedule_of
from quorum_attention.execution.task_levels import deepest
from quorum_attention.execution.trimmed_tasks import TrimmedSizes, trimmed_sizes
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.protocol import Launches
from quorum_attention.planner import policy
from quorum_attention.planner.constraints import PlanConstraints
from quorum_attention.planner.hardware import HardwareModel
from quorum_attention.quorums import chunk_count, quorum_sizes


def decompositions(
    n_tokens: int, constraints: PlanConstraints
) -> Iterator[Decomposition]:
    """Yield the decompositions that are looked at, those into fewer tasks first.

    Without levels asked for, these are all whose largest task is clearly smaller than
    that of any decomposition into fewer tasks.

    Raises:
        ValueError: the depth asked for makes no task smaller.
    """
    if constraints.levels is not None:
        yield constraints.decompose(n_tokens, constraints.levels)
        return
    constraints.check_depth(n_tokens)
    smallest = math.inf
    for decomposition in _by_number_of_tasks(n_tokens, constraints):
        if constraints.depth not in (None, decomposition.depth):
            continue
        tokens = decomposition.max_task_tokens
        if tokens == smallest or tokens >= policy.MAX_TASK_GROWTH * smallest:
            continue
        # The uncut call and tasks of two thirds of the tokens are no measure for
        # others.
        if decomposition.n_tasks > 3:
            smallest = min(smallest, tokens)
        yield decomposition
    if constraints.depth and smallest == math.inf:
        yield constraints.decompose(
            n_tokens, (policy.DEEP_LEVEL_CHUNKS,) * constraints.depth
        )


def _by_number_of_tasks(
    n_tokens: int, constraints: PlanConstraints
) -> Iterator[Decomposition]:
    """Yield all decompositions into at most ``policy.MAX_TASKS`` tasks, fewest tasks
    first.

    A decomposition whose last level makes no task smaller is left out, and so are those
    that continue it.
    """
    chunk_counts = [
        chunk_count(l) for l in quorum_sizes(policy.MAX_QUORUM_SIZE) if l > 2
    ]
    max_depth = math.inf if constraints.depth is None else constraints.depth
    # A heap of (number of tasks, levels, tokens of the largest task one level before).
    # Three chunks are tried as the only level: as a second level they save little.
    waiting: list[tuple[int, tuple[int, ...], int]] = [(1, (), 0), (3, (3,), 0)]
    while waiting:
        n_tasks, levels, parent_tokens = heappop(waiting)
        decomposition = constraints.decompose(n_tokens, levels)
        tokens = decomposition.max_task_tokens
        if len(levels) > 1 and tokens >= parent_tokens:
            continue
        yield decomposition
        if len(levels) >= max_depth:
            continue
        max_chunks = policy.MAX_TASKS // n_tasks
        if levels:
            max_chunks = min(max_chunks, levels[-1])
        for chunks in chunk_counts:
            if chunks > max_chunks:
                break
            heappush(waiting, (n_tasks * chunks, (*levels, chunks), tokens))


def schedules(
    problem: Problem, constraints: PlanConstraints, decomposition: Decomposition
) -> Iterator[Schedule]:
    """Yield the schedules of a decomposition that are worth a price."""
    in_place = list(blockwise_schedules(problem, constraints, decomposition))
    yield from in_place
    if in_place and constraints.over_inputs:
        return
    if not decomposition.depth:
        yield from whole_schedules(problem, constraints, decomposition)
    elif not _saves_little(problem, constraints, decomposition):
        yield from slot_schedules(problem, constraints, decomposition)


def whole_schedules(
    problem: Problem, constraints: PlanConstraints, decomposition: Decomposition
) -> Iterator[Schedule]:
    """Yield one kernel call for each head group, through slots where none can run in
    place.

    The sides of a rectangle have no limit: an uncut call is one rectangle under a bias
    too, as in torch.
    """
    # The streams of the routes make no difference to single calls.
    kinds = dict.fromkeys(
        (slots.n_cap, slots.accumulator) for slots in _slot_routes(problem, constraints)
    )
    for size, (n_cap, accumulator) in product(
        _group_sizes(problem.shape, constraints), kinds
    ):
        schedule = schedule_of(
            problem.shape,
            decomposition,
            size,
            Whole(n_cap, accumulator),
            pinned=constraints.pinned,
        )
        yield schedule.as_runnable(problem)


def blockwise_schedules(
    problem: Problem, constraints: PlanConstraints, decomposition: Decomposition
) -> Iterator[Schedule]:
    """Yield schedules of all tasks of a head group at once, over the inputs as they
    lie."""
    if not _may_run_blockwise(problem, constraints, decomposition):
        return
    routes = [
        Blockwise(streams=streams, pieces=pieces)
        for streams in _streams(problem, constraints)
        for pieces in _piece_layouts(problem)
    ]
    for size, route in product(_group_sizes(problem.shape, constraints), routes):
        if size.batch > 1 or not Schedule(decomposition, size, route).runs(problem):
            continue
        yield schedule_of(
            problem.shape, decomposition, size, route, pinned=constraints.pinned
        )


def slot_schedules(
    problem: Problem, constraints: PlanConstraints, decomposition: Decomposition
) -> Iterator[Schedule]:
    """Yield schedules of task by task through slots."""
    shape = problem.shape
    bias = shape.bias
    has_full_bias = bias is not None and bias.rows and bias.columns
    max_pairs = policy.MAX_BIAS_PAIRS if has_full_bias else None
    # Each task of a decomposition that is trimmed is looked at.
    is_trimmed = constraints.levels is not None or (
        decomposition.n_tasks <= policy.MAX_TRIMMED_TASKS
    )
    trimmed = sizes_after_trimming(decomposition, problem) if is_trimmed else None
    routes = _slot_routes(problem, constraints)
    for size, slots in product(_group_sizes(shape, constraints), routes):
        yield schedule_of(
            shape,
            decomposition,
            size,
            replace(slots, trimmed=trimmed),
            pinned=constraints.pinned,
            max_pairs=max_pairs,
        )


def streaming_schedules(
    problem: Problem, schedule: Schedule, hardware: HardwareModel, budget_bytes: int
) -> Iterator[Schedule]:
    """Yield schedules of a chunk that stays on the device while rows of the other side
    stream by.

    For every head group and a few sizes of the chunk it is the schedule with the
    largest blocks that fits. There is none where the route cannot run the call.

    Args:
        schedule: the one through slots that takes over if memory runs out; for a larger
            head group its tasks are cut further, so that they fit as well.
    """
    slots = schedule.route
    if not isinstance(slots, Slots):
        return
    spec = problem.spec
    resident_axis: Axis = "key" if spec.backward else "query"
    length = problem.shape.n_keys if spec.backward else problem.shape.n_queries
    route = Streaming(resident_axis=resident_axis, instead=slots)
    if not route.runs(schedule, problem):
        return
    for group in group_sizes(problem.shape):
        if group.batch > 1:
            continue
        schedule_of_group = replace(schedule, group=group)
        deeper_by = _levels_to_fit(schedule_of_group, budget_bytes, problem)
        if deeper_by is None:
            continue
        # Sizes after trimming are of tasks that are cut no further.
        instead = replace(slots, trimmed=None) if deeper_by else slots
        sizes = _resident_rows(group, length, problem, hardware)
        for chunk_rows, chunk_slots in product(sizes, (2, 1)):
            route = replace(
                route,
                queries=chunk_rows,
                keys=chunk_rows,
                chunk_slots=chunk_slots,
                instead=instead,
                deeper_by=deeper_by,
            )
            streaming = _largest_block(schedule_of_group, route, budget_bytes, problem)
            if streaming is not None:
                yield streaming


def is_worth_trimming(pairs: Pairs) -> bool:
    """Whether parts of tasks are without pairs.

    A kernel's own mask leaves such parts, and so do many more queries than keys, or
    keys than queries.
    """
    shorter = min(pairs.n_queries, pairs.n_keys)
    longer = max(pairs.n_queries, pairs.n_keys)
    if pairs.verdict is not None:
        return True
    return shorter * policy.MIN_LENGTH_RATIO_TO_TRIM <= longer


def sizes_after_trimming(
    decomposition: Decomposition, problem: Problem
) -> TrimmedSizes | None:
    """Return the sizes of the trimmed tasks, or None where nothing is trimmed."""
    if decomposition.depth == 0 or not is_worth_trimming(problem.pairs):
        return None
    lengths = problem.shape.lengths
    return trimmed_sizes(
        decomposition,
        lengths,
        problem.kernel,
        problem.spec.backward,
    )


def _group_sizes(shape: CallShape, constraints: PlanConstraints) -> list[GroupSize]:
    """Return the head group asked for, or all that may be of use, the largest first."""
    return group_sizes(shape) if constraints.group is None else [constraints.group]


def _streams(problem: Problem, constraints: PlanConstraints) -> tuple[int, ...]:
    """Return the numbers of kernel calls in flight that are tried."""
    uses_streams = problem.kernel.launches is Launches.CALLS_ON_STREAMS
    if not problem.backend.own_memory or not uses_streams:
        return (1,)
    if constraints.streams is not None:
        return (constraints.streams,)
    return (1, 2)


def _slot_routes(problem: Problem, constraints: PlanConstraints) -> list[Slots]:
    """Return the routes through slots that are tried: as asked for, or all that may be
    of use."""
    has_own_memory = problem.backend.own_memory
    n_caps = (2, 1) if has_own_memory else (1,)
    if constraints.n_cap is not None:
        n_caps = (constraints.n_cap,)
    accumulators: tuple[Home, ...] = ("device", "host") if has_own_memory else ("host",)
    if constraints.accumulator is not None:
        accumulators = (constraints.accumulator,)
    streams = _streams(problem, constraints)
    return [Slots(*fields) for fields in product(n_caps, accumulators, streams)]


def _may_run_blockwise(
    problem: Problem, constraints: PlanConstraints, decomposition: Decomposition
) -> bool:
    """Whether tasks over the inputs as they lie may be asked for, and may gain
    anything."""
    kernel = problem.kernel
    has_own_memory = problem.backend.own_memory
    wants_slots = constraints.n_cap is not None or constraints.over_inputs is False
    wants_host_accumulator = constraints.accumulator == "host" and has_own_memory
    # A kernel of one launch a task may need all heads for a whole call (FlexAttention).
    may_gain = kernel.launches is Launches.CALLS_ON_STREAMS
    if kernel.own_attention:
        may_gain = kernel.launches is not Launches.CALLS
    if wants_slots or wants_host_accumulator:
        return False
    if not may_gain or decomposition.depth != 1:
        return False
    if has_own_memory:
        return decomposition.n_tasks <= policy.MAX_CHUNKS_IN_PLACE
    if decomposition.n_tasks == 3 and constraints.levels is None:
        return False  # on a CPU no cut is faster, and this one saves little memory
    return decomposition.n_tasks <= policy.MAX_CHUNKS_WITHOUT_OVERLAP


def _piece_layouts(problem: Problem) -> tuple[Pieces, ...]:
    """Return the layouts of rectangles that are tried over the inputs as they lie."""
    if problem.backend.own_memory:
        return policy.PIECES
    if problem.spec.backward:
        return policy.BACKWARD_PIECES_WITHOUT_OVERLAP
    return policy.FORWARD_PIECES_WITHOUT_OVERLAP


def _saves_little(
    problem: Problem, constraints: PlanConstraints, decomposition: Decomposition
) -> bool:
    """Whether nobody asked for tasks of two chunks of three, and no mask makes them
    smaller."""
    is_asked_for = constraints.levels is not None
    has_mask = problem.pairs.verdict is not None
    return decomposition.levels == (3,) and not is_asked_for and not has_mask


def _resident_rows(
    group: GroupSize, length: int, problem: Problem, hardware: HardwareModel
) -> Iterator[int]:
    """Yield sizes of a chunk that stays: whole waves of rows, all heads of the group
    together."""
    n_heads = group.kv_heads * problem.shape.queries_per_key_head
    rows = (hardware.wave_rows or policy.ASSUMED_WAVE_ROWS) // n_heads
    wave = max(policy.MIN_STREAMED_ROWS, rows // policy.TILE * policy.TILE)
    all_rows = round_up(length, policy.TILE)
    for waves in policy.RESIDENT_WAVES:
        if waves * wave >= all_rows:
            yield all_rows
            return
        yield waves * wave


def _levels_to_fit(
    schedule: Schedule, budget_bytes: int, problem: Problem
) -> int | None:
    """Return how many levels further the tasks of a schedule through slots have to be
    cut to fit the budget; None: the smallest tasks do not fit."""
    deeper = schedule
    while deeper.route.memory_use(deeper, problem).total > budget_bytes:
        if deeper.decomposition.depth >= deepest(deeper.decomposition):
            return None
        deeper = deeper.deeper(problem.shape)
    return deeper.decomposition.depth - schedule.decomposition.depth


def _largest_block(
    schedule: Schedule, route: Streaming, budget_bytes: int, problem: Problem
) -> Schedule | None:
    """Return the schedule whose blocks are the largest part of a chunk that fits, if
    any fits."""
    shape = problem.shape
    group = schedule.group
    chunk_rows = route.rows(route.resident_axis)
    for parts in policy.STREAMED_PARTS:
        block_rows, rest = divmod(chunk_rows, parts)
        # Otherwise the rectangles at the diagonal would have many sizes.
        if rest or block_rows % policy.TILE:
            continue
        if block_rows < policy.MIN_STREAMED_ROWS and parts > 1:
            return None
        if route.resident_axis == "query":
            candidate = replace(route, keys=block_rows)
        else:
            candidate = replace(route, queries=block_rows)
        stream = candidate.stream(shape)
        most_units = policy.MAX_PASSAGES // count_groups(shape, group)
        if stream.fewest_units > most_units or stream.n_units > most_units:
            return None
        streaming = schedule_of(
            shape, schedule.decomposition, group, candidate, pinned=schedule.pinned
        )
        if streaming.route.memory_use(streaming, problem).total <= budget_bytes:
            return streaming
    return None
