"""The route ``together``: all tasks of a head group at once, over the inputs as they lie.

All tasks of a level together keep every pair once. If the inputs are on the computing device and
the state of a whole head group fits beside them, the tasks need not run one by one: the whole
sequence is cut into rectangles as a single task would be. These are fewer and larger than those of
the tasks, and are read and merged in place, so far fewer kernel calls are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product, starmap
from typing import Any

import torch

from quorum_attention.decomposition import Decomposition
from quorum_attention.decomposition.pieces import Pieces, largest_chunk
from quorum_attention.execution.case import Case
from quorum_attention.execution.control.machine import HERE, Machine
from quorum_attention.execution.job import Job
from quorum_attention.execution.routes.choice import Choice
from quorum_attention.execution.routes.over_inputs import OverInputs, all_rectangles
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.rows import group_part
from quorum_attention.execution.scaling import Ask, Computed, Steps, asking
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.takes import Bytes, Load, final_bytes, in_results, state_bytes
from quorum_attention.execution.tools import Tools
from quorum_attention.execution.workload import Group, GroupSize, Workload, count_groups
from quorum_attention.kernels.protocol import TaskTensors
from quorum_attention.kernels.scaling import Scaling
from quorum_attention.kernels.tensors import copy_on_device

# At least the bytes of each small tensor that a scaled backward makes for a head group.
_SMALL_BYTES = 512


@dataclass(frozen=True, slots=True)
class Together(OverInputs):
    """All tasks of a head group as one.

    Attributes:
        streams: kernel calls in flight at once.
        pieces: how their rectangles are laid out.
    """

    streams: int = 1
    pieces: Pieces = "halves"

    words = "inputs in place, all tasks of a head group at once"

    def __post_init__(self) -> None:
        if self.streams < 1:
            raise ValueError(f"streams must be at least 1, got {self.streams}")

    @classmethod
    def offered(cls, choice: Choice) -> Iterator[Together]:
        """Those that a search tries: every combination."""
        return starmap(cls, product(choice.streams, choice.pieces))

    def limits(self, shape: Decomposition, work: Workload) -> tuple[int, int]:
        """Halved rectangles are as they come; others have a chunk of queries, or of both."""
        if self.pieces == "halves":
            return OverInputs.limits(self, shape, work)
        chunk = largest_chunk(shape)
        keys = chunk if self.pieces == "blocks" else work.n_keys
        return min(chunk, work.n_queries), min(keys, work.n_keys)

    def runs(self, schedule: Schedule, case: Case) -> bool:
        """Whether all inputs can be read where they lie. Under a mask only small rectangles are
        of use: each has a part of the mask in the inputs' dtype."""
        maskless = case.work.mask is None or self.pieces != "halves"
        return maskless and case.place.in_place and case.place.lse_here

    def takes(self, schedule: Schedule, case: Case) -> Bytes:
        """The states of one head group, and the results of all."""
        states = scaled_bytes if case.scaled else merged_bytes
        return Bytes(
            self.streams * case.workspace(schedule.extent(case.work)),
            0,
            (*states(case, schedule.group), *final_bytes(case)),
            self.results(schedule, case),
        )

    def rows_copied(self, schedule: Schedule, case: Case) -> int | None:
        """The rows of a rectangle, if rectangles are small and the kernel copies by itself."""
        small = self.pieces != "halves" and case.kernel.any_upstream
        return schedule.max_queries if small else None

    def load(self, schedule: Schedule, case: Case) -> Load:
        """Each head group is one unit."""
        units = count_groups(case.work, schedule.group)
        return Load(units=units, at_once=self.pieces, begun=units)

    def slots(self, **changes: Any) -> Slots:
        """One slot, with as many calls in flight."""
        return Slots(1, "device", self.streams).slots(**changes)

    def run(self, job: Job, schedule: Schedule, machine: Machine, tools: Tools) -> Iterator[int]:
        """Compute the head groups that are left, one after the other."""
        job.results.make()
        task, rectangles = all_rectangles(job.call.work, schedule.decomposition, self.pieces)
        every = len(machine.groups_left)
        for done, group in enumerate(machine.whole_groups(HERE), start=1):
            tensors = job.task_in_place(schedule.limits, group, tools, task, rectangles)
            copied = self.rows_copied(schedule, job.case) is None
            ask = asking(machine, group)
            job.repeated(compute_group(job, tensors, group, tools, ask, copied=copied))
            job.tell(done, every)
            yield schedule.decomposition.n_tasks


