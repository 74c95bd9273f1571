"""FlashAttention-4 in tests: skipped by name where it is not, and a stand-in for its functions."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch

from quorum_attention.kernels import CallShape, fa4
from quorum_attention.kernels.fa4 import version
from quorum_attention.kernels.masked import kernel as masked

FA4 = pytest.param(
    "fa4", marks=pytest.mark.skipif(version() is None, reason="flash-attn-4 is not installed")
)


def kept_pairs(
    n_queries: int, n_keys: int, causal: bool, left: int | None, right: int | None
) -> torch.Tensor:
    """As flash-attn-4 documents them: diagonals are counted from the last query and key."""
    apart = torch.arange(n_keys)[None] - torch.arange(n_queries)[:, None] - (n_keys - n_queries)
    kept = torch.ones(n_queries, n_keys, dtype=torch.bool)
    if causal:
        kept &= apart <= 0
    if left is not None:
        kept &= apart >= -left
    if right is not None:
        kept &= apart <= right
    return kept


def scores_of(query, key, scale, kept, softcap):
    shared = query.shape[2] // key.shape[2]
    q, k = query.transpose(1, 2).double(), key.transpose(1, 2).double()
    scores = scale * (q @ k.repeat_interleave(shared, 1).mT)
    slope = 1.0
    if softcap:
        bent = torch.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent * bent
    return scores.masked_fill(~kept, -math.inf), slope, shared


def forward(
    q, k, v, *, softmax_scale, return_lse, causal=False, window_size_left=None,
    window_size_right=None, softcap=None,
):  # fmt: skip
    """(b, n, h, d) in and out, lse (b, h, n) in fp32; a row that is not finite has lse -inf."""
    assert return_lse
    kept = kept_pairs(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    scores, _, shared = scores_of(q, k, softmax_scale, kept, softcap)
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    out = p @ v.transpose(1, 2).double().repeat_interleave(shared, 1)
    lse = lse.nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)
    return out.to(q.dtype).transpose(1, 2).contiguous(), lse.float(), None, None, None


def backward(
    q, k, v, out, dout, lse, *, softmax_scale, deterministic, causal=False,
    window_size_left=None, window_size_right=None, softcap=None,
):  # fmt: skip
    """Gradients (b, n, h, d), for an lse of whole rows."""
    assert lse.is_contiguous()
    kept = kept_pairs(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    scores, slope, shared = scores_of(q, k, softmax_scale, kept, softcap)
    # A row without keys has an lse of -inf, and no pair.
    p = torch.exp(scores - lse.double().masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    do, o = (t.transpose(1, 2).double() for t in (dout, out))
    values = v.transpose(1, 2).double().repeat_interleave(shared, 1)
    ds = slope * softmax_scale * p * (do @ values.mT - (do * o).sum(-1, keepdim=True))
    keys = k.transpose(1, 2).double().repeat_interleave(shared, 1)

    def of_group(grad: torch.Tensor) -> torch.Tensor:
        return grad.unflatten(1, (-1, shared)).sum(2)

    found = ds @ keys, of_group(ds.mT @ q.transpose(1, 2).double()), of_group(p.mT @ do)
    return tuple(t.to(q.dtype).transpose(1, 2).contiguous() for t in found)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> fa4.Fa4Kernel:
    """The kernel, with these functions, on a CPU."""
    if torch.cuda.is_available():
        pytest.skip("tests/gpu has the kernel itself")

    def refusal(self: fa4.Fa4Kernel, call: CallShape) -> str | None:
        return "it takes no attention mask" if call.mask is not None else None

    monkeypatch.setattr(fa4, "_functions", lambda: (forward, backward))
    monkeypatch.setattr(fa4, "_on", lambda device: nullcontext())
    monkeypatch.setattr(fa4.Fa4Kernel, "refusal", refusal)
    masked._capped.cache_clear()
    return fa4.Fa4Kernel()
