"""Chooses a schedule: of those that fit the budget, the one that should be fastest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quorum_attention.decomposition import Decomposition
from quorum_attention.errors import BudgetError
from quorum_attention.execution.footprint import Footprint
from quorum_attention.execution.head_groups import GroupSize
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.routes.whole import Whole
from quorum_attention.execution.schedule import Schedule, schedule_of
from quorum_attention.kernels.cache import remembered
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.planner import policy
from quorum_attention.planner.candidates import (
    decompositions,
    is_worth_trimming,
    schedules,
    sizes_after_trimming,
    streaming_schedules,
)
from quorum_attention.planner.constraints import PlanConstraints
from quorum_attention.planner.hardware import HardwareModel
from quorum_attention.planner.plan import Plan
from quorum_attention.planner.price import (
    kernel_hardware,
    least_cost,
    price,
)
from quorum_attention.units import counted, format_bytes, format_least, format_seconds

_SHORT = "the uncut call fits and is short, so nothing else was tried"
_ON_A_CPU = "the uncut call fits; on a CPU no cut is faster"


@remembered(256)
def choose(
    problem: Problem, constraints: PlanConstraints, hardware: HardwareModel
) -> Plan:
    """Return the fastest schedule that fits, or the uncut call if nothing is clearly
    faster.

    Answers are remembered: a model calls attention many times with the same sizes.

    Raises:
        BudgetError: nothing fits; names the smallest budget that would do.
    """
    if constraints.is_only_budget:
        short = short_call(problem, hardware)
        if short is not None and short.peak_bytes <= constraints.budget_bytes:
            return short
    search = _Search(problem, constraints, kernel_hardware(problem, hardware))
    for decomposition in decompositions(problem.shape.n_tokens, constraints):
        if search.may_end_before(decomposition):
            break
        for schedule in schedules(problem, constraints, decomposition):
            final = search.consider(schedule)
            if final is not None:
                return final
        if search.best is not None or search.uncut is not None:
            search.n_fitting += 1
    search.consider_streaming()
    return search.result()


@dataclass(slots=True)
class _Search:
    """The constraints of a search, and what it has found so far.

    Attributes:
        hardware: with the rates that the kernel reaches.
        best: the plan that fits and is predicted fastest, the uncut call left aside.
        uncut: the plan of the uncut call, if it fits.
        smallest: the schedule of the fewest bytes, whether it fits or not.
        smallest_footprint: its bytes.
        n_tried: how many schedules were looked at, the uncut call left aside.
        n_fitting: decompositions looked at since one fits.
    """

    problem: Problem
    constraints: PlanConstraints
    hardware: HardwareModel
    best: Plan | None = None
    uncut: Plan | None = None
    smallest: Schedule | None = None
    smallest_footprint: Footprint | None = None
    n_tried: int = 0
    n_fitting: int = 0

    def may_end_before(self, decomposition: Decomposition) -> bool:
        """Whether this decomposition and those into more tasks are not looked at."""
        needs_no_fit = self.smallest is not None and not self.constraints.enforce_budget
        if is_worth_trimming(self.problem.pairs):
            max_tasks = policy.MAX_TASKS_PRICED_TRIMMED
            enough = policy.ENOUGH_FITTING_TRIMMED
        else:
            max_tasks = policy.MAX_TASKS_PRICED
            enough = policy.ENOUGH_FITTING
        is_enough = needs_no_fit or self.n_fitting >= enough
        return is_enough and decomposition.n_tasks > max_tasks

    def consider(self, schedule: Schedule) -> Plan | None:
        """Price a schedule, unless it does not fit or takes longer than the best one in
        any case.

        Returns:
            The plan of an uncut call that needs no comparison: it ends the search.
        """
        is_uncut = isinstance(schedule.route, Whole) and schedule.is_all(
            self.problem.shape
        )
        if not is_uncut:
            self.n_tried += 1
            if self._is_slower(schedule):
                return None
        footprint = schedule.route.memory_use(schedule, self.problem)
        if (
            self.smallest_footprint is None
            or footprint.total < self.smallest_footprint.total
        ):
            self.smallest = schedule
            self.smallest_footprint = footprint
        if footprint.total > self.constraints.budget_bytes:
            return None
        plan = price(schedule, self.problem, self.hardware)
        if not is_uncut:
            if self.best is None or _score(plan) < _score(self.best):
                self.best = plan
            return None
        if plan.predicted_seconds < policy.MIN_SECONDS_TO_SEARCH:
            return replace(plan, why=_SHORT)
        if not self.problem.backend.own_memory:
            return replace(plan, why=_ON_A_CPU)
        self.uncut = plan
        return None

    def _is_slower(self, schedule: Schedule) -> bool:
        """Whether a schedule takes longer than the best one by a part of its cost
        alone."""
        if self.best is None:
            return False
        return least_cost(schedule, self.problem, self.hardware) > _score(self.best)

    def consider_streaming(self) -> None:
        """Look at rows that stream by, if the call has to be cut."""
        best = self.best
        if best is None or self.uncut is not None or self.problem.place.resident:
            return
        is_cut = best.schedule.decomposition.depth > 0
        if not is_cut or not self.constraints.is_only_budget:
            return
        budget_bytes = self.constraints.budget_bytes
        for schedule in streaming_schedules(
            self.problem, best.schedule, self.hardware, budget_bytes
        ):
            self.consider(schedule)

    def result(self) -> Plan:
        """Return the choice, now that everything has been looked at.

        Raises:
            BudgetError: nothing fits; names the smallest budget that would do.
        """
        plan = self._fastest()
        if plan is not None:
            bytes_if_uncut = uncut_bytes(self.problem)
            why = self._reason(plan, bytes_if_uncut)
            return replace(plan, why=why, uncut_bytes=bytes_if_uncut)
        assert self.smallest is not None, "the search always has a candidate"
        assert self.smallest_footprint is not None
        if not self.constraints.enforce_budget:
            return price(self.smallest, self.problem, self.hardware)
        budget = self.constraints.budget_bytes
        needed = self.smallest_footprint.total
        raise BudgetError(
            f"a budget of {format_bytes(budget)} ({budget} bytes) is too small for "
            f"this call on {self.problem.shape.device_type}; the smallest that works "
            f"is {format_least(needed)} ({needed} bytes){self.constraints.words}: "
            f"{self.smallest_footprint.words}",
            smallest_bytes=needed,
        )

    def _fastest(self) -> Plan | None:
        """Return the best plan, or the uncut call where it fits and no cut is clearly
        faster."""
        if self.best is None or self.uncut is None:
            return self.best or self.uncut
        limit = policy.REQUIRED_TIME_SHARE * self.uncut.predicted_seconds
        return self.best if self.best.predicted_seconds < limit else self.uncut

    def _reason(self, plan: Plan, bytes_if_uncut: int) -> str:
        """Return why this plan is taken, in words."""
        if self.uncut is not None:
            seconds = format_seconds(self.uncut.predicted_seconds)
            if plan is self.uncut:
                return "the uncut call fits, and no cut is clearly faster"
            return f"predicted clearly faster than the uncut call ({seconds})"
        reason = f"predicted to be the fastest of {counted(self.n_tried, 'schedule')}"
        if bytes_if_uncut > self.constraints.budget_bytes:
            reason += f"; the uncut call needs {format_bytes(bytes_if_uncut)}"
        if not plan.levels:
            reason += "; only heads are cut"
        return reason


def _score(plan: Plan) -> float:
    """Return what a search minimises.

    The score is seconds, and a small share of the extra time of the first call.
    """
    seconds = plan.cost.seconds
    return seconds + min(policy.MAX_PREPARATION_SHARE * seconds, plan.cost.preparation)


def uncut_schedule(shape: CallShape) -> Schedule:
    """Return the schedule of the whole call in one kernel call."""
    group = GroupSize(shape.batch, shape.kv_heads)
    return schedule_of(
        shape,
        Decomposition(shape.n_tokens),
        group,
        Whole(),
    )


def uncut_bytes(problem: Problem) -> int:
    """Return the device bytes of the uncut call, through one slot where it cannot run
    in place."""
    schedule = uncut_schedule(problem.shape).as_runnable(problem, accumulator="host")
    return schedule.route.memory_use(schedule, problem).total


@remembered(256)
def short_call(problem: Problem, hardware: HardwareModel) -> Plan | None:
    """Return the plan of an uncut call that is so short and small that no search is
    worth its time.

    None for all other calls.
    """
    shape = problem.shape
    # With several batch dimensions there may be several calls: those that are complete
    # when memory runs out must not be repeated, so such a pass needs a plan.
    if len(shape.batch_shape) > 1:
        return None
    schedule = uncut_schedule(shape)
    if not schedule.runs(problem):
        return None
    has_own_memory = problem.backend.own_memory
    why = _SHORT if has_own_memory else _ON_A_CPU
    plan = price(
        schedule,
        problem,
        kernel_hardware(problem, hardware),
        why,
    )
    if has_own_memory and plan.predicted_seconds >= policy.MIN_SECONDS_TO_SEARCH:
        return None
    max_bytes = (
        policy.MAX_BYTES_UNCHECKED if has_own_memory else policy.MAX_CPU_BYTES_UNCHECKED
    )
    return plan if plan.peak_bytes <= max_bytes else None


def refit(plan: Plan, problem: Problem, hardware: HardwareModel) -> Plan:
    """Return ``plan``, which was made for another pass, as it serves this one.

    The kernel may be another one, whose mask leaves out more or less. Results may be of
    a wider dtype than was planned for. A pass that cannot run on the inputs as they lie
    goes through slots.
    """
    shape = problem.shape
    schedule = plan.schedule
    place = replace(
        plan.place,
        result_dtype=problem.place.result_dtype,
        n_unreadable=problem.place.n_unreadable,
        rescaled_grad_bytes=problem.place.rescaled_grad_bytes,
        flattenable=problem.place.flattenable,
        unreadable_inputs=problem.place.unreadable_inputs,
    )
    if not schedule.runs(problem):
        schedule = schedule.through_slots(shape)
        place = problem.place
    if isinstance(schedule.route, Slots):
        schedule = _refit_slots(schedule, schedule.route, problem)
    is_same_call = replace(plan.shape, batch_shape=shape.batch_shape) == shape
    if is_same_call and place == plan.place and schedule == plan.schedule:
        return plan
    moved = replace(problem, place=place)
    return price(
        schedule,
        moved,
        kernel_hardware(problem, hardware),
        plan.why,
    )


def _refit_slots(schedule: Schedule, slots: Slots, problem: Problem) -> Schedule:
    """Return a schedule through slots with tasks trimmed as this pass has them.

    An uncut schedule goes through no slots where one call can run a head group in
    place.
    """
    if not schedule.decomposition.depth:
        uncut = replace(schedule, route=Whole(slots.n_cap, slots.accumulator))
        if uncut.runs(problem):
            return uncut
    trimmed = sizes_after_trimming(schedule.decomposition, problem)
    return replace(schedule, route=replace(slots, trimmed=trimmed))
