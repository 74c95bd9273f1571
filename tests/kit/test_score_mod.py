"""FlexAttention's modifications in global positions, a rectangle at a time, against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers_attention import fresh_generator
from helpers_score_mods import cases, reference, within

import quorum_attention as qa
from quorum_attention.decomposition import EMPTY, FULL, PARTIAL, Pairs, Ranges, Verdict
from quorum_attention.decomposition.pairs import kept_share
from quorum_attention.kernels.kit import (
    document,
    from_score_mod,
    prefix_lm,
    sliding_window,
)
from quorum_attention.kernels.kit.masks import causal
from quorum_attention.kernels.masked import functions

pytest.importorskip("torch.nn.attention.flex_attention")

N, HEADS = 230, 2
CASES = cases(N)


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
    expected, _ = reference(*right, CASES[name])
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


def pairs_run(mask_mod) -> tuple[int, int]:  # type: ignore[no-untyped-def]
    """How many pairs the rectangles of tasks have, and how many those that are run."""
    n, counts = 8192, [0, 0]
    kernel = from_score_mod(None, mask_mod, compiled=False)
    by_parts = kernel._by_parts[True]
    parts_of = by_parts._parts_of

    def counted(task, *given):  # type: ignore[no-untyped-def]
        found = parts_of(task, *given)
        for index, rectangles in enumerate((task.rectangles, sum(found, ()))):
            counts[index] += sum(r.pairs for r in rectangles)
        return found

    by_parts._parts_of = counted  # type: ignore[method-assign]
    q = torch.randn(1, 2, n, 8)
    plan = qa.plan(n, heads=2, head_dim=8, dtype=torch.float32, levels=(31,), is_causal=True,
                   kernel=kernel, device="cpu")  # fmt: skip
    out = qa.attention(q, q, q, is_causal=True, plan=plan, kernel=kernel, devices="cpu")
    assert out.isfinite().all()
    return counts[0], counts[1]


def test_emptied_rectangles_are_never_run() -> None:
    """Under a window tasks hold no tokens for them; with the first tokens for everyone those with
    the first chunk do, and leave them out."""
    n = 8192
    assert pairs_run(sliding_window(80, 0))[1] < 0.1 * n * n
    every, run = pairs_run(sliding_window(80, 0) | within(0, n, 0, 64))
    assert run < 0.5 * every


def test_functions_of_heads_empty_rectangles_too() -> None:
    every, run = pairs_run(lambda b, h, q, k: (q - k).abs() <= 40 * (h + 1))
    assert run < 0.1 * every


@pytest.mark.parametrize("mask", [
    causal(), sliding_window(9, 3), prefix_lm(11), document(torch.arange(60) // 13),
    sliding_window(9, 3) & document(torch.arange(60) // 13), prefix_lm(7) | sliding_window(4, 4),
], ids=["causal", "window", "prefix", "document", "and", "or"])  # fmt: skip
def test_verdicts_are_never_wrong(mask) -> None:
    """Masked means no pair, clear means all; unsure is allowed."""
    zero = torch.zeros((), dtype=torch.int64)
    sure = 0
    for q0 in range(0, 60, 7):
        for k0 in range(0, 60, 5):
            r = Ranges.of(q0, min(60, q0 + 9), k0, min(60, k0 + 7))
            q = torch.arange(*r.queries)[:, None]
            k = torch.arange(*r.keys)[None]
            kept = mask(zero, zero, q, k).expand(q.numel(), k.numel())
            verdict = mask.geometry.verdict(r)
            assert not (verdict is EMPTY and kept.any())
            assert not (verdict is FULL and not kept.all())
            sure += verdict is not PARTIAL
    assert sure > 10


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "mask", [sliding_window(700), sliding_window(100, 300), document(torch.arange(3000) // 450),
             prefix_lm(800)],
    ids=["window", "both sides", "documents", "prefix"],
)  # fmt: skip
def test_what_a_mask_leaves_is_predicted(mask, is_causal: bool) -> None:  # type: ignore[no-untyped-def]
    n = 3000
    q, k = torch.arange(n)[:, None], torch.arange(n)[None]
    there = (q >= k) if is_causal else torch.ones(n, n, dtype=torch.bool)
    kept = mask(0, 0, q, k) & there
    share = kept_share(Pairs(n, n, is_causal, mask.geometry.verdict))
    assert abs(share - float(kept.sum() / there.sum())) < 0.03
    assert kept_share(Pairs(n, n, True, causal().geometry.verdict)) > 0.97


def test_a_budget_that_is_too_small_names_the_smallest_of_trimmed_plans() -> None:
    sizes = {"heads": 1, "head_dim": 64, "is_causal": True, "device": "cuda",
             "kernel": from_score_mod(None, sliding_window(512), compiled=True)}  # fmt: skip
    with pytest.raises(qa.BudgetError, match="smallest that works") as caught:
        qa.plan(1 << 18, budget="1MiB", **sizes)
    smallest = caught.value.smallest_bytes
    assert qa.plan(1 << 18, budget=smallest, **sizes).peak_bytes <= smallest
    for levels in ((57, 57), (31, 31), (91,)):
        assert qa.plan(1 << 18, levels=levels, **sizes).peak_bytes >= smallest


def test_what_is_never_sure_is_soon_given_up() -> None:
    n, asked = 1 << 18, []

    def verdict(block: Ranges) -> Verdict:
        asked.append(block)
        return PARTIAL

    assert 0.45 < kept_share(Pairs(n, n, True, verdict)) < 0.55
    assert len(asked) < 200_000


class Slopes(torch.nn.Module):
    """A score modification with parameters, as a model would hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.tensor([0.1, 0.2]), requires_grad=False)

    def forward(self, score, b, h, q, k):  # type: ignore[no-untyped-def]
        return score - self.slopes[h] * (q - k).abs()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_copy_of_a_model_has_a_kernel_of_its_own(compiled: bool) -> None:
    model = torch.nn.Module()
    model.slopes = Slopes()
    model.kernel = from_score_mod(model.slopes, sliding_window(5), compiled=compiled)
    copied = copy.deepcopy(model)
    assert copied.kernel.score_mod is copied.slopes
    assert copied.kernel is not model.kernel
    assert copied.kernel.name == model.kernel.name
    if compiled:
        return
    query = torch.randn(1, 2, 20, 4, dtype=torch.float64)
    first = qa.attention(query, query, query, kernel=model.kernel)
    copied.slopes.slopes.mul_(3)
    assert torch.equal(qa.attention(query, query, query, kernel=model.kernel), first)
    assert not torch.allclose(qa.attention(query, query, query, kernel=copied.kernel), first)


