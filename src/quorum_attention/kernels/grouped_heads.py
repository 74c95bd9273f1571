"""Grouped heads for an operator that takes as many key heads as query heads, without expanded keys.

In a forward without a causal mask, the query heads that share a key/value head become further rows
of one head. Otherwise each key/value head becomes a batch entry: the query heads of its group are
the entry's heads, and all of them read its keys through a stride of 0. Where (batch, key heads)
cannot become one dimension without a copy, batch entries run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import itemgetter

import torch

from quorum_attention.kernels.operator_call import Call, OutLse, Saved, Three
from quorum_attention.kernels.tensors import Pick


def grouped_forward(run: Callable[[Call], OutLse], call: Call) -> OutLse:
    """Return (out, lse) of a call with fewer key heads than query heads.

    Args:
        run: computes (out, lse) of a call with as many key heads as query heads.
    """
    query = call.query  # (b, hq, n, d)
    out, lse = _forward_of_equal_heads(run, call)
    return out.reshape(*query.shape[:-1], -1), lse.reshape(query.shape[:-1])


def _forward_of_equal_heads(run: Callable[[Call], OutLse], call: Call) -> OutLse:
    """Return (out, lse) in the shape of the calls that were run."""
    if _same_for_all_rows(call):
        batch, key_heads = call.key.shape[:2]
        # (b, hk, g * n, d)
        rows = call.query.reshape(batch, key_heads, -1, call.query.shape[-1])
        return run(replace(call, query=rows))
    grouped = _groups_as_entries(call)
    if grouped is not None:
        return run(grouped)
    outs = []
    lses = []
    for _, entry_call in _entry_calls(call):
        out, lse = grouped_forward(run, entry_call)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _same_for_all_rows(call: Call) -> bool:
    """Whether all rows of all heads of a batch entry see the same keys with the same bias."""
    return not call.causal and (call.bias is None or call.bias.shape[1:3] == (1, 1))


def grouped_backward(run: Callable[[Call, Saved], Three], call: Call, saved: Saved) -> Three:
    """Return the gradients of query, key and value of a call with fewer key heads than query heads.

    The gradients of key and value are summed over the query heads that share a key head.

    Args:
        run: computes the gradients of a call with as many key heads as query heads.
    """
    grouped = _groups_as_entries(call)
    if grouped is None:
        entries = [
            grouped_backward(run, entry_call, saved.mapped(pick))
            for pick, entry_call in _entry_calls(call)
        ]
        grad_queries, grad_keys, grad_values = zip(*entries, strict=True)
        return torch.cat(grad_queries), torch.cat(grad_keys), torch.cat(grad_values)
    lanes = grouped.query.shape[:2]
    grouped_saved = saved.mapped(lambda rows: rows.reshape(*lanes, *rows.shape[2:]))
    grad_query, grad_key, grad_value = run(grouped, grouped_saved)
    return (
        grad_query.reshape(call.query.shape),
        grad_key.sum(1).view(call.key.shape),
        grad_value.sum(1).view(call.value.shape),
    )


def _entry_calls(call: Call) -> Iterator[tuple[Pick, Call]]:
    """Yield what selects each batch entry, and the call of that entry."""
    bias = call.bias
    for entry in range(call.key.shape[0]):
        pick = itemgetter(slice(entry, entry + 1))
        entry_bias = bias
        if bias is not None and bias.shape[0] > 1:
            entry_bias = pick(bias)
        yield pick, call.mapped(pick, pick, bias=entry_bias)


def _groups_as_entries(call: Call) -> Call | None:
    """Return the call with each key head as a batch entry, whose heads are the query heads of its
    group; None where that takes a copy."""
    batch, key_heads = call.key.shape[:2]
    heads = call.query.shape[1]
    entries = batch * key_heads
    group = heads // key_heads
    try:
        bias = call.bias
        if bias is not None and bias.shape[:2] != (1, 1):
            bias = bias.expand(batch, heads, -1, -1).view(entries, group, *bias.shape[2:])
        return call.mapped(
            lambda query: query.view(entries, group, *query.shape[2:]),
            lambda rows: rows.view(entries, 1, *rows.shape[2:]).expand(entries, group, -1, -1),
            bias=bias,
        )
    except RuntimeError:  # there is no such view
        return None
