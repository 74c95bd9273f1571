"""A plan: how a pass will be run, its memory and predicted time, and why."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from os import PathLike
from typing import NamedTuple

import torch

from quorum_attention.decomposition import Census, Decomposition, Pairs, Task, census
from quorum_attention.errors import BudgetError
from quorum_attention.execution.device.allocate import Home
from quorum_attention.execution.footprint import Footprint
from quorum_attention.execution.head_groups import count_groups
from quorum_attention.execution.problem import Placement
from quorum_attention.execution.report import InWords
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.trimmed_tasks import trim
from quorum_attention.kernels.protocol import CallShape, InnerKernel
from quorum_attention.units import counted, format_bytes, format_least, format_seconds

LOG = logging.getLogger("quorum_attention")


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds by term.

    Attributes:
        arithmetic: the kernel calls.
        merge: merging statistics, or adding gradients.
        up, down: copies to the slots and back.
        issue: the host's time for issuing calls and copies.
        exposed: copies that no computation overlaps: those of the first and of the last unit.
        fixed: time of a pass that does not depend on its size.
        preparation: extra time of the first call, while the kernel prepares the shapes of a few
            typical tasks; not part of ``seconds``.
        uniform_units: whether all units are alike, so that the shorter terms are hidden completely.
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
    uniform_units: bool
    overlaps: bool

    @property
    def seconds(self) -> float:
        """Predicted seconds of a pass: the slowest of compute, copies and host where they overlap,
        otherwise their sum."""
        compute = self.arithmetic + self.merge
        if self.overlaps:
            side_by_side = (compute, self.up, self.down, self.issue)
            longest = max(side_by_side)
            if not self.uniform_units and longest > 0:
                # One unit computes longer, the next copies longer: two slots hide only a part of
                # the shorter terms (fitted: docs/planner.md).
                longest *= sum((part / longest) ** 2.5 for part in side_by_side) ** 0.4
            return longest + self.exposed + self.fixed
        return compute + self.up + self.down + self.issue + self.fixed


@dataclass(frozen=True, slots=True)
class Plan(InWords):
    """How one pass of one call will be run; made by ``quorum_attention.plan``.

    Attributes:
        shape: the call's sizes.
        place: where the call's tensors are assumed to be.
        kernel: name of the inner kernel.
        backward: whether it is the plan of a backward pass.
        schedule: what the executor runs: decomposition, head group and route.
        footprint, cost: its predicted bytes and seconds.
        why: what else there was, in words; empty where nothing was compared.
        uncut_bytes: device bytes of the whole call at once; None where a search did not say.
        budget_bytes: the budget that the plan was made for; None where none was given.
        pairs: the pairs that the call keeps; None is what ``shape`` says.
        kept: them in words, such as "causal, window 4096"; "" is all pairs.
    """

    shape: CallShape
    place: Placement
    kernel: str
    backward: bool
    schedule: Schedule
    footprint: Footprint
    cost: Cost
    why: str = ""
    uncut_bytes: int | None = field(default=None, compare=False)
    budget_bytes: int | None = None
    pairs: Pairs | None = field(default=None, compare=False, repr=False)
    kept: str = field(default="", compare=False)

    @property
    def decomposition(self) -> Decomposition:
        """How the tokens are cut into tasks."""
        return self.schedule.decomposition

    @property
    def levels(self) -> tuple[int, ...]:
        """Chunk counts per level; () is monolithic."""
        return self.decomposition.levels

    @property
    def depth(self) -> int:
        """Levels of recursion."""
        return self.decomposition.depth

    @property
    def n_tasks(self) -> int:
        """Tasks of one head group."""
        return self.schedule.n_tasks

    @property
    def n_groups(self) -> int:
        """Number of head groups; there are ``n_groups * n_tasks`` units."""
        return count_groups(self.shape, self.schedule.group)

    @property
    def peak_bytes(self) -> int:
        """Device bytes at most, beyond what is allocated when the pass begins."""
        return self.footprint.total

    @property
    def predicted_seconds(self) -> float:
        """Predicted by the cost model; ``quorum-attention calibrate`` gives it this machine's
        rates."""
        return self.cost.seconds

    def tasks(self) -> Iterator[Task]:
        """All tasks of the decomposition, lazily, in the order they run. They include tokens and
        whole tasks that are trimmed under a kernel's own mask (``n_tasks`` counts what is run)."""
        return self.decomposition.tasks()

    def census(self) -> Census:
        """Shares of masked, clear and mixed tiles (128 x 128) of the tasks as they are run, under
        the call's mask (paper, Appendix A.2)."""
        return census(self._trimmed() or self.tasks(), self._pairs())

    def _pairs(self) -> Pairs:
        shape = self.shape
        return self.pairs or Pairs(shape.n_queries, shape.n_keys, shape.is_causal)

    def _kept(self) -> str:
        return self.kept or ("causal" if self.shape.is_causal else "")

    def _trimmed(self) -> list[Task] | None:
        """The tasks as they are run; None where they are those of the decomposition."""
        if self.schedule.route.trimmed is None:
            return None
        return list(trim(self.decomposition, self._pairs(), self.backward)[0])

    def draw(self, path: str | PathLike[str]) -> None:
        """Write a picture of the coverage to ``path`` (needs matplotlib: the ``draw`` extra)."""
        from quorum_attention.pictures import draw_coverage

        draw_coverage(
            self.decomposition, self._pairs(), path, tasks=self._trimmed(), kept=self._kept()
        )

    def describe(self) -> str:
        """The plan in words, with the reasons."""
        first, *rest = self._lines()
        return "\n".join([first[1], *(f"{label}: {text}" for label, text in rest)])

    def _lines(self) -> list[tuple[str, str]]:
        """(what, words about it), the call itself first."""
        shape, schedule, cost = self.shape, self.schedule, self.cost
        cut, kept = self.decomposition, self._kept()
        dtype = str(shape.dtype).removeprefix("torch.")
        call = (
            f"{'backward' if self.backward else 'forward'} of "
            f"{counted(shape.n_queries, 'query', 'queries')} x {counted(shape.n_keys, 'key')}, "
            f"{shape.batch} x {counted(shape.heads, 'head')} ({shape.kv_heads} key/value), "
            f"head_dim {shape.head_dim}, {dtype}{f', {kept}' if kept else ''}"
        )
        levels = "none, one uncut task for each head group"
        if cut.levels:
            share = 100 * schedule.largest_task / max(1, cut.n_tokens)
            levels = (
                f"{' x '.join(map(str, cut.levels))} chunks ({cut.layout}), "
                f"{counted(self.n_tasks, 'task')} of at most "
                f"{counted(schedule.largest_task, 'token')} "
                f"({share:.{1 if share >= 0.1 else 4}f}% of the sequence)"
            )
        units = (
            f"{counted(self.n_groups, 'head group')} of {schedule.group.batch} x "
            f"{counted(schedule.group.kv_heads, 'key/value head')} x "
            f"{schedule.route.parts(schedule, shape)}, "
            f"{schedule.route.n_cap} at a time, "
            f"{counted(schedule.route.streams, 'kernel call')} in flight"
        )
        within = f" of {format_bytes(self.budget_bytes)}" if self.budget_bytes is not None else ""
        terms = {
            "arithmetic": cost.arithmetic, "merge": cost.merge, "up": cost.up, "down": cost.down,
            "host": cost.issue,
        }  # fmt: skip
        parts = ", ".join(f"{label} {format_seconds(spent)}" for label, spent in terms.items())
        order = "overlapped" if cost.overlaps else "one after the other"
        lines = [
            ("call", call),
            ("levels", levels),
            ("units", units),
            ("kernel", f"{self.kernel} on {self.shape.device_type}, {schedule.route.words}"),
            (
                "peak memory",
                f"{format_bytes(self.peak_bytes)}{within} ({self.footprint.words})",
            ),
            ("predicted", f"{format_seconds(cost.seconds)} ({parts}, {order})"),
        ]
        if cost.preparation:
            more = f"at least {format_seconds(cost.preparation)} more"
            lines.append(("first call", f"{more}, while the kernel prepares its shapes"))
        lines.append(("why", self.why or "no other was asked for"))
        return lines

    __str__ = describe


