"""Chooses a schedule: of those that fit the budget, the one that should be fastest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise, product

from quorum_attention.decomposition import Decomposition, Pairs
from quorum_attention.decomposition.pairs import kept_share
from quorum_attention.errors import BudgetError
from quorum_attention.execution.case import Case, Placement
from quorum_attention.execution.device.residency import Home
from quorum_attention.execution.pass_spec import spec_of
from quorum_attention.execution.routes.in_place import InPlace, Together, takes_tasks
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.routes.whole import Whole
from quorum_attention.execution.schedule import Choice, Route, Schedule, schedule_of
from quorum_attention.execution.trimming import Tally, pairs_of, tally
from quorum_attention.execution.workload import GroupSize, Workload, group_sizes
from quorum_attention.kernels.cache import remembered
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.planner import known, passing, policy
from quorum_attention.planner.cost import Cost, cost, least_seconds, preparation_seconds
from quorum_attention.planner.footprint import Footprint, footprint_of
from quorum_attention.planner.machine import Machine
from quorum_attention.quorums import chunk_count, quorum_size, quorum_sizes
from quorum_attention.sizes import format_bytes, format_least, format_seconds

_SHORT = "the monolithic call fits, and is short: nothing else was looked at"
_ON_A_CPU = "the monolithic call fits, and on a CPU no cut is faster: nothing else was looked at"


@dataclass(frozen=True, slots=True)
class Wish:
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
    layout: str = "aligned"
    tile: int = 128
    accumulator: Home | None = None
    group: GroupSize | None = None
    n_cap: int | None = None
    pinned: bool = False
    streams: int | None = None
    over_inputs: bool | None = None
    enforce_budget: bool = True


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule with its price.

    Attributes:
        why: what else there was, in words; empty where nothing was compared.
    """

    schedule: Schedule
    footprint: Footprint
    cost: Cost
    why: str = ""


def price(schedule: Schedule, case: Case, machine: Machine) -> Candidate:
    """Bytes and seconds of one schedule."""
    return Candidate(schedule, footprint_of(schedule, case), cost(schedule, case, machine))


def prepared(found: Candidate, case: Case, machine: Machine) -> Candidate:
    """It with all shapes counted that its kernel has to prepare: the search looks at few."""
    before = found.cost.preparation
    seconds = preparation_seconds(found.schedule, case, machine, before)
    return (
        found
        if seconds == before
        else replace(found, cost=replace(found.cost, preparation=seconds))
    )


def refitted(
    found: Candidate, case: Case, planned: Placement, machine: Machine, *, same_work: bool = True
) -> Candidate:
    """``found``, which was chosen for another case, as it serves this one.

    The kernel may be another one, whose mask leaves out more or less; results may be of a wider
    dtype than was planned for; and what cannot run on the inputs as they lie goes through slots.

    Args:
        planned: the place that it was chosen for.
        same_work: whether it was chosen for the same mask and scale.
    """
    schedule, work, kernel, place = found.schedule, case.work, case.kernel, case.place
    as_planned, planned = planned, replace(
        planned, result_dtype=place.result_dtype, copied=place.copied, divided=place.divided
    )  # fmt: skip
    if not schedule.runs(case):
        schedule, planned = schedule.through_slots(work), place
        if isinstance(found.schedule.route, Whole):
            made = price(schedule, case, machine)
            return replace(made, why=found.why)
    elif isinstance(schedule.route, Together) and planned == as_planned:
        return found
    pairs = pairs_of(work, kernel)
    trimmed = _trimmed_tally(schedule.decomposition, pairs, case)
    unchanged = schedule is found.schedule and trimmed == schedule.trimmed
    if not (same_work and unchanged and planned == as_planned):
        if isinstance(schedule.route, (InPlace, Slots)):
            schedule = replace(schedule, route=replace(schedule.route, trimmed=trimmed))
        paced = _paced(machine, work, kernel, pairs, backward=case.spec.backward)
        made = price(schedule, replace(case, place=planned), paced)
        found = replace(made, why=found.why)
    return _as_one_call(found, case)


def _as_one_call(found: Candidate, case: Case) -> Candidate:
    """``found``; if it is uncut and goes through slots, without them where one call can run a whole
    head group on the inputs as they lie."""
    schedule = found.schedule
    if schedule.decomposition.depth or not isinstance(schedule.route, Slots):
        return found
    whole = replace(schedule, route=Whole(schedule.route))
    return replace(found, schedule=whole) if whole.runs(case) else found


