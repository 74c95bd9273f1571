"""All tasks of a head group at once, on inputs that lie where they are computed.

Between them the tasks of a level keep every pair once. Where nothing has to be moved and the
state of a whole head group fits, they need not run one by one: the chunks of the whole sequence
are halved as those of a task are, into fewer and larger rectangles, which are read and merged in
place. A few kernel calls do what as many tasks would take several each for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from quorum_attention.execution.case import Case
from quorum_attention.execution.control.machine import HERE, Machine
from quorum_attention.execution.job import Job
from quorum_attention.execution.routes.choice import Choice
from quorum_attention.execution.routes.over_inputs import OverInputs, all_rectangles
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.rows import group_part
from quorum_attention.execution.scaling import Ask, Computed, Level, asking
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.takes import Bytes, Load, kept_bytes, state_bytes
from quorum_attention.execution.tools import Tools
from quorum_attention.execution.workload import Group, GroupSize, count_groups
from quorum_attention.kernels.copies import copy_on_device
from quorum_attention.kernels.protocol import TaskTensors
from quorum_attention.kernels.scaling import Scaling

# More than a scaled backward notes of a head.
_SMALL_BYTES = 512


@dataclass(frozen=True, slots=True)
class Together(OverInputs):
    """All tasks of a head group as one.

    Attributes:
        streams: kernel calls in flight at once.
    """

    streams: int = 1

    words = "inputs in place, all tasks of a head group at once"

    def __post_init__(self) -> None:
        if self.streams < 1:
            raise ValueError(f"streams must be at least 1, got {self.streams}")

    @classmethod
    def offered(cls, choice: Choice) -> Iterator[Together]:
        """Those that a search looks at."""
        return map(cls, choice.streams)

    def takes(self, schedule: Schedule, case: Case) -> Bytes:
        """The states of a head group, and of all of them what is returned."""
        states = scaled_bytes if case.scaled else state_bytes
        return Bytes(
            self.streams * case.workspace(schedule.extent(case.work)),
            0,
            (*states(case, schedule.group), *kept_bytes(case)),
            self.results(schedule, case),
        )

    def load(self, schedule: Schedule, case: Case) -> Load:
        """One unit for each head group."""
        units = count_groups(case.work, schedule.group)
        return Load(units=units, at_once=True, begun=units)

    def slots(self, **changes: Any) -> Slots:
        """One, with as many calls in flight."""
        return Slots(1, "device", self.streams).slots(**changes)

    def run(self, job: Job, schedule: Schedule, machine: Machine, tools: Tools) -> Iterator[int]:
        """Make the results of the head groups that are left, one after the other."""
        job.results.make()
        task, rectangles = all_rectangles(job.call.work, schedule.decomposition)
        every = len(machine.groups_left)
        for done, group in enumerate(machine.whole_groups(HERE), start=1):
            tensors = job.lying(schedule.limits, group, tools, task, rectangles)
            job.repeated(compute_group(job, tensors, group, tools, asking(machine, group)))
            job.tell(done, every)
            yield schedule.decomposition.n_tasks


def scaled_bytes(case: Case, group: GroupSize) -> tuple[int, ...]:
    """Of the states of ``compute_group`` where it is scaled: with a copy of the input that is
    divided, and small numbers for every head."""
    spec, work = case.spec, case.work
    divided = next(item for item in spec.inputs if item.name == spec.divided)
    copy = divided.count(work, group) * work.element_bytes
    return (*state_bytes(case, group), copy, *(_SMALL_BYTES,) * 4)


def compute_group(job: Job, task: TaskTensors, group: Group, tools: Tools, ask: Ask) -> int:
    """Put the results of a head group, all of it ``task``, where they belong; returns how often it
    had to be run again (execution/scaling.py), which is for ``ask`` to say."""
    call, work, spec = job.call, job.call.work, job.spec
    given = job.operands(group)
    divided = spec.divided if job.scaled else None
    upstream = None if divided is None else given[divided]
    if divided is not None and upstream is not None:
        given[divided] = torch.empty(upstream.shape, dtype=work.dtype, device=call.device)
    targets = [
        group_part(result, group, state.axis)
        for state, result in zip(spec.states, job.results.make(), strict=True)
    ]
    states = [
        # What has the state's dtype accumulates where it belongs.
        target.fill_(state.fill)
        if state.over is None
        else torch.zeros(target.shape, dtype=work.state_dtype, device=call.device)
        for state, target in zip(spec.states, targets, strict=True)
    ]
    scaling, level, repeated = Scaling(), Level(work.n_keys), 0
    while True:
        if divided is not None and upstream is not None:
            with tools.clock.timed("gather"):
                sizes = task.value.shape[:2]
                unscale = torch.empty(sizes, dtype=torch.float32, device=call.device)
                overflow = torch.zeros(sizes, dtype=torch.int32, device=call.device)
                copy_on_device(given[divided], upstream)
                level.divide_(given[divided], task.value, unscale)
            scaling = Scaling(level.shift, unscale, overflow)
        with tools.clock.timed("compute"):
            spec.accumulate(call.kernel, task, given, states, scaling)
        if upstream is None or scaling.overflow is None or not bool(scaling.overflow.any()):
            break
        computed = Computed(
            task.query, given["out"], upstream, given["lse"].unsqueeze(-1), task.key, task.value,
            *states,
        )  # fmt: skip
        if not level.lower(scaling.overflow, computed, ask):
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
                target.copy_(made)
    return repeated