def merged_bytes(case: Case, group: GroupSize) -> tuple[int, ...]:
    """Bytes of the states that ``compute_group`` allocates."""
    return () if in_results(case) else state_bytes(case, group)


def scaled_bytes(case: Case, group: GroupSize) -> tuple[int, ...]:
    """Bytes of what ``compute_group`` allocates where it is scaled: the states, a copy of the input
    that is divided, and a few numbers for every head."""
    spec, work = case.spec, case.work
    divided = next(item for item in spec.inputs if item.name == spec.divided)
    copy = divided.count(work, group) * work.element_bytes
    return (*merged_bytes(case, group), copy, *(_SMALL_BYTES,) * 4)


def _begun(target: torch.Tensor, fill: float | torch.Tensor) -> torch.Tensor:
    """``target``, filled; where each head begins otherwise, it is (1, h, rows)."""
    return target.copy_(fill.squeeze(-1)) if isinstance(fill, torch.Tensor) else target.fill_(fill)


def compute_group(
    job: Job, task: TaskTensors, group: Group, tools: Tools, ask: Ask, *, copied: bool = True
) -> int:
    """Compute a head group and write its results.

    Args:
        task: all of the head group.
        ask: decides whether a scaled group that overflowed runs again (execution/scaling.py).
        copied: whether to copy inputs that operators cannot read; if not, the kernel does.

    Returns:
        How often it was run again.
    """
    call, work, spec = job.call, job.call.work, job.spec
    given = job.operands(group, copied=copied)
    divided = spec.divided if job.scaled else None
    upstream = None if divided is None else given[divided]
    if divided is not None and upstream is not None:
        given[divided] = torch.empty(upstream.shape, dtype=work.dtype, device=call.device)
    targets = [
        group_part(result, group, state.axis)
        for state, result in zip(spec.states, job.results.make(), strict=True)
    ]
    own = in_results(job.case)
    states = [
        # A result in the state's dtype is its own state.
        _begun(target, job.fill(state, group))
        if state.over is None or own
        else torch.zeros(target.shape, dtype=work.state_dtype, device=call.device)
        for state, target in zip(spec.states, targets, strict=True)
    ]
    scaling, steps, repeated = Scaling(), Steps(work.n_keys), 0
    while True:
        if divided is not None and upstream is not None:
            with tools.clock.timed("gather"):
                sizes = task.value.shape[:2]
                unscale = torch.empty(sizes, dtype=torch.float32, device=call.device)
                overflow = torch.zeros(sizes, dtype=torch.int32, device=call.device)
                copy_on_device(given[divided], upstream)
                steps.divide_(given[divided], task.value, unscale)
            scaling = Scaling(steps.shift, unscale, overflow)
        with tools.clock.timed("compute"):
            spec.accumulate(call.kernel, task, given, states, scaling)
        if upstream is None or scaling.overflow is None or not bool(scaling.overflow.any()):
            break
        computed = Computed(
            task.query, given["out"], upstream, given["lse"].unsqueeze(-1), task.key, task.value,
            *states,
        )  # fmt: skip
        if not steps.lower(scaling.overflow, computed, ask):
            break
        repeated += 1
        for state in states:
            state.zero_()
    with tools.clock.timed("scatter"):
        for spec_of_state, target, made in zip(spec.states, targets, states, strict=True):
            if spec_of_state.over is not None:
                factor = job.factor(group, spec_of_state.axis)
                if factor is not None:
                    made.mul_(factor)
                if not own:
                    target.copy_(made)
    return repeated
