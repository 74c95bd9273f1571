"""One pass of one call, with its tensors: what it reads, and the results that it makes.

Brings the upstream gradient into the inputs' dtype.

Numbers of an fp32 gradient for fp16 inputs may be too large or too small for fp16. All results of a
backward are linear in the upstream gradient. So it is divided by a power of two for each key/value
head, and the finished gradients are multiplied by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quorum_attention.decomposition import Rectangle, Task
from quorum_attention.execution.call import Call, no_bias, operand
from quorum_attention.execution.case import Case, Placement
from quorum_attention.execution.device.clock import Clock
from quorum_attention.execution.device.residency import Residency
from quorum_attention.execution.pass_spec import BACKWARD, FORWARD, PassSpec, StateSpec
from quorum_attention.execution.report import PassReport
from quorum_attention.execution.scaling import Computed, scales
from quorum_attention.execution.workload import Axis, Group, Workload, flat_entries, group_part
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.protocol import Bias, Lanes, TaskTensors

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Tools:
    """A clock for stages, and streams (lanes) for several kernel calls at once."""

    clock: Clock
    lanes: Lanes | None = None


# The largest element is below 2 to this power after the division: large where that is no danger, to
# keep the small numbers. Elsewhere it is below 1, so that no product overflows.
_WIDE_LARGEST, _PLAIN_LARGEST = 15, 0
# Largest magnitude of an exponent: fp32 holds these powers of two exactly, with room to spare.
_LARGEST_EXPONENT = 120


def outreaches(gradient: torch.dtype, inputs: torch.dtype) -> bool:
    """Whether dtype ``gradient`` has numbers that are too small or large for dtype ``inputs``."""
    return torch.finfo(gradient).tiny < torch.finfo(inputs).tiny


@dataclass(frozen=True, slots=True)
class Upstream:
    """An upstream gradient, divided if the inputs' dtype cannot hold it.

    Attributes:
        tensor: (*batch, heads, n_queries, value_dim), with any strides: as it was given, or divided
            and in the inputs' dtype.
        divisor: (*batch, kv_heads), the powers of two it was divided by, in the state's dtype on
            the device that computes; None if it was not divided.
    """

    tensor: torch.Tensor
    divisor: torch.Tensor | None = None

    def factor(self, group: Group, axis: Axis) -> torch.Tensor | None:
        """The factor of a group's finished gradients, (entries, heads, 1, 1); None is 1."""
        if self.divisor is None:
            return None
        found = torch.stack([self.divisor[entry][group.key_heads] for entry in group.entries])
        if axis == "query":
            found = found.repeat_interleave(group.queries_per_key_head, dim=-1)
        return found[:, :, None, None]


