"""Allocations made to fail, one after the other: right, or an honest error."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from itertools import count as count_from
from typing import Any

import pytest
import torch
from helpers_attention import Inputs, assert_close, exact, inputs
from helpers_memory import FailingAllocations
from helpers_plans import unpinned

import quorum_attention as qa

pytestmark = pytest.mark.usefixtures("one_thread")
N = 100
SIZES = {"heads": 2, "head_dim": 4, "dtype": torch.float16, "tile": 8, "is_causal": True}


def make(
    backward: bool, n_cap: int, accumulator: str, pinned: bool, levels: tuple[int, ...] = (3,)
) -> tuple[Inputs, Callable[[], Any], tuple[torch.Tensor, ...]]:
    """Inputs, the call, and what it should return."""
    given = inputs(N, heads=2, head_dim=4, dtype=torch.float16)
    plan = qa.plan(
        N, levels=levels, n_cap=n_cap, accumulator=accumulator, backward=backward,
        **SIZES,
    )  # fmt: skip
    plan = plan if pinned else unpinned(plan)
    out, lse = qa.attention_with_lse(*given.three, is_causal=True)
    reference = exact(given, is_causal=True, gradients=True)

    def call() -> Any:
        if backward:
            return qa.attention_backward(
                given.grad_out, *given.three, out, lse, is_causal=True, plan=plan
            )
        return (qa.attention(*given.three, is_causal=True, plan=plan),)

    call()
    return given, call, reference.grads if backward else (reference.out,)


def sabotage(
    call: Callable[[], Any], wanted: tuple[torch.Tensor, ...], count: int, step: int = 1
) -> list[bool]:
    """Did the call succeed when allocations n and on failed? For n up to 12, where there are
    results, accumulators and the first task, and then every ``step``-th."""
    succeeded = []
    said = ""
    for n in chain(range(1, 12), count_from(12, step)):
        with FailingAllocations(n, count) as failing:
            try:
                results = call()
            except torch.OutOfMemoryError as error:
                said = str(error)
                results = None
        if results is None:
            assert "sabotaged" in said
            succeeded.append(False)
            continue
        if failing.seen < n:
            return succeeded
        for actual, expected in zip(results, wanted, strict=True):
            assert_close(actual, expected, 1e-2)
        succeeded.append(True)
    raise AssertionError("the loop ends with the call's last allocation")


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("accumulator", ["device", "host"])
@pytest.mark.parametrize("n_cap", [1, 2, 3])
def test_one_failure_anywhere_is_recovered_from(backward, accumulator, n_cap) -> None:
    """Only what the call must have whole (its results, an accumulator) may end it."""
    _, call, wanted = make(backward, n_cap, accumulator, pinned=False)
    # A backward allocates three times as often.
    succeeded = sabotage(call, wanted, 1, step=16 if backward else 3)
    assert len(succeeded) > 16
    first = succeeded.index(True)
    assert first <= 10, "before the arena: results, log-sum-exp, accumulators"
    assert all(succeeded[first:])


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_pinned_depth_reports_every_failure(backward) -> None:
    _, call, wanted = make(backward, 2, "host", pinned=True)
    assert not any(sabotage(call, wanted, 1, step=16 if backward else 3))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_monolithic_call_that_fails_is_decomposed(backward) -> None:
    _, call, wanted = make(backward, 1, "host", pinned=False, levels=())
    succeeded = sabotage(call, wanted, 1)
    assert succeeded
    assert any(succeeded)
