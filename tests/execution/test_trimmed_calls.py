"""Calls with trimmed tasks: the same results, after any failure, and fewer bytes
copied."""

from __future__ import annotations

import pytest
import torch
from helpers.attention import assert_close, exact, inputs
from helpers.kernels import WatchedKernel
from helpers.passes import pass_of
from helpers.plans import unpinned
from helpers.score_mods import within
from hypothesis import given, settings
from hypothesis import strategies as st

import quorum_attention as qa
from quorum_attention.decomposition import Decomposition
from quorum_attention.decomposition.decomposition import tokens_of
from quorum_attention.execution.pass_spec import spec_of
from quorum_attention.execution.problem import Placement, Problem
from quorum_attention.execution.task_levels import TaskLevels
from quorum_attention.execution.trimmed_tasks import trimmed_sizes, trimmed_tasks
from quorum_attention.kernels import Gradients, Statistics, TaskTensors
from quorum_attention.kernels.kit import from_score_mod, sliding_window
from quorum_attention.kernels.masked.geometry import Geometry

pytest.importorskip("torch.nn.attention.flex_attention")
pytestmark = pytest.mark.usefixtures("one_thread")

N = 640
TILE = 8
# Some queries keep no key, and some keys are kept by no query.
_GAP = within(200, N, 0, 500)
MASKS = {"window": sliding_window(50), "a gap": _GAP & sliding_window(60)}


class WatchedMask(WatchedKernel):
    """A kernel whose mask says which pairs it keeps; counts its calls, fails in chosen
    ones."""

    own_attention = sparse = True

    def __init__(
        self, mask: Geometry, fail_at: set[int] | None = None, late: bool = False
    ):
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


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("name", "fails", "backward", "late", "n_cap"),
    [("window", {0, 3, 4}, False, True, 1), ("window", {0, 3, 4}, True, False, 2),
     ("a gap", {2, 7, 13}, False, False, 2), ("a gap", {2, 7, 13}, True, True, 1)],
)  # fmt: skip
def test_whatever_fails(name, fails, backward, late, n_cap) -> None:  # type: ignore[no-untyped-def]
    """A row whose state was stored or finished before the failure does not begin anew.
    (Results of 16 bits, so that the state of a finished row cannot be loaded from
    them.)"""
    made = inputs(N, dtype=torch.float16)
    kernel = WatchedMask(MASKS[name], fails, late)
    plan = unpinned(
        qa.plan(
            N, heads=2, head_dim=8, dtype=torch.float16, levels=(7,), tile=TILE, kernel=kernel,
            n_cap=n_cap, heads_per_group=1, backward=backward, is_causal=True, device="cpu",
        )
    )  # fmt: skip
    wanted = exact(made, mask=kept(name), is_causal=True, gradients=True)
    report, results = qa.Report(), (wanted.out.half(), wanted.lse.float())
    call = {"is_causal": True, "plan": plan, "kernel": kernel, "report": report}
    kernel.arm()
    found = pass_of(made, backward, results, **call)()
    done = report.backward if backward else report.forward
    assert_close(found, wanted.of(backward), 1e-2)
    assert len([line for line in done.recoveries if "out of memory" in line]) == len(
        fails
    )
    assert done.left_out > 0.2
    # Every pair that the mask keeps, once for each head group.
    pairs = kept(name).tril().nonzero().tolist()
    assert all(kernel.pairs[i, j] == 2 for i, j in pairs)


@pytest.mark.slow
def test_less_is_moved() -> None:
    """Inputs are copied little more than once, not once for each task that holds a
    chunk."""
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


@pytest.mark.parametrize("window", [30, 333])
def test_a_task_that_is_cut_further_gets_no_token_back(window: int) -> None:
    """The row of a trimmed token may be finished, and then has no state to continue
    from."""
    n = 6000
    kernel = from_score_mod(None, sliding_window(window), compiled=False)
    plan = qa.plan(n, heads=2, head_dim=8, dtype=torch.float32, levels=(7,), tile=TILE,
                   is_causal=True, kernel=kernel, device="cpu", backward=True)  # fmt: skip
    place = Placement(True, False, torch.float32)
    cutting = TaskLevels(
        plan.schedule, Problem(plan.shape, kernel, spec_of(True), place)
    )
    for task in cutting.tasks(1):
        parts = cutting.split_tasks([task], 2)
        held = {
            at
            for part in parts
            for start, stop in tokens_of(part)
            for at in range(start, stop)
        }
        assert held == {
            at for start, stop in tokens_of(task) for at in range(start, stop)
        }


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
    out = qa.attention(
        *made.three, is_causal=True, plan=plan, kernel=kernel, report=report
    )
    at = torch.arange(N)
    keeps = None if mask is None else mask(0, 0, at[:, None], at).expand(N, N)
    assert_close(out, exact(made, mask=keeps, is_causal=True).out, 2e-5)
    narrower = mask is not None and mask.band.low > -9
    assert (report.forward.planned_peak_bytes < plan.peak_bytes) == narrower
    tight = qa.plan(N, kernel=first, budget=plan.peak_bytes, **sizes)
    if not narrower:
        with pytest.raises(qa.BudgetError, match="the plan's budget"):
            qa.attention(*made.three, is_causal=True, plan=tight, kernel=kernel)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    window=st.integers(1, 3000),
    levels=st.sampled_from([(3,), (7,), (7, 7)]),
    tile=st.sampled_from([16, 128]),
    is_causal=st.booleans(),
    backward=st.booleans(),
)
def test_the_tally_is_that_of_the_tasks(
    window, levels, tile, is_causal, backward
) -> None:  # type: ignore[no-untyped-def]
    kernel = from_score_mod(None, sliding_window(window), compiled=False)
    decomposition = Decomposition(4096, levels, "aligned", tile)
    tasks, sizes_of_tasks = trimmed_tasks(
        decomposition, (4096, 4096, is_causal), kernel, backward
    )
    counted = trimmed_sizes(decomposition, (4096, 4096, is_causal), kernel, backward)
    assert counted == sizes_of_tasks
    sizes = [task.n_tokens for task in tasks]
    assert counted.n_tasks == len(sizes) <= decomposition.n_tasks
    assert counted.tokens == sum(sizes) <= counted.untrimmed_tokens
    assert counted.untrimmed_tokens == sum(
        task.n_tokens for task in decomposition.tasks()
    )
    assert counted.largest == max(sizes) <= decomposition.max_task_tokens
    assert 0.0 <= counted.trimmed_share < 1.0