def _paced(
    machine: Machine, work: Workload, kernel: InnerKernel, pairs: Pairs, *, backward: bool
) -> Machine:
    """The machine with the rates that ``kernel`` reaches.

    Costs count all pairs of a call: a kernel whose own mask leaves out some of them reaches a
    higher rate of counted pairs.
    """
    share = kept_share(pairs)
    forward, back = kernel.rates
    if kernel.pace is not None:
        machine = kernel.pace(machine, work.head_dim, backward)
    return replace(
        machine,
        flops=machine.flops * forward / share,
        backward_flops=machine.backward_flops * back / share,
    )


def least(work: Workload, kernel: InnerKernel, machine: Machine, *, backward: bool) -> float:
    """Predicted seconds that no schedule of ``kernel`` is below, without a search."""
    paced = _paced(machine, work, kernel, pairs_of(work, kernel), backward=backward)
    return least_seconds(work, paced, spec_of(backward))


def choose(
    work: Workload,
    wish: Wish,
    kernel: InnerKernel,
    place: Placement,
    machine: Machine,
    *,
    backward: bool,
) -> Candidate:
    """The fastest schedule that fits; the monolithic call where it fits and nothing is clearly
    faster.

    Answers are remembered: a model calls attention many times with the same sizes.

    Raises:
        BudgetError: nothing fits; names the smallest budget that would do.
    """
    pairs = pairs_of(work, kernel)
    return _choose(work, wish, pairs, kernel, place, machine, backward=backward)


@remembered(256)
def _choose(
    work: Workload,
    wish: Wish,
    pairs: Pairs,
    kernel: InnerKernel,
    place: Placement,
    machine: Machine,
    *,
    backward: bool,
) -> Candidate:
    case = Case(work, kernel, spec_of(backward), place)
    paced = _paced(machine, work, kernel, pairs, backward=backward)
    name = known.name_of(case, wish, paced) if pairs.verdict is None else None
    entry = None if name is None else known.find(name)
    if entry is not None and entry[0].decomposition.n_tokens == work.n_tokens:
        again = replace(price(entry[0], case, paced), why=entry[1])
        if again.footprint.total <= wish.budget_bytes:
            return again
    taken = _searched(case, wish, pairs, paced)
    if name is not None:
        known.note(name, taken.schedule, taken.why)
    return taken


def _searched(case: Case, wish: Wish, pairs: Pairs, machine: Machine) -> Candidate:
    """What a search finds."""
    search = _Search(case, wish, machine)
    at_once = search.look(_schedules(case, wish, pairs))
    if at_once is not None:
        return at_once
    # Trimming takes time for every task, so decompositions into more tasks are trimmed only while
    # nothing fits. Once also under the kernel's own mask, where the best has as many untrimmed.
    for number, counts in enumerate(pairwise(policy.MOST_TRIMMED)):
        nothing = search.best is None and _trims(pairs)
        masked = number == 0 and pairs.verdict is not None
        many = masked and search.best is not None and _many(search.best, counts[0])
        if search.monolithic is None and (nothing or many):
            search.look(_schedules(case, wish, pairs, n_tasks=counts))
    if search.nothing and wish.levels is None and wish.enforce_budget:
        search.look(_schedules(case, wish, pairs, shapes=_deep(case, wish, pairs)))
    return _or_passing(search.taken(), case, wish, machine)


def _or_passing(taken: Candidate, case: Case, wish: Wish, machine: Machine) -> Candidate:
    """``taken``; or, if that is faster, rows that pass by a chunk (passing.py)."""
    asked = (wish.levels, wish.depth, wish.accumulator, wish.group, wish.n_cap, wish.streams)
    free = wish.enforce_budget and wish.over_inputs is None and not wish.pinned
    enough = taken.cost.seconds * policy.PASSING
    floor = least_seconds(case.work, machine, case.spec) * policy.NEARLY_ARITHMETIC
    if not free or any(one is not None for one in asked) or floor >= enough:
        return taken
    found = [
        price(schedule, case, machine)
        for schedule in passing.schedules(taken.schedule, wish.budget_bytes, case, machine)
    ]
    best = min(found, key=_score, default=taken)
    if best.cost.seconds >= enough:
        return taken
    spent = format_seconds(taken.cost.seconds)
    why = f"predicted faster than tasks through slots ({spent}; {taken.why})"
    return replace(best, why=why)


