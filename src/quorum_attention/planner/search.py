"""Chooses a schedule: of those that fit the budget, the one that should be fastest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import product

from quorum_attention.arithmetic import round_up
from quorum_attention.decomposition import Decomposition, Layout, Pairs
from quorum_attention.errors import BudgetError
from quorum_attention.execution.device.allocate import Home
from quorum_attention.execution.problem import (
    Axis,
    Footprint,
    GroupSize,
    Problem,
    count_groups,
    group_sizes,
)
from quorum_attention.execution.routes.over_inputs import Blockwise, Whole
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.routes.streaming import Streaming
from quorum_attention.execution.schedule import Route, Schedule, schedule_of
from quorum_attention.execution.task_levels import deepest
from quorum_attention.execution.trimmed_tasks import TrimmedSizes, trimmed_sizes
from quorum_attention.kernels.cache import remembered
from quorum_attention.kernels.protocol import CallShape
from quorum_attention.planner import policy
from quorum_attention.planner.hardware import HardwareModel
from quorum_attention.planner.plan import Plan
from quorum_attention.planner.price import kernel_hardware, least_cost, least_seconds, price
from quorum_attention.quorums import chunk_count, quorum_sizes
from quorum_attention.units import counted, format_bytes, format_least, format_seconds

_SHORT = "the uncut call fits and is short, so nothing else was tried"
_ON_A_CPU = "the uncut call fits; on a CPU no cut is faster"


@dataclass(frozen=True, slots=True)
class PlanConstraints:
    """What a schedule has to be; None leaves a choice to the search.

    Attributes:
        budget_bytes: device bytes the pass may take.
        levels: chunk counts per level.
        depth: number of levels; with ``levels`` None the planner picks their chunk counts.
        pinned: report an out-of-memory failure instead of recovering from it.
    """

    budget_bytes: int
    levels: tuple[int, ...] | None = None
    depth: int | None = None
    layout: Layout = "aligned"
    tile: int = 128
    accumulator: Home | None = None
    group: GroupSize | None = None
    n_cap: int | None = None
    pinned: bool = False
    streams: int | None = None
    over_inputs: bool | None = None
    enforce_budget: bool = True

    @property
    def free(self) -> bool:
        """Whether nothing but a budget is asked for."""
        return replace(self, budget_bytes=0, layout="aligned", tile=128) == PlanConstraints(0)

    def decompose(self, n_tokens: int, levels: tuple[int, ...]) -> Decomposition:
        """The decomposition of ``n_tokens`` at these levels, remembered."""
        return _decomposition(n_tokens, levels, self.layout, self.tile)


_decomposition = lru_cache(maxsize=1024)(Decomposition)


def refitted(plan: Plan, problem: Problem, hardware: HardwareModel) -> Plan:
    """``plan``, which was made for another pass, as it serves this one.

    The kernel may be another one, whose mask leaves out more or less; results may be of a wider
    dtype than was planned for; and what cannot run on the inputs as they lie goes through slots.
    """
    schedule, here, shape = plan.schedule, problem.place, problem.shape
    place = replace(
        plan.place,
        result_dtype=here.result_dtype,
        n_unreadable=here.n_unreadable,
        rescaled_grad_bytes=here.rescaled_grad_bytes,
        flattenable=here.flattenable,
    )
    if not schedule.runs(problem):
        schedule, place = schedule.through_slots(shape), here
    if isinstance(schedule.route, Slots):
        trimmed = _trimmed_sizes(schedule.decomposition, problem)
        schedule = replace(schedule, route=replace(schedule.route, trimmed=trimmed))
        # An uncut schedule goes through no slots where one call can run a head group as it lies.
        whole = replace(schedule, route=Whole(schedule.route.n_cap, schedule.route.accumulator))
        schedule = whole if not plan.depth and whole.runs(problem) else schedule
    same_work = replace(plan.shape, batch_shape=shape.batch_shape) == shape
    if same_work and place == plan.place and schedule == plan.schedule:
        return plan
    there = replace(problem, place=place)
    return price(schedule, there, kernel_hardware(problem, hardware), plan.why)


@remembered(256)
def choose(problem: Problem, constraints: PlanConstraints, hardware: HardwareModel) -> Plan:
    """The fastest schedule that fits; the monolithic call where it fits and nothing is clearly
    faster.

    Answers are remembered: a model calls attention many times with the same sizes.

    Raises:
        BudgetError: nothing fits; names the smallest budget that would do.
    """
    short = short_call(problem, hardware) if constraints.free else None
    if short is not None and short.peak_bytes <= constraints.budget_bytes:
        return short
    search = _Search(problem, constraints, kernel_hardware(problem, hardware))
    trims = _trims(problem.pairs)
    few, enough = policy.PRICED_TRIMMED if trims else policy.PRICED
    fitting = 0
    for decomposition in _decompositions(problem.shape.n_tokens, constraints):
        looked = search.smallest is not None and not constraints.enforce_budget
        if decomposition.n_tasks > few and (looked or fitting >= enough):
            break
        short = search.look(_schedules(problem, constraints, decomposition))
        if short is not None:
            return short
        fitting += not search.nothing
    if search.best is not None and search.monolithic is None and constraints.free:
        search.look(_streamed(search.best, search))
    return search.taken()


@dataclass(slots=True)
class _Search:
    """What a search asks of every schedule, and what it has found so far.

    Attributes:
        hardware: with the rates that the kernel reaches.
        best: the schedule that fits and is predicted fastest, the monolithic call left aside.
        monolithic: the monolithic call, where it fits.
        smallest: the schedule of the fewest bytes, whether it fits or not.
        tried: how many schedules were looked at, the monolithic call left aside.
    """

    problem: Problem
    constraints: PlanConstraints
    hardware: HardwareModel
    best: Plan | None = None
    monolithic: Plan | None = None
    smallest: tuple[Schedule, Footprint] | None = None
    tried: int = 0

    @property
    def nothing(self) -> bool:
        """Whether nothing has been found that fits."""
        return self.best is None and self.monolithic is None

    def look(self, schedules: Iterable[Schedule]) -> Plan | None:
        """Price the schedules that fit and may be faster than the best one. A monolithic call that
        needs no comparison is returned."""
        for schedule in schedules:
            every = schedule.is_all(self.problem.shape) and isinstance(schedule.route, Whole)
            self.tried += not every
            if self.best is not None and not every:
                # Most take longer than the best one by their copies alone.
                least = least_cost(schedule, self.problem, self.hardware)
                if least > _score(self.best):
                    continue
            footprint = schedule.route.memory_use(schedule, self.problem)
            total = footprint.total
            if self.smallest is None or total < self.smallest[1].total:
                self.smallest = schedule, footprint
            if total > self.constraints.budget_bytes:
                continue
            found = price(schedule, self.problem, self.hardware)
            if not every:
                if self.best is None or _score(found) < _score(self.best):
                    self.best = found
            elif found.predicted_seconds < policy.MIN_SECONDS_TO_SEARCH:
                return replace(found, why=_SHORT)
            elif not self.problem.backend.own_memory:
                return replace(found, why=_ON_A_CPU)
            else:
                self.monolithic = found
        return None

    def taken(self) -> Plan:
        """The choice, now that everything has been looked at.

        Raises:
            BudgetError: nothing fits; names the smallest budget that would do.
        """
        best, monolithic = self.best, self.monolithic
        if monolithic is not None:
            worth_it = (
                best is not None
                and best.predicted_seconds
                < policy.REQUIRED_TIME_SHARE * monolithic.predicted_seconds
            )
            best = best if worth_it else monolithic
        if best is not None:
            whole_bytes = uncut_bytes(self.problem)
            return replace(best, why=self._words(best, whole_bytes), uncut_bytes=whole_bytes)
        assert self.smallest is not None, "the search always has a candidate"
        schedule, footprint = self.smallest
        if not self.constraints.enforce_budget:
            return price(schedule, self.problem, self.hardware)
        needed, budget = footprint.total, self.constraints.budget_bytes
        raise BudgetError(
            f"a budget of {format_bytes(budget)} ({budget} bytes) is too small for this call on "
            f"{self.problem.shape.device_type}; the smallest that works is {format_least(needed)} "
            f"({needed} bytes){_pinned_words(self.constraints)}: {footprint.words}",
            smallest_bytes=needed,
        )

    def _words(self, plan: Plan, whole_bytes: int) -> str:
        """Why this schedule is taken."""
        if self.monolithic is not None:
            spent = format_seconds(self.monolithic.predicted_seconds)
            if plan is self.monolithic:
                return "the uncut call fits, and no cut is clearly faster"
            return f"predicted clearly faster than the uncut call ({spent})"
        reason = f"predicted to be the fastest of {counted(self.tried, 'schedule')}"
        if whole_bytes > self.constraints.budget_bytes:
            reason += f"; the uncut call needs {format_bytes(whole_bytes)}"
        if not plan.levels:
            reason += "; only heads are cut"
        return reason


def uncut(shape: CallShape) -> Schedule:
    """The whole call in one kernel call."""
    group = GroupSize(shape.batch, shape.kv_heads)
    return schedule_of(shape, Decomposition(shape.n_tokens), group, Whole())


def uncut_bytes(problem: Problem) -> int:
    """Device bytes of the whole call at once, through one slot where it cannot run as it lies."""
    schedule = uncut(problem.shape)
    if not schedule.runs(problem):
        schedule = schedule.through_slots(problem.shape, accumulator="host")
    return schedule.route.memory_use(schedule, problem).total


@remembered(256)
def short_call(problem: Problem, hardware: HardwareModel) -> Plan | None:
    """The monolithic call, where it is so short and small that no search is worth its time."""
    shape, backend = problem.shape, problem.backend
    # With several batch dimensions there may be several calls: those that are complete when memory
    # runs out must not be repeated, so such a pass needs a plan.
    if not group_sizes(shape) or len(shape.batch_shape) > 1:
        return None
    schedule = uncut(shape)
    if not schedule.runs(problem):
        return None
    why = _SHORT if backend.own_memory else _ON_A_CPU
    found = price(schedule, problem, kernel_hardware(problem, hardware), why)
    short = found.predicted_seconds < policy.MIN_SECONDS_TO_SEARCH or not backend.own_memory
    most = policy.MAX_BYTES_UNCHECKED if backend.own_memory else policy.MAX_CPU_BYTES_UNCHECKED
    return found if short and found.peak_bytes <= most else None


def _score(plan: Plan) -> float:
    """What the search minimises: seconds, and a small share of what the first call takes more."""
    seconds = plan.cost.seconds
    return seconds + min(policy.MAX_PREPARATION_SHARE * seconds, plan.cost.preparation)


def _pinned_words(constraints: PlanConstraints) -> str:
    if constraints.levels is not None:
        return f" at levels {constraints.levels}"
    return "" if constraints.depth is None else f" at depth {constraints.depth}"


def _schedules(
    problem: Problem, constraints: PlanConstraints, decomposition: Decomposition
) -> Iterator[Schedule]:
    """Every schedule of a decomposition that is worth a price."""
    shape, pinned = problem.shape, constraints.pinned
    pairs = problem.pairs
    sizes = [constraints.group] if constraints.group is not None else group_sizes(shape)
    sizes = sizes or [GroupSize(max(1, shape.batch), max(1, shape.kv_heads))]
    offered = _over_inputs(problem, constraints, decomposition)
    routes = [r for r in offered if Schedule(decomposition, sizes[-1], r).runs(problem)]
    for size, route in product(sizes, routes):
        if size.batch == 1:
            yield schedule_of(shape, decomposition, size, route, pinned=pinned)
    # Tasks of two chunks of three save little memory, but under a kernel's own mask.
    worth_it = (
        decomposition.levels != (3,) or constraints.levels is not None or pairs.verdict is not None
    )
    if not worth_it or (routes and constraints.over_inputs):
        return
    every = _slots(problem, constraints)
    if not decomposition.depth:
        # No ``max_pairs``: a monolithic call is one rectangle under a mask too, as in torch.
        kinds = dict.fromkeys((slots.n_cap, slots.accumulator) for slots in every)
        for size, kind in product(sizes, kinds):
            made = schedule_of(shape, decomposition, size, Whole(*kind), pinned=pinned)
            yield made if made.runs(problem) else made.through_slots(shape)
        return
    max_pairs = None
    if shape.bias is not None and shape.bias.rows and shape.bias.columns:
        max_pairs = policy.MAX_BIAS_PAIRS
    few = policy.MAX_TRIMMED_TASKS if constraints.levels is None else math.inf
    trimmed = _trimmed_sizes(decomposition, problem) if decomposition.n_tasks <= few else None
    for size, slots in product(sizes, every):
        route = replace(slots, trimmed=trimmed)
        yield schedule_of(shape, decomposition, size, route, pinned=pinned, max_pairs=max_pairs)


def _streams(problem: Problem, constraints: PlanConstraints) -> tuple[int, ...]:
    """The numbers of kernel calls in flight that are tried."""
    if not problem.backend.own_memory or not problem.kernel.several_streams:
        return (1,)
    return (1, 2) if constraints.streams is None else (constraints.streams,)


def _slots(problem: Problem, constraints: PlanConstraints) -> list[Slots]:
    """The routes through slots that are tried: as asked for, or all that may be of use."""
    backend = problem.backend
    n_caps = (2, 1) if backend.own_memory else (1,)
    n_caps = n_caps if constraints.n_cap is None else (constraints.n_cap,)
    homes: tuple[Home, ...] = ("device", "host") if backend.own_memory else ("host",)
    homes = homes if constraints.accumulator is None else (constraints.accumulator,)
    return [Slots(*fields) for fields in product(n_caps, homes, _streams(problem, constraints))]


def _over_inputs(
    problem: Problem, constraints: PlanConstraints, decomposition: Decomposition
) -> list[Route]:
    """The routes of several tasks over the inputs as they lie that are tried."""
    kernel, backend = problem.kernel, problem.backend
    asked_for_slots = constraints.n_cap is not None or constraints.over_inputs is False
    asked_for_slots |= constraints.accumulator == "host" and backend.own_memory
    # A kernel of one launch a task may need all heads for a whole call (FlexAttention).
    gains = kernel.several_streams or (kernel.own_attention and kernel.whole_tasks)
    most = policy.MAX_CHUNKS_IN_PLACE if backend.own_memory else policy.MAX_SMALL_PIECES_CHUNKS
    if asked_for_slots or not gains or decomposition.depth != 1 or decomposition.n_tasks > most:
        return []
    if decomposition.n_tasks == 3 and constraints.levels is None and not backend.own_memory:
        return []  # no cut is faster there, and it saves little memory
    in_step = policy.PIECES_WITHOUT_OVERLAP[problem.spec.backward]
    pieces = policy.PIECES if backend.own_memory else in_step
    every = product(_streams(problem, constraints), pieces)
    return [Blockwise(streams=streams, pieces=layout) for streams, layout in every]


def _decompositions(n_tokens: int, constraints: PlanConstraints) -> Iterator[Decomposition]:
    """Those asked for; or all into at most ``policy.MAX_TASKS`` tasks, by number of tasks, but for
    those whose largest task is larger than another's with fewer tasks."""
    if constraints.levels is not None:
        yield constraints.decompose(n_tokens, constraints.levels)
        return
    depth, smallest = constraints.depth, math.inf
    if depth is not None and depth > policy.MAX_LISTED_DEPTH:
        _check_depth(n_tokens, constraints)
    counts = [chunk_count(l) for l in quorum_sizes(policy.MAX_QUORUM_SIZE) if l > 2]
    # (3,) is looked at by itself: as a second level it saves little.
    waiting: list[tuple[int, tuple[int, ...], int]] = [(1, (), 0), (3, (3,), 0)]
    while waiting:
        n_tasks, levels, before = heappop(waiting)
        decomposition = constraints.decompose(n_tokens, levels)
        tokens = decomposition.max_task_tokens
        if len(levels) > 1 and tokens >= before:
            continue
        worth_it = tokens != smallest and tokens < policy.MIN_SHRINK * smallest
        if worth_it and depth in (None, len(levels)):
            smallest = min(smallest, tokens) if n_tasks > 3 else math.inf
            yield decomposition
        for count in counts:
            if n_tasks * count > policy.MAX_TASKS or (levels and count > levels[-1]):
                break
            if depth is None or len(levels) < depth:
                heappush(waiting, (n_tasks * count, (*levels, count), tokens))
    if depth and smallest == math.inf:
        yield constraints.decompose(n_tokens, (policy.DEEP_LEVEL_CHUNKS,) * depth)


