"""Grouped heads for an operator that takes as many key heads as query heads, without
expanded keys.

In a forward without a causal mask, the query heads that share a key/value head become
further rows of one head. Otherwise each key/value head becomes a batch entry: the query
heads of its group are the entry's heads, and all of them read its keys through a stride
of 0. Where (batch, key heads) cannot become one dimension without a copy, batch entries
run one after the other.
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
        parts = [run(part) for _, part in _calls_of_equal_heads(call)]
        outs, lses = zip(*parts, strict=True)
        out = _joined(outs)
        lse = _joined(lses)
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
    parts: list[Three] = []
    for pick, part in _calls_of_equal_heads(call):
        grad_query, grad_key, grad_value = run(
            part, saved.mapped(partial(_rows_of, part, pick))
        )
        parts.append((grad_query, grad_key.sum(1), grad_value.sum(1)))
    grad_query, grad_key, grad_value = map(_joined, zip(*parts, strict=True))
    return (
        grad_query.reshape(call.query.shape),
        grad_key.view(call.key.shape),
        grad_value.view(call.value.shape),
    )


def _rows_of(part: Call, pick: Pick, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows (b, hq, n, ...) of a part, in the shape of its query."""
    lanes = part.query.shape[:2]
    return pick(rows).reshape(*lanes, *rows.shape[2:])


def _joined(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _calls_of_equal_heads(call: Call) -> Iterator[tuple[Pick, Call]]:
    """Yield calls with each key head as a batch entry, and what selects their batch
    entries.

    It is one call of all entries where that takes no copy; else each entry is a call.
    """
    grouped = _groups_as_entries(call)
    if grouped is not None:
        yield as_it_is, grouped
        return
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
