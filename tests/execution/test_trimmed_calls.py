"""Calls with trimmed tasks: the same results, after any failure, and fewer bytes copied."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import assert_close, exact, inputs
from helpers_kernels import WatchedKernel
from helpers_plans import unpinned
from helpers_score_mods import within

import quorum_attention as qa
from quorum_attention.decomposition.decomposition import tokens_of
from quorum_attention.execution.problem import Placement, Problem, spec_of
from quorum_attention.execution.routes.over_inputs import Blockwise
from quorum_attention.execution.schedule import Cutting
from quorum_attention.kernels import Gradients, Statistics, TaskTensors
from quorum_attention.kernels.kit import document, from_score_mod, prefix_lm, sliding_window
from quorum_attention.kernels.kit.masks import BlockMask

pytest.importorskip("torch.nn.attention.flex_attention")
pytestmark = pytest.mark.usefixtures("one_thread")

N = 640
TILE = 8
# Some queries keep no key, and some keys are kept by no query.
_GAP = within(200, N, 0, 500)
MASKS = {
    "window": sliding_window(50),
    "both sides": sliding_window(20, 30),
    "documents": document(torch.arange(N) // 75),
    "first tokens and a window": prefix_lm(16) & (sliding_window(40) | prefix_lm(16)),
    "a gap": _GAP & sliding_window(60),
}


class WatchedMask(WatchedKernel):
    """A kernel whose mask says which pairs it keeps; counts its calls, fails in chosen ones."""

    own_attention = sparse = True

    def __init__(self, mask: BlockMask, fail_at: set[int] | None = None, late: bool = False):
        super().__init__(fail_at, late=late)
        self.inner = from_score_mod(None, mask, compiled=False)
        self.kept_pairs = self.inner.kept_pairs
        self.forward_workspace_bytes = self.inner.forward_workspace_bytes
        self.backward_workspace_bytes = self.inner.backward_workspace_bytes

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        self._watch(task, lambda: self.inner.forward(task, state))

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        self._watch(task, lambda: self.inner.backward(task, grads))


def kept(name: str) -> torch.Tensor:
    at = torch.arange(N)
    return torch.broadcast_to(MASKS[name](0, 0, at[:, None], at), (N, N))


def both_passes(made, kernel, plans, **call):  # type: ignore[no-untyped-def]
    report = qa.Report()
    call = {"kernel": kernel, "report": report, "devices": "cpu", **call}
    out, lse = qa.attention_with_lse(*made.three, plan=plans[0], **call)
    grads = qa.attention_backward(made.grad_out, *made.three, out, lse, plan=plans[1], **call)
    return (out, lse, *grads), report


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("levels", [(7,), (13,), (7, 3), (3, 3, 3)])
@pytest.mark.parametrize("name", MASKS)
def test_results(name: str, levels: tuple[int, ...], is_causal: bool) -> None:
    made = inputs(N, dtype=torch.float64)
    kernel = WatchedMask(MASKS[name])
    plans = [
        qa.plan(N, heads=2, head_dim=8, dtype=torch.float64, levels=levels, tile=TILE,
                is_causal=is_causal, kernel=kernel, backward=backward, device="cpu")
        for backward in (False, True)
    ]  # fmt: skip
    found, report = both_passes(made, kernel, plans, is_causal=is_causal)
    wanted = exact(made, mask=kept(name), is_causal=is_causal, gradients=True)
    assert torch.equal(found[1] == -torch.inf, wanted.lse == -torch.inf)
    for actual, expected in zip(found, (wanted.out, wanted.lse, *wanted.grads), strict=True):
        assert_close(actual, expected, 1e-11)
    if name != "first tokens and a window":
        for done, plan in zip((report.forward, report.backward), plans, strict=True):
            assert done.left_out > 0.2
            assert done.left_out == plan.schedule.trimmed.left_out
            assert done.units == plan.n_tasks * plan.n_groups
        assert "left out" in str(report)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_over_the_inputs_as_they_lie(name: str, is_causal: bool) -> None:
    """A kernel that takes a task in one launch computes all tasks of a head group in one."""
    made = inputs(N, dtype=torch.float64)
    kernel = WatchedMask(MASKS[name])
    kernel.whole_tasks = True
    plans = [
        qa.plan(N, heads=2, head_dim=8, dtype=torch.float64, levels=(7,), tile=TILE,
                heads_per_group=1, is_causal=is_causal, kernel=kernel, backward=backward,
                device="cpu", over_inputs=True)
        for backward in (False, True)
    ]  # fmt: skip
    assert all(isinstance(plan.schedule.route, Blockwise) for plan in plans)
    found, _ = both_passes(made, kernel, plans, is_causal=is_causal)
    wanted = exact(made, mask=kept(name), is_causal=is_causal, gradients=True)
    for actual, expected in zip(found, (wanted.out, wanted.lse, *wanted.grads), strict=True):
        assert_close(actual, expected, 1e-11)


@pytest.mark.parametrize("n_cap", [1, 2])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "half-way"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("fails", [{0}, {3, 4}, {2, 7, 13}], ids=str)
@pytest.mark.parametrize("name", ["window", "a gap"])
def test_whatever_fails(name, fails, backward, late, n_cap) -> None:  # type: ignore[no-untyped-def]
    """A row whose state was stored or finished before the failure does not begin anew. (Results of
    16 bits, so that the state of a finished row cannot be loaded from them.)"""
    made = inputs(N, dtype=torch.float16)
    kernel = WatchedMask(MASKS[name], fails, late)
    plan = unpinned(
        qa.plan(
            N, heads=2, head_dim=8, dtype=torch.float16, levels=(7,), tile=TILE, kernel=kernel,
            n_cap=n_cap, heads_per_group=1, backward=backward, is_causal=True, device="cpu",
        )
    )  # fmt: skip
    wanted = exact(made, mask=kept(name), is_causal=True, gradients=True)
    call = {"is_causal": True, "plan": plan, "kernel": kernel, "report": qa.Report()}
    out, lse = wanted.out.half(), wanted.lse.float()
    kernel.arm()
    if backward:
        found = qa.attention_backward(made.grad_out, *made.three, out, lse, **call)
        expected, done = wanted.grads, call["report"].backward
    else:
        found = qa.attention_with_lse(*made.three, **call)
        expected, done = (wanted.out, wanted.lse), call["report"].forward
    for actual, right in zip(found, expected, strict=True):
        assert_close(actual, right, 1e-2)
    assert len([line for line in done.recoveries if "out of memory" in line]) == len(fails)
    assert done.left_out > 0.2
    # Every pair that the mask keeps, once for each head group.
    pairs = kept(name).tril().nonzero().tolist()
    assert all(kernel.pairs[i, j] == 2 for i, j in pairs)


def test_less_is_moved() -> None:
    """Inputs are copied little more than once, not once for each task that holds a chunk."""
    n, heads = 1 << 14, 1
    q = torch.randn(1, heads, n, 8)
    moved = []
    for mask in (None, sliding_window(256)):
        kernel = from_score_mod(None, mask, compiled=False)
        plan = qa.plan(n, heads=heads, head_dim=8, dtype=torch.float32, levels=(13,),
                       is_causal=True, kernel=kernel, device="cpu")  # fmt: skip
        report = qa.Report()
        qa.attention(q, q, q, is_causal=True, plan=plan, kernel=kernel, report=report)
        moved.append(report.forward.loaded_bytes)
    once = 3 * q.numel() * 4
    assert moved[0] > 3.9 * once
    assert moved[1] < 1.4 * once


@pytest.mark.parametrize("window", [30, 100, 333, 700])
def test_a_task_that_is_cut_further_gets_no_token_back(window: int) -> None:
    """The row of a trimmed token may be finished, and then has no state to continue from."""
    n = 6000
    kernel = from_score_mod(None, sliding_window(window), compiled=False)
    plan = qa.plan(n, heads=2, head_dim=8, dtype=torch.float32, levels=(7,), tile=TILE,
                   is_causal=True, kernel=kernel, device="cpu", backward=True)  # fmt: skip
    place = Placement("cpu", True, False, torch.float32)
    cutting = Cutting(plan.schedule, Problem(plan.work, kernel, spec_of(True), place))
    for task in cutting.tasks(1):
        parts = cutting.further([task], 2)
        held = {
            at for part in parts for start, stop in tokens_of(part) for at in range(start, stop)
        }
        assert held == {at for start, stop in tokens_of(task) for at in range(start, stop)}


@pytest.mark.parametrize("mask", [None, sliding_window(400), sliding_window(3)],
                         ids=["none", "wider", "narrower"])  # fmt: skip
def test_a_plan_made_for_another_mask(mask) -> None:  # type: ignore[no-untyped-def]
    """The slots are sized for the call's own mask, and the budget holds."""
    sizes = {"heads": 2, "head_dim": 8, "dtype": torch.float32, "levels": (7,), "tile": TILE,
             "is_causal": True, "device": "cpu"}  # fmt: skip
    first = from_score_mod(None, sliding_window(9), compiled=False)
    plan = qa.plan(N, kernel=first, **sizes)
    made, report = inputs(N), qa.Report()
    kernel = from_score_mod(None, mask, compiled=False)
    out = qa.attention(*made.three, is_causal=True, plan=plan, kernel=kernel, report=report)
    at = torch.arange(N)
    keeps = None if mask is None else mask(0, 0, at[:, None], at).expand(N, N)
    assert_close(out, exact(made, mask=keeps, is_causal=True).out, 2e-5)
    narrower = mask is not None and mask.geometry.band.low > -9
    assert (report.forward.planned_peak_bytes < plan.peak_bytes) == narrower
    tight = qa.plan(N, kernel=first, budget=plan.peak_bytes, **sizes)
    if not narrower:
        with pytest.raises(qa.BudgetError, match="the plan's budget"):
            qa.attention(*made.three, is_causal=True, plan=tight, kernel=kernel)


def test_keys_that_nobody_asks_about_are_not_copied() -> None:
    """They have no result in the forward; in the backward their gradients are zero."""
    queries, keys = 100, 5000
    made = inputs(queries, keys, dtype=torch.float64)
    plans = [
        qa.plan(queries, n_keys=keys, heads=2, head_dim=8, dtype=torch.float64, levels=(7,),
                tile=TILE, is_causal=True, kernel="dense", backward=backward, device="cpu",
                over_inputs=False)
        for backward in (False, True)
    ]  # fmt: skip
    assert max(plans[0].schedule.task_rows(plans[0].work)) < 200
    found, report = both_passes(made, "dense", plans, is_causal=True)
    wanted = exact(made, is_causal=True, gradients=True)
    for actual, expected in zip(found, (wanted.out, wanted.lse, *wanted.grads), strict=True):
        assert_close(actual, expected, 1e-11)
    assert report.forward.loaded_bytes < 0.1 * made.key.numel() * 8
