"""One pass of one call: what it reads, what it makes, and whom it tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quorum_attention.decomposition import Rectangle, Task
from quorum_attention.execution.call import Call, operand
from quorum_attention.execution.case import Case
from quorum_attention.execution.device.residency import Residency
from quorum_attention.execution.masks import no_bias
from quorum_attention.execution.pass_spec import BACKWARD, FORWARD, PassSpec, StateSpec
from quorum_attention.execution.placement import Placement
from quorum_attention.execution.report import PassReport
from quorum_attention.execution.rows import Axis, group_part
from quorum_attention.execution.scaling import scales
from quorum_attention.execution.tools import Progress, Tools
from quorum_attention.execution.upstream import Upstream
from quorum_attention.execution.workload import Group, Workload, flat_entries
from quorum_attention.kernels.protocol import Bias, TaskTensors


@dataclass(slots=True)
class Results:
    """What a pass returns, as far as it is there already.

    Attributes:
        spec: of the pass.
        work: the call's sizes.
        dtype: of results that have a dtype of their own; the others have the state's.
        device: where the inputs are, and results are made.
        compute: what computes them.
        tensors: by name.
    """

    spec: PassSpec
    work: Workload
    dtype: torch.dtype
    device: torch.device
    compute: torch.device
    tensors: dict[str, torch.Tensor]

    def dtype_of(self, state: StateSpec) -> torch.dtype:
        """Of one of them."""
        return self.work.state_dtype if state.over is None else self.dtype

    def make(self, home: torch.device | None = None) -> tuple[torch.Tensor, ...]:
        """All of them, those made that are not there; ``home``: where those are made that
        accumulate where they lie, if not where the inputs are.

        Raises:
            OutOfMemoryError: host memory cannot hold them.
        """
        for state in self.spec.states:
            if state.name not in self.tensors:
                where = self.device if state.over is not None or home is None else home
                shape, dtype = state.shape(self.work), self.dtype_of(state)
                self.tensors[state.name] = Residency(where).result(
                    shape, dtype, state.words, self.compute
                )
        return tuple(self.tensors[state.name] for state in self.spec.states)

    def take(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """A kernel's own results (b, heads, ...) of all the call, wherever nothing was given."""
        lies_so = len(self.work.batch_shape) == 1
        found = []
        for state, part in zip(self.spec.states, parts, strict=True):
            result = part if lies_so else part.reshape(state.shape(self.work))
            given = self.tensors.get(state.name)
            if given is not None:
                result = given.copy_(result)
            elif result.dtype != (dtype := self.dtype_of(state)):
                result = result.to(dtype)
            found.append(result)
            self.tensors[state.name] = result
        return tuple(found)