class Reserve(NamedTuple):
    """Bytes of a budget that something else than the pass takes.

    Attributes:
        purpose: what takes them, in words for an error.
    """

    n_bytes: int
    purpose: str


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """Where and how a call may be run; None leaves a choice to the planner.

    Attributes:
        device: what computes.
        kernel: "auto", the name of a registered kernel, or a kernel.
        budget_bytes: device bytes that a pass may take; None: what is free when it begins.
        plan: the plan of one of the two passes; the other pass gets its levels.
        depth: number of levels; 0 is the monolithic call.
        accumulator: where unfinished rows are kept between tasks.
        watched: whether a report or progress is asked for.
        reserves: what the budget has to hold beside the pass.
    """

    device: torch.device
    kernel: str | InnerKernel = "auto"
    budget_bytes: int | None = None
    plan: Plan | None = None
    depth: int | None = None
    accumulator: Home | None = None
    watched: bool = False
    reserves: tuple[Reserve, ...] = ()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the budget that the pass may not take."""
        return sum(reserve.n_bytes for reserve in self.reserves)

    @property
    def available_bytes(self) -> int | None:
        """What the reserves leave of the budget to the pass; None without a budget."""
        if self.budget_bytes is None:
            return None
        return max(0, self.budget_bytes - self.reserved_bytes)

    def reserving(self, n_bytes: int, purpose: str) -> PlannerOptions:
        """Return the options with ``n_bytes`` of the budget reserved, for a purpose in words."""
        if n_bytes == 0 or self.budget_bytes is None:
            return self
        return replace(self, reserves=(*self.reserves, Reserve(n_bytes, purpose)))

    def of_whole_budget(self, error: BudgetError) -> BudgetError:
        """Return the error about the whole budget, for one about what the reserves leave of it."""
        budget = self.budget_bytes
        if not self.reserves or budget is None or error.smallest_bytes is None:
            return error
        smallest = error.smallest_bytes + self.reserved_bytes
        reserved = ", ".join(f"{r.purpose} {format_bytes(r.n_bytes)}" for r in self.reserves)
        return BudgetError(
            f"a budget of {format_bytes(budget)} ({budget} bytes) is too small for this call; the "
            f"smallest that works is {format_least(smallest)} ({smallest} bytes): {reserved}, and "
            f"beside that {error}",
            smallest_bytes=smallest,
        )

    @property
    def pinned(self) -> bool:
        """Whether the depth is given: running out of memory is then reported, not recovered."""
        return self.plan is not None or self.depth is not None


def is_cut(plan: Plan) -> bool:
    """Whether a pass runs in more than one unit: head group after head group, or as tasks."""
    return bool(plan.levels) or plan.n_groups > 1


_log_once = lru_cache(maxsize=4096)(LOG.info)


def log_cut(plan: Plan) -> None:
    """Log (INFO) that a pass is cut: once for each such call."""
    if not LOG.isEnabledFor(logging.INFO) or not is_cut(plan):
        return
    call = plan._lines()[0][1]
    within = "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    _log_once(
        f"{call}, is cut: budget {within}, depth {plan.depth} ({counted(plan.n_tasks, 'task')}), "
        f"{counted(plan.n_groups, 'head group')}, kernel {plan.kernel}, peak "
        f"{format_bytes(plan.peak_bytes)}, predicted {format_seconds(plan.predicted_seconds)}; "
        f"said once for calls like this"
    )