@dataclass(slots=True)
class _Search:
    """What a search asks of every schedule, and what it has found so far.

    Attributes:
        machine: with the rates that the kernel reaches (``_paced``).
        best: the schedule that fits and is predicted fastest, the monolithic call left aside.
        monolithic: the monolithic call, where it fits.
        smallest: the schedule of the fewest bytes, whether it fits or not.
        fitting: how many schedules fit, the monolithic call left aside.
        whole_bytes: the fewest bytes of an uncut call, whether it fits or not.
        by_levels: the fewest seconds of those that fit, by their levels.
    """

    case: Case
    wish: Wish
    machine: Machine
    best: Candidate | None = None
    monolithic: Candidate | None = None
    smallest: tuple[Schedule, Footprint] | None = None
    fitting: int = 0
    whole_bytes: int | None = None
    by_levels: dict[tuple[int, ...], float] = field(default_factory=dict)

    @property
    def nothing(self) -> bool:
        """Whether nothing has been found that fits."""
        return self.best is None and self.monolithic is None

    def look(self, schedules: Iterable[Schedule]) -> Candidate | None:
        """Price the schedules that fit. A monolithic call that needs no comparison is returned."""
        for schedule in schedules:
            footprint = footprint_of(schedule, self.case)
            total = footprint.total
            if self.smallest is None or total < self.smallest[1].total:
                self.smallest = schedule, footprint
            every = schedule.is_all(self.case.work)
            if every and not schedule.decomposition.levels:
                least = self.whole_bytes
                self.whole_bytes = total if least is None else min(total, least)
            if total > self.wish.budget_bytes:
                continue
            found = price(schedule, self.case, self.machine)
            if not (every and isinstance(schedule.route, Whole)):
                self._add(found)
            elif found.cost.seconds < policy.WORTH_COMPARING:
                return replace(found, why=_SHORT)
            elif not self.case.place.backend.overlaps:
                return replace(found, why=_ON_A_CPU)
            else:
                self.monolithic = found
        return None

    def taken(self) -> Candidate:
        """The choice, now that everything has been looked at.

        Raises:
            BudgetError: nothing fits; names the smallest budget that would do.
        """
        best, monolithic = self.best, self.monolithic
        if monolithic is not None:
            worth_it = (
                best is not None and best.cost.seconds < policy.CLEARLY * monolithic.cost.seconds
            )
            best = best if worth_it else monolithic
        if best is not None:
            return replace(best, why=self._words(best))
        assert self.smallest is not None, "the search always has a candidate"
        schedule, footprint = self.smallest
        if not self.wish.enforce_budget:
            return price(schedule, self.case, self.machine)
        needed, budget = footprint.total, self.wish.budget_bytes
        raise BudgetError(
            f"a budget of {format_bytes(budget)} ({budget} bytes) is too small for this call; the "
            f"smallest that works, of the cuts this search knows, is {format_least(needed)} "
            f"({needed} bytes){_pinned_words(self.wish)}: {_breakdown(footprint)}",
            smallest_bytes=needed,
        )

    def _add(self, found: Candidate) -> None:
        self.fitting += 1
        levels = found.schedule.decomposition.levels
        seconds = found.cost.seconds
        self.by_levels[levels] = min(seconds, self.by_levels.get(levels, seconds))
        if self.best is None or _score(found) < _score(self.best):
            self.best = found

    def _words(self, taken: Candidate) -> str:
        """Why this schedule is taken."""
        levels = taken.schedule.decomposition.levels
        others = [(s, other) for other, s in self.by_levels.items() if other != levels]
        following = ""
        if others:
            seconds, other = min(others)
            name = " x ".join(map(str, other)) or "undivided heads"
            following = f"; the best of other levels, {name}, would take {format_seconds(seconds)}"
        if self.monolithic is not None:
            spent = format_seconds(self.monolithic.cost.seconds)
            if taken is self.monolithic:
                return f"the monolithic call fits, and nothing is clearly faster{following}"
            return f"predicted clearly faster than the monolithic call ({spent}){following}"
        reason = f"the fastest by prediction of {self.fitting} schedules that fit"
        if self.whole_bytes is not None and self.whole_bytes > self.wish.budget_bytes:
            reason += f"; uncut it would take {format_bytes(self.whole_bytes)}"
        if not levels:
            reason += "; cutting heads alone is enough"
        return reason + following


