"""The whole-task FlexAttention kernel, with an eager stand-in for the compiled call."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from helpers_attention import fresh_generator
from helpers_flex import EagerFlexKernel, check_lists, eager_flex, kept_pairs
from helpers_score_mods import cases, local_global, reference

import quorum_attention as qa
from quorum_attention.decomposition import Decomposition, Rectangle, Span, Task
from quorum_attention.execution.call import no_bias
from quorum_attention.kernels import CallShape, Extent, TaskTensors
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.kit import (
    document,
    flex,
    prefix_lm,
    sliding_window,
)
from quorum_attention.kernels.masked.block_table import (
    PAIR_BYTES,
    BlockEvaluator,
    TaskPairs,
    block_lists,
    evaluated_bytes,
    listed_blocks,
)
from quorum_attention.kernels.masked.geometry import geometry_of

pytest.importorskip("torch.nn.attention.flex_attention")

N, HEADS = 450, 2
COMPILED_FLEX = flex.compiled_flex
CASES = cases(N)


@pytest.fixture(autouse=True)
def eager(monkeypatch) -> Iterator[None]:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(flex, "compiled_flex", lambda in_blocks: eager_flex)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def kernel_of(score_mod, mask_mod) -> EagerFlexKernel:  # type: ignore[no-untyped-def]
    return EagerFlexKernel(score_mod, mask_mod, "flex")


def lists_of(pairs, mask):  # type: ignore[no-untyped-def]
    """Of a block mask, or none."""
    return block_lists(pairs, *listed_blocks(geometry_of(mask), None, pairs, 1 << 20, by_lane=True))  # type: ignore[arg-type]


def run(kernel, tensors, is_causal, **plan):  # type: ignore[no-untyped-def]
    """(out, lse, gradients)."""
    q, k, v, grad = tensors
    plans = [
        qa.plan(q.shape[2], heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[3],
                n_keys=k.shape[2], dtype=q.dtype, is_causal=is_causal, kernel=kernel,
                backward=backward, device="cpu", **plan)
        for backward in (False, True)
    ]  # fmt: skip
    common = {
        "is_causal": is_causal, "kernel": kernel, "devices": "cpu",
        "enable_gqa": q.shape[1] != k.shape[1],
    }  # fmt: skip
    out, lse = qa.attention_with_lse(q, k, v, plan=plans[0], **common)
    return out, lse, qa.attention_backward(grad, q, k, v, out, lse, plan=plans[1], **common)


def random(n: int, kv_heads: int = HEADS, n_keys: int | None = None) -> list[torch.Tensor]:
    g = fresh_generator()
    return [
        torch.randn(1, heads, rows, 16, generator=g)
        for heads, rows in ((HEADS, n), (kv_heads, n_keys or n), (kv_heads, n_keys or n),
                            (HEADS, n))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("levels", "tile", "over_inputs"),
    [
        ((), 128, None),
        ((7,), 16, True),
        ((7,), 16, False),
        ((3,), 128, True),
        ((3,), 128, False),
        ((3, 3), 16, None),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, levels, tile: int, over_inputs: bool | None) -> None:
    """Edges on the borders of blocks and within, fewer key heads."""
    tensors = random(N, kv_heads=1 if tile == 128 else HEADS)
    check(tensors, CASES[name], levels=levels, tile=tile, over_inputs=over_inputs)


def check(tensors, case, **plan) -> None:  # type: ignore[no-untyped-def]
    out, lse, grads = run(kernel_of(*case[:2]), tensors, case[2], **plan)
    right = [t.double().requires_grad_() for t in tensors[:3]]
    expected, expected_lse = reference(*right, case)
    expected.backward(tensors[3].double())
    torch.testing.assert_close(out.double(), expected.detach(), atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse.detach(), atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(grads, right, strict=True):
        torch.testing.assert_close(mine.double(), theirs.grad, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("n_keys", [330, 600])
def test_other_numbers_of_keys(n_keys: int) -> None:
    case = (None, sliding_window(90), True)
    check(random(N, n_keys=n_keys), case, levels=(7,), tile=16)


def test_a_monolithic_call_on_the_inputs_as_they_lie(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Two entries of a batch, and rows and keys beyond what the mask lists at all."""

    def late(b, h, q, k):  # type: ignore[no-untyped-def]
        return (q >= 290 + 20 * h) & (k >= 260 + b)

    kernel = kernel_of(None, late)
    called = []
    whole = kernel.whole_forward
    monkeypatch.setattr(kernel, "whole_forward", lambda *a: called.append(1) or whole(*a))
    g = fresh_generator()
    tensors = [torch.randn(2, HEADS, N, 16, generator=g) for _ in range(4)]
    q, k, v, grad = tensors
    common = {"kernel": kernel, "devices": "cpu"}
    out, lse = qa.attention_with_lse(q, k, v, **common)
    grads = qa.attention_backward(grad, q, k, v, out, lse, **common)
    assert called
    for entry in range(2):
        right = [t[entry : entry + 1].double().requires_grad_() for t in tensors[:3]]
        case = (None, lambda b, h, q, k, entry=entry: late(entry, h, q, k), False)
        expected, expected_lse = reference(*right, case)
        expected.backward(grad[entry : entry + 1].double())
        torch.testing.assert_close(out[entry].double(), expected[0].detach(), atol=3e-6, rtol=1e-5)
        torch.testing.assert_close(
            lse[entry].double(), expected_lse[0].detach(), atol=1e-5, rtol=1e-5
        )
        for mine, theirs in zip(grads, right, strict=True):
            torch.testing.assert_close(mine[entry].double(), theirs.grad[0], atol=2e-5, rtol=1e-5)


