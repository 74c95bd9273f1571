"""The reference: materialised scores under the CQS mask, as the paper writes it (section 3).

With S = scale Q K^T + bias, -inf where the task does not keep a pair,

    lse = logsumexp(S),   P = exp(S - lse),   O = P V

(the forward computes P = exp(S - m) / rowsum(exp(S - m)) with the largest score m of each row,
which is more exact), and with the global lse and D = rowsum(dO * O),

    dV = P^T dO,   dS = P * (dO V^T - D),   dQ = scale dS K,   dK = scale dS^T Q.

With dropout P is multiplied by Z wherever it meets V or dO (kernels/dropout.py).

Memory is quadratic in tokens. Every other kernel is tested against this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quorum_attention.decomposition import Rectangle
from quorum_attention.kernels.dropout import dropped, dropped_bytes
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES, merge_
from quorum_attention.kernels.positions import positions
from quorum_attention.kernels.protocol import (
    CallShape,
    Extent,
    Gradients,
    Statistics,
    TaskTensors,
)
from quorum_attention.kernels.traits import Traits

# On a GPU each tensor takes whole units of 512 bytes: what that may add to those of a backward.
_UNITS = 16 * 512


class DenseKernel:
    """Materialised attention of a whole task, on any device, for any floating dtype.

    It computes in fp32 (fp64 for fp64 inputs), so its results are exact up to fp32 rounding.
    """

    name = "dense"
    traits = Traits(plain_softmax=True, dropout=True, wide_products=True)

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        if not call.dtype.is_floating_point:
            return f"it takes floating-point tensors, not {call.dtype}"
        return None

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        kept = _kept(task)
        for group in _groups(task):
            _forward_group(group, kept, state)

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place.

        ``grads.scaling`` is for 16-bit probabilities; here they are not 16-bit, nor scaled.
        """
        kept = _kept(task)
        for group in _groups(task):
            _backward_group(group, kept, grads)

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``forward`` allocates at any one time; quadratic in tokens."""
        return _pair_bytes(call, extent, 1) + _row_bytes(call, extent) + MERGE_WORKSPACE_BYTES

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``backward`` allocates at any one time; quadratic in tokens."""
        found = _pair_bytes(call, extent, 2) + 2 * _row_bytes(call, extent)
        return found + (_UNITS if call.device_type == "cuda" else 0)


@dataclass(frozen=True, slots=True)
class _Group:
    """The query heads of one batch entry that share a key head: (g, nq, d), (nk, d), (nk, dv).

    ``dropped``: (g, nq, nk), which probabilities are dropped, or None; the others are multiplied by
    ``rescale``.
    """

    batch: int
    heads: slice
    key_head: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    bias: torch.Tensor | None
    dropped: torch.Tensor | None
    rescale: float


def _forward_group(group: _Group, kept: torch.Tensor, state: Statistics) -> None:
    at = (slice(group.batch, group.batch + 1), group.heads)
    dtype = state.out.dtype
    empty = _empty(group, kept)
    scores = _scores(group, kept, dtype)
    scores.masked_fill_(empty, -torch.inf)
    # Divided by the sum instead of taking exp(S - lse): a large lse has too few digits left.
    largest = scores.amax(dim=-1)
    p = _probabilities(scores, largest)
    total = p.sum(dim=-1)
    lse = largest + total.log()
    p = _drop_(p, group)
    out = (p @ group.value.to(dtype)).div_(total.masked_fill(total == 0.0, 1.0).unsqueeze(-1))
    out.masked_fill_(empty, 0.0)
    merge_(state.out[at], state.lse[at], out.unsqueeze(0), lse.unsqueeze(0))


def _backward_group(group: _Group, kept: torch.Tensor, grads: Gradients) -> None:
    at, at_key = (group.batch, group.heads), (group.batch, group.key_head)
    dtype = grads.grad_query.dtype
    query, key, value = (t.to(dtype) for t in (group.query, group.key, group.value))
    # Rows without keys take no part, whatever is in them: 0 times NaN is NaN.
    empty = _empty(group, kept)
    query = query.masked_fill(empty, 0.0)
    grad_out = grads.grad_out[at].to(dtype).masked_fill(empty, 0.0)
    delta = (grad_out * grads.out[at].to(dtype)).sum(dim=-1, keepdim=True)

    scores = _scores(group, kept, dtype).masked_fill_(empty, -torch.inf)
    p = _probabilities(scores, grads.lse[at])
    _normalise_(p, grads.lse[at].unsqueeze(-1))
    weights = p if group.dropped is None else _drop_(p.clone(), group)
    grads.grad_value[at_key].add_(_over_rows(weights, grad_out))
    del weights
    ds = p.mul_(_drop_(grad_out @ value.mT, group).sub_(delta)).masked_fill_(empty, 0.0)
    grads.grad_query[at].add_((ds @ key).masked_fill_(empty, 0.0), alpha=group.scale)
    grads.grad_key[at_key].add_(_over_rows(ds, query), alpha=group.scale)


