"""Attention over rectangles with scores in memory, some rows at a time: any dtype, any device.

It runs what no other kernel here can: a soft cap on a CPU or in float64, and masks that an operator
refuses. Scores are computed in fp32 (fp64 for fp64 inputs). Dropout is that of
``kernels/dropout.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from quorum_attention.decomposition import Rows
from quorum_attention.kernels.bias import dead_rows, dead_rows_bytes
from quorum_attention.kernels.dropout import Dropout, dropped, dropped_bytes
from quorum_attention.kernels.protocol import CallShape, Extent
from quorum_attention.kernels.workspace import SLACK_BYTES

# Bytes of the scores of the rows that are computed at a time, unless one row has more.
_SCORE_BYTES = 8 << 20
# Score matrices that are alive at one time.
_FORWARD_MATRICES, _BACKWARD_MATRICES = 4, 6


@dataclass(frozen=True, slots=True)
class Gone:
    """Which pairs of a rectangle are dropped.

    Attributes:
        dropout: of the heads and batch entries at hand.
        queries: (rows,) int64, positions in the whole sequence, in the order of the rows.
        keys: runs of the rectangle's keys, ascending.
        turned: whether the keys of the call are in descending order.
    """

    dropout: Dropout
    queries: torch.Tensor
    keys: Sequence[Rows]
    turned: bool

    def of(self, batch: int, heads: int, rows: slice) -> torch.Tensor:
        """Of some rows: (batch, heads, rows, keys) bool, True where a pair is dropped."""
        found = dropped(self.dropout, batch, heads, self.queries[rows], self.keys)
        return found.flip(-1) if self.turned else found


class Tiles:
    """An operator, as ``RectangleKernel``'s are: whole rectangles, results as they are.

    Args:
        softcap: scores become ``softcap * tanh(score / softcap)``, before the mask is added; None
            is none.
    """

    name = "tiles"

    def __init__(self, softcap: float | None = None) -> None:
        self.softcap = softcap

    def whole_forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        scale: float,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None = None,
        gone: Gone | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``WholeCalls``; ``out`` in fp32 (fp64 for fp64 inputs)."""
        work = _work_dtype(query)
        out = torch.empty((*query.shape[:3], value.shape[-1]), dtype=work, device=query.device)
        lse = torch.empty(query.shape[:3], dtype=work, device=query.device)
        grouped, keys = _grouped(query, key), key.to(work).mT.unsqueeze(2)
        values = value.to(work).unsqueeze(2)
        outs, lses = _grouped(out, key), lse.unflatten(1, (key.shape[1], -1))
        for rows in _rows(query, key.shape[2]):
            seen = slice(0, rows.stop if causal else None)  # later keys are masked
            scores, _ = self._scores(
                grouped[..., rows, :], keys[..., seen], scale, rows, causal, bias
            )
            # Divided by the sum instead of taking exp(S - lse): a large lse has few digits left.
            largest = scores.amax(dim=-1, keepdim=True)
            p = scores.sub_(largest.masked_fill(largest == -torch.inf, 0.0)).exp_()
            total = p.sum(dim=-1, keepdim=True)
            if gone is not None:
                _drop_(p, gone, rows)
            outs[..., rows, :] = (p @ values[..., seen, :]).div_(
                total.masked_fill(total == 0.0, 1.0)
            )
            lses[..., rows] = (largest + total.log()).squeeze(-1)
        empty = _empty(bias, query.shape[2], causal)
        if empty is not None:
            out.masked_fill_(empty.unsqueeze(-1), 0.0)
            lse.masked_fill_(empty, -torch.inf)
        return out, lse

    def whole_backward(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
        bias: torch.Tensor | None,
        grad_dtype: torch.dtype | None = None,
        gone: Gone | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See ``WholeCalls``; gradients in fp32 (fp64 for fp64 inputs)."""
        work = _work_dtype(query)
        grads = tuple(
            torch.zeros(t.shape, dtype=work, device=t.device) for t in (query, key, value)
        )
        keys, values = (t.to(work).unsqueeze(2) for t in (key, value))
        grad_query = _grouped(grads[0], key)
        grouped, upstream, outs = (_grouped(t, key) for t in (query, grad_out, out))
        lses = lse.unflatten(1, (key.shape[1], -1)).unsqueeze(-1)
        empty = _empty(bias, query.shape[2], causal)
        if empty is not None:
            empty = empty.expand(lse.shape).unflatten(1, (key.shape[1], -1)).unsqueeze(-1)
        for rows in _rows(query, key.shape[2]):
            part, seen = grouped[..., rows, :].to(work), slice(0, rows.stop if causal else None)
            some_keys, some_values = keys[..., seen, :], values[..., seen, :]
            do, none = upstream[..., rows, :].to(work), None
            if empty is not None:
                # Nothing comes from rows without keys, whatever is in them.
                none = empty[..., rows, :]
                part, do = part.masked_fill(none, 0.0), do.masked_fill(none, 0.0)
            scores, slack = self._scores(part, some_keys.mT, scale, rows, causal, bias)
            if none is not None:
                scores.masked_fill_(none, -torch.inf)
            p = scores.sub_(lses[..., rows, :]).exp_()
            products = do @ some_values.mT
            weights = p
            if gone is not None:
                # What is dropped has neither a weight nor a product.
                weights = _drop_(p.clone(), gone, rows)
                _drop_(products, gone, rows)
            grads[2][:, :, seen].add_((weights.mT @ do).sum(dim=2))
            delta = (do * outs[..., rows, :].to(work)).sum(dim=-1, keepdim=True)
            ds = p.mul_(products.sub_(delta))
            if slack is not None:
                ds.mul_(slack)
            if none is not None:
                ds.masked_fill_(none, 0.0)
            grad_query[..., rows, :] = (ds @ some_keys).mul_(scale)
            if none is not None:
                grad_query[..., rows, :].masked_fill_(none, 0.0)
            grads[1][:, :, seen].add_((ds.mT @ part).sum(dim=2), alpha=scale)
        return grads[0], grads[1], grads[2]

    def _scores(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        scale: float,
        rows: slice,
        causal: bool,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scores (b, hk, g, rows, keys), and the derivative of the soft cap."""
        scores = (query.to(keys.dtype) @ keys).mul_(scale)
        slack = self.cap_(scores)
        if bias is not None:
            bias = bias[(None,) * (4 - bias.dim())]
            part = bias[:, :, rows] if bias.shape[2] > 1 else bias
            part = part[..., : scores.shape[-1]] if part.shape[3] > 1 else part
            # A dimension for the heads that share a key head.
            heads = keys.shape[1]
            shape = (heads, -1) if part.shape[1] > 1 else (1, 1)
            scores += part.unflatten(1, shape).to(scores.dtype)
        if causal:
            at = torch.arange(rows.start, rows.stop, device=scores.device)
            later = torch.arange(scores.shape[-1], device=scores.device) > at[:, None]
            scores.masked_fill_(later, -torch.inf)
        return scores, slack

    def cap_(self, scores: torch.Tensor) -> torch.Tensor | None:
        """Cap scaled scores in place; returns the derivative of the cap, None without one."""
        if self.softcap is None:
            return None
        scores.div_(self.softcap).tanh_()
        slack = 1.0 - scores * scores
        scores.mul_(self.softcap)
        return slack

    def forward_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes that ``whole_forward`` takes, its results among them."""
        sizes = _Sizes(call, extent)
        copies = sizes.keys + sizes.rows_at_once * (call.head_dim + call.value_dim) * sizes.item
        results = sizes.rows * (call.value_dim + 1) * sizes.item
        return (
            _FORWARD_MATRICES * sizes.scores
            + copies
            + results
            + sizes.gone
            + sizes.empty
            + SLACK_BYTES
        )

    def backward_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes that ``whole_backward`` takes, its results among them."""
        sizes = _Sizes(call, extent)
        width = call.head_dim + call.value_dim
        copies = sizes.keys + 4 * sizes.rows_at_once * width * sizes.item
        # A part of the key gradients for each query head, and their sum.
        results = sizes.rows * call.head_dim * sizes.item + sizes.keys
        parts = (sizes.shared + 1) * sizes.keys
        matrices = (_BACKWARD_MATRICES + call.dropout) * sizes.scores
        return matrices + copies + results + parts + sizes.gone + sizes.empty + SLACK_BYTES


class _Sizes:
    def __init__(self, call: CallShape, extent: Extent) -> None:
        self.item = 8 if call.dtype == torch.float64 else 4
        lanes = extent.batch * extent.query_heads
        one = lanes * max(1, extent.max_keys) * self.item
        at_once = min(max(1, extent.max_queries), max(1, _SCORE_BYTES // one))
        self.scores = at_once * one
        self.gone = 0
        if call.dropout:
            shape = (extent.batch, extent.query_heads, at_once, max(1, extent.max_keys))
            # And the same in the other order.
            self.gone = dropped_bytes(*shape) + lanes * at_once * extent.max_keys
        self.empty = dead_rows_bytes(
            extent.batch, extent.query_heads, extent.max_queries, extent.max_keys, True
        )
        self.rows = lanes * extent.max_queries
        self.rows_at_once = lanes * at_once
        self.shared = extent.query_heads // max(1, extent.key_heads)
        width = call.head_dim + call.value_dim
        self.keys = extent.batch * extent.key_heads * extent.max_keys * width * self.item


def _empty(bias: torch.Tensor | None, n_rows: int, causal: bool) -> torch.Tensor | None:
    """True where a row has no key, broadcastable to (b, hq, rows); None: none is so.

    Asked of the mask, because a score of NaN plus -inf is NaN.
    """
    if bias is None:
        return None
    empty = dead_rows(bias[(None,) * (4 - bias.dim())], n_rows, causal)
    # Most masks leave no such row. On a GPU, asking would make the host wait.
    return empty if empty.is_cuda or bool(empty.any()) else None


def _drop_(p: torch.Tensor, gone: Gone, rows: slice) -> torch.Tensor:
    """Drop pairs of (b, hk, g, rows, keys) in place; the others are divided by the chance to stay.
    Keys may be the first ones alone."""
    batch, key_heads, shared = p.shape[:3]
    lost = gone.of(batch, key_heads * shared, rows)[..., : p.shape[-1]]
    return p.masked_fill_(lost.unflatten(1, (key_heads, -1)), 0.0).mul_(gone.dropout.rescale)


def _rows(query: torch.Tensor, n_keys: int) -> Iterator[slice]:
    """The rows to compute at a time."""
    lanes, n_queries = query.shape[0] * query.shape[1], query.shape[2]
    one = max(1, lanes * n_keys * _work_dtype(query).itemsize)
    step = max(1, _SCORE_BYTES // one)
    for start in range(0, n_queries, step):
        yield slice(start, min(start + step, n_queries))


def _grouped(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """(b, hq, n, d) as (b, hk, g, n, d)."""
    found: torch.Tensor = tensor.unflatten(1, (key.shape[1], -1))
    return found


def _work_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
