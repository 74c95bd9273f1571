"""Dilated attention: its multiplicity in float64, and exactness relative to itself."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import fresh_generator

import quorum_attention as qa
from quorum_attention.kernels import CpuKernel, DenseKernel

MIXTURE = [(32, 1), (64, 2), (128, 4)]


def reference(query, key, value, settings, is_causal):
    """Pairs counted as often as settings keep them."""
    n, m, heads = query.shape[2], key.shape[2], query.shape[1]
    q, k = torch.arange(n)[None, :, None], torch.arange(m)[None, None]
    h = torch.arange(heads)[:, None, None]
    count = torch.zeros(heads, n, m, dtype=torch.float64)
    for w, r in settings:
        count += (q // w == k // w) & (q % r == h % r) & (k % r == h % r)
    if is_causal:
        count = count * (k <= q)
    scores = query @ key.mT * query.shape[-1] ** -0.5 + torch.log(count.clamp_min(1))
    scores = scores.masked_fill(count == 0, -1e30)
    return (torch.softmax(scores, -1) * (count > 0)) @ value


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("settings", [MIXTURE, [(64, 4)], [(1, 1)], [(512, 8), (16, 1)]], ids=str)
@pytest.mark.parametrize("levels", [(), (7,), (3, 3)])
def test_against_float64(settings, levels, is_causal) -> None:
    g, n, heads = fresh_generator(), 300, 5
    kernel = qa.LongNetKernel(settings)
    q, k, v, grad = (torch.randn(1, heads, n, 8, generator=g) for _ in range(4))
    plans = [
        qa.plan(n, heads=heads, head_dim=8, dtype=torch.float32, levels=levels, tile=16,
                is_causal=is_causal, kernel=kernel, backward=backward, device="cpu",
                heads_per_group=2)
        for backward in (False, True)
    ]  # fmt: skip
    common = {"is_causal": is_causal, "kernel": kernel, "devices": "cpu"}
    out, lse = qa.attention_with_lse(q, k, v, plan=plans[0], **common)
    grads = qa.attention_backward(grad, q, k, v, out, lse, plan=plans[1], **common)
    right = [t.double().requires_grad_() for t in (q, k, v)]
    expected = reference(*right, settings, is_causal)
    expected.backward(grad.double())
    torch.testing.assert_close(out.double(), expected.detach(), atol=3e-6, rtol=1e-5)
    for mine, theirs in zip(grads, right, strict=True):
        torch.testing.assert_close(mine.double(), theirs.grad, atol=2e-5, rtol=1e-5)


def test_exact_by_check_kernel() -> None:
    found = qa.check_kernel(qa.LongNetKernel(MIXTURE), heads=5, dtype=torch.float32, device="cpu",
                            other_sizes=False)  # fmt: skip
    assert found.exact, str(found)


def test_full_precision_inside() -> None:
    """With 16-bit tokens a cut call then differs from the uncut one by its final rounding alone."""
    kernel = qa.LongNetKernel(MIXTURE, full_precision=True)
    found = qa.check_kernel(kernel, heads=5, dtype=torch.bfloat16, device="cpu")
    assert found.exact
    rounded = qa.check_kernel(qa.LongNetKernel(MIXTURE), heads=5, dtype=torch.bfloat16,
                              device="cpu")  # fmt: skip
    assert rounded.exact, str(rounded)
    for name in ("out", "grad_key", "grad_value"):
        worst, other = (max(c.errors[name] for c in f.cases) for f in (found, rounded))
        assert worst < other, name


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="positive multiple of its dilation"):
        qa.LongNetKernel([(30, 4)])
    with pytest.raises(ValueError, match="at least one"):
        qa.LongNetKernel([])
    with pytest.raises(TypeError, match="inner must be a RectangleKernel"):
        qa.LongNetKernel(MIXTURE, inner="cpu")
    with pytest.raises(TypeError, match="inner must be a RectangleKernel"):
        qa.LongNetKernel(MIXTURE, inner=DenseKernel())
    for operator in (CpuKernel(), qa.NativeKernel()):
        qa.LongNetKernel(MIXTURE, inner=operator)
    q, k = torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8)
    with pytest.raises(NotImplementedError, match="as many key heads"):
        qa.attention(q, k, k, enable_gqa=True, kernel=qa.LongNetKernel(MIXTURE), devices="cpu")
