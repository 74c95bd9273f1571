"""Grouped heads for operators that need as many key heads as query heads, without expanding keys.

There are three ways. Without a causal mask, the query heads that share a key/value head become
further rows of one head. Otherwise each key/value head becomes a batch entry: the query heads of
its group are the entry's heads, and all of them read its keys through a stride of 0. If batch and
key heads cannot be flattened without a copy, the operator is called once for every j, with the
j-th query head of every group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quorum_attention.kernels.tensors import jth_of_group

_FEW_ROWS = 64

Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def grouped_forward(
    run: Forward,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out (b, h, n, dv) and lse (b, h, n) of query (b, h, n, d) and key (b, hk, m, d), h > hk.

    ``run(query, key, value, bias)`` returns (out, lse) for as many query heads as key heads.
    """
    if _folds(bias, causal):
        out, lse = run(_as_rows(query, key), key, value, bias)
        return out.reshape(*query.shape[:-1], -1), lse.reshape(query.shape[:-1])
    if _flattens(query, key, value, bias):
        shared = query.shape[1] // key.shape[1]
        out, lse = run(
            _by_group(query, key),
            _under(key, shared),
            _under(value, shared),
            _bias_by_group(bias, key),
        )
        return out.reshape(*query.shape[:-1], -1), lse.reshape(query.shape[:-1])
    outs, lses = [], []
    for j in range(query.shape[1] // key.shape[1]):
        out, lse = run(_jth(query, key, j), key, value, _jth_bias(bias, key, j))
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs, 2).flatten(1, 2), torch.stack(lses, 2).flatten(1, 2)


def grouped_backward(
    run: Backward,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value, summed over the query heads that share a key head.

    ``run(grad_out, query, key, value, out, lse, bias)`` returns the three gradients for as many
    query heads as key heads.
    """
    if _folds(bias, causal) and _few_rows(query, key):
        rows = (_as_rows(t, key) for t in (grad_out, query))
        found = run(*rows, key, value, _as_rows(out, key), _as_rows(lse, key), bias)
        return found[0].reshape(query.shape), found[1], found[2]
    if _flattens(query, key, value, bias):
        shared = query.shape[1] // key.shape[1]
        found = run(
            _by_group(grad_out, key),
            _by_group(query, key),
            _under(key, shared),
            _under(value, shared),
            _by_group(out, key),
            _by_group(lse, key),
            _bias_by_group(bias, key),
        )
        grad_query, grad_key, grad_value = found
        return (
            grad_query.reshape(query.shape),
            grad_key.sum(1).view(key.shape),
            grad_value.sum(1).view(value.shape),
        )
    queries: list[torch.Tensor] = []
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    for j in range(query.shape[1] // key.shape[1]):
        mine, grad_key, grad_value = run(
            _jth(grad_out, key, j), _jth(query, key, j), key, value, _jth(out, key, j),
            _jth(lse, key, j), _jth_bias(bias, key, j),
        )  # fmt: skip
        queries.append(mine)
        # Summed in fp32, as torch does: 16-bit partial sums would be rounded for every head.
        wide = torch.promote_types(key.dtype, torch.float32)
        keys = grad_key.to(wide) if keys is None else keys.add_(grad_key)
        values = grad_value.to(wide) if values is None else values.add_(grad_value)
    assert keys is not None
    assert values is not None
    grad_query = torch.stack(queries, 2).flatten(1, 2)
    return grad_query, keys.to(key.dtype), values.to(value.dtype)


def _folds(bias: torch.Tensor | None, causal: bool) -> bool:
    """Whether all rows and all heads have the same mask, so that heads can become rows."""
    return not causal and (bias is None or bias.shape[1:3] == (1, 1))


def _few_rows(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether folding keeps all threads busy: in a backward each head is the work of one thread."""
    rows = query.shape[1] // key.shape[1] * query.shape[2]
    return rows <= _FEW_ROWS or key.shape[0] * key.shape[1] >= torch.get_num_threads()


def _as_rows(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """(b, h, n, ...) as (b, hk, h / hk * n, ...); copied where its strides allow no view."""
    batch, heads = key.shape[:2]
    return tensor.reshape(batch, heads, -1, *tensor.shape[3:])


def _flattens(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
) -> bool:
    """Whether (batch, key heads) can become one dimension without a copy."""
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


def _jth(tensor: torch.Tensor, key: torch.Tensor, j: int) -> torch.Tensor:
    return jth_of_group(key.shape[1], j, tensor)


def _jth_bias(bias: torch.Tensor | None, key: torch.Tensor, j: int) -> torch.Tensor | None:
    return bias if bias is None or bias.shape[1] == 1 else _jth(bias, key, j)
