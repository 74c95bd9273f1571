"""FlashAttention-4 in tests: skipped by name where it is not, and a stand-in for its
functions."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import quorum_attention as qa
from helpers.attention import Inputs, assert_close, exact, softmax
from quorum_attention import Mask
from quorum_attention.kernels import CallShape, fa4
from quorum_attention.kernels.fa4 import version
from quorum_attention.kernels.masked import choose

FA4 = pytest.param(
    "fa4",
    marks=pytest.mark.skipif(version() is None, reason="flash-attn-4 is not installed"),
)


def scores_of(query, key, scale, causal, left, right, softcap):  # type: ignore[no-untyped-def]
    """Of (b, h, n, d) in float64, as flash-attn-4 documents them: diagonals are counted
    from the last query and key."""
    scores = scale * (
        query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    )
    n, m = scores.shape[-2:]
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    apart = torch.arange(m)[None] - torch.arange(n)[:, None] - (m - n)
    left, right = n + m if left is None else left, n + m if right is None else right
    kept = (apart >= -left) & (apart <= (min(right, 0) if causal else right))
    return scores.masked_fill(~kept, -math.inf)


def double(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """(b, n, h, d) as (b, h, n, d)."""
    return [t.detach().transpose(1, 2).double() for t in tensors]


def forward(
    q, k, v, *, softmax_scale, return_lse, out, causal=False, window_size_left=None,
    window_size_right=None, softcap=None,
):  # fmt: skip
    """(b, n, h, d) in and out, lse (b, h, n) in fp32; a row that is not finite has lse
    -inf."""
    assert return_lse
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert out.dtype == q.dtype
    assert all(stride % 8 == 0 for stride in out.stride()[:3])
    query, key, value = double(q, k, v)
    how = softmax_scale, causal, window_size_left, window_size_right, softcap
    shared = query.shape[1] // key.shape[1]
    exact, lse = softmax(
        scores_of(query, key, *how), value.repeat_interleave(shared, 1)
    )
    lse = lse.nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)
    out.copy_(exact.transpose(1, 2))
    return out, lse.float(), None, None, None


def backward(
    q, k, v, out, dout, lse, *, softmax_scale, deterministic, causal=False,
    window_size_left=None, window_size_right=None, softcap=None, dlse=None,
):  # fmt: skip
    """Gradients (b, n, h, d), for an lse of whole rows."""
    assert lse.is_contiguous()
    assert out.dtype == dout.dtype == q.dtype
    query, key, value, o, do = double(q, k, v, out, dout)
    how = softmax_scale, causal, window_size_left, window_size_right, softcap
    with torch.enable_grad():
        leaves = query.requires_grad_(), key.requires_grad_()
        scores = scores_of(*leaves, *how)
    shared = query.shape[1] // key.shape[1]
    # A row without keys has an lse of -inf, and no pair.
    lse = lse.double().masked_fill(lse == -math.inf, 0.0)
    p = torch.exp(scores.detach() - lse.unsqueeze(-1))
    dp = do @ value.repeat_interleave(shared, 1).mT
    delta = (do * o).sum(-1, keepdim=True)
    if dlse is not None:
        assert dlse.is_contiguous()
        delta = delta - dlse.double().unsqueeze(-1)
    # The tensor cores read it in 16 bits.
    grad_scores = (p * (dp - delta)).to(q.dtype).double()
    grads = torch.autograd.grad(scores, leaves, grad_scores)
    found = *grads, (p.mT @ do).unflatten(1, (-1, shared)).sum(2)
    return tuple(t.to(q.dtype).transpose(1, 2).contiguous() for t in found)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> fa4.Fa4Kernel:
    """The kernel, with these functions, on a CPU."""
    if torch.cuda.is_available():
        pytest.skip("tests/gpu has the kernel itself")

    def refusal(self: fa4.Fa4Kernel, shape: CallShape) -> str | None:
        return "it takes no attention mask" if shape.bias is not None else None

    monkeypatch.setattr(fa4, "_functions", lambda: (forward, backward))
    monkeypatch.setattr(fa4, "_on_device", lambda device: nullcontext())
    monkeypatch.setattr(fa4.Fa4Kernel, "refusal", refusal)
    choose._with_softcap.cache_clear()
    return fa4.Fa4Kernel()


def check_overflow_of_scores(
    kernel: str | fa4.Fa4Kernel,
    device: str = "cpu",
    *,
    kv_heads: int,
    softcap: float | None,
) -> None:
    """An uncut fp16 backward, with the dS of one row beyond fp16: gradients of every
    call are those of float64."""
    n, heads = 256, 2
    query, key, value, grad_out = (
        torch.randn(1, h, n, 32) for h in (heads, kv_heads, kv_heads, heads)
    )
    # Probabilities are even. dS is about 5e5, and sums of dS times key or query fit.
    row = int(torch.randint(n // 2, n, ()))
    grad_out[0, 1, row] *= 2.0**14
    tensors = (query / 64, key / 4096, value * 512, grad_out.clamp(-6e4, 6e4))
    made = Inputs(*(tensor.half() for tensor in tensors))
    right = exact(made, is_causal=True, softcap=softcap, gradients=True)
    call = {
        "attn_mask": None if softcap is None else Mask(softcap=softcap),
        "is_causal": True,
        "enable_gqa": True,
        "kernel": kernel,
    }

    def assert_right(**more: Any) -> None:
        leaves = [tensor.to(device).requires_grad_() for tensor in made.three]
        out = qa.attention(*leaves, **call, **more)
        grads = torch.autograd.grad(out, leaves, made.grad_out.to(device))
        assert_close(grads, right.grads, 1e-2)

    for _ in range(3):  # tried out, decided, cached
        assert_right()
    report = qa.Report()
    assert_right(report=report)
    assert report.backward is not None
    assert report.backward.repeated_units == 1
