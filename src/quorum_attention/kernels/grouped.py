"""Grouped heads for operators that need as many key heads as query heads, without expanding keys.

There are three ways. Without a causal mask, the query heads that share a key/value head become
further rows of one head. Otherwise each key/value head becomes a batch entry: the query heads of
its group are the entry's heads, and all of them read its keys through a stride of 0. If batch and
key heads cannot be flattened without a copy, the operator is called once for every j, with the
j-th query head of every group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from quorum_attention.kernels.protocol import Call, Saved, Three
from quorum_attention.kernels.tensors import Pick, jth_of_group

_FEW_ROWS = 64

Forward = Callable[[Call], tuple[torch.Tensor, torch.Tensor]]
Backward = Callable[[Call, Saved], Three]


def grouped_forward(run: Forward, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """``run`` of a call with fewer key heads than query heads, by calls with as many."""
    query, key = call.query, call.key
    if _folds(call):
        out, lse = run(replace(call, query=_as_rows(query, key)))
    elif _flattens(call):
        out, lse = run(_by_group_of(call))
    else:
        parts = [run(part) for part, _ in _parts(call)]
        out, lse = (torch.stack(some, 2).flatten(1, 2) for some in zip(*parts, strict=True))
    return out.reshape(*query.shape[:-1], -1), lse.reshape(query.shape[:-1])


def grouped_backward(run: Backward, call: Call, saved: Saved) -> Three:
    """The gradients of query, key and value, summed over the query heads that share a key head."""
    query, key, value = call.inputs
    if _folds(call) and _few_rows(query, key):
        rows = saved.mapped(lambda tensor: _as_rows(tensor, key))
        found = run(replace(call, query=_as_rows(query, key)), rows)
        return found[0].reshape(query.shape), found[1], found[2]
    if _flattens(call):
        found = run(_by_group_of(call), saved.mapped(lambda tensor: _by_group(tensor, key)))
        return (
            found[0].reshape(query.shape),
            found[1].sum(1).view(key.shape),
            found[2].sum(1).view(value.shape),
        )
    queries: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    # Summed in fp32, as torch does: 16-bit partial sums would be rounded for every head.
    wide = torch.promote_types(key.dtype, torch.float32)
    for part, pick in _parts(call):
        mine, *others = run(part, saved.mapped(pick))
        queries.append(mine)
        if sums:
            for total, grad in zip(sums, others, strict=True):
                total.add_(grad)
        else:
            sums = [grad.to(wide) for grad in others]
    grad_key, grad_value = (total.to(key.dtype) for total in sums)
    return torch.stack(queries, 2).flatten(1, 2), grad_key, grad_value


def _by_group_of(call: Call) -> Call:
    """Each key head as a batch entry, whose heads are the query heads of its group."""
    key, shared = call.key, call.query.shape[1] // call.key.shape[1]
    return call.mapped(
        lambda tensor: _by_group(tensor, key),
        lambda tensor: _under(tensor, shared),
        bias=_bias_by_group(call.bias, key),
    )


def _parts(call: Call) -> Iterator[tuple[Call, Pick]]:
    """The call of the j-th query head of every group, for each j, and what selects these heads."""
    key_heads, bias = call.key.shape[1], call.bias
    for j in range(call.query.shape[1] // key_heads):
        pick = partial(jth_of_group, key_heads, j)
        mask = bias if bias is None or bias.shape[1] == 1 else pick(bias)
        yield replace(call, query=pick(call.query), bias=mask), pick


def _folds(call: Call) -> bool:
    """Whether all rows and all heads have the same mask, so that heads can become rows."""
    bias = call.bias
    return not call.causal and (bias is None or bias.shape[1:3] == (1, 1))


def _few_rows(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether folding keeps all threads busy: in a backward each head is the work of one thread."""
    rows = query.shape[1] // key.shape[1] * query.shape[2]
    return rows <= _FEW_ROWS or key.shape[0] * key.shape[1] >= torch.get_num_threads()


def _as_rows(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """(b, h, n, ...) as (b, hk, h / hk * n, ...); copied where its strides allow no view."""
    batch, heads = key.shape[:2]
    return tensor.reshape(batch, heads, -1, *tensor.shape[3:])


def _flattens(call: Call) -> bool:
    """Whether (batch, key heads) can become one dimension without a copy."""
    query, key, value, bias = *call.inputs, call.bias
    batch, heads = key.shape[:2]
    if batch == 1:
        return True
    if heads > 1 and any(t.stride(0) != heads * t.stride(1) for t in (key, value)):
        return False
    flat_queries = query.stride(0) == query.shape[1] * query.stride(1)
    return flat_queries and (bias is None or bias.shape[:2] == (1, 1))


def _by_group(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """(b, h, ...) as (b * hk, h / hk, ...); copied where its strides allow no view."""
    batch, heads = key.shape[:2]
    return tensor.reshape(batch * heads, tensor.shape[1] // heads, *tensor.shape[2:])


def _under(tensor: torch.Tensor, shared: int) -> torch.Tensor:
    """(b, hk, m, d) as (b * hk, shared, m, d), a view."""
    return tensor.flatten(0, 1).unsqueeze(1).expand(-1, shared, -1, -1)


def _bias_by_group(bias: torch.Tensor | None, key: torch.Tensor) -> torch.Tensor | None:
    return bias if bias is None or bias.shape[1] == 1 else _by_group(bias, key)
