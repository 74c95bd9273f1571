"""FlexAttention's modifications in global positions, cut in every way, against float64."""

from __future__ import annotations

import time

import pytest
import torch
from helpers_attention import fresh_generator

import quorum_attention as qa
from quorum_attention.kernels.kit import document, from_score_mod, prefix_lm, sliding_window
from quorum_attention.kernels.kit.masks import Ranges, causal
from quorum_attention.kernels.kit.score_mod import _block_mask, block_verdicts

pytest.importorskip("torch.nn.attention.flex_attention")

N, HEADS = 230, 2
IDS = torch.arange(N) * 7 // N
SLOPES = torch.tensor([0.1, 0.02], dtype=torch.float64)


def alibi(score, b, h, q, k):
    return score - SLOPES[h].to(score.dtype) * (q - k).abs()


def softcap(score, b, h, q, k):
    return 2.0 * torch.tanh(score / 2.0)


def local_global(b, h, q, k):
    """Gemma's: one head sees a window, the other everything."""
    return (h == 1) | ((q - k).abs() <= 20)


CASES = {
    "alibi": (alibi, None, True),
    "soft cap": (softcap, None, False),
    "window": (None, sliding_window(40, 0), False),
    "window by a function": (None, lambda b, h, q, k: (q - k <= 30) & (k <= q), False),
    "documents": (None, document(IDS), True),
    "documents, plain": (None, document(IDS), False),
    "prefix": (None, prefix_lm(50), False),
    "local and global heads": (None, local_global, True),
    "soft cap, alibi and window": (
        lambda s, b, h, q, k: alibi(softcap(s, b, h, q, k), b, h, q, k), sliding_window(60, 5),
        False,
    ),
}  # fmt: skip


def reference(query, key, value, score_mod, mask_mod, is_causal):
    q, k = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])[None]
    scores = query @ key.mT * query.shape[-1] ** -0.5
    h = torch.arange(query.shape[1])[:, None, None]
    b = torch.zeros((), dtype=torch.int64)
    if score_mod is not None:
        scores = score_mod(scores, b, h, q, k)
    keep = torch.ones(query.shape[1], *scores.shape[-2:], dtype=torch.bool)
    if mask_mod is not None:
        keep = keep & mask_mod(b, h, q, k)
    if is_causal:
        keep = keep & (q >= k)
    scores = scores.masked_fill(~keep, -torch.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)) @ value


@pytest.mark.parametrize("levels", [(), (7,), (3, 3)])
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, levels) -> None:
    score_mod, mask_mod, is_causal = CASES[name]
    kernel = from_score_mod(score_mod, mask_mod, compiled=False)
    g = fresh_generator()
    q, k, v, grad = (torch.randn(1, HEADS, N, 16, generator=g) for _ in range(4))
    plans = [
        qa.plan(N, heads=HEADS, head_dim=16, dtype=torch.float32, levels=levels, tile=16,
                is_causal=is_causal, kernel=kernel, backward=backward, device="cpu",
                heads_per_group=1)
        for backward in (False, True)
    ]  # fmt: skip
    common = {"is_causal": is_causal, "kernel": kernel, "devices": "cpu"}
    out, lse = qa.attention_with_lse(q, k, v, plan=plans[0], **common)
    grads = qa.attention_backward(grad, q, k, v, out, lse, plan=plans[1], **common)
    right = [t.double().requires_grad_() for t in (q, k, v)]
    expected = reference(*right, score_mod, mask_mod, is_causal)
    expected.backward(grad.double())
    torch.testing.assert_close(out.double(), expected.detach(), atol=3e-6, rtol=1e-5)
    for mine, theirs in zip(grads, right, strict=True):
        torch.testing.assert_close(mine.double(), theirs.grad, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["alibi", "window", "documents", "local and global heads"])
def test_exact_by_check_kernel(name: str) -> None:
    score_mod, mask_mod, is_causal = CASES[name]
    kernel = from_score_mod(score_mod, mask_mod, compiled=False)
    found = qa.check_kernel(
        kernel, n_tokens=N - 1, is_causal=is_causal, device="cpu", levels=((3,), (7,), (3, 3))
    )
    assert found.exact, str(found)


