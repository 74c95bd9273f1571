"""FlexAttention as its CUDA kernels take a block mask, in eager torch: lists and all."""

from __future__ import annotations

import math

import torch
from helpers_attention import softmax

from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.kit.flex import FlexKernel, assume_stride_multiple, layout, sixteenth
from quorum_attention.kernels.masked.functions import over_pairs

LOG2_E = math.log2(math.e)


def listed(counts: torch.Tensor, indices: torch.Tensor, across: int) -> torch.Tensor:
    """(b, h, lines, across) bool: what lists say; no block twice."""
    found = torch.zeros(*counts.shape, across, dtype=torch.int64)
    there = torch.arange(indices.shape[-1]) < counts.unsqueeze(-1)
    assert int(indices.min()) >= 0
    assert int(indices.max()) < across
    found.scatter_add_(-1, indices.long(), there.long())
    assert int(found.max()) <= 1
    return found.bool()


def kept_pairs(block_mask, counts, full_counts, shape) -> torch.Tensor:
    """(b, h, nq, nk): pairs of full blocks, and of mixed ones those that the mask keeps."""
    nq, nk = shape[2:]
    columns = -(-nk // 128)
    at = [torch.arange(size) for size in shape]
    wide = [
        listed(c, i, columns).repeat_interleave(128, -2).repeat_interleave(128, -1)[..., :nq, :nk]
        for c, i in ((counts, block_mask.kv_indices), (full_counts, block_mask.full_kv_indices))
    ]
    mixed, full = wide
    assert not (mixed & full).any()
    return full | (mixed & over_pairs(block_mask.mask_mod)(*at))


class _Listed(torch.autograd.Function):
    """Saves what compiled FlexAttention saves."""

    @staticmethod
    def forward(ctx, query, key, value, counts, full_counts, block_mask, score_mod, scale):
        ctx.call = block_mask, score_mod, scale
        scores, _ = _scores(query, key, counts, full_counts, *ctx.call)
        shared = query.shape[1] // value.shape[1]
        out, lse = softmax(scores, value.repeat_interleave(shared, 1).to(scores.dtype))
        out = out.to(query.dtype)
        raw = lse * LOG2_E
        ctx.save_for_backward(query, key, value, out, raw, counts, full_counts)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        query, key, value, out, raw, counts, full_counts = ctx.saved_tensors
        lse = raw / LOG2_E
        shared = query.shape[1] // value.shape[1]
        with torch.enable_grad():
            leaves = [t.detach().float().requires_grad_() for t in (query, key)]
            scores, _ = _scores(*leaves, counts, full_counts, *ctx.call)
        p = torch.exp(scores.detach() - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
        grad = grad_out.float()
        dp = grad @ value.float().repeat_interleave(shared, 1).mT
        delta = (grad * out.float()).sum(-1) - (0 if grad_lse is None else grad_lse)
        ds = p * (dp - delta.unsqueeze(-1))
        dq, dk = torch.autograd.grad(scores, leaves, ds)
        dv = (p.mT @ grad).unflatten(1, (-1, shared)).sum(2)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), *[None] * 5


def _scores(query, key, counts, full_counts, block_mask, score_mod, scale):
    shared = query.shape[1] // key.shape[1]
    scores = query.float() @ key.float().repeat_interleave(shared, 1).mT * scale
    at = [torch.arange(size) for size in scores.shape]
    if score_mod is not None:
        scores = over_pairs(score_mod, scored=True)(scores, *at).float()
    kept = kept_pairs(block_mask, counts, full_counts, scores.shape)
    return scores.masked_fill(~kept, -torch.inf), kept


def check_lists(block_mask) -> None:
    """By key the same blocks as by query; widths as torch's kernel needs them."""
    rows, columns = (-(-n // 128) for n in block_mask.seq_lengths)
    for kind in ("", "full_"):
        by_query = listed(getattr(block_mask, f"{kind}kv_num_blocks"),
                          getattr(block_mask, f"{kind}kv_indices"), columns)  # fmt: skip
        by_key = listed(getattr(block_mask, f"{kind}q_num_blocks"),
                        getattr(block_mask, f"{kind}q_indices"), rows)  # fmt: skip
        assert torch.equal(by_query, by_key.mT)
    for side, other in (("kv", columns), ("q", rows)):
        width = getattr(block_mask, f"{side}_indices").shape[-1]
        assert getattr(block_mask, f"full_{side}_indices").shape[-1] == width
        longest = max(int(getattr(block_mask, f"{kind}{side}_num_blocks").max())
                      for kind in ("", "full_"))  # fmt: skip
        assert width == max(2, longest)
        assert longest <= other


def eager_flex(query, key, value, block_mask, *, score_mod, scale):
    """What ``compiled_flex`` makes, on the CPU."""
    for tensor in (query, key, value):
        assert tensor.storage_offset() == 0
        assert layout(tensor) is not None
        assume_stride_multiple(tensor, sixteenth(tensor))
    counts = block_mask.kv_num_blocks, block_mask.full_kv_num_blocks
    if int(counts[0].sum() + counts[1].sum()):
        check_lists(block_mask)
    return _Listed.apply(query, key, value, *counts, block_mask, score_mod, scale)


class EagerFlexKernel(FlexKernel):
    """The whole-task kernel with ``eager_flex`` in place of torch's, for the CPU."""

    def __init__(self, score_mod, mask_mod, name) -> None:
        super().__init__(score_mod, mask_mod, name)
        self._compiled, self._takes_rows = (Cache(128, lambda one: 1) for _ in range(2))

    def refusal(self, call):
        return None
