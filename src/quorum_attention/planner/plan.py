"""A plan: how a pass will be run, its memory and predicted time, and why."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from os import PathLike

from quorum_attention.decomposition import Census, Decomposition, Pairs, Task, census
from quorum_attention.execution.footprint import Footprint
from quorum_attention.execution.head_groups import count_groups
from quorum_attention.execution.problem import Placement
from quorum_attention.execution.report import InWords
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.trimmed_tasks import trim
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.units import counted, format_bytes, format_seconds

LOG = logging.getLogger("quorum_attention")


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds by term.

    Attributes:
        arithmetic: the kernel calls.
        merge: merging statistics, or adding gradients.
        up, down: copies to the slots and back.
        issue: the host's time for issuing calls and copies.
        exposed: copies that no computation overlaps: those of the first and of the last
            unit.
        fixed: time of a pass that does not depend on its size.
        preparation: extra time of the first call, while the kernel prepares the shapes
            of a few typical tasks; not part of ``seconds``.
        uniform_units: whether all units are alike, so that a term is hidden almost
            completely unless it is nearly as long as the longest.
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
        """Predicted seconds of a pass.

        They are those of the slowest of compute, copies and host where these overlap,
        otherwise their sum.
        """
        compute = self.arithmetic + self.merge
        if not self.overlaps:
            return compute + self.up + self.down + self.issue + self.fixed
        side_by_side = (compute, self.up, self.down, self.issue)
        longest = max(side_by_side)
        if longest == 0:
            return self.exposed + self.fixed
        # One unit computes longer, the next copies longer: two slots hide only a part
        # of the shorter terms, and less of them where units differ (fitted:
        # docs/planner.md).
        exponent = 8 if self.uniform_units else 2.5
        powers = 0.0
        for part in side_by_side:
            share = part / longest
            powers += share**exponent
        norm = float(powers ** (1 / exponent))
        return longest * norm + self.exposed + self.fixed


@dataclass(frozen=True, slots=True)
class Plan(InWords):
    """How one pass of one call will run; made by ``quorum_attention.plan``.

    Attributes:
        shape: the call's sizes.
        place: where the call's tensors are assumed to be.
        kernel: name of the inner kernel.
        backward: whether it is the plan of a backward pass.
        schedule: what the executor runs: decomposition, head group and route.
        footprint: its bytes.
        cost: its predicted seconds.
        why: what the plan was compared with, in words; empty if nothing was compared.
        uncut_bytes: device bytes of the uncut call; None if they were not computed.
        budget_bytes: the budget that the plan was made for; None if none was given.
        pairs: the pairs that the call keeps; None: those that ``shape`` describes.
        mask_words: these pairs in words, such as "causal, window 4096"; "" is all
            pairs.
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
    mask_words: str = field(default="", compare=False)

    @property
    def decomposition(self) -> Decomposition:
        """How the tokens are cut into tasks."""
        return self.schedule.decomposition

    @property
    def levels(self) -> tuple[int, ...]:
        """The number of chunks at each level; () is uncut."""
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
        """The most device bytes beyond what is allocated when the pass begins."""
        return self.footprint.total

    @property
    def predicted_seconds(self) -> float:
        """The predicted seconds. ``quorum-attention calibrate`` measures the rates of
        this machine for them."""
        return self.cost.seconds

    def tasks(self) -> Iterator[Task]:
        """Yield all tasks of the decomposition, in the order they run.

        They include tokens and tasks that do not run because a kernel's own mask leaves
        them out. (``n_tasks`` counts the tasks that run.)
        """
        return self.decomposition.tasks()

    def census(self) -> Census:
        """Return the shares of masked, clear and mixed tiles (128 x 128 pairs) in the
        tasks that run.

        Tiles are judged under the call's mask (paper, Appendix A.2).
        """
        return census(self._trimmed_tasks() or self.tasks(), self._call_pairs())

    def draw(self, path: str | PathLike[str]) -> None:
        """Write a picture of the coverage to ``path`` (needs matplotlib: the ``draw``
        extra)."""
        from quorum_attention.pictures import draw_coverage

        draw_coverage(
            self.decomposition,
            self._call_pairs(),
            path,
            tasks=self._trimmed_tasks(),
            mask_words=_mask_words(self),
        )

    def describe(self) -> str:
        """Return the plan in words, with the reasons."""
        lines = [_call_words(self)]
        lines += [f"{label}: {text}" for label, text in _labelled_words(self)]
        return "\n".join(lines)

    def _call_pairs(self) -> Pairs:
        """Return the pairs that the call keeps."""
        shape = self.shape
        return self.pairs or Pairs(shape.n_queries, shape.n_keys, shape.is_causal)

    def _trimmed_tasks(self) -> list[Task] | None:
        """Return the tasks as they are run; None where they are those of the
        decomposition."""
        if self.schedule.route.trimmed is None:
            return None
        tasks, _ = trim(self.decomposition, self._call_pairs(), self.backward)
        return list(tasks)

    __str__ = describe