def _many(found: Candidate, tasks: int) -> bool:
    """Whether the schedule has more than ``tasks`` tasks, none of them trimmed."""
    return found.schedule.trimmed is None and found.schedule.decomposition.n_tasks > tasks


def uncut(work: Workload, group: GroupSize) -> Schedule:
    """Head groups in one kernel call each."""
    return schedule_of(work, Decomposition(work.n_tokens), group, Whole())


@remembered(256)
def short_monolithic(
    work: Workload, kernel: InnerKernel, place: Placement, machine: Machine, *, backward: bool
) -> Candidate | None:
    """The monolithic call, where it is so short and small that no search is worth its time."""
    sizes = group_sizes(work)
    # With several batch dimensions there may be several calls: those that are complete when memory
    # runs out must not be repeated, so such a pass needs a plan.
    if not place.backend.refuses or not sizes or len(work.batch_shape) > 1:
        return None
    schedule = uncut(work, sizes[0])
    case = Case(work, kernel, spec_of(backward), place)
    if not schedule.runs(case):
        return None
    found = price(
        schedule, case, _paced(machine, work, kernel, pairs_of(work, kernel), backward=backward)
    )
    small = (
        found.footprint.total <= policy.SHORT_BYTES and found.cost.seconds < policy.WORTH_COMPARING
    )
    return replace(found, why=_SHORT) if small else None


def _score(candidate: Candidate) -> float:
    """What the search minimises: seconds, and a small share of what the first call takes more."""
    seconds = candidate.cost.seconds
    return seconds + min(policy.FIRST_CALL_COUNTS * seconds, candidate.cost.preparation)


def _pinned_words(wish: Wish) -> str:
    if wish.levels is not None:
        return f" at levels {wish.levels}"
    if wish.depth is not None:
        return f" at depth {wish.depth}"
    return ""


def _breakdown(footprint: Footprint) -> str:
    parts = {
        "slots": footprint.slots,
        "kernel workspace": footprint.workspace,
        "accumulators": footprint.accumulators,
        "results": footprint.results,
    }
    return ", ".join(f"{name} {format_bytes(n)}" for name, n in parts.items() if n)


def _schedules(
    case: Case,
    wish: Wish,
    pairs: Pairs,
    *,
    n_tasks: tuple[int, int] | None = None,
    shapes: tuple[Decomposition, ...] | None = None,
) -> Iterator[Schedule]:
    """Every schedule worth a price.

    Args:
        pairs: which query-key pairs the call keeps.
        n_tasks: (a, b): only through slots, with more than a and at most b tasks, trimmed.
        shapes: only these decompositions, through slots.
    """
    work, kernel = case.work, case.kernel
    sizes = [wish.group] if wish.group is not None else group_sizes(work)
    sizes = sizes or [GroupSize(max(1, work.batch), max(1, work.kv_heads))]
    over_inputs = n_tasks is None and shapes is None
    if shapes is None:
        shapes = _decompositions(work, wish, pairs)
    if n_tasks is not None:
        shapes = tuple(s for s in shapes if n_tasks[0] < s.n_tasks <= n_tasks[1])
    choice = _choice(wish, case)
    over: type[InPlace | Together] = InPlace if takes_tasks(kernel, work) else Together
    cuts = _cuts_over_inputs(case, wish, shapes) if over_inputs else []
    # One answer holds for all: whether a route can run does not depend on the decomposition.
    able = (
        [r for r in over.offered(choice) if Schedule(cuts[0], sizes[-1], r).runs(case)]
        if cuts
        else []
    )
    if able:
        for shape in cuts:
            routes: Sequence[Route] = able
            if over is InPlace:
                trimmed = _trimmed_tally(shape, pairs, case)
                routes = tuple(InPlace.offered(replace(choice, trimmed=trimmed)))
            for size, route in product(sizes, routes):
                if size.batch == 1:
                    yield schedule_of(work, shape, size, route, pinned=wish.pinned)
        if wish.over_inputs:
            return
    max_pairs = None
    if work.mask is not None and work.mask.rows and work.mask.columns:
        max_pairs = policy.MASKED_PAIRS
    few = policy.MOST_TRIMMED[0] if n_tasks is None and wish.levels is None else math.inf
    for shape in shapes:
        if not shape.depth:
            # No ``max_pairs``: a monolithic call is one rectangle under a mask too, as in torch.
            for size, slots in product(sizes, tuple(Slots.offered(replace(choice, streams=(1,))))):
                made = schedule_of(work, shape, size, Whole(slots), pinned=wish.pinned)
                yield made if made.runs(case) else made.through_slots(work)
            continue
        trimmed = _trimmed_tally(shape, pairs, case) if shape.n_tasks <= few else None
        mine = replace(choice, trimmed=trimmed)
        for size, slots in product(sizes, tuple(Slots.offered(mine))):
            yield schedule_of(work, shape, size, slots, pinned=wish.pinned, max_pairs=max_pairs)


