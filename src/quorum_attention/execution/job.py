"""One pass of a call with its tensors: what it reads, and the results it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from quorum_attention.decomposition import Rectangle, Task
from quorum_attention.execution.bias import BiasView, no_bias
from quorum_attention.execution.device.allocate import empty_result
from quorum_attention.execution.device.clock import Clock
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.device.streams import KernelStreams
from quorum_attention.execution.head_groups import Axis, Group, group_part
from quorum_attention.execution.kernel_layout import as_kernel_readable
from quorum_attention.execution.pass_spec import InputSpec, PassSpec, StateSpec
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.report import PassReport
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.result_layout import laid_out_like
from quorum_attention.kernels.task_tensors import Bias, TaskTensors
from quorum_attention.kernels.tensors import NamedTensors

Progress = Callable[[int, int, str], None]
OnStored = Callable[[Group], None]
"""Called with each head group whose results are in their place, where that is known."""

_NOTHING_MEASURED = Clock()


@dataclass(slots=True)
class PassJob:
    """One pass of one call with its tensors, as it is given to a route.

    Attributes:
        problem: the pass without its tensors, as routes are asked about it.
        tensors: the tensors it reads, by name: (*batch, heads, n, d); lse is (*batch,
            heads, n). They are on ``device`` or on the host.
        scale: the factor of the scores.
        device: the device that computes.
        bias: what the call's mask adds to the scores; None if it has none.
        sinks: (heads,), on ``device``, of the state's dtype; None if the call has none.
        dropout: which probabilities are dropped; None: none.
        results: the results that exist, by name: given by the caller, or made.
        divisor: what the upstream gradient was divided by (``rescale_upstream``); None:
            it was not.
        report: filled while it runs; None for a call that has no plan.
        progress: called with units done, units in all, and the pass's name.
        on_stored: called with head groups whose results are in place; None: nobody
            asks, or the results of the job are not those of the call.
        clock: measures the stages of the present attempt.
        streams: streams for several kernel calls at once; None: calls follow one
            another.
    """

    problem: Problem
    tensors: NamedTensors
    scale: float
    device: torch.device
    bias: BiasView | None = None
    sinks: torch.Tensor | None = None
    dropout: Dropout | None = None
    results: NamedTensors = field(default_factory=dict)
    divisor: torch.Tensor | None = None
    report: PassReport | None = None
    progress: Progress | None = None
    on_stored: OnStored | None = None
    clock: Clock = _NOTHING_MEASURED
    streams: KernelStreams | None = None

    @property
    def shape(self) -> CallShape:
        """The call's sizes."""
        return self.problem.shape

    @property
    def kernel(self) -> InnerKernel:
        """The inner kernel."""
        return self.problem.kernel

    @property
    def spec(self) -> PassSpec:
        """Which pass."""
        return self.problem.spec

    def input_part(
        self, item: InputSpec, group: Group, *, copies: bool = True
    ) -> torch.Tensor:
        """An input's part for a head group of one batch entry, (1, heads, ...).

        Args:
            copies: whether to copy a part that operators cannot read otherwise.
        """
        part = group_part(self.tensors[item.name], group, item.axis)
        if copies and self.may_be_unreadable(item):
            return as_kernel_readable(part, item.dtype(self.shape))
        return part

    def may_be_unreadable(self, item: InputSpec) -> bool:
        """Whether an input may have to be copied before operators can read it."""
        is_unreadable = item.name in self.problem.place.unreadable_inputs
        return item.may_be_unreadable or is_unreadable

    def task_tensors(
        self,
        task: Task,
        rectangles: Sequence[Rectangle],
        group: Group,
        limits: tuple[int, int],
        query_key_value: Sequence[torch.Tensor] | None = None,
    ) -> TaskTensors:
        """The tensors and options by which a kernel computes ``task``.

        Args:
            rectangles: what to compute, in positions of the rows of
                ``query_key_value``.
            limits: most queries and keys of a rectangle.
            query_key_value: (b, heads, n, d) each; None: the inputs themselves, for a
                head group of one batch entry.
        """
        if query_key_value is None:
            query_key_value = [
                self.input_part(item, group) for item in self.spec.inputs[:3]
            ]
        query, key, value = query_key_value
        max_queries, max_keys = limits
        return TaskTensors(
            task=task,
            rectangles=rectangles,
            query=query,
            key=key,
            value=value,
            scale=self.scale,
            is_causal=self.shape.is_causal,
            bias=self.task_bias(group, task),
            max_queries=max_queries,
            max_keys=max_keys,
            timed=self.clock.timed,
            streams=self.streams,
            first_head=group.query_heads.start,
            entries=group.entry_numbers,
            dropout=self.group_dropout(group),
        )

    def task_bias(self, group: Group, task: Task) -> Bias:
        """The function that gives the bias of each rectangle of ``task``."""
        if self.bias is None:
            return no_bias
        return self.bias.of_task(
            group,
            task,
            self.shape.bias_dtype,
            self.device,
        )

    def group_dropout(self, group: Group) -> Dropout | None:
        """The dropout of a head group, numbered in the whole call."""
        if self.dropout is None:
            return None
        return self.dropout.at(group.query_heads.start, group.entry_numbers.start)

    def initial_value(self, state: StateSpec, group: Group) -> float | torch.Tensor:
        """The value that rows of ``state`` begin with: a number, or (with sinks) one
        for each head of the group, (h, 1, 1)."""
        if self.sinks is None or state.name != "lse":
            return state.fill
        sinks = self.sinks[group.query_heads]
        return sinks[:, None, None]

    def finishing_factor(self, group: Group, axis: Axis) -> torch.Tensor | None:
        """The factor of a head group's finished rows, (entries, heads, 1, 1); None is
        1."""
        if self.divisor is None:
            return None
        by_entry = self.divisor.reshape(-1, self.shape.kv_heads)
        entries = slice(group.entry_numbers.start, group.entry_numbers.stop)
        factor = by_entry[entries, group.key_heads]
        if axis == "query":
            factor = factor.repeat_interleave(group.queries_per_key_head, dim=-1)
        return factor[:, :, None, None]

    def result_dtype(self, state: StateSpec) -> torch.dtype:
        """The dtype of the result of ``state``."""
        if state.over is None:
            return self.shape.state_dtype
        return self.problem.place.result_dtype

    def make_results(
        self, home: torch.device | None = None
    ) -> tuple[torch.Tensor, ...]:
        """All results, in the order of the pass's states; allocates those that do not
        exist.

        Args:
            home: where to allocate results that are their own state; None is where the
                inputs are.

        Raises:
            OutOfMemoryError: host memory cannot hold them.
        """
        results: list[torch.Tensor] = []
        for state in self.spec.states:
            if state.name not in self.results:
                self.results[state.name] = self._make_result(state, home)
            results.append(self.results[state.name])
        return tuple(results)

    def _make_result(self, state: StateSpec, home: torch.device | None) -> torch.Tensor:
        """An uninitialised result of ``state``, laid out as its input is."""
        device = self.tensors["query"].device
        if state.over is None and home is not None:
            device = home
        return empty_result(
            state.tensor_shape(self.shape),
            self.result_dtype(state),
            device,
            state.words,
            self.device,
            like=None if state.over is None else self.tensors[state.over],
        )

    def result_parts(self, group: Group) -> list[torch.Tensor]:
        """A head group's part of each result, as views; of one batch entry."""
        states_and_results = zip(self.spec.states, self.make_results(), strict=True)
        return [
            group_part(result, group, state.axis)
            for state, result in states_and_results
        ]

    def store_results(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Take a kernel's own tensors (b, heads, ...) of the whole call as results;
        copies those that the caller gave tensors for, or that have another dtype."""
        shape = self.shape
        results: list[torch.Tensor] = []
        for state, part in zip(self.spec.states, parts, strict=True):
            if len(shape.batch_shape) != 1:
                part = part.reshape(state.tensor_shape(shape))
            result = self.results.get(state.name)
            if result is not None:
                result.copy_(part)
            else:
                result = self._as_result(state, part)
            self.results[state.name] = result
            results.append(result)
        return tuple(results)

    def _as_result(self, state: StateSpec, part: torch.Tensor) -> torch.Tensor:
        """Return a kernel's own tensor as a result.

        A query without a view (b, heads, n, d), or without readable rows, was copied
        for the kernel, so that the output lies as that copy did.
        """
        dtype = self.result_dtype(state)
        part = part if part.dtype == dtype else part.to(dtype)
        is_like_input = self.spec.backward or not self.problem.place.copies_query
        if is_like_input or state.over is None:
            return part
        return laid_out_like(part, self.tensors[state.over])

    def count_repeat(self) -> None:
        """Add one to the report's count of repeated units."""
        if self.report is not None:
            self.report.repeated_units += 1

    def report_progress(self, done: int, total: int) -> None:
        """Report progress, in units."""
        if self.progress is not None:
            self.progress(done, total, self.spec.name)

    def report_stored(self, group: Group, mover: Mover) -> None:
        """Report that a head group is done, once ``mover`` has stored its results."""
        if self.on_stored is not None:
            mover.when_stored(partial(self.on_stored, group))