def _trimmed_sizes(decomposition: Decomposition, problem: Problem) -> TrimmedSizes | None:
    """What trimming leaves of the tasks, None where there is nothing to leave out."""
    pairs = problem.pairs
    if decomposition.depth == 0 or not _trims(pairs):
        return None
    return trimmed_sizes(
        decomposition, problem.shape.lengths, problem.kernel, problem.spec.backward
    )


def _trims(pairs: Pairs) -> bool:
    """Whether tasks are worth trimming: a kernel's own mask, or many more queries than keys (or
    keys than queries) leave parts of them without pairs."""
    few, many = sorted((pairs.n_queries, pairs.n_keys))
    return pairs.verdict is not None or few * policy.MIN_LENGTH_RATIO_TO_TRIM <= many


def _check_depth(n_tokens: int, constraints: PlanConstraints) -> None:
    """Refuse a depth whose last levels make no task smaller, and only more tasks.

    Raises:
        ValueError: names the largest depth that is taken.
    """
    assert constraints.depth is not None
    most = max(deepest(constraints.decompose(n_tokens, ())), policy.MAX_LISTED_DEPTH)
    if constraints.depth > most:
        tiles = f" in tiles of {constraints.tile}" if constraints.layout == "aligned" else ""
        raise ValueError(
            f"depth must be at most {most} for {counted(n_tokens, 'token')}{tiles}, got "
            f"{constraints.depth}: more levels make no task smaller"
        )


