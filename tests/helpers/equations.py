"""Attention as its equations read: float64, every pair at once, from the raw arguments
of a call.

For query i and key j of a head, with the factor c of the scores and the additive mask
B,

    S_ij = softcap(c q_i . k_j) + B_ij,  or -inf where the pair is not kept
    lse_i = log(sum_j exp(S_ij) + exp(sink)),   P_ij = exp(S_ij - lse_i),   O = (Z P) V
    dV = (Z P)^T dO,   dS = P (Z (dO V^T) - delta + d lse),   delta = rowsum(dO * O)
    dQ = c dS' K,   dK = c dS'^T Q,   dB = dS,   d sink = -sum_i P_sink (delta - d lse)

where dS' is dS times the derivative of the soft cap, and Z is 0 for pairs that dropout
drops and 1 / (1 - p) for all others.

This file imports nothing of the package and rounds nothing, so an error of the package
cannot be in both. A ``Mask`` is read by the names of its fields; which pairs dropout
drops is computed from the published definition of Philox4x32-7.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass
class Forward:
    """Results of a forward, and what they are made of; batch dimensions are one, heads
    expanded.

    Attributes:
        query, key, value: (b, h, n, d), (b, h, m, d), (b, h, m, dv).
        scale: c.
        products: c q . k, (b, h, n, m).
        bias: B, (b or 1, h or 1, n or 1, m or 1), 0 where a pair is not kept; None:
            there is none.
        kept: which pairs are kept, (b, h, n, m).
        scores: S, (b, h, n, m).
        slope: the derivative of the soft cap, (b, h, n, m), or 1.
        p: P, (b, h, n, m).
        p_sink: (b, h, n), or None.
        factors: Z, (b, h, n, m), or 1.
        out: O, (b, h, n, dv).
        lse: (b, h, n).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    products: Tensor
    bias: Tensor | None
    kept: Tensor
    scores: Tensor
    slope: Tensor | float
    p: Tensor
    p_sink: Tensor | None
    factors: Tensor | float
    out: Tensor
    lse: Tensor

    @property
    def without_keys(self) -> Tensor:
        """Rows that keep no key, (b, h, n)."""
        return ~self.kept.any(-1)


@dataclass
class Gradients:
    """Gradients in float64, (b, h, ...) with the heads of keys and values expanded.

    Attributes:
        grad_lse: d lse, (b, h, n), 0 in rows without keys.
        centred_grad_p: Z (dO V^T) - delta + d lse, (b, h, n, m).
        scores: dS, (b, h, n, m), which is the gradient of the additive mask before it
            is summed over what the mask broadcasts over.
        query, key, value: (b, h, n, d), (b, h, m, d), (b, h, m, dv).
        sinks: (h,), or None.
    """

    grad_lse: Tensor
    centred_grad_p: Tensor
    scores: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
) -> Forward:
    """The forward.

    Args:
        query, key, value: (*batch, heads, n, d), (*batch, kv_heads, m, d), (*batch,
            kv_heads, m, dv).
        attn_mask: a tensor, boolean or additive, that broadcasts to (*batch, heads, n,
            m); or a ``Mask``.
        window, softcap, alibi_slopes: of a kernel with such options.
    """
    batch, heads = query.shape[:-3], query.shape[-3]
    entries, shared = math.prod(batch), heads // max(1, key.shape[-3])
    q, k, v = (
        t.detach().double().reshape(entries, *t.shape[-3:]) for t in (query, key, value)
    )
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    n, m = q.shape[2], k.shape[2]
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    rules = None if attn_mask is None or isinstance(attn_mask, Tensor) else attn_mask
    tensor = attn_mask if rules is None else rules.bias
    if rules is not None and rules.softcap is not None:
        softcap = rules.softcap

    products = scale * (q @ k.mT)
    scores, slope = capped(products, softcap)
    distance = torch.arange(n, device=q.device)[:, None] - torch.arange(
        m, device=q.device
    )
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(scores)[:, None, None] * distance.abs()
    kept = torch.ones(entries, heads, n, m, dtype=torch.bool, device=q.device)
    if is_causal:
        kept = kept & (distance >= 0)
    if window is not None:
        kept = kept & within(distance, window)
    if rules is not None:
        kept = kept & kept_by(rules, entries, heads, n, m).to(q.device)
    bias = None
    if tensor is not None:
        whole = torch.broadcast_to(tensor.detach(), (*batch, heads, n, m)).reshape(
            scores.shape
        )
        if tensor.dtype == torch.bool:
            kept = kept & whole
        else:
            kept = kept & (whole != -math.inf)
            bias = whole.double().masked_fill(~kept, 0.0)
            scores = scores + bias
    scores = scores.masked_fill(~kept, -math.inf)
    p, p_sink, lse = softmax(scores, kept, None if rules is None else rules.sinks)
    factors: Tensor | float = 1.0
    if dropout_p:
        lost = dropped(dropout_p, dropout_seed, (entries, heads, n, m)).to(q.device)
        factors = (~lost).double() / (1 - dropout_p)
    out = (factors * p) @ v
    return Forward(
        q,
        k,
        v,
        scale,
        products,
        bias,
        kept,
        scores,
        slope,
        p,
        p_sink,
        factors,
        out,
        lse,
    )