@pytest.mark.parametrize(
    ("mask_mod", "got"),
    [(lambda b, h, q, k: (q - k) % 4, "int64"), (lambda b, h, q, k: True, "bool")],
)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_mask_of_numbers_is_refused(mask_mod, got: str, depth: int) -> None:
    """2 is not True, joined bit by bit with what a task keeps."""
    q, k, v = (torch.randn(1, 2, N, 16) for _ in range(3))
    for options in (
        {"attn_mask": qa.Mask(keeps=mask_mod)},
        {"kernel": from_score_mod(None, mask_mod, compiled=False)},
    ):
        with pytest.raises(TypeError, match=rf"must return a tensor of torch\.bool .* got .*{got}"):
            qa.attention(q, k, v, depth=depth, **options)


def test_slopes_of_heads() -> None:
    slopes = torch.rand(4)
    cpu, mask = torch.device("cpu"), lambda b, h, q, k: slopes[h] * q >= k
    assert functions.depends_on_batch_head(mask, cpu) == (False, True)
    x = torch.randn(1, 4, 40, 8)
    biased = qa.from_score_mod(lambda s, b, h, i, j: s - slopes[h] * (i - j).abs())
    far = (torch.arange(40)[:, None] - torch.arange(40)).abs()
    exact = (x @ x.mT / 8**0.5 - slopes[:, None, None] * far).softmax(-1) @ x
    torch.testing.assert_close(qa.attention(x, x, x, kernel=biased, depth=1), exact)