def _streamed(plan: Plan, search: _Search) -> Iterator[Schedule]:
    """For every head group and a few sizes of a chunk that stays on the device while rows stream
    by, the schedule with the largest blocks that fits; none where the route cannot run the call.

    Args:
        plan: what takes over if memory runs out; through slots.
    """
    problem, hardware, instead = search.problem, search.hardware, plan.schedule
    route, shape = instead.route, problem.shape
    nearly = least_seconds(problem, hardware) * policy.MIN_TIME_OVER_ARITHMETIC
    if not isinstance(route, Slots) or not instead.decomposition.depth:
        return
    if problem.place.resident or plan.predicted_seconds <= nearly:
        return
    stays: Axis = "key" if problem.spec.backward else "query"
    length = shape.n_keys if problem.spec.backward else shape.n_queries
    for group in group_sizes(shape):
        if group.batch > 1:
            continue
        made = replace(instead, group=group)
        if not Streaming(resident_axis=stays, instead=route).runs(made, problem):
            return
        for chunk in _stream_chunks(group, length, problem, hardware):
            streaming = Streaming(resident_axis=stays, queries=chunk, keys=chunk, instead=route)
            found = _largest_block(made, streaming, search.constraints.budget_bytes, problem)
            if found is not None:
                yield found


def _stream_chunks(
    group: GroupSize, length: int, problem: Problem, hardware: HardwareModel
) -> Iterator[int]:
    """Sizes of a chunk: whole waves of rows, all heads of the group together."""
    n_heads = group.kv_heads * problem.shape.queries_per_key_head
    rows = (hardware.wave_rows or policy.ASSUMED_WAVE_ROWS) // n_heads
    wave = max(policy.MIN_STREAMED_ROWS, rows // policy.TILE * policy.TILE)
    most = round_up(length, policy.TILE)
    for waves in policy.RESIDENT_WAVES:
        if waves * wave >= most:
            yield most
            return
        yield waves * wave


def _largest_block(
    schedule: Schedule, route: Streaming, budget: int, problem: Problem
) -> Schedule | None:
    """The schedule whose blocks are the largest part of a chunk that fits."""
    shape, chunk = problem.shape, route.rows(route.resident_axis)
    for parts in policy.STREAMED_PARTS:
        block, rest = divmod(chunk, parts)
        # Otherwise the rectangles at the diagonal would have many sizes.
        if rest or block % policy.TILE:
            continue
        if block < policy.MIN_STREAMED_ROWS and parts > 1:
            return None
        sizes = (chunk, block) if route.resident_axis == "query" else (block, chunk)
        one = replace(route, queries=sizes[0], keys=sizes[1])
        units = count_groups(shape, schedule.group) * one.stream(shape).n_units
        if units > policy.MAX_PASSAGES:
            return None
        made = schedule_of(
            shape, schedule.decomposition, schedule.group, one, pinned=schedule.pinned
        )
        if made.route.memory_use(made, problem).total <= budget:
            return made
    return None