def _labelled_words(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what a line of a description is about, and its words; the call is left
    aside."""
    schedule = plan.schedule
    peak = format_bytes(plan.peak_bytes)
    if plan.budget_bytes is not None:
        peak = f"{peak} of {format_bytes(plan.budget_bytes)}"
    yield "levels", _levels_words(plan)
    yield "units", _units_words(plan)
    yield "kernel", f"{plan.kernel} on {plan.shape.device_type}, {schedule.route.words}"
    yield "peak memory", f"{peak} ({plan.footprint.words})"
    yield "predicted", _cost_words(plan.cost)
    if plan.cost.preparation:
        seconds = format_seconds(plan.cost.preparation)
        yield (
            "first call",
            f"at least {seconds} more, while the kernel prepares its shapes",
        )
    yield "why", plan.why or "no other was asked for"


def _call_words(plan: Plan) -> str:
    """Return the call of a plan in words: "forward of 1,024 queries x 1,024 keys,
    ..."."""
    shape = plan.shape
    pass_name = "backward" if plan.backward else "forward"
    words = [
        f"{pass_name} of {counted(shape.n_queries, 'query', 'queries')} x "
        f"{counted(shape.n_keys, 'key')}",
        f"{shape.batch} x {counted(shape.heads, 'head')} ({shape.kv_heads} key/value)",
        f"head_dim {shape.head_dim}",
        str(shape.dtype).removeprefix("torch."),
    ]
    mask_words = _mask_words(plan)
    if mask_words:
        words.append(mask_words)
    return ", ".join(words)


def _mask_words(plan: Plan) -> str:
    """Return the pairs that a call keeps, in words; "" is all of them."""
    if plan.mask_words:
        return plan.mask_words
    return "causal" if plan.shape.is_causal else ""


def _levels_words(plan: Plan) -> str:
    if not plan.levels:
        return "none, one uncut task for each head group"
    decomposition = plan.decomposition
    largest = plan.schedule.largest_task
    percent = 100 * largest / max(1, decomposition.n_tokens)
    decimals = 1 if percent >= 0.1 else 4
    chunks = " x ".join(map(str, plan.levels))
    return (
        f"{chunks} chunks ({decomposition.layout}), {counted(plan.n_tasks, 'task')} of "
        f"at most {counted(largest, 'token')} ({percent:.{decimals}f}% of the "
        "sequence)"
    )


def _units_words(plan: Plan) -> str:
    schedule = plan.schedule
    group = schedule.group
    return (
        f"{counted(plan.n_groups, 'head group')} of {group.batch} x "
        f"{counted(group.kv_heads, 'key/value head')} x "
        f"{schedule.route.parts(schedule, plan.shape)}, "
        f"{schedule.route.n_cap} at a time, "
        f"{counted(schedule.route.streams, 'kernel call')} in flight"
    )


def _cost_words(cost: Cost) -> str:
    terms = {
        "arithmetic": cost.arithmetic,
        "merge": cost.merge,
        "up": cost.up,
        "down": cost.down,
        "host": cost.issue,
    }
    parts = ", ".join(
        f"{label} {format_seconds(seconds)}" for label, seconds in terms.items()
    )
    order = "overlapped" if cost.overlaps else "one after the other"
    return f"{format_seconds(cost.seconds)} ({parts}, {order})"


def is_cut(plan: Plan) -> bool:
    """Whether a pass runs in more than one unit: head group after head group, or as
    tasks."""
    return bool(plan.levels) or plan.n_groups > 1


_log_once = lru_cache(maxsize=4096)(LOG.info)


def log_cut(plan: Plan) -> None:
    """Log (INFO) that a pass is cut: once for each such call."""
    if not LOG.isEnabledFor(logging.INFO) or not is_cut(plan):
        return
    within = "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    _log_once(
        f"{_call_words(plan)}, is cut: budget {within}, depth {plan.depth} "
        f"({counted(plan.n_tasks, 'task')}), {counted(plan.n_groups, 'head group')}, "
        f"kernel {plan.kernel}, peak {format_bytes(plan.peak_bytes)}, predicted "
        f"{format_seconds(plan.predicted_seconds)}; said once for calls like this"
    )
