"""Kernels that are right, of every sort: none may be called wrong."""

from __future__ import annotations

from collections.abc import Callable

import torch
from helpers_planted_errors import (
    Grouped,
    WholeTask,
    gradients,
    mask_of,
    plain,
    rotated,
    scores_of,
    softmax,
    summed,
)
from torch.nn import functional

import quorum_attention as qa
from quorum_attention.kernels import InnerKernel, merge_
from quorum_attention.kernels.kit import (
    document,
    from_lse_function,
    from_score_mod,
    sliding_window,
)

N = 101


def torchs_own(query, key, value, *, is_causal, scale):
    """torch's FlashAttention for the CPU, which returns its lse."""
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if value.shape[-1] != query.shape[-1]:
        return plain(query, key, value, is_causal=is_causal, scale=scale)
    out, lse = call(query, key, value, 0.0, is_causal, scale=scale)
    return out, lse


def torchs_own_backward(grad_out, query, key, value, out, lse, *, is_causal, scale):
    if value.shape[-1] != query.shape[-1]:
        return gradients(grad_out, query, key, value, out, lse, is_causal=is_causal, scale=scale)
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return call(
        grad_out.contiguous(), query, key, value, out.contiguous(), lse.contiguous(), 0.0,
        is_causal, scale=scale,
    )  # fmt: skip


def alibi(query, key, value, *, is_causal, scale, query_positions, key_positions, head_indices):
    slopes = 0.5 ** (head_indices.to(query.dtype) + 1)
    apart = query_positions[:, None] - key_positions[None]
    scores = scale * (query @ key.mT) - slopes[:, None, None] * apart.abs()
    return softmax(scores.masked_fill(apart < 0, -torch.inf) if is_causal else scores, value)


def rotary(query, key, value, *, is_causal, scale, query_positions, key_positions):
    query, key = rotated(query, query_positions), rotated(key, key_positions)
    return plain(query, key, value, is_causal=is_causal, scale=scale)


def window(query, key, value, *, is_causal, scale, query_positions, key_positions):
    """With rows that keep no key of a rectangle."""
    apart = query_positions[:, None] - key_positions[None]
    keep = apart.abs() < 9
    if is_causal:
        keep = keep & (apart >= 0)
    scores = (scale * (query @ key.mT)).masked_fill(~keep, -torch.inf)
    none = ~keep.any(-1)
    safe = scores.masked_fill(none[:, None], 0.0)
    lse = torch.logsumexp(safe, -1)
    out = torch.exp(safe - lse.unsqueeze(-1)) @ value
    return out, lse.masked_fill(none, -torch.inf)


def softcapped(query, key, value, *, is_causal, scale):
    scores = 5 * torch.tanh(scale * (query @ key.mT) / 5)
    if is_causal:
        scores = scores.masked_fill(mask_of(*scores.shape[-2:]), -torch.inf)
    return softmax(scores, value)


def padded(query, key, value, *, is_causal, scale):
    """To multiples of 16, with keys that do not count, and to heads of 32."""
    n, rows, width, wide = key.shape[2], query.shape[2], query.shape[3], value.shape[3]
    down, right = -n % 16, -width % 32
    query, key = functional.pad(query, (0, right)), functional.pad(key, (0, right, 0, down))
    scores = scale * (query @ key.mT)
    keep = torch.arange(n + down) < n
    if is_causal:
        keep = keep & ~mask_of(rows, n + down)
    out, lse = softmax(
        scores.masked_fill(~keep, -torch.inf), functional.pad(value, (0, 0, 0, down))
    )
    return out[..., :wide], lse


