"""FlexAttention's score modifications and masks against float64: by the reference, and
as whole tasks with an eager stand-in for the compiled call, which takes a block mask as
CUDA kernels do."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from helpers.attention import softmax
from helpers.score_mods import cases, check, random, reference, run

import quorum_attention as qa
from quorum_attention.decomposition import Decomposition, Pairs
from quorum_attention.decomposition.pairs import kept_share
from quorum_attention.execution.bias import no_bias
from quorum_attention.kernels import CallShape, Extent, TaskTensors
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.kit import (
    document,
    flex,
    from_score_mod,
    prefix_lm,
    sliding_window,
    word_layout,
)
from quorum_attention.kernels.kit.flex import FlexKernel
from quorum_attention.kernels.kit.word_layout import (
    assume_stride_multiple,
    head_stride_sixteenth,
)
from quorum_attention.kernels.masked.block_table import sides
from quorum_attention.kernels.masked.pair_functions import over_pairs

pytest.importorskip("torch.nn.attention.flex_attention")

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
    """(b, h, nq, nk): pairs of full blocks, and of mixed ones those that the mask
    keeps."""
    nq, nk = shape[2:]
    columns = -(-nk // 128)
    at = [torch.arange(size) for size in shape]
    wide = [
        listed(c, i, columns)
        .repeat_interleave(128, -2)
        .repeat_interleave(128, -1)[..., :nq, :nk]
        for c, i in (
            (counts, block_mask.kv_indices),
            (full_counts, block_mask.full_kv_indices),
        )
    ]
    mixed, full = wide
    assert not (mixed & full).any()
    return full | (mixed & over_pairs(block_mask.mask_mod)(*at))


class _Listed(torch.autograd.Function):
    """Saves what compiled FlexAttention saves."""

    @staticmethod
    def forward(
        ctx, query, key, value, counts, full_counts, block_mask, score_mod, scale
    ):
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
        p = torch.exp(
            scores.detach() - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)
        )
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
        assert word_layout.word_layout(tensor) is not None
        assume_stride_multiple(tensor, head_stride_sixteenth(tensor))
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


N, HEADS = 450, 2
COMPILED_FLEX = flex.compiled_flex
CASES = cases(N)
KERNELS = {"tasks": partial(EagerFlexKernel, name="flex"),
           "tiles": partial(from_score_mod, compiled=False)}  # fmt: skip


@pytest.fixture(autouse=True)
def eager(monkeypatch) -> Iterator[None]:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(flex, "compiled_flex", lambda in_blocks: eager_flex)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def kernel_of(score_mod, mask_mod) -> EagerFlexKernel:  # type: ignore[no-untyped-def]
    return EagerFlexKernel(score_mod, mask_mod, "flex")


def check_case(kernel: str, case, tensors, **plan) -> None:  # type: ignore[no-untyped-def]
    made = KERNELS[kernel](*case[:2])
    check(made, tensors, lambda *three: reference(*three, case), case[2], **plan)


PLANS = [
    ("tasks", (), 128, None), ("tasks", (7,), 16, True), ("tiles", (3, 3), 16, None),
    ("tasks", (3,), 128, True), ("tasks", (7,), 16, False), ("tiles", (), 128, None),
    ("tasks", (3, 3), 16, None), ("tasks", (3,), 128, False), ("tiles", (7,), 16, False),
]  # fmt: skip


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("name", "plan"),
    [(name, plan) for i, name in enumerate(CASES) for plan in PLANS[i % 3 :: 3]],
    ids=str,
)
def test_against_float64(name: str, plan) -> None:  # type: ignore[no-untyped-def]
    """Edges on the borders of blocks and within, fewer key heads."""
    kernel, levels, tile, over_inputs = plan
    tensors = random(N, kv_heads=1 if tile == 128 else HEADS)
    check_case(
        kernel, CASES[name], tensors, levels=levels, tile=tile, over_inputs=over_inputs
    )


def late(b, h, q, k):  # type: ignore[no-untyped-def]
    """Rows and keys beyond what it keeps at all, other ones in each head and batch
    entry."""
    return (q >= 290 + 20 * h) & (k >= 260 + b)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("case", "sizes", "plan"),
    [
        (
            (None, sliding_window(90), True),
            {"n_keys": 330},
            {"levels": (7,), "tile": 16},
        ),
        (
            (None, sliding_window(90), True),
            {"n_keys": 600},
            {"levels": (7,), "tile": 16},
        ),
        ((None, late, False), {"batch": 2}, {}),
        (
            (lambda s, b, h, q, k: s * (1 + h), None, True),
            {},
            {"levels": (), "heads_per_group": 1},
        ),
    ],
    ids=["fewer keys", "more keys", "a whole batch", "head groups"],
)
def test_other_calls(kernel: str, case, sizes, plan) -> None:  # type: ignore[no-untyped-def]
    check_case(kernel, case, random(N, **sizes), **plan)


@pytest.mark.parametrize(
    "case", [(lambda s, b, h, q, k: s * (1 + b % 3), None, True), (None, late, False)]
)
def test_more_entries_than_a_grid_has_blocks(monkeypatch, case) -> None:  # type: ignore[no-untyped-def]
    """Some go into each call; functions get their numbers in the whole call."""
    monkeypatch.setattr(FlexKernel, "entries_limit", 3)
    check_case("tasks", case, random(N, batch=7))
    heads = CallShape("cuda", torch.float16, 70_000, 70_000, 64, 64)
    assert "takes 65535 heads at most" in str(
        FlexKernel(None, None, "flex").refusal(heads)
    )


@pytest.mark.parametrize("over_inputs", [True, False])
def test_a_head_that_keeps_nothing(over_inputs: bool) -> None:
    """In a head group of its own."""

    def near(b, h, q, k):  # type: ignore[no-untyped-def]
        return (h == 1) & (q - k < 30)

    how = {
        "levels": (3,),
        "tile": 128,
        "heads_per_group": 1,
        "over_inputs": over_inputs,
    }
    out, lse, grads = run(kernel_of(None, near), random(300), True, **how)
    assert bool((lse[:, 0] == -torch.inf).all())
    for found in (out, *grads):
        assert not found[:, 0].any()
        assert found[:, 1].any()


REACH = torch.tensor([200, 4000])
MASKS = {
    "none": None,
    "window": sliding_window(300, 20),
    "documents": document(torch.arange(4000) // 700),
    "prefix": prefix_lm(500),
    "a function": lambda b, h, q, k: q - k < 250,
    "a function of heads": lambda b, h, q, k: (q - k).abs() <= REACH[h],
    "a function of numbers": lambda b, h, q, k: torch.stack([q - k, k - q]).max() < 150,
    "nothing": lambda b, h, q, k: q < 0,
}


CUTS = [(48, (), True), (128, (7,), True), (48, (3, 3), False),
        (128, (), False), (48, (7,), False), (128, (3, 3), True)]  # fmt: skip


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("name", "tile", "levels", "is_causal"),
    [(name, *cut) for i, name in enumerate(MASKS) for cut in CUTS[i % 2 :: 2]],
)
def test_block_lists(name: str, tile: int, levels, is_causal: bool) -> None:  # type: ignore[no-untyped-def]
    """Listed pairs are those of the task's rectangles that the mask keeps, none
    twice."""
    mask, kernel = MASKS[name], kernel_of(None, MASKS[name])
    for task in Decomposition(1900, levels, "aligned", tile).tasks():
        rectangles = task.rectangles(is_causal)
        tokens = torch.cat([torch.arange(a, b) for a, b, _ in task.runs])
        size = len(tokens)
        wanted = torch.zeros(HEADS, size, size, dtype=torch.bool)
        for r in rectangles:
            wanted[:, r.query_start : r.query_stop, r.key_start : r.key_stop] = True
        if is_causal:
            wanted &= tokens[:, None] >= tokens
        if name == "a function of numbers":
            wanted &= (tokens[:, None] - tokens).abs() < 150
        elif mask is not None:
            wanted &= mask(
                0, torch.arange(HEADS)[:, None, None], tokens[:, None], tokens
            )
        tensors = torch.empty(1, HEADS, size, 1)
        given = TaskTensors(
            task,
            rectangles,
            tensors,
            tensors,
            tensors,
            1.0,
            is_causal,
            no_bias,
            size,
            size,
        )
        found = torch.zeros_like(wanted)
        for region, some in flex.regions(given):
            launch = kernel._flex_call(given, region, some)
            if launch is None:
                continue
            block_mask = launch.block_mask()
            check_lists(block_mask)
            longest = kernel._longest_list(-(-size // 128) + 1)
            for lists in (block_mask.kv_indices, block_mask.q_indices):
                assert lists.shape[-1] <= longest
            counts = block_mask.kv_num_blocks, block_mask.full_kv_num_blocks
            shape = (1, HEADS, region.n_queries, region.n_keys)
            rows, columns = (slice(*side) for side in sides(region))
            found[:, rows, columns] |= kept_pairs(block_mask, *counts, shape)[0]
            if name in ("window", "documents", "a function"):
                # Little is mixed that need not be: no more than the border.
                assert block_mask.kv_num_blocks.max() <= 12
        assert torch.equal(found, wanted)


def test_workspace_of_windows_is_linear() -> None:
    n = 1 << 20
    shape = CallShape("cuda", torch.float16, 1, 1, 64, 64, True)
    windowed, dense = (
        kernel_of(None, mask).forward_workspace_bytes(shape, Extent(1, 1, 1, n, n, n))
        for mask in (
            sliding_window(4096) & document(torch.arange(n) // 20_000),
            prefix_lm(50),
        )
    )
    assert dense > 16 * (n // 128) ** 2
    assert windowed < 600 * n


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_mask_may_change_between_calls(kernel: str) -> None:
    """Neither what it emptied nor what it filled is remembered."""
    edge = torch.tensor(400)

    def by_tensor(b, h, q, k):  # type: ignore[no-untyped-def]
        return (q - k).abs() <= edge

    tensors, made = random(N), KERNELS[kernel](None, by_tensor)
    for width in (400, 3, 300):
        edge.fill_(width)
        case = (None, by_tensor, False)
        check(
            made,
            tensors,
            lambda *t, c=case: reference(*t, c),
            False,
            levels=(3,),
            tile=16,
        )


def test_beyond_torchs_limit_of_compilations_it_begins_anew(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from torch._dynamo.exc import FailOnRecompileLimitHit

    limit = FailOnRecompileLimitHit("too many")
    compiled = [Mock(side_effect=[n, n, limit]) for n in range(3)]
    monkeypatch.setattr(torch, "compile", Mock(side_effect=compiled))
    call = COMPILED_FLEX(in_blocks=True)
    assert [call() for _ in range(5)] == [0, 0, 1, 1, 2]
    assert torch.compile.call_args.kwargs == {"fullgraph": True, "dynamic": True}


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
    share = kept_share(Pairs(n, n, is_causal, mask.verdict))
    assert abs(share - float(kept.sum() / there.sum())) < 0.03


@pytest.mark.slow
def test_a_budget_that_is_too_small_names_the_smallest_of_trimmed_plans() -> None:
    sizes = {"heads": 1, "head_dim": 64, "is_causal": True, "device": "cuda",
             "kernel": from_score_mod(None, sliding_window(512), compiled=True)}  # fmt: skip
    with pytest.raises(qa.BudgetError, match="smallest that works") as caught:
        qa.plan(1 << 16, budget="1MiB", **sizes)
    smallest = caught.value.smallest_bytes
    assert qa.plan(1 << 16, budget=smallest, **sizes).peak_bytes <= smallest
    for levels in ((31, 31), (91,)):
        assert qa.plan(1 << 16, levels=levels, **sizes).peak_bytes >= smallest


class Slopes(torch.nn.Module):
    """A score modification with parameters, as a model would hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.tensor([0.1, 0.2]), requires_grad=False)

    def forward(self, score, b, h, q, k):  # type: ignore[no-untyped-def]
        return score - self.slopes[h] * (q - k).abs()


