"""A kernel of its own mask and one launch a task, on inputs as they lie: the results of slots."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import assert_close, exact, inputs
from helpers_kernels import WatchedKernel
from helpers_plans import unpinned
from helpers_score_mods import within

import quorum_attention as qa
from quorum_attention.execution.routes.over_inputs import Blockwise
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.kernels import Gradients, Statistics, TaskTensors
from quorum_attention.kernels.kit import document, from_score_mod, sliding_window
from quorum_attention.kernels.kit.masks import BlockMask

pytest.importorskip("torch.nn.attention.flex_attention")
pytestmark = pytest.mark.usefixtures("one_thread")

N = 400
TILE = 8
_LATE = within(130, N, 0, 300)
MASKS = {
    "window": sliding_window(30),
    "documents": document(torch.arange(N) // 45),
    "rows and keys without a partner": _LATE & sliding_window(40),
    "none": None,
    "nothing at all": within(0, 0, 0, 0),
}


class InPlace(WatchedKernel):
    """Attention under a mask, task by task on inputs as they lie; fails when told to."""

    own_attention = whole_tasks = sparse = True

    def __init__(self, mask: BlockMask | None, fail_at: set[int] | None = None) -> None:
        super().__init__(fail_at)
        self.mask = mask
        self.inner = from_score_mod(None, mask, compiled=False)
        self.kept_pairs = self.inner.kept_pairs
        self.forward_workspace_bytes = self.inner.forward_workspace_bytes
        self.backward_workspace_bytes = self.inner.backward_workspace_bytes

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        self._watch(task, lambda: self.inner.forward(task, state))

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        self._watch(task, lambda: self.inner.backward(task, grads))


def plans(given, kernel, is_causal: bool, over_inputs: bool | None = True, **more):  # type: ignore[no-untyped-def]
    """Forward's and backward's."""
    q, k, _ = given.three
    more = {"levels": (7,), "tile": TILE, **more}
    return [
        qa.plan(q.shape[-2], n_keys=k.shape[-2], heads=q.shape[-3], kv_heads=k.shape[-3],
                head_dim=q.shape[-1], dtype=q.dtype, is_causal=is_causal, kernel=kernel,
                batch=q.shape[:-3].numel(), device="cpu", over_inputs=over_inputs,
                backward=backward, **more)
        for backward in (False, True)
    ]  # fmt: skip


def run(given, kernel, is_causal: bool, planned, reports=(None, None)):  # type: ignore[no-untyped-def]
    common = {"is_causal": is_causal, "kernel": kernel, "devices": "cpu", "enable_gqa": True}
    out, lse = qa.attention_with_lse(*given.three, plan=planned[0], report=reports[0], **common)
    return out, lse, *qa.attention_backward(
        given.grad_out, *given.three, out, lse, plan=planned[1], report=reports[1], **common
    )  # fmt: skip


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sizes", [(N, N), (150, N), (N, 250)])
@pytest.mark.parametrize("name", MASKS)
def test_results_are_those_through_slots(name: str, sizes, is_causal: bool) -> None:
    given = inputs(*sizes, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64)
    found = []
    for over_inputs in (True, False):
        kernel = InPlace(MASKS[name])
        planned = plans(given, kernel, is_causal, over_inputs)
        route = Blockwise if over_inputs else Slots
        assert all(isinstance(p.schedule.route, route) for p in planned)
        found.append(run(given, kernel, is_causal, planned))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_batches_head_groups_and_strided_inputs(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    q, k, v, grad = (
        torch.randn(2, N, 4, 8, generator=g).to(dtype).transpose(1, 2) for _ in range(4)
    )
    given = inputs(N, heads=4, head_dim=8, dtype=dtype)
    given.query, given.key, given.value, given.grad_out = q, k, v, grad
    kernel = InPlace(None)
    for more in ({}, {"heads_per_group": 2}):
        planned = plans(given, kernel, True, **more)
        assert isinstance(planned[0].schedule.route, Blockwise)
        out, _, *grads = run(given, kernel, True, planned)
        right = exact(given, is_causal=True, gradients=True)
        tolerance = 5e-3 if dtype == torch.float16 else 1e-4
        assert_close(out, right.out, tolerance)
        for mine, wanted in zip(grads, right.grads, strict=True):
            assert_close(mine, wanted, tolerance)


@pytest.mark.parametrize("backward", [False, True])
def test_groups_that_are_done_are_not_computed_again(backward: bool) -> None:
    """A failure in the third of four costs what that one had come to, no more."""
    n, kernel = 96, InPlace(None)
    given = inputs(n, heads=4)
    made = qa.plan(
        n, heads=4, head_dim=8, dtype=torch.float32, is_causal=True, levels=(7,), tile=8,
        over_inputs=True, heads_per_group=1, kernel=kernel, device="cpu", backward=backward,
    )  # fmt: skip
    assert isinstance(made.schedule.route, Blockwise)
    out, lse = qa.attention_with_lse(*given.three, is_causal=True)
    reference = exact(given, is_causal=True, gradients=True)
    kernel.fail_at = {3}
    kernel.arm()
    call = {"is_causal": True, "plan": unpinned(made), "kernel": kernel, "devices": "cpu"}
    if backward:
        got = qa.attention_backward(given.grad_out, *given.three, out, lse, **call)
        wanted = reference.grads
    else:
        got, wanted = (qa.attention(*given.three, **call),), (reference.out,)
    for actual, expected in zip(got, wanted, strict=True):
        assert_close(actual, expected, 5e-5)
    one = n * (n + 1) // 2
    assert 4 * one <= sum(kernel.pairs.values()) < 5 * one