def upstream_of(
    grad_out: torch.Tensor, work: Workload, device: torch.device, *, wide: bool
) -> Upstream:
    """``grad_out`` (*batch, heads, n_queries, value_dim) for inputs of ``work``'s dtype.

    The host does not wait for the device.

    Args:
        device: the device that computes.
        wide: whether no product of the backward overflows, however large its elements are: see
            ``takes_wide`` (execution/scaling.py).
    """
    if not outreaches(grad_out.dtype, work.dtype):
        return Upstream(grad_out)
    # Rows that are not finite do not count.
    rows = torch.linalg.vector_norm(grad_out, ord=torch.inf, dim=-1)
    rows = rows.nan_to_num_(0.0, posinf=0.0)
    largest = rows.unflatten(-2, (work.kv_heads, -1)).amax(dim=(-2, -1))
    # 2**(exponent - 1) <= largest < 2**exponent
    exponent = torch.frexp(largest.to(torch.float64)).exponent
    exponent -= _WIDE_LARGEST if wide else _PLAIN_LARGEST
    exponent = exponent.clamp_(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    by_query = _power(-exponent).repeat_interleave(work.queries_per_key_head, dim=-1)
    tensor = torch.empty(grad_out.shape, dtype=work.dtype, device=grad_out.device)
    torch.mul(grad_out, by_query[..., None, None], out=tensor)
    return Upstream(tensor, _power(exponent).to(device=device, dtype=work.state_dtype))


def divided_bytes(gradient: torch.dtype, work: Workload, *, here: bool) -> int | None:
    """Bytes that ``upstream_of`` allocates on the device that computes, for a gradient of dtype
    ``gradient`` that is there (``here``) or elsewhere; None if it is not divided."""
    if not outreaches(gradient, work.dtype):
        return None
    # The divided copy, and two numbers for each row.
    per_row = work.value_dim * work.element_bytes + 2 * gradient.itemsize
    return work.batch * work.heads * work.n_queries * per_row if here else 0


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent in fp32, made from its bits: exact, as a device's pow may not be."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


# The state that begins with a sink instead of with no key.
_LSE = "lse"


@dataclass(slots=True)
class Results:
    """The results of a pass: given by the caller, or made when they are needed.

    Attributes:
        spec: which pass.
        work: the call's sizes.
        dtype: of the results, except those whose state is the result (the log-sum-exp).
        device: where the inputs are; results are made there.
        compute: the device that computes.
        tensors: the results that exist, by name.
    """

    spec: PassSpec
    work: Workload
    dtype: torch.dtype
    device: torch.device
    compute: torch.device
    tensors: dict[str, torch.Tensor]

    def dtype_of(self, state: StateSpec) -> torch.dtype:
        """The dtype of the result of ``state``."""
        return self.work.state_dtype if state.over is None else self.dtype

    def make(self, home: torch.device | None = None) -> tuple[torch.Tensor, ...]:
        """All results, in the order of the pass's states; allocates those that do not exist.

        Args:
            home: where to allocate results that are their own state; None is where the inputs are.

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
        """Take a kernel's own tensors (b, heads, ...) of the whole call as results; copies those
        that the caller gave tensors for, or that have another dtype."""
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


class ProgressStoppedError(Exception):
    """A StopIteration of the caller's progress, which generators on its way would take for their
    own; ``run_pass`` raises the original again."""

    def __init__(self, error: StopIteration) -> None:
        super().__init__()
        self.error = error


@dataclass(slots=True)
class Job:
    """One pass of one call, as it is given to a route.

    Attributes:
        call: the inputs, and what to run them with.
        spec: which pass.
        tensors: the tensors it reads, by name: (*batch, heads, n, d); lse is (*batch, heads, n).
        results: the results it makes.
        report: filled while it runs; None for a call that has no plan.
        progress: called with units done, units in all, and the pass's name.
        upstream: the upstream gradient of a backward; None in a forward.
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
        """The pass without its tensors, as routes are asked about it."""
        call, device = self.call, self.call.device
        # The log-sum-exp is moved if it is elsewhere.
        here = all(t.device == device for n, t in self.tensors.items() if n != "lse")
        place = Placement(
            device.type,
            here,
            False,
            self.results.dtype,
            call.in_place,
            divided=0 if self.is_divided else None,
            lse_here="lse" not in self.tensors or self.tensors["lse"].device == device,
            lse_given="lse" in self.results.tensors,
        )
        return Case(call.work, call.kernel, self.spec, place)

    @property
    def is_divided(self) -> bool:
        """Whether the upstream gradient was divided (execution/job.py)."""
        return self.upstream is not None and self.upstream.divisor is not None

    @property
    def scaled(self) -> bool:
        """Whether this is a scaled backward (execution/scaling.py)."""
        return self.spec.divided is not None and scales(self.call.kernel, self.call.work)

    def factor(self, group: Group, axis: Axis) -> torch.Tensor | None:
        """The factor of a head group's finished rows, (entries, heads, 1, 1); None is 1."""
        return None if self.upstream is None else self.upstream.factor(group, axis)

    def operands(self, group: Group, *, copied: bool = True) -> dict[str, torch.Tensor]:
        """The inputs after query, key and value, for a head group of one batch entry.

        They are copied if operators cannot read them otherwise. An input that will be divided is
        not: dividing it makes a copy anyway.

        Args:
            copied: False leaves them as they are.
        """
        found = {}
        for item in self.spec.inputs[3:]:
            part = group_part(self.tensors[item.name], group, item.axis)
            if copied and item.copied and not (self.scaled and item.name == self.spec.divided):
                part = operand(part, self.call.work.dtype)
            found[item.name] = part
        return found

    def computed(self, group: Group, gradients: Sequence[torch.Tensor]) -> Computed:
        """The inputs of a head group of one batch entry, and ``gradients`` computed from them."""
        query, key, value, out, grad_out, lse = (
            group_part(self.tensors[item.name], group, item.axis) for item in self.spec.inputs
        )
        return Computed(query, out, grad_out, lse.unsqueeze(-1), key, value, *gradients)

    def fill(self, state: StateSpec, group: Group | None) -> float | torch.Tensor:
        """What rows of ``state`` begin with: a number, or one for each head of the group (None: of
        the call), (h, 1, 1)."""
        sinks = self.call.sinks
        if sinks is None or state.name != _LSE:
            return state.fill
        return (sinks if group is None else sinks[group.query_heads])[:, None, None]

    def repeated(self, times: int) -> None:
        """Add ``times`` to the report's count of repeated units."""
        if self.report is not None:
            self.report.repeated_units += times

    def tell(self, done: int, total: int) -> None:
        """Report progress, in units."""
        if self.progress is not None:
            try:
                self.progress(done, total, self.spec.name)
            except StopIteration as error:
                raise ProgressStoppedError(error) from None

    def dropout(self, group: Group) -> Dropout | None:
        """The dropout of a head group, numbered in the whole call."""
        every = self.call.dropout
        if every is None:
            return None
        return every.at(group.query_heads.start, flat_entries(self.call.work, group)[0])

    def bias(self, group: Group, task: Task) -> Bias:
        """The function that gives the additive mask of each rectangle of ``task``."""
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
        """What a kernel is given to compute ``task``.

        Args:
            limits: most queries and keys of a rectangle.
            rectangles: what to compute, in positions of the rows of ``three``.
            three: query, key and value, (b, heads, n, d) each.
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
            dropout=self.dropout(group),
        )

    def task_in_place(
        self,
        limits: tuple[int, int],
        group: Group,
        tools: Tools,
        task: Task,
        rectangles: Sequence[Rectangle],
    ) -> TaskTensors:
        """``task`` on views of the inputs themselves, for a head group of one batch entry."""
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
    lse: torch.Tensor | None = None,
) -> Job:
    """The forward of a call.

    Its results are out (*batch, heads, n_queries, value_dim) in ``out_dtype``, on the inputs'
    device (or the given ``out``, filled), and lse (*batch, heads, n_queries), natural log, in the
    state's dtype (or the given ``lse``).
    """
    given = {} if out is None else {"out": out}
    if lse is not None:
        given["lse"] = lse
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
    """The backward of a call.

    Its results are the gradients of query, key and value, with the shapes, dtypes and device of the
    inputs (or the given ``grads``, filled).

    Args:
        out: (*batch, heads, n_queries, value_dim), on any device, with any strides, as the upstream
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