def capped(products: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | float]:
    """Scores under a soft cap, and the derivative of the cap."""
    if softcap is None:
        return products, 1.0
    bent = torch.tanh(products / softcap)
    return softcap * bent, 1 - bent**2


def softmax(
    scores: Tensor, kept: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """P (b, h, n, m), the share of the sink (b, h, n) or None, and the log-sum-exp (b,
    h, n). A pair that is not kept has no share, whatever its score would have been."""
    logits = scores
    if sinks is not None:
        column = sinks.detach().to(scores)[:, None, None].expand(*scores.shape[:-1], 1)
        logits = torch.cat((scores, column), -1)
    if logits.shape[-1] == 0:
        return scores, None, scores.new_full(scores.shape[:-1], -math.inf)
    lse = logits.logsumexp(-1)
    shares = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    p = shares[..., : scores.shape[-1]].masked_fill(~kept, 0.0)
    return p, None if sinks is None else shares[..., -1], lse


def backward(
    done: Forward,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    out: Tensor | None = None,
) -> Gradients:
    """The gradients.

    Args:
        grad_out: (*batch, heads, n, dv).
        grad_lse: (*batch, heads, n); None: nothing flows through the log-sum-exp.
        out: the output that delta is formed of, (b, h, n, dv); None: the exact one.
    """
    upstream = grad_out.detach().double().reshape(done.out.shape)
    delta = (upstream * (done.out if out is None else out)).sum(-1)
    lse_gradient = torch.zeros_like(delta)
    if grad_lse is not None:
        lse_gradient = grad_lse.detach().double().reshape(delta.shape)
        lse_gradient = lse_gradient.masked_fill(done.lse == -math.inf, 0.0)
    of_row = (lse_gradient - delta).unsqueeze(-1)
    centred_grad_p = done.factors * (upstream @ done.value.mT) + of_row
    scores = done.p * centred_grad_p
    products = scores * done.slope
    sinks = None
    if done.p_sink is not None:
        sinks = (done.p_sink * (lse_gradient - delta)).sum((0, 2))
    return Gradients(
        lse_gradient,
        centred_grad_p,
        scores,
        done.scale * (products @ done.key),
        done.scale * (products.mT @ done.query),
        (done.factors * done.p).mT @ upstream,
        sinks,
    )


def summed_by_key_head(gradient: Tensor, shared: int) -> Tensor:
    """(b, h, m, d) summed over the query heads that share a key head."""
    return gradient.unflatten(1, (-1, shared)).sum(2) if shared > 1 else gradient


def summed_like(gradient: Tensor, mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """dS of a call of ``shape`` (*batch, heads, n, m), summed to the shape of its
    mask."""
    return gradient.reshape(shape).sum_to_size(mask.shape)


# --- Which pairs are kept -----------------------------------------------------------------------


def within(distance: Tensor, window: int | tuple[int, int]) -> Tensor:
    """Pairs whose key is at most so far before the query, and so far after; -1 is no
    limit."""
    left, right = (window, window) if isinstance(window, int) else window
    near = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        near = near & (distance <= left)
    if right >= 0:
        near = near & (distance >= -right)
    return near


def kept_by(rules: Any, entries: int, heads: int, n: int, m: int) -> Tensor:
    """Which pairs a ``Mask`` keeps, its bias aside: bool (entries, heads, n, m)."""
    query, key = torch.arange(n)[:, None], torch.arange(m)[None]
    position = places(rules, entries, n, m)[:, None, :, None]
    kept = torch.ones(entries, heads, n, m, dtype=torch.bool)
    if rules.causal:
        kept = kept & (key <= position)
    if rules.window is not None:
        kept = kept & within(position - key, rules.window)
    if rules.chunk is not None:
        same = (
            torch.div(position, rules.chunk, rounding_mode="floor")
            == key // rules.chunk
        )
        kept = kept & same
    if rules.documents is not None:
        two = isinstance(rules.documents, tuple)
        of_queries, of_keys = (
            rules.documents if two else (rules.documents, rules.documents)
        )
        mine = torch.atleast_2d(of_queries.cpu())[:, None, :, None]
        theirs = torch.atleast_2d(of_keys.cpu())[:, None, None, :]
        kept = kept & (mine == theirs)
    if rules.key_lengths is not None:
        kept = kept & (key < rules.key_lengths.cpu()[:, None, None, None])
    if rules.key_padding is not None:
        kept = kept & torch.atleast_2d(rules.key_padding.cpu())[:, None, None, :]
    if rules.keeps is not None:
        entry, head = (
            torch.arange(entries)[:, None, None, None],
            torch.arange(heads)[:, None, None],
        )
        kept = kept & rules.keeps(entry, head, query, key)
    for mask in rules.every:
        kept = kept & kept_by(mask, entries, heads, n, m)
    if rules.either:
        some = [kept_by(mask, entries, heads, n, m) for mask in rules.either]
        kept = kept & torch.stack(some).any(0)
    return kept


def _places_from_last(queries: list[int], keys: list[int]) -> list[int]:
    """Where the queries of a document stand, whose queries and keys are these,
    ascending."""
    places = []
    for nth in range(len(keys) - len(queries), len(keys)):
        places.append(keys[nth] if nth >= 0 else (keys or [0])[0] + nth)
    return places


def places(rules: Any, batch: int, n_queries: int, n_keys: int) -> Tensor:
    """Where each query stands among the keys, (batch, n_queries)."""
    offset = rules.offset
    if offset is None:
        offset = "lower_right" if rules.causal == "lower_right" else 0
    if not isinstance(offset, str):
        moved = torch.arange(n_queries) + torch.as_tensor(offset).cpu()
        return moved.expand(batch, n_queries)
    ids: Any = (
        rules.documents
        if isinstance(rules.documents, tuple)
        else (rules.documents,) * 2
    )
    of_query, of_key = (
        (torch.zeros(n) if one is None else one).expand(batch, n).tolist()
        for one, n in zip(ids, (n_queries, n_keys), strict=True)
    )
    lengths = (
        [n_keys] * batch if rules.key_lengths is None else rules.key_lengths.tolist()
    )
    found = torch.zeros(batch, n_queries, dtype=torch.int64)
    for entry, length in enumerate(lengths):
        for name in set(of_query[entry]):
            queries = [n for n, other in enumerate(of_query[entry]) if other == name]
            keys = [
                n for n, other in enumerate(of_key[entry][:length]) if other == name
            ]
            found[entry, queries] = torch.tensor(_places_from_last(queries, keys))
    return found


# --- Dropout --------------------------------------------------------------------------------------


def dropped(
    p: float,
    seed: int,
    sizes: tuple[int, int, int, int],
    first_head: int = 0,
    first_entry: int = 0,
) -> Tensor:
    """Which pairs of (entries, heads, n, m) are dropped, bool.

    The word of query i and key j in head h of entry b is word j mod 4 of Philox4x32-7
    at counter (j // 4, i, h, b) under the key (lower half of the seed, upper half); it
    is dropped below p 2**32.

    Args:
        first_head, first_entry: numbers of the first head and entry in the whole call.
    """
    entries, heads, n, m = sizes
    numbers = (
        range(-(-m // 4)), range(n), range(first_head, first_head + heads),
        range(first_entry, first_entry + entries),
    )  # fmt: skip
    counter = np.meshgrid(
        *(np.array(part, dtype=np.uint64) for part in numbers), indexing="ij"
    )
    words = np.stack(
        philox_4x32_7(counter, seed), axis=1
    )  # (keys / 4, 4, n, heads, entries)
    words = words.reshape(4 * len(numbers[0]), n, heads, entries)[:m]
    below = words < np.uint64(min(2**32 - 1, round(p * 2**32)))
    return torch.from_numpy(np.ascontiguousarray(below.transpose(3, 2, 1, 0)))


def philox_4x32_7(counter: Any, seed: int) -> tuple[Any, ...]:
    """The four words of a counter, as Salmon et al. (2011) define them: seven rounds of
    two products of 32 by 32 bits, whose halves change places."""
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    c0, c1, c2, c3 = counter
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(7):
        product0 = c0 * np.uint64(0xD2511F53)
        product1 = c2 * np.uint64(0xCD9E8D57)
        high0, low0 = product0 >> half, product0 & low
        high1, low1 = product1 >> half, product1 & low
        c0, c1, c2, c3 = (
            high1 ^ c1 ^ np.uint64(k0),
            low1,
            high0 ^ c3 ^ np.uint64(k1),
            low0,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3