@dataclass(slots=True)
class Job:
    """One pass of one call, as it goes through a route.

    Attributes:
        call: the inputs, and what runs them.
        spec: which pass.
        tensors: what it reads, by name: (*batch, heads, n, d), a lse without the last dimension.
        results: what it makes.
        report: of what happens; None where nothing is planned.
        progress: called with units done, units in all, and the pass's name.
        upstream: of a backward, the gradient that it is given.
    """

    call: Call
    spec: PassSpec
    tensors: dict[str, torch.Tensor]
    results: Results
    report: PassReport | None = None
    progress: Progress | None = None
    upstream: Upstream | None = None

    @property
    def case(self) -> Case:
        """What routes are asked about."""
        call, device = self.call, self.call.device
        # A lse is moved to where it is wanted.
        here = all(t.device == device for n, t in self.tensors.items() if n != "lse")
        place = Placement(
            device.type,
            here,
            False,
            self.results.dtype,
            call.in_place,
            divided=0 if self.is_divided else None,
            lse_here="lse" not in self.tensors or self.tensors["lse"].device == device,
        )
        return Case(call.work, call.kernel, self.spec, place)

    @property
    def is_divided(self) -> bool:
        """Whether the upstream gradient was divided (execution/upstream.py)."""
        return self.upstream is not None and self.upstream.divisor is not None

    @property
    def scaled(self) -> bool:
        """Whether units are scaled (execution/scaling.py)."""
        return self.spec.divided is not None and scales(self.call.kernel, self.call.work)

    def factor(self, group: Group, axis: Axis) -> torch.Tensor | None:
        """What a head group's finished rows are multiplied by, (entries, heads, 1, 1)."""
        return None if self.upstream is None else self.upstream.factor(group, axis)

    def operands(self, group: Group) -> dict[str, torch.Tensor]:
        """Its own inputs beside query, key and value of a head group of one entry, as operators
        take them; but the one that is going to be divided as it was given."""
        found = {}
        for item in self.spec.inputs[3:]:
            part = group_part(self.tensors[item.name], group, item.axis)
            if item.copied and not (self.scaled and item.name == self.spec.divided):
                part = operand(part, self.call.work.dtype)
            found[item.name] = part
        return found

    def repeated(self, times: int) -> None:
        """Note that a unit was run again so often."""
        if self.report is not None:
            self.report.repeated_units += times

    def tell(self, done: int, total: int) -> None:
        """Of progress."""
        if self.progress is not None:
            self.progress(done, total, self.spec.name)

    def bias(self, group: Group, task: Task) -> Bias:
        """The additive mask of a head group's rectangles of ``task``."""
        call = self.call
        if call.mask is None:
            return no_bias
        return call.mask.bias(group, task, call.work.dtype, call.device)

    def task(
        self,
        limits: tuple[int, int],
        group: Group,
        tools: Tools,
        task: Task,
        rectangles: Sequence[Rectangle],
        three: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> TaskTensors:
        """What a kernel gets of ``task``: ``rectangles`` of the rows in ``three``, which are query,
        key and value (b, heads, n, d).

        Args:
            limits: most queries and keys of a rectangle.
        """
        return TaskTensors(
            task=task,
            rectangles=rectangles,
            query=three[0],
            key=three[1],
            value=three[2],
            scale=self.call.scale,
            is_causal=self.call.work.is_causal,
            bias=self.bias(group, task),
            max_queries=limits[0],
            max_keys=limits[1],
            timed=tools.clock.timed,
            lanes=tools.lanes,
            first_head=group.query_heads.start,
            entries=flat_entries(self.call.work, group),
        )

    def lying(
        self,
        limits: tuple[int, int],
        group: Group,
        tools: Tools,
        task: Task,
        rectangles: Sequence[Rectangle],
    ) -> TaskTensors:
        """The same of a head group's part of the inputs as they lie; of one entry."""
        query, key, value = (
            group_part(self.tensors[item.name], group, item.axis) for item in self.spec.inputs[:3]
        )
        return self.task(limits, group, tools, task, rectangles, (query, key, value))


def forward_job(
    call: Call,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
    report: PassReport | None = None,
    progress: Progress | None = None,
) -> Job:
    """The forward of a call: returns (out, lse), out (*batch, heads, n_queries, value_dim) in
    ``out_dtype`` where the inputs are (or ``out``, filled), lse (*batch, heads, n_queries), natural
    log, in the state's dtype."""
    given = {} if out is None else {"out": out}
    results = Results(FORWARD, call.work, out_dtype, call.query.device, call.device, given)
    return Job(call, FORWARD, _inputs(call), results, report, progress)


def backward_job(
    call: Call,
    upstream: Upstream,
    out: torch.Tensor,
    lse: torch.Tensor,
    grads: Sequence[torch.Tensor] | None = None,
    report: PassReport | None = None,
    progress: Progress | None = None,
) -> Job:
    """The backward of a call: returns the gradients of query, key and value in the shapes, dtypes
    and places of the inputs, or ``grads``, filled.

    Args:
        out: (*batch, heads, n_queries, value_dim), anywhere, however it lies, as the upstream
            gradient.
        lse: (*batch, heads, n_queries) as the forward returned it.
    """
    names = ("query", "key", "value")
    given = {} if grads is None else dict(zip(names, grads, strict=True))
    dtype = call.work.dtype if grads is None else grads[0].dtype
    tensors = _inputs(call)
    tensors.update(out=out, grad_out=upstream.tensor, lse=lse)
    results = Results(BACKWARD, call.work, dtype, call.query.device, call.device, given)
    return Job(call, BACKWARD, tensors, results, report, progress, upstream)


def _inputs(call: Call) -> dict[str, torch.Tensor]:
    return {"query": call.query, "key": call.key, "value": call.value}