def _normalise_(p: torch.Tensor, lse: torch.Tensor) -> None:
    """Divide rows of probabilities (g, nq, nk) by their sums, in place, where nothing but rounding
    keeps those from 1: an ``lse`` (g, nq, 1) of 1,000 has lost three digits of exp(S - lse).

    Rows of which other tasks have a part are left alone.
    """
    total = p.sum(dim=-1, keepdim=True)
    rounding = torch.finfo(p.dtype).eps * (2.0 * lse.abs() + 8.0)
    # An lse of -inf is of a row without keys, which adds up to 0.
    whole = (total - 1.0).abs() <= rounding.clamp_(max=0.01)
    p.div_(total.masked_fill_(~whole, 1.0))


def _drop_(pairs: torch.Tensor, group: _Group) -> torch.Tensor:
    """Multiply (g, nq, nk) by 0 where it is dropped, by ``rescale`` elsewhere, in place."""
    if group.dropped is None:
        return pairs
    return pairs.mul_(group.rescale).masked_fill_(group.dropped, 0.0)


def _groups(task: TaskTensors) -> Iterator[_Group]:
    n_batch, query_heads, n_queries, _ = task.query.shape
    key_heads, n_keys = task.key.shape[1:3]
    if n_queries == 0 or n_keys == 0 or key_heads == 0:
        return
    size = query_heads // key_heads
    bias = task.bias(Rectangle(0, n_queries, 0, n_keys))
    if bias is not None:
        bias = bias.expand(n_batch, query_heads, *bias.shape[-2:])
    for batch in range(n_batch):
        for key_head in range(key_heads):
            heads = slice(key_head * size, (key_head + 1) * size)
            yield _Group(
                batch,
                heads,
                key_head,
                task.query[batch, heads],
                task.key[batch, key_head],
                task.value[batch, key_head],
                task.scale,
                None if bias is None else bias[batch, heads],
                _dropped(task, batch, heads),
                1.0 if task.dropout is None else task.dropout.rescale,
            )


def _dropped(task: TaskTensors, batch: int, heads: slice) -> torch.Tensor | None:
    """Which probabilities of some heads of a batch entry are dropped, (heads, nq, nk)."""
    if task.dropout is None:
        return None
    n_queries, n_keys = task.query.shape[2], task.key.shape[2]
    rows = positions(task.task, 0, n_queries, task.query.device)
    some = task.dropout.at(heads.start, batch)
    return dropped(some, 1, heads.stop - heads.start, rows, task.task.segments(0, n_keys))[0]


def _scores(group: _Group, kept: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scores (g, nq, nk), -inf where the task does not keep the pair."""
    scores = (group.query.to(dtype) @ group.key.to(dtype).mT).mul_(group.scale)
    if group.bias is not None:
        scores += group.bias
    return scores.masked_fill_(~kept, -torch.inf)


def _empty(group: _Group, kept: torch.Tensor) -> torch.Tensor:
    """True where a row keeps no key of the task, (g, nq, 1) or (nq, 1).

    Asked of the masks and not of scores, because NaN plus -inf is NaN.
    """
    if group.bias is None:
        return ~kept.any(dim=-1, keepdim=True)
    # Gone before there are scores, which take as many bytes or more.
    return group.bias.masked_fill(~kept, -torch.inf).amax(dim=-1, keepdim=True) == -torch.inf


def _over_rows(pairs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Sum over the query rows of every head of a group: (g, nq, nk), (g, nq, d) -> (nk, d)."""
    return pairs.flatten(0, 1).mT @ rows.flatten(0, 1)


def _kept(task: TaskTensors) -> torch.Tensor:
    """The CQS mask (nq, nk), True where a pair is kept; combined with the causal mask, if any."""
    n_queries, n_keys = task.query.shape[2], task.key.shape[2]
    kept = torch.from_numpy(task.task.mask())[:n_queries, :n_keys].to(task.query.device)
    # The tokens of a task are in ascending order, so local positions order them as global ones do.
    return kept.tril() if task.is_causal else kept


def _probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(S - lse), in place of S; 0 in rows without keys (lse -inf).

    ``lse`` may also be another number for each row, for example its largest score.
    """
    finite = lse.masked_fill(lse == -math.inf, 0.0)
    return scores.sub_(finite.unsqueeze(-1)).exp_()


def _pair_bytes(call: CallShape, extent: Extent, matrices: int) -> int:
    """``matrices`` score matrices in fp32 (or fp64), boolean masks, the bias and a wide copy; with
    dropout one matrix more, and what says which are dropped."""
    group = extent.query_heads // max(1, extent.key_heads)
    matrices += (call.mask is not None) + call.dropout
    pairs = extent.n_tokens * extent.n_tokens
    bias = 0
    if call.mask is not None:
        copies = (extent.batch if call.mask.batch else 1) * (
            extent.query_heads if call.mask.heads else 1
        )
        bias = copies * pairs * call.dtype.itemsize
    if call.dropout:
        bias += dropped_bytes(1, group, extent.n_tokens, extent.n_tokens)
    return pairs * (matrices * group * _work_size(call.dtype) + 4) + bias


def _row_bytes(call: CallShape, extent: Extent) -> int:
    """Inputs and results of one group in fp32 (or fp64)."""
    group = extent.query_heads // max(1, extent.key_heads)
    rows = extent.n_tokens * (group + 1)
    return rows * (2 * (call.head_dim + call.value_dim) + 8) * _work_size(call.dtype)


def _work_size(dtype: torch.dtype) -> int:
    return 8 if dtype == torch.float64 else 4