def _choice(wish: Wish, case: Case) -> Choice:
    """The values of a route's fields that are tried: those asked for, or all that may be of use."""
    backend = case.place.backend
    n_caps = (2, 1) if backend.overlaps else (1,)
    homes: tuple[Home, ...] = ("device", "host") if backend.own_memory else ("host",)
    streams = (1, 2) if wish.streams is None else (wish.streams,)
    if backend.most_streams == 1 or not case.kernel.several_streams:
        streams = (1,)
    return Choice(
        n_caps if wish.n_cap is None else (wish.n_cap,),
        homes if wish.accumulator is None else (wish.accumulator,),
        streams,
        pieces=policy.PIECES if backend.overlaps else policy.PIECES_IN_STEP[case.spec.backward],
    )


def _cuts_over_inputs(
    case: Case, wish: Wish, shapes: tuple[Decomposition, ...]
) -> list[Decomposition]:
    """The decompositions that are worth running on the inputs as they lie: some of ``shapes``, and
    one more (``policy.FEWEST``)."""
    work, kernel, place = case.work, case.kernel, case.place
    asked_for_slots = wish.n_cap is not None or wish.over_inputs is False
    asked_for_slots |= wish.accumulator == "host" and place.backend.own_memory
    gains = kernel.several_streams or takes_tasks(kernel, work)
    if asked_for_slots or not gains:
        return []
    most = policy.MOST_OVER_INPUTS if place.backend.overlaps else policy.MOST_PIECES
    found = [s for s in shapes if s.depth == 1 and s.levels[0] <= most]
    if place.backend.overlaps and wish.levels is None and wish.depth in (None, 1):
        found.append(decomposition_of(work.n_tokens, policy.FEWEST, wish.layout, wish.tile))
    return found


