"""One call of an attention operator, and what its backward is given beside."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch

from quorum_attention.decomposition import Decomposition, Rectangle, Task
from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.task_tensors import TaskTensors
from quorum_attention.kernels.tensors import Pick

OutLse = tuple[torch.Tensor, torch.Tensor]
"""Output (b, h, n, dv), and log-sum-exp (b, h, n)."""

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value, or their gradients."""

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The gradients of query, key, value and bias."""


@dataclass(frozen=True, slots=True)
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

    def mapped(self, on_rows: Pick, on_keys: Pick, **changes: Any) -> Call:
        """Return the call with other queries, and other keys and values."""
        return replace(
            self,
            query=on_rows(self.query),
            key=on_keys(self.key),
            value=on_keys(self.value),
            **changes,
        )


@dataclass(frozen=True, slots=True)
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
        entries=tuple(range(call.first_entry, call.first_entry + batch)),
        dropout=call.dropout,
    )


@lru_cache(maxsize=64)
def uncut(n_tokens: int) -> Task:
    """Return a sequence as one task."""
    return Decomposition(n_tokens).task(())


def part_of(bias: torch.Tensor | None, r: Rectangle) -> torch.Tensor | None:
    """Return the bias of a rectangle, from that of a whole call."""
    if bias is None:
        return None
    missing_dims = 4 - bias.dim()
    bias = bias[(None,) * missing_dims]
    if bias.shape[2] > 1:
        bias = bias[:, :, r.query_start : r.query_stop]
    if bias.shape[3] > 1:
        bias = bias[..., r.key_start : r.key_stop]
    return bias
