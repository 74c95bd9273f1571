"""The sizes of trimmed tasks, and what is remembered about them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quorum_attention as qa
from quorum_attention.decomposition import Decomposition, Pairs
from quorum_attention.execution.trimming import (
    Tally,
    Trimmed,
    pairs_of,
    tally,
    trimmed_tasks,
    written,
)
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels import DenseKernel
from quorum_attention.kernels.kit import from_score_mod, sliding_window

N = 4096


def work(n_queries: int = N, n_keys: int = N, is_causal: bool = True) -> Workload:
    return Workload((1,), 1, 1, n_queries, n_keys, 8, 8, torch.float32, is_causal)


def test_a_kernel_that_knows_no_mask_keeps_what_the_call_keeps() -> None:
    assert pairs_of(work(), DenseKernel()) == Pairs(N, N, True)
    assert pairs_of(work(5, 9, False), DenseKernel()) == Pairs(5, 9, False)


def test_a_kernel_that_knows_its_mask_says_so() -> None:
    window = from_score_mod(None, sliding_window(100), compiled=False)
    pairs = pairs_of(work(), window)
    assert pairs.verdict is not None
    assert not pairs.every_token_meets


@pytest.mark.parametrize(("n_queries", "n_keys"), [(10, 30), (30, 10), (20, 20)])
def test_rows_that_a_pass_returns(n_queries: int, n_keys: int) -> None:
    """The forward returns rows of queries, the backward rows of queries and keys."""
    pairs = Pairs(n_queries, n_keys, False)
    assert written(pairs, backward=False) == n_queries
    assert written(pairs, backward=True) == max(n_queries, n_keys)


@settings(max_examples=30, deadline=None)
@given(
    window=st.integers(1, 3000),
    levels=st.sampled_from([(3,), (7,), (7, 7)]),
    tile=st.sampled_from([16, 128]),
    is_causal=st.booleans(),
    backward=st.booleans(),
)
def test_the_tally_is_that_of_the_tasks(window, levels, tile, is_causal, backward) -> None:  # type: ignore[no-untyped-def]
    kernel = from_score_mod(None, sliding_window(window), compiled=False)
    shape = Decomposition(N, levels, "aligned", tile)
    pairs = kernel.kept_pairs(N, N, is_causal)
    found = trimmed_tasks(shape, pairs, kernel, backward)
    counted = tally(shape, pairs, kernel, backward)
    assert counted == found.tally()
    sizes = [task.n_tokens for task in found.tasks]
    assert counted.n_tasks == len(sizes) <= shape.n_tasks
    assert counted.tokens == sum(sizes) <= counted.before
    assert counted.before == sum(task.n_tokens for task in shape.tasks())
    assert counted.largest == max(sizes) <= shape.max_task_tokens
    assert 0.0 <= counted.left_out < 1.0
    lengths = [task.spans[-1].stop - task.spans[0].start for task in found.tasks]
    assert max(lengths) <= counted.widest <= N
    assert counted.shared <= N
    if tile % 128:
        assert counted.widest == counted.shared == N


def test_where_nothing_is_left_out() -> None:
    assert Tally(1, 10, 10, 10, 10, 0).left_out == 0.0
    assert Tally(0, 0, 0, 0, 0, 0).left_out == 0.0
    assert Tally(1, 5, 5, 10, 10, 0).left_out == 0.5
    empty = Trimmed(Decomposition(N, (7,)), (), 0)
    assert empty.tally().tokens == empty.tally().largest == 0


def test_a_whole_call_is_not_trimmed() -> None:
    kernel = from_score_mod(None, sliding_window(5), compiled=False)
    shape = Decomposition(N, ())
    (task,) = trimmed_tasks(shape, kernel.kept_pairs(N, N, True), kernel, False).tasks
    assert task.n_tokens == N


def test_what_is_left_out_is_in_the_report() -> None:
    kernel = from_score_mod(None, sliding_window(64), compiled=False)
    q = torch.randn(1, 1, 2048, 8)
    report = qa.Report()
    plan = qa.plan(2048, heads=1, head_dim=8, dtype=torch.float32, levels=(7,), tile=16,
                   is_causal=True, kernel=kernel, over_inputs=False, device="cpu")  # fmt: skip
    qa.attention(q, q, q, is_causal=True, kernel=kernel, plan=plan, report=report)
    assert report.forward is not None
    assert plan.schedule.trimmed is not None
    assert report.forward.left_out == plan.schedule.trimmed.left_out > 0.3
