"""The two passes of a call as data: what each reads, accumulates and returns.

The forward merges the statistics of every row over the tasks (paper, Algorithm 1). The
backward adds up three gradients (paper, Algorithm 2): given the global log-sum-exp,
every task computes its part of the true probabilities, P = exp(s - lse) <= 1 (paper,
Equation 9).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from quorum_attention.execution.head_groups import Axis, GroupSize
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.scaling import Scaling
from quorum_attention.kernels.task_tensors import Gradients, Statistics, TaskTensors

Width = Literal["head_dim", "value_dim", "one"]
TensorsByName = Mapping[str, torch.Tensor]


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

    def n_columns(self, shape: CallShape) -> int:
        """How many numbers a row has."""
        if self.width == "one":
            return 1
        return shape.head_dim if self.width == "head_dim" else shape.value_dim

    def n_rows(self, shape: CallShape) -> int:
        """How many rows a head has."""
        return shape.n_queries if self.axis == "query" else shape.n_keys

    def n_heads(self, shape: CallShape, kv_heads: int) -> int:
        """How many heads belong to ``kv_heads`` key/value heads."""
        if self.axis == "key":
            return kv_heads
        return kv_heads * shape.queries_per_key_head

    def count(
        self, shape: CallShape, group: GroupSize | None = None, rows: int | None = None
    ) -> int:
        """How many numbers ``rows`` rows (default: all) of a group (default: the call)
        have."""
        if group is None:
            group = GroupSize(shape.batch, shape.kv_heads)
        if rows is None:
            rows = self.n_rows(shape)
        n_heads = group.batch * self.n_heads(shape, group.kv_heads)
        return n_heads * rows * self.n_columns(shape)

    def tensor_shape(self, shape: CallShape) -> tuple[int, ...]:
        """The shape of the whole tensor: (*batch, heads, rows, width)."""
        n_heads = self.n_heads(shape, shape.kv_heads)
        n_rows = self.n_rows(shape)
        sizes = (*shape.batch_shape, n_heads, n_rows)
        if self.width == "one":
            return sizes
        return (*sizes, self.n_columns(shape))


@dataclass(frozen=True, slots=True)
class InputSpec(RowSpec):
    """A tensor of which every task reads its rows.

    Attributes:
        may_be_unreadable: whether it may have another dtype than the inputs, or strides
            that operators refuse. Routes without slots then copy it, one head group at
            a time.
        has_state_dtype: whether it has the state's dtype, not the inputs'.
        may_be_wide: whether it has the state's dtype in calls with ``wide_out``.
    """

    may_be_unreadable: bool = False
    has_state_dtype: bool = False
    may_be_wide: bool = False

    def dtype(self, shape: CallShape) -> torch.dtype:
        """Its dtype as kernels get it."""
        is_wide = self.may_be_wide and shape.wide_out
        return shape.state_dtype if self.has_state_dtype or is_wide else shape.dtype

    def n_bytes(self, shape: CallShape) -> int:
        """Bytes of the whole tensor as kernels get it."""
        return self.count(shape) * self.dtype(shape).itemsize


@dataclass(frozen=True, slots=True)
class StateSpec(RowSpec):
    """A tensor that accumulates row by row over the tasks, in the state's dtype.

    Attributes:
        fill: the value of a row before any task has added to it.
        over: the input whose layout the result has, and whose rows finished rows may
            overwrite in a slot, where the result has another dtype than the state.
            None: the state itself is the result.
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
        combined: calls by which the parts of a rectangle are combined with the states.
        products: matrix products for each pair of tiles.
    """

    name: str
    backward: bool
    inputs: tuple[InputSpec, ...]
    states: tuple[StateSpec, ...]
    combined: int
    products: int

    @property
    def saved_inputs(self) -> tuple[InputSpec, ...]:
        """The inputs after query, key and value."""
        return self.inputs[3:]

    def accumulate(
        self,
        kernel: InnerKernel,
        task: TaskTensors,
        saved: TensorsByName,
        states: Sequence[torch.Tensor],
        scaling: Scaling,
    ) -> None:
        """Add a task's part to states (b, h, n, d), or (b, h, n) for width "one".

        Args:
            saved: the inputs after query, key and value, by name.
        """
        if not self.backward:
            out, lse = states
            kernel.forward(task, Statistics(out, lse))
            return
        grad_query, grad_key, grad_value = states
        gradients = Gradients(
            saved["grad_out"],
            saved["out"],
            saved["lse"],
            grad_query,
            grad_key,
            grad_value,
            scaling,
        )
        kernel.backward(task, gradients)


def spec_of(backward: bool) -> PassSpec:
    """The backward, or the forward."""
    return BACKWARD if backward else FORWARD


_QUERY = InputSpec("query", "query", "head_dim")
_KEY = InputSpec("key", "key", "head_dim")
_VALUE = InputSpec("value", "key", "value_dim")
GRAD_OUT = InputSpec("grad_out", "query", "value_dim", may_be_unreadable=True)
"""The upstream gradient, which a scaled backward divides by powers of two."""

FORWARD = PassSpec(
    name="forward",
    backward=False,
    inputs=(_QUERY, _KEY, _VALUE),
    states=(
        StateSpec("out", "query", "value_dim", 0.0, "query", "the output"),
        StateSpec("lse", "query", "one", float("-inf"), None, "the log-sum-exp"),
    ),
    combined=1,
    products=2,
)

BACKWARD = PassSpec(
    name="backward",
    backward=True,
    inputs=(
        _QUERY,
        _KEY,
        _VALUE,
        InputSpec(
            "out", "query", "value_dim", may_be_unreadable=True, may_be_wide=True
        ),
        GRAD_OUT,
        InputSpec("lse", "query", "one", has_state_dtype=True),
    ),
    states=(
        StateSpec(
            "grad_query", "query", "head_dim", 0.0, "query", "the query's gradient"
        ),
        StateSpec("grad_key", "key", "head_dim", 0.0, "key", "the key's gradient"),
        StateSpec(
            "grad_value", "key", "value_dim", 0.0, "value", "the value's gradient"
        ),
    ),
    combined=3,
    products=5,
)
