"""One call of an attention operator, and what its backward is given beside."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

import torch

from quorum_attention.decomposition import Decomposition, Rectangle, Task
from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.call_shape import state_dtype
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.limits import CallPart
from quorum_attention.kernels.result_layout import empty_like_input
from quorum_attention.kernels.task_tensors import TaskTensors
from quorum_attention.kernels.tensors import Pick

OutLse = tuple[torch.Tensor, torch.Tensor]
"""Output (b, h, n, dv), and log-sum-exp (b, h, n)."""

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value, or their gradients."""

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The gradients of query, key, value and bias."""


@dataclass(slots=True)
class Call:
    """One call of an attention operator.

    Attributes:
        query, key, value: (b, h, n, d), (b, hk, m, d), (b, hk, m, dv).
        causal: whether keys after the query are masked. A kernel with ``bands`` also
            takes a ``Band`` here.
        scale: factor of the scores.
        bias: additive mask broadcastable to (b, h, n, m), of ``CallShape.bias_dtype``;
            or None.
        stored: the dtype that results will be stored in, if it is another than the
            inputs'; a kernel may return them in it.
        dropout: which probabilities are dropped, or None; only for kernels with
            ``dropout``.
        first_entry: the number of the first batch entry in the whole call.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    causal: bool | Band = False
    scale: float = 1.0
    bias: torch.Tensor | None = None
    stored: torch.dtype | None = None
    dropout: Dropout | None = None
    first_entry: int = 0

    @property
    def inputs(self) -> Three:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def is_causal(self) -> bool:
        """Whether ``causal`` is the plain rule, of a kernel without bands."""
        return self.causal is True

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of results."""
        return self.stored or self.query.dtype

    def mapped(self, on_rows: Pick, on_keys: Pick, **changes: Any) -> Call:
        """Return the call with other queries, and other keys and values."""
        return replace(
            self,
            query=on_rows(self.query),
            key=on_keys(self.key),
            value=on_keys(self.value),
            **changes,
        )

    def part(self, part: CallPart) -> Call:
        """Return the call of some batch entries and heads."""
        return self.mapped(
            itemgetter(part.query_rows),
            itemgetter(part.key_rows),
            bias=bias_of_heads(self.bias, *part.query_rows),
        )


@dataclass(slots=True)
class Saved:
    """The inputs of a backward besides query, key and value, of whole rows.

    Attributes:
        grad_out: (b, h, n, dv), upstream.
        out: (b, h, n, dv).
        lse: (b, h, n).
    """

    grad_out: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def mapped(self, on_rows: Pick) -> Saved:
        """Return other rows of all three."""
        return Saved(
            on_rows(self.grad_out),
            on_rows(self.out),
            on_rows(self.lse),
        )


def whole_task(call: Call) -> TaskTensors:
    """Return a whole call as one task."""
    batch, heads, n_queries, _ = call.query.shape
    n_keys = call.key.shape[2]
    is_empty = 0 in (batch, heads, n_queries, n_keys)
    all_pairs = Rectangle(0, n_queries, 0, n_keys, call.is_causal)
    return TaskTensors(
        uncut(max(n_queries, n_keys)),
        () if is_empty else (all_pairs,),
        *call.inputs,
        scale=call.scale,
        is_causal=call.is_causal,
        bias=partial(part_of, call.bias),
        max_queries=n_queries,
        max_keys=n_keys,
        entries=range(call.first_entry, call.first_entry + batch),
        dropout=call.dropout,
    )


@lru_cache(maxsize=64)
def uncut(n_tokens: int) -> Task:
    """Return a sequence as one task."""
    return Decomposition(n_tokens).task(())


def empty_results(call: Call, dtype: torch.dtype) -> OutLse:
    """Return uninitialised (out, lse) of a call; ``dtype`` is that of the output."""
    query = call.query
    rows = query.shape[:3]
    out = empty_like_input(
        query,
        (*rows, call.value.shape[-1]),
        dtype,
    )
    lse = torch.empty(
        rows,
        dtype=state_dtype(query.dtype),
        device=query.device,
    )
    return out, lse


def empty_gradients(call: Call, dtype: torch.dtype) -> Three:
    """Return uninitialised gradients of query, key and value of a call."""
    return map_three(
        lambda tensor: empty_like_input(tensor, tensor.shape, dtype), call.inputs
    )


def map_three(change: Pick, tensors: Three) -> Three:
    """Return all three tensors changed."""
    first, second, third = map(change, tensors)
    return first, second, third


def four_dims(bias: torch.Tensor) -> torch.Tensor:
    """Return a view of ``bias`` with four dimensions (b, h, lq, lk); missing ones have
    size 1."""
    missing = 4 - bias.dim()
    return bias[(None,) * missing]


def bias_of_heads(
    bias: torch.Tensor | None, entries: slice, heads: slice
) -> torch.Tensor | None:
    """Return the bias of some batch entries and query heads, with four dimensions."""
    if bias is None:
        return None
    bias = four_dims(bias)
    if bias.shape[0] > 1:
        bias = bias[entries]
    return bias[:, heads] if bias.shape[1] > 1 else bias


def part_of(bias: torch.Tensor | None, r: Rectangle) -> torch.Tensor | None:
    """Return the bias of a rectangle, from that of a whole call."""
    if bias is None:
        return None
    bias = four_dims(bias)
    if bias.shape[2] > 1:
        bias = bias[:, :, r.query_start : r.query_stop]
    if bias.shape[3] > 1:
        bias = bias[..., r.key_start : r.key_stop]
    return bias