def in_float32(query, key, value, *, is_causal, scale):
    """16-bit tokens, statistics in fp32."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = scores_of(query.to(wide), key.to(wide), is_causal, scale)
    out, lse = softmax(scores, value.to(wide))
    return out.to(query.dtype), lse


def blockwise(query, key, value, *, is_causal, scale):
    """Online, eight keys at a time."""
    out, lse = torch.zeros_like(query[..., :1]) + 0 * value[:, :, :1], None
    for start in range(0, key.shape[2], 8):
        stop = min(key.shape[2], start + 8)
        scores = scale * (query @ key[:, :, start:stop].mT)
        if is_causal:
            keep = torch.arange(query.shape[2])[:, None] >= torch.arange(start, stop)[None]
            scores = scores.masked_fill(~keep, -torch.finfo(scores.dtype).max / 4)
        part = torch.logsumexp(scores, -1)
        mine = torch.softmax(scores, -1) @ value[:, :, start:stop]
        both = part if lse is None else torch.logaddexp(lse, part)
        old = 0.0 if lse is None else torch.exp(lse - both).unsqueeze(-1)
        out, lse = out * old + mine * torch.exp(part - both).unsqueeze(-1), both
    return out, lse


class InSixteenBitsOnly(WholeTask):
    """As the operators of a GPU are: sums in fp32, everything else in 16 bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def refusal(self, call):
        return "16 bits only" if call.dtype != self.dtype else super().refusal(call)

    def scores(self, task):
        scores = task.scale * (task.query.float() @ task.key.float().mT)
        return scores.masked_fill(~self.mask(task), -torch.inf)

    def forward(self, task, state):
        scores = self.scores(task)
        lse = torch.logsumexp(scores, dim=-1)
        safe = lse.masked_fill(lse == -torch.inf, 0.0)
        p = torch.exp(scores - safe.unsqueeze(-1)).to(self.dtype).float()
        merge_(state.out, state.lse, (p @ task.value.float()).to(self.dtype), lse)

    def backward(self, task, grads):
        lse = grads.lse.masked_fill(grads.lse == -torch.inf, 0.0)
        p = torch.exp(self.scores(task) - lse.unsqueeze(-1))
        grad_out, out, value = (t.float() for t in (grads.grad_out, grads.out, task.value))
        ds = p * (grad_out @ value.mT - (grad_out * out).sum(-1, keepdim=True))
        ds, p = ds.to(self.dtype).float(), p.to(self.dtype).float()
        grads.grad_query += (task.scale * (ds @ task.key.float())).to(self.dtype)
        grads.grad_key += (task.scale * (ds.mT @ task.query.float())).to(self.dtype)
        grads.grad_value += (p.mT @ grad_out).to(self.dtype)


def softcap(score, b, h, q, k):
    return 2.0 * torch.tanh(score / 2.0)


def slopes(score, b, h, q, k):
    return score - (0.1 / (1 + h)) * (q - k).abs()


def local_global(b, h, q, k):
    return (h >= 1) | ((q - k).abs() <= 20)


IDS = torch.arange(2 * N) * 7 // N

RIGHT: dict[str, Callable[[], str | InnerKernel]] = {
    "dense": lambda: "dense",
    "cpu": lambda: "cpu",
    "plain": lambda: from_lse_function(plain),
    "plain, backward given": lambda: from_lse_function(plain, backward=gradients),
    "torch's own": lambda: from_lse_function(
        torchs_own, backward=torchs_own_backward, positive_scale=True
    ),
    "grouped": lambda: from_lse_function(Grouped.right, grouped=True),
    "grouped, backward given": lambda: from_lse_function(
        Grouped.right, backward=Grouped.gradients(summed), grouped=True
    ),
    "whole task": WholeTask,
    "longnet": lambda: qa.LongNetKernel([(32, 1), (64, 2), (128, 4)]),
    "longnet, full precision": lambda: qa.LongNetKernel([(32, 1), (64, 2)], full_precision=True),
    "mod: alibi": lambda: from_score_mod(slopes, compiled=False),
    "mod: soft cap": lambda: from_score_mod(softcap, compiled=False),
    "mod: soft cap, window, documents": lambda: from_score_mod(
        lambda s, b, h, q, k: 50 * torch.tanh(s / 50),
        sliding_window(40) & document(IDS),
        compiled=False,
    ),
    "mod: window by a function": lambda: from_score_mod(
        None, lambda b, h, q, k: (q - k <= 30) & (k <= q), compiled=False
    ),
    "mod: local and global heads": lambda: from_score_mod(None, local_global, compiled=False),
}
for _function in (alibi, rotary, window, softcapped, padded, in_float32, blockwise):
    RIGHT[_function.__name__] = lambda function=_function: from_lse_function(function)

ONLY = {
    "fp16 only": lambda: InSixteenBitsOnly(torch.float16),
    "bf16 only": lambda: InSixteenBitsOnly(torch.bfloat16),
}

SIXTEEN_BITS = (
    "dense", "cpu", "plain", "torch's own", "longnet", "longnet, full precision", "mod: alibi",
    "alibi", "window", "in_float32",
)  # fmt: skip
