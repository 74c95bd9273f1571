"""Whole calls in parts that an operator can take; their results are joined."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter

import torch

from quorum_attention.kernels.limits import (
    CallLimits,
    CallPart,
    CallSizes,
    call_parts,
)
from quorum_attention.kernels.operator_call import (
    Call,
    OutLse,
    Saved,
    Three,
    empty_gradients,
    empty_results,
)


def forward_by_parts(
    run: Callable[[Call], OutLse], call: Call, limits: CallLimits
) -> OutLse:
    """Return (out, lse) of a call, by parts if it is beyond the limits.

    Args:
        run: computes (out, lse) of a call within the limits.
    """
    parts = _parts_within(limits, call)
    if len(parts) < 2:
        return run(call)
    out, lse = empty_results(call, call.result_dtype)
    for part in parts:
        part_out, part_lse = run(call.part(part))
        out[part.query_rows].copy_(part_out)
        lse[part.query_rows].copy_(part_lse)
        del part_out, part_lse  # before the next part's are made
    return out, lse


def backward_by_parts(
    run: Callable[[Call, Saved], Three], call: Call, saved: Saved, limits: CallLimits
) -> Three:
    """Return the gradients of a call, by parts if it is beyond the limits.

    Args:
        run: computes the gradients of a call within the limits.
    """
    parts = _parts_within(limits, call)
    if len(parts) < 2:
        return run(call, saved)
    grads = empty_gradients(call, call.result_dtype)
    for part in parts:
        part_grads = run(call.part(part), saved.mapped(itemgetter(part.query_rows)))
        rows_of_part = (part.query_rows, part.key_rows, part.key_rows)
        for grad, rows, part_grad in zip(grads, rows_of_part, part_grads, strict=True):
            grad[rows].copy_(part_grad)
        del part_grads, part_grad  # before the next part's are made
    return grads


def _parts_within(limits: CallLimits, call: Call) -> tuple[CallPart, ...]:
    """Return the parts of a call that an operator can take."""
    return call_parts(limits, call_sizes(call.query, call.value))


def call_sizes(query: torch.Tensor, value: torch.Tensor) -> CallSizes:
    """Return the sizes of a call with these inputs."""
    entries, heads, n_queries, head_dim = query.shape
    _, key_heads, n_keys, value_dim = value.shape
    return CallSizes(
        entries,
        key_heads,
        group=heads // key_heads,
        queries=n_queries,
        keys=n_keys,
        width=max(head_dim, value_dim),
    )