def _deep(case: Case, wish: Wish, pairs: Pairs) -> tuple[Decomposition, ...]:
    """A few of all the decompositions that fit; where none fits, the one of the fewest bytes."""
    work = case.work
    smallest = (group_sizes(work) or [GroupSize(max(1, work.batch), max(1, work.kv_heads))])[-1]
    least = replace(
        wish,
        group=wish.group or smallest,
        n_cap=wish.n_cap or 1,
        accumulator=wish.accumulator or "host",
        streams=1,
    )
    # Not by ``decomposition_of``: so many would drive what calls need out of its memory.
    shapes = tuple(
        Decomposition(work.n_tokens, levels, wish.layout, wish.tile)  # type: ignore[arg-type]
        for levels in _deep_levels(work.n_tokens, wish.layout, wish.tile)
        if wish.depth is None or len(levels) == wish.depth
    )
    sized = [
        (footprint_of(schedule, case).total, schedule.decomposition)
        for schedule in _schedules(case, least, pairs, shapes=shapes)
    ]
    fitting = [shape for total, shape in sized if total <= wish.budget_bytes]
    if fitting or not sized:
        fitting.sort(key=lambda shape: shape.n_tasks)
        return tuple(fitting[:: max(1, -(-len(fitting) // policy.PRICED_DEEP))])
    return (min(sized, key=lambda found: found[0])[1],)


@lru_cache(maxsize=64)
def _deep_levels(n_tokens: int, layout: str, tile: int) -> tuple[tuple[int, ...], ...]:
    """The levels of every decomposition into at most ``policy.MOST_TASKS`` tasks.

    Chunk counts do not grow from level to level, and every level makes the largest task smaller.
    """
    counts = [chunk_count(l) for l in quorum_sizes(policy.LARGEST_SINGLE) if l >= 3]
    # Also one whose largest task is the whole call: through slots it may take fewer bytes than the
    # monolithic call, where that one copies something.
    found: list[tuple[int, ...]] = []
    if Decomposition(n_tokens, (counts[0],), layout, tile).max_task_tokens == n_tokens:  # type: ignore[arg-type]
        found.append((counts[0],))

    def go(levels: tuple[int, ...], tasks: int, tokens: int) -> None:
        for c in counts:
            if tasks * c > policy.MOST_TASKS or (levels and c > levels[-1]):
                return
            finer = (*levels, c)
            left = Decomposition(n_tokens, finer, layout, tile).max_task_tokens  # type: ignore[arg-type]
            if left < tokens:
                found.append(finer)
                go(finer, tasks * c, left)

    go((), 1, n_tokens)
    return tuple(found)


def _trimmed_tally(shape: Decomposition, pairs: Pairs, case: Case) -> Tally | None:
    """What trimming leaves of the tasks, None where there is nothing to leave out."""
    if shape.depth == 0 or not _trims(pairs):
        return None
    return tally(shape, pairs, case.kernel, case.spec.backward)


def _trims(pairs: Pairs) -> bool:
    """Whether tasks are worth trimming: a kernel's own mask, or many more queries than keys (or
    keys than queries) leave parts of them without pairs."""
    few, many = sorted((pairs.n_queries, pairs.n_keys))
    return pairs.verdict is not None or few * policy.LOPSIDED <= many


def _decompositions(work: Workload, wish: Wish, pairs: Pairs) -> tuple[Decomposition, ...]:
    """Those asked for, or those worth a look, coarser levels first."""
    if wish.levels is not None:
        levels = [wish.levels]
    else:
        levels = [
            chosen
            for chosen in _level_choices(pairs.verdict is not None)
            if wish.depth is None or len(chosen) == wish.depth
        ]
        if wish.depth is not None and wish.depth > policy.LISTED:
            _check_depth(work.n_tokens, wish)
            levels = [(policy.DEEP,) * wish.depth]
        useful = [chosen for chosen in levels if _is_useful(chosen, work.n_tokens, wish)]
        levels = useful or levels[:1]
    return tuple(
        decomposition_of(work.n_tokens, chosen, wish.layout, wish.tile) for chosen in levels
    )


def _check_depth(n_tokens: int, wish: Wish) -> None:
    """Refuse a depth whose last levels make no task smaller, and only more tasks.

    Raises:
        ValueError: names the largest depth that is taken.
    """
    assert wish.depth is not None
    useful, tokens = 0, n_tokens
    while useful < wish.depth:
        finer = decomposition_of(n_tokens, (policy.DEEP,) * (useful + 1), wish.layout, wish.tile)
        if finer.max_task_tokens >= tokens:
            break
        useful, tokens = useful + 1, finer.max_task_tokens
    if useful < wish.depth:
        tiles = f" in tiles of {wish.tile}" if wish.layout == "aligned" else ""
        raise ValueError(
            f"depth must be at most {max(useful, policy.LISTED)} for {n_tokens} tokens{tiles}, got "
            f"{wish.depth}: more levels make no task smaller"
        )


@lru_cache(maxsize=1024)
def decomposition_of(
    n_tokens: int, levels: tuple[int, ...], layout: str, tile: int
) -> Decomposition:
    """The decomposition of ``n_tokens`` at these levels, remembered."""
    return Decomposition(n_tokens, levels, layout, tile)  # type: ignore[arg-type]


@lru_cache(maxsize=2)
def _level_choices(masked: bool) -> tuple[tuple[int, ...], ...]:
    """The levels that a search looks at; fewer single levels under a mask of the kernel's own."""
    sizes = policy.TRIMMED_SINGLE if masked else quorum_sizes(policy.LARGEST_SINGLE)
    single = [(chunk_count(l),) for l in sizes if l >= (2 if masked else 3)]
    pairs = [
        (chunk_count(a), chunk_count(b)) for a, b in product(policy.PAIRED, policy.PAIRED) if a >= b
    ]
    return ((), *single, *pairs, *policy.TRIPLES)


def _is_useful(levels: tuple[int, ...], n_tokens: int, wish: Wish) -> bool:
    """Whether the finest chunks still hold a tile."""
    if not levels:
        return True
    smallest = wish.tile if wish.layout == "aligned" else 1
    # At deeper levels a chunk is a part of a task, not of the sequence.
    tokens = float(n_tokens)
    for c in levels[:-1]:
        tokens *= quorum_size(c) / c
    return tokens / levels[-1] >= smallest
