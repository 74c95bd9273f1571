"""The two passes as data: what each reads, what it accumulates, and how it calls a kernel.

The forward merges the statistics of every row over the tasks (paper, Algorithm 1). The backward
adds up three gradients (paper, Algorithm 2): given the global log-sum-exp, every task computes its
part of the true probabilities, P = exp(s - lse) <= 1 (paper, Equation 9).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from quorum_attention.execution.workload import Axis, GroupSize, Workload
from quorum_attention.kernels.merge import add_, merge_
from quorum_attention.kernels.protocol import (
    Call,
    CallShape,
    Extent,
    Gradients,
    InnerKernel,
    Saved,
    Statistics,
    TaskTensors,
)
from quorum_attention.kernels.scaling import Scaling

Width = Literal["head_dim", "value_dim", "one"]
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class RowSpec:
    """A tensor with a row for every query, or for every key.

    Attributes:
        name: of the tensor.
        axis: whether its rows are those of queries or of keys.
        width: the numbers in a row. A tensor of width "one" has no dimension for them.
    """

    name: str
    axis: Axis
    width: Width

    def columns(self, work: Workload) -> int:
        """How many numbers a row has."""
        if self.width == "one":
            return 1
        return work.head_dim if self.width == "head_dim" else work.value_dim

    def rows(self, work: Workload) -> int:
        """How many rows a head has."""
        return work.n_queries if self.axis == "query" else work.n_keys

    def heads(self, work: Workload, kv_heads: int) -> int:
        """How many heads belong to ``kv_heads`` key/value heads."""
        return kv_heads * (work.queries_per_key_head if self.axis == "query" else 1)

    def count(self, work: Workload, group: GroupSize | None = None, rows: int | None = None) -> int:
        """How many numbers ``rows`` rows (default: all) of a group (default: the call) have."""
        size = GroupSize(work.batch, work.kv_heads) if group is None else group
        rows = self.rows(work) if rows is None else rows
        return size.batch * self.heads(work, size.kv_heads) * rows * self.columns(work)

    def shape(self, work: Workload) -> tuple[int, ...]:
        """The shape of the whole tensor: (*batch, heads, rows, width)."""
        found = (*work.batch_shape, self.heads(work, work.kv_heads), self.rows(work))
        return found if self.width == "one" else (*found, self.columns(work))


@dataclass(frozen=True, slots=True)
class InputSpec(RowSpec):
    """A tensor of which every task reads its rows.

    Attributes:
        copied: whether it may have another dtype than the inputs, or strides that operators refuse.
            Routes without slots then copy it, one head group at a time.
        of_state: whether it has the state's dtype, not the inputs'.
        of_scores: whether probabilities are made of it. Rows that fill up a chunk repeat the
            last one; those of other inputs are 0 (execution/trimming.py).
    """

    copied: bool = False
    of_state: bool = False
    of_scores: bool = False

    def dtype(self, work: Workload) -> torch.dtype:
        """Its dtype as kernels get it."""
        return work.state_dtype if self.of_state else work.dtype


@dataclass(frozen=True, slots=True)
class StateSpec(RowSpec):
    """A tensor that accumulates row by row over the tasks, in the state's dtype.

    Attributes:
        fill: the value of a row before any task has added to it.
        over: the input whose rows finished rows may overwrite in a slot, where the result has
            another dtype than the state. None: the state itself is the result.
        words: the result's name in error messages.
    """

    fill: float
    over: str | None
    words: str


@dataclass(frozen=True, slots=True, eq=False)
class PassSpec:
    """One of the two passes, ``FORWARD`` or ``BACKWARD``; compared by identity.

    Attributes:
        name: "forward" or "backward", for people.
        backward: whether it is the backward.
        inputs: the tensors it reads: query, key and value first.
        states: the tensors it accumulates; its results, in this order.
        combined: groups of indices of ``states`` that are combined by one call.
        combine: combines parts with states, in place: ``combine(*states, *parts)``.
        products: matrix products for each pair of tiles.
        divided: the input that a scaled backward divides by powers of two; None: never scaled.
        accumulate: adds a task's part to states (b, h, n, d), or (b, h, n) for width "one".
        of_task: a task's part as ``Kernel.task_forward`` returns it; reads the inputs after the
            first three from its last argument.
        of_call: the results of a whole call as ``Kernel.whole_forward`` returns them; reads the
            same from its last argument, the lse with 0 in place of -inf.
        workspace: most bytes that ``accumulate`` allocates.
    """

    name: str
    backward: bool
    inputs: tuple[InputSpec, ...]
    states: tuple[StateSpec, ...]
    combined: tuple[tuple[int, ...], ...]
    combine: Callable[..., None]
    products: int
    divided: str | None
    accumulate: Callable[[InnerKernel, TaskTensors, Tensors, Sequence[torch.Tensor], Scaling], None]
    of_task: Callable[[InnerKernel, TaskTensors, Tensors], tuple[torch.Tensor, ...]]
    of_call: Callable[[InnerKernel, Call, Tensors], tuple[torch.Tensor, ...]]
    workspace: Callable[[InnerKernel, CallShape, Extent], int]


def spec_of(backward: bool) -> PassSpec:
    """The backward, or the forward."""
    return BACKWARD if backward else FORWARD


def _merge_into(
    kernel: InnerKernel,
    task: TaskTensors,
    given: Tensors,
    states: Sequence[torch.Tensor],
    scaling: Scaling,
) -> None:
    kernel.forward(task, Statistics(*states))


def _add_to(
    kernel: InnerKernel,
    task: TaskTensors,
    given: Tensors,
    states: Sequence[torch.Tensor],
    scaling: Scaling,
) -> None:
    query, key, value = states
    kernel.backward(
        task,
        Gradients(given["grad_out"], given["out"], given["lse"], query, key, value, scaling),
    )


def _saved(given: Tensors) -> Saved:
    return Saved(given["grad_out"], given["out"], given["lse"])


_READ = (
    InputSpec("query", "query", "head_dim", of_scores=True),
    InputSpec("key", "key", "head_dim", of_scores=True),
    InputSpec("value", "key", "value_dim"),
)

FORWARD = PassSpec(
    name="forward",
    backward=False,
    inputs=_READ,
    states=(
        StateSpec("out", "query", "value_dim", 0.0, "query", "the output"),
        StateSpec("lse", "query", "one", float("-inf"), None, "the log-sum-exp"),
    ),
    combined=((0, 1),),
    combine=merge_,
    products=2,
    divided=None,
    accumulate=_merge_into,
    of_task=lambda kernel, task, given: kernel.task_forward(task),
    of_call=lambda kernel, call, given: kernel.whole_forward(call),
    workspace=lambda kernel, call, extent: kernel.forward_workspace_bytes(call, extent),
)

BACKWARD = PassSpec(
    name="backward",
    backward=True,
    inputs=(
        *_READ,
        InputSpec("out", "query", "value_dim", copied=True),
        InputSpec("grad_out", "query", "value_dim", copied=True),
        InputSpec("lse", "query", "one", of_state=True, of_scores=True),
    ),
    states=(
        StateSpec("query", "query", "head_dim", 0.0, "query", "the query's gradient"),
        StateSpec("key", "key", "head_dim", 0.0, "key", "the key's gradient"),
        StateSpec("value", "key", "value_dim", 0.0, "value", "the value's gradient"),
    ),
    combined=((0,), (1,), (2,)),
    combine=add_,
    products=5,
    divided="grad_out",
    accumulate=_add_to,
    of_task=lambda kernel, task, given: kernel.task_backward(task, _saved(given)),
    of_call=lambda kernel, call, given: kernel.whole_backward(call, _saved(given)),
    workspace=lambda kernel, call, extent: kernel.backward_workspace_bytes(call, extent),
)  # fmt: skip