def test_emptied_rectangles_are_never_run() -> None:
    """A window of 1 % of the tokens leaves few of a task's rectangles."""
    n = 8192
    kernel = from_score_mod(None, sliding_window(80, 0), compiled=False)
    q = torch.randn(1, 1, n, 8)
    plan = qa.plan(n, heads=1, head_dim=8, dtype=torch.float32, levels=(31,), is_causal=True,
                   kernel=kernel, device="cpu")  # fmt: skip
    out = qa.attention(q, q, q, is_causal=True, plan=plan, kernel=kernel, devices="cpu")
    assert out.isfinite().all()
    assert kernel.pruned > 50
    assert kernel.run < 120


@pytest.mark.parametrize("mask", [
    causal(), sliding_window(9, 3), prefix_lm(11), document(torch.arange(60) // 13),
    sliding_window(9, 3) & document(torch.arange(60) // 13), prefix_lm(7) | sliding_window(4, 4),
], ids=["causal", "window", "prefix", "document", "and", "or"])  # fmt: skip
def test_verdicts_are_never_wrong(mask) -> None:
    """Empty means no pair, full means all; unsure is allowed."""
    zero = torch.zeros((), dtype=torch.int64)
    sure = 0
    for q0 in range(0, 60, 7):
        for k0 in range(0, 60, 5):
            r = Ranges(q0, min(59, q0 + 8), k0, min(59, k0 + 6))
            q = torch.arange(r.first_query, r.last_query + 1)[:, None]
            k = torch.arange(r.first_key, r.last_key + 1)[None]
            kept = mask(zero, zero, q, k).expand(q.numel(), k.numel())
            verdict = mask.verdict(r)
            assert not (verdict == "empty" and kept.any())
            assert not (verdict == "full" and not kept.all())
            sure += verdict != "mixed"
    assert sure > 10


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", ["window", "documents", "prefix", "none", "a function"])
def test_block_masks(name: str, is_causal: bool) -> None:
    """What FlexAttention is told on CUDA, from verdicts: no kept pair outside, no other in full
    blocks, and little that is neither; across a jump of positions as well."""
    mask = {
        "window": sliding_window(300, 20), "documents": document(torch.arange(4000) // 700),
        "prefix": prefix_lm(500), "none": None, "a function": lambda b, h, q, k: q - k < 250,
    }[name]  # fmt: skip
    queries = torch.cat([torch.arange(100, 1100), torch.arange(2000, 2600)])
    keys = torch.cat([torch.arange(100, 1100), torch.arange(2000, 2350)])
    zero = torch.zeros((), dtype=torch.int64)
    kept = torch.ones(len(queries), len(keys), dtype=torch.bool)
    if mask is not None:
        kept &= mask(zero, zero, queries[:, None], keys[None])
    if is_causal:
        kept &= queries[:, None] >= keys[None]
    found = block_verdicts(mask, is_causal, queries.numpy(), keys.numpy(), 128)
    for i, row in enumerate(found):
        for j, verdict in enumerate(row):
            part = kept[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
            if verdict == 0:
                assert not part.any()
            elif verdict == 1:
                assert part.all()
            elif name != "a function":
                assert part.any()
                assert not part.all()
    listed = _block_mask(lambda b, h, q, k: q >= k, mask, is_causal, queries, keys)
    assert torch.equal(listed.to_dense()[0, 0].bool(), torch.from_numpy(found > 0))


def test_block_masks_of_long_rectangles_are_quick() -> None:
    where = torch.arange(262_144).numpy()
    began = time.perf_counter()
    found = block_verdicts(sliding_window(4096), True, where, where, 128)
    assert time.perf_counter() - began < 5
    assert (found > 0).sum() < 2048 * 34


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="score_mod must be callable"):
        from_score_mod(3)
    with pytest.raises(ValueError, match="left and right must be 0 or more"):
        sliding_window(-1)
    with pytest.raises(ValueError, match="ascending integers"):
        document(torch.tensor([2, 1]))
