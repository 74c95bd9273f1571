"""Grouped heads for an operator that takes as many key heads as query heads, without
expanded keys.

In a forward without a causal mask, the query heads that share a key/value head become
further rows of one head. Otherwise each key/value head becomes a batch entry: the query
heads of its group are the entry's heads, and all of them read its keys through a stride
of 0. Where (batch, key heads) cannot become one dimension without a copy (a mask of
each entry for all heads), batch entries run one after the other, or key heads if these
are fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter

import torch

from quorum_attention.kernels.operator_call import Call, OutLse, Saved, Three
from quorum_attention.kernels.tensors import Pick
from quorum_attention.kernels.torch_private import as_it_is


def grouped_forward(run: Callable[[Call], OutLse], call: Call) -> OutLse:
    """Return (out, lse) of a call with fewer key heads than query heads.

    Args:
        run: computes (out, lse) of a call with as many key heads as query heads.
    """
    query = call.query  # (b, hq, n, d)
    if _same_for_all_rows(call):
        batch, key_heads = call.key.shape[:2]
        head_dim = query.shape[-1]
        rows = query.reshape(batch, key_heads, -1, head_dim)  # (b, hk, g * n, d)
        out, lse = run(replace(call, query=rows))
    else:
        dim, calls = _calls_of_equal_heads(call)
        parts = [run(part) for _, part in calls]
        outs, lses = zip(*parts, strict=True)
        out = _joined(outs, dim)
        lse = _joined(lses, dim)
    rows_shape = query.shape[:-1]
    return out.reshape(*rows_shape, -1), lse.reshape(rows_shape)


def _same_for_all_rows(call: Call) -> bool:
    """Whether all rows of all heads of a batch entry see the same keys with the same
    bias."""
    if call.causal:
        return False
    return call.bias is None or call.bias.shape[1:3] == (1, 1)


def grouped_backward(
    run: Callable[[Call, Saved], Three], call: Call, saved: Saved
) -> Three:
    """Return the gradients of query, key and value of a call with fewer key heads than
    query heads.

    The gradients of key and value are summed over the query heads that share a key
    head.

    Args:
        run: computes the gradients of a call with as many key heads as query heads.
    """
    dim, calls = _calls_of_equal_heads(call)
    parts: list[Three] = []
    for pick, part in calls:
        grad_query, grad_key, grad_value = run(
            part, saved.mapped(partial(_rows_of, part, pick))
        )
        grad_key = grad_key.sum(1, keepdim=True)
        grad_value = grad_value.sum(1, keepdim=True)
        parts.append((grad_query, grad_key, grad_value))
    grads = (
        _joined(grads_of_parts, dim) for grads_of_parts in zip(*parts, strict=True)
    )
    grad_query, grad_key, grad_value = grads
    return (
        grad_query.reshape(call.query.shape),
        grad_key.view(call.key.shape),
        grad_value.view(call.value.shape),
    )


def _rows_of(part: Call, pick: Pick, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows (b, hq, n, ...) of a part, in the shape of its query."""
    lanes = part.query.shape[:2]
    return pick(rows).reshape(*lanes, *rows.shape[2:])


def _joined(parts: tuple[torch.Tensor, ...], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _calls_of_equal_heads(call: Call) -> tuple[int, Iterator[tuple[Pick, Call]]]:
    """Return calls in which each key head is there for every query head of its group.

    It is one call of all entries where that takes no copy; else a call of each entry,
    or of each key head if these are fewer.

    Returns:
        The dimension along which results of the calls are joined; and the calls, each
        with what selects its rows of a tensor (b, hq, n, ...).
    """
    grouped = _groups_as_entries(call)
    if grouped is not None:
        return 0, iter([(as_it_is, grouped)])
    batch, key_heads = call.key.shape[:2]
    if key_heads < batch:
        return 1, _calls_of_key_heads(call)
    return 0, _calls_of_entries(call)


def _calls_of_key_heads(call: Call) -> Iterator[tuple[Pick, Call]]:
    """Yield the call of each key head, for all entries."""
    heads = call.query.shape[1]
    key_heads = call.key.shape[1]
    group = heads // key_heads
    for key_head in range(key_heads):
        first = key_head * group
        pick = itemgetter((slice(None), slice(first, first + group)))
        pick_key = itemgetter((slice(None), slice(key_head, key_head + 1)))
        bias = call.bias
        if bias is not None and bias.shape[1] > 1:
            bias = pick(bias)
        part = call.mapped(pick, pick_key, bias=bias)
        key = part.key.expand(-1, group, -1, -1)
        value = part.value.expand(-1, group, -1, -1)
        yield pick, replace(part, key=key, value=value)


def _calls_of_entries(call: Call) -> Iterator[tuple[Pick, Call]]:
    """Yield the call of each entry, with each key head as an entry."""
    for entry in range(call.key.shape[0]):
        pick = itemgetter(slice(entry, entry + 1))
        bias = call.bias
        if bias is not None and bias.shape[0] > 1:
            bias = pick(bias)
        grouped = _groups_as_entries(call.mapped(pick, pick, bias=bias))
        assert grouped is not None, "a single entry has such a view"
        yield pick, grouped


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