def test_head_groups_go_through_tasks() -> None:
    """A monolithic call does not say which heads it was given."""

    def by_head(score, b, h, q, k):  # type: ignore[no-untyped-def]
        return score * (1 + h)

    check(random(200), (by_head, None, True), levels=(), heads_per_group=1)


@pytest.mark.parametrize("over_inputs", [True, False])
def test_a_head_that_keeps_nothing(over_inputs: bool) -> None:
    """In a head group of its own."""

    def near(b, h, q, k):  # type: ignore[no-untyped-def]
        return (h == 1) & (q - k < 30)

    kernel, tensors = kernel_of(None, near), random(300)
    out, lse, grads = run(
        kernel, tensors, True, levels=(3,), tile=128, heads_per_group=1, over_inputs=over_inputs
    )
    assert bool((lse[:, 0] == -torch.inf).all())
    for found in (out, *grads):
        assert not found[:, 0].any()
        assert found[:, 1].any()


MASKS = {
    "none": None,
    "window": sliding_window(300, 20),
    "documents": document(torch.arange(4000) // 700),
    "prefix": prefix_lm(500),
    "a function": lambda b, h, q, k: q - k < 250,
    "a function of heads": lambda b, h, q, k: (h == 1) | ((q - k).abs() <= 200),
    "a function of numbers": lambda b, h, q, k: torch.stack([q - k, k - q]).max() < 150,
    "nothing": lambda b, h, q, k: q < 0,
}


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("levels", [(), (3,), (7,), (3, 3)])
@pytest.mark.parametrize("tile", [48, 128])
@pytest.mark.parametrize("name", MASKS)
def test_block_lists(name: str, tile: int, levels, is_causal: bool) -> None:
    """Listed pairs are those of the task's rectangles that the mask keeps, none twice."""
    mask = MASKS[name]
    kernel = kernel_of(None, mask)
    n = 2500
    for task in Decomposition(n, levels, "aligned", tile).tasks():
        rectangles = task.rectangles(is_causal)
        tokens = torch.cat([torch.arange(a, b) for a, b, _ in task.runs])
        size = len(tokens)
        wanted = torch.zeros(HEADS, size, size, dtype=torch.bool)
        for r in rectangles:
            wanted[:, r.query_start : r.query_stop, r.key_start : r.key_stop] = True
        if is_causal:
            wanted &= tokens[:, None] >= tokens
        if mask is not None:
            heads = torch.arange(HEADS)
            if name == "a function of numbers":
                wanted &= (tokens[:, None] - tokens).abs() < 150
            else:
                wanted &= mask(0, heads[:, None, None], tokens[:, None], tokens)
        tensors = torch.empty(1, HEADS, size, 1)
        given = TaskTensors(task, rectangles, tensors, tensors, tensors, 1.0, is_causal, no_bias)
        launch = kernel._launch(given)
        if launch is None:
            assert not wanted.any()
            continue
        block_mask = launch.block_mask()
        check_lists(block_mask)
        longest = kernel._longest_list(-(-size // 128) + 1)
        for lists in (block_mask.kv_indices, block_mask.q_indices):
            assert lists.shape[-1] <= longest
        counts = block_mask.kv_num_blocks, block_mask.full_kv_num_blocks
        found = kept_pairs(block_mask, *counts, (1, HEADS, size, size))[0]
        assert torch.equal(found, wanted)
        if name in ("window", "documents", "a function"):
            # Little is mixed that need not be: no more than the border.
            assert block_mask.kv_num_blocks.max() <= 12


def test_workspace_of_windows_is_linear() -> None:
    n = 1 << 20
    call = CallShape("cuda", torch.float16, 1, 1, 64, 64, True)
    windowed, dense = (
        kernel_of(None, mask).forward_workspace_bytes(call, Extent(1, 1, 1, n, n, n))
        for mask in (sliding_window(4096) & document(torch.arange(n) // 20_000), prefix_lm(50))
    )
    assert dense > 16 * (n // 128) ** 2
    assert windowed < 600 * n


def test_rectangles_that_do_not_touch() -> None:
    """Any rectangles, of a task with jumps, cropped on all sides."""
    task = Task((), (Span(100, 1100, 0), Span(2000, 2600, 0)))
    rectangles = (Rectangle(300, 520, 130, 270), Rectangle(513, 515, 600, 601),
                  Rectangle(300, 520, 700, 900))  # fmt: skip
    pairs = TaskPairs(task, rectangles)
    lists = lists_of(pairs, None)
    assert lists.in_pieces
    aligned = TaskPairs(task, (Rectangle(1408, 1600, 0, 256),))
    lists = lists_of(aligned, None)
    assert not lists.in_pieces
    parts = lists.on(torch.device("cpu"))
    # The last row of blocks reaches beyond the last query.
    assert parts[0].flatten().tolist() == [0] * 12 + [2]
    assert parts[2].flatten().tolist() == [0] * 11 + [2, 0]
    assert block_lists(aligned, *[np.zeros((0, 5), dtype=np.int64)] * 2) is None


def test_emptied_tasks_are_never_run(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    kernel, launched = kernel_of(None, sliding_window(80)), []
    launch = kernel._launch
    monkeypatch.setattr(kernel, "_launch", lambda task: launched.append(1) or launch(task))
    n = 8192
    q = torch.randn(1, 1, n, 8)
    plan = qa.plan(n, heads=1, head_dim=8, dtype=torch.float32, levels=(31,),
                   over_inputs=False, is_causal=True,
                   kernel=kernel, device="cpu")  # fmt: skip
    report = qa.Report()
    out = qa.attention(q, q, q, is_causal=True, plan=plan, kernel=kernel, devices="cpu",
                       report=report)  # fmt: skip
    assert out.isfinite().all()
    assert report.forward is not None
    assert report.forward.left_out > 0.6
    assert len(launched) < 60


@pytest.mark.parametrize("eager_kernel", [True, False])
def test_a_mask_may_change_between_calls(eager_kernel: bool) -> None:
    """Neither what it emptied nor what it filled is remembered; nor the ids of a document."""
    edge = torch.tensor(400)
    ids = torch.arange(N) // 200

    def by_tensor(b, h, q, k):  # type: ignore[no-untyped-def]
        return (q - k).abs() <= edge

    tensors = random(N)
    kernel = (
        kernel_of(None, by_tensor) if eager_kernel else flex.ScoreModKernel(None, by_tensor, "flex")
    )
    for width in (400, 3, 300):
        edge.fill_(width)
        out = run(kernel, tensors, False, levels=(3,), tile=16)[0]
        expected, _ = reference(*(t.double() for t in tensors[:3]), (None, by_tensor, False))
        torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=1e-5)
    mask = document(ids)
    expected, _ = reference(*(t.double() for t in tensors[:3]), (None, mask, False))
    ids.zero_()
    out = run(kernel_of(None, mask), tensors, False, levels=(3,))[0]
    torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=1e-5)


def test_a_mask_made_anew_is_compiled_once(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Packed documents: another mask with every batch, and the same code."""
    made = []
    monkeypatch.setattr(
        flex, "compiled_flex", lambda in_blocks: made.append(in_blocks) or eager_flex
    )
    shared: Cache = Cache(128, lambda call: 1)
    tensors = random(N)
    compiled = []
    for _ in range(3):
        kernel = kernel_of(None, document(torch.arange(N) // 100))
        kernel._compiled = shared
        run(kernel, tensors, True, levels=(3,))
        compiled.append(len(made))
    assert compiled == [compiled[0]] * 3


def test_beyond_torchs_limit_of_compilations_it_begins_anew(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from torch._dynamo.exc import FailOnRecompileLimitHit

    calls = []

    def compile_(function, **options):  # type: ignore[no-untyped-def]
        assert options == {"fullgraph": True, "dynamic": True}
        calls.append(0)

        def compiled(*args, **named):  # type: ignore[no-untyped-def]
            calls[-1] += 1
            if calls[-1] > 2:
                raise FailOnRecompileLimitHit("too many")
            return len(calls), calls[-1]

        return compiled

    monkeypatch.setattr(torch, "compile", compile_)
    call = COMPILED_FLEX(in_blocks=True)
    assert [call() for _ in range(5)] == [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)]


def test_many_heads_are_tried_within_the_bound(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    pairs_at_once = []
    original = BlockEvaluator.kept

    def kept(self, rows, columns):  # type: ignore[no-untyped-def]
        found = original(self, rows, columns)
        pairs_at_once.append(found.numel())
        return found

    monkeypatch.setattr(BlockEvaluator, "kept", kept)
    monkeypatch.setattr(flex, "_EVALUATED_BYTES", 1 << 20)
    tensors = [torch.randn(1, 6, 300, 16) for _ in range(4)]
    run(kernel_of(None, local_global), tensors, False, levels=())
    assert max(pairs_at_once) * PAIR_BYTES <= evaluated_bytes(6, 1 << 20)