def test_a_copy_of_a_model_has_a_kernel_of_its_own() -> None:
    model = torch.nn.Module()
    model.slopes = Slopes()
    model.kernel = from_score_mod(model.slopes, sliding_window(5), compiled=False)
    copied = copy.deepcopy(model)
    assert copied.kernel.score_mod is copied.slopes
    assert copied.kernel is not model.kernel
    query = torch.randn(1, 2, 20, 4, dtype=torch.float64)
    first = qa.attention(query, query, query, kernel=model.kernel)
    copied.slopes.slopes.mul_(3)
    assert torch.equal(qa.attention(query, query, query, kernel=model.kernel), first)
    assert not torch.allclose(
        qa.attention(query, query, query, kernel=copied.kernel), first
    )


@pytest.mark.parametrize(
    ("mask_mod", "got"),
    [
        (lambda b, h, q, k: (q - k) % 4, "int64"),
        (lambda b, h, q, k: True, "bool"),
        (lambda b, h, q, k: (q >= k)[None], r"bool of shape \(1,\)"),
    ],
)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_mask_of_numbers_is_refused(mask_mod, got: str, depth: int) -> None:  # type: ignore[no-untyped-def]
    """2 is not True, joined bit by bit with what a task keeps."""
    q, k, v, _ = random(N)
    for options in (
        {"attn_mask": qa.Mask(keeps=mask_mod)},
        {"kernel": from_score_mod(None, mask_mod, compiled=False)},
    ):
        with pytest.raises(
            TypeError, match=rf"must return a tensor of torch\.bool .* got .*{got}"
        ):
            qa.attention(q, k, v, depth=depth, **options)


