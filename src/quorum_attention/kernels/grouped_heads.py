"""Grouped heads for an operator that takes as many key heads as query heads, without
expanded keys.

In a forward without a causal mask, the query heads that share a key/value head become
further rows of one head. So they do in a backward with few rows of 16 bits: the
operator then sums the gradients of a key in one product, and rounds the sum once.
Otherwise each key/value head becomes a batch entry: the query heads of its group are
the entry's heads, and all of them read its keys through a stride of 0. Where (batch,
key heads) cannot become one dimension without a copy (a mask of each entry for all
heads), batch entries run one after the other, or key heads if these are fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from quorum_attention.kernels.limits import CallLimits
from quorum_attention.kernels.operator_call import Call, OutLse, Saved, Three
from quorum_attention.kernels.operator_parts import backward_by_parts, forward_by_parts


def grouped_forward(run: Callable[[Call], OutLse], call: Call) -> OutLse:
    """Return (out, lse) of a call with fewer key heads than query heads.

    Args:
        run: computes (out, lse) of a call with as many key heads as query heads.
    """
    equal_heads = _groups_as_rows(call) or _groups_as_entries(call)
    if equal_heads is None:
        run_part = partial(grouped_forward, run)
        return forward_by_parts(run_part, call, _limits_of_views(call))
    out, lse = run(equal_heads)
    rows_shape = call.query.shape[:-1]
    return out.reshape(*rows_shape, -1), lse.reshape(rows_shape)


def grouped_backward(
    run: Callable[[Call, Saved], Three],
    call: Call,
    saved: Saved,
    most_rows: int = 0,
) -> Three:
    """Return the gradients of query, key and value of a call with fewer key heads than
    query heads.

    The gradients of key and value are summed over the query heads that share a key
    head.

    Args:
        run: computes the gradients of a call with as many key heads as query heads.
        most_rows: up to so many query rows of a group, of 16 bits, become rows of one
            head. In fp32 and float64 the products of several rows at a time are less
            exact than those of single rows.
    """
    equal_heads = None
    if call.query.dtype.itemsize == 2 and group_rows(call) <= most_rows:
        equal_heads = _groups_as_rows(call)
    if equal_heads is None:
        equal_heads = _groups_as_entries(call)
    if equal_heads is None:
        run_part = partial(grouped_backward, run, most_rows=most_rows)
        return backward_by_parts(run_part, call, saved, _limits_of_views(call))
    rows_shape = equal_heads.query.shape[:3]

    def by_group(rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(*rows_shape, *rows.shape[3:])

    grad_query, grad_key, grad_value = run(equal_heads, saved.mapped(by_group))
    grad_query = grad_query.reshape(call.query.shape)
    if grad_key.shape == call.key.shape:
        return grad_query, grad_key, grad_value
    return (
        grad_query,
        grad_key.sum(1, keepdim=True).view(call.key.shape),
        grad_value.sum(1, keepdim=True).view(call.value.shape),
    )


def group_rows(call: Call) -> int:
    """Return the query rows of all heads that share a key/value head."""
    return call.query.shape[1] // call.key.shape[1] * call.query.shape[2]


def _groups_as_rows(call: Call) -> Call | None:
    """Return the call with the query heads of a group as rows of one head; None unless
    all rows of all heads of a batch entry see the same keys with the same bias."""
    if call.causal or (call.bias is not None and call.bias.shape[1:3] != (1, 1)):
        return None
    batch, key_heads = call.key.shape[:2]
    head_dim = call.query.shape[-1]
    rows = call.query.reshape(batch, key_heads, -1, head_dim)  # (b, hk, g * n, d)
    return replace(call, query=rows)


def _limits_of_views(call: Call) -> CallLimits:
    """Return the limits of calls in which each key head can be a batch entry without a
    copy: single entries, or single key heads if these are fewer."""
    batch, key_heads = call.key.shape[:2]
    if key_heads < batch:
        return CallLimits(heads=call.query.shape[1] // key_heads)
    return CallLimits(entries=1)


def _groups_as_entries(call: Call) -> Call | None:
    """Return the call with each key head as a batch entry, whose heads are the query
    heads of its group; None where that takes a copy."""
    batch, key_heads = call.key.shape[:2]
    heads = call.query.shape[1]
    entries = batch * key_heads
    group = heads // key_heads
    try:
        bias = call.bias
        if bias is not None and bias.shape[:2] != (1, 1):
            bias = bias.expand(batch, heads, -1, -1).view(
                entries, group, *bias.shape[2:]
            )
        return call.mapped(
            lambda query: query.view(entries, group, *query.shape[2:]),
            lambda rows: rows.view(entries, 1, *rows.shape[2:]).expand(
                entries, group, -1, -1
            ),
            bias=bias,
        )
    except RuntimeError:  # there is no such view
        return None