@pytest.mark.parametrize(
    ("score_mod", "got"),
    [
        (lambda s, b, h, q, k: q >= k, "torch.bool"),
        (lambda s, b, h, q, k: 2.0 * s[None], r"float\d\d of shape \(1,\)"),
        (lambda s, b, h, q, k: s * (1 + 2j), "complex"),
        (lambda s, b, h, q, k: 1.0, "float"),
    ],
)
@pytest.mark.parametrize("depth", [0, 1])
def test_scores_that_are_no_numbers_are_refused(
    score_mod, got: str, depth: int
) -> None:  # type: ignore[no-untyped-def]
    """A rule given as a score would be scores of 0 and 1."""
    q, k, v, _ = random(N)
    kernel = from_score_mod(score_mod, compiled=False)
    with pytest.raises(TypeError, match=rf"score function .* got .*{got}"):
        qa.attention(q, k, v, kernel=kernel, depth=depth)


def test_compiled_calls_refuse_what_torchs_have_not() -> None:
    kernel = from_score_mod(None, sliding_window(5), compiled=True)
    for dtype, words in ((torch.float64, "no float64"), (torch.float32, "on the CPU")):
        x = torch.randn(1, 1, 9, 4, dtype=dtype)
        with pytest.raises(NotImplementedError, match=words):
            qa.attention(x, x, x, kernel=kernel)


@pytest.mark.parametrize("saves_else", [False, True])
def test_a_backward_takes_the_whole_rows_results(monkeypatch, saves_else: bool) -> None:  # type: ignore[no-untyped-def]
    """The first gradients of a kind are found both ways; from then on no forward runs
    again, but where torch saves something else."""
    kernel, tensors = kernel_of(None, sliding_window(40)), random(N)
    if saves_else:
        monkeypatch.setitem(globals(), "LOG2_E", 1.0)
        with pytest.warns(RuntimeWarning, match="takes no results of another forward"):
            run(kernel, tensors, True, levels=(3,))
    else:
        run(kernel, tensors, True, levels=(3,))
    again: list[int] = []
    original = flex.gradients_by_autograd
    monkeypatch.setattr(
        flex,
        "gradients_by_autograd",
        lambda *args: [again.append(1), original(*args)][1],
    )
    *_, grads = run(kernel, tensors, True, levels=(3,))
    assert bool(again) == saves_else
    with torch.inference_mode():
        *_, others = run(kernel, [t.clone() for t in tensors], True, levels=(3,))
    for mine, theirs in zip(grads, others, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    "where", ["whole", "some rows", "some entries", "tokens first", "columns"]
)
def test_what_lies_in_words_is_not_copied(where: str) -> None:
    whole = torch.arange(2 * 4 * 100 * 32).view(2, 4, 100, 32).half()
    tensor = {
        "whole": whole, "some rows": whole[:, :, 16:80], "some entries": whole[:1, 1:3, :50],
        "tokens first": whole.transpose(1, 2).contiguous().transpose(1, 2),
        "columns": whole[..., 1:],
    }[where]  # fmt: skip
    found = word_layout.as_word_layout(tensor)
    assert (found.data_ptr() == tensor.data_ptr()) == (where != "columns")
    assert found.storage_offset() == 0
    assert torch.equal(found, tensor)
    assert (head_stride_sixteenth(found) is not None) == where.startswith("some")
