"""Allocations made to fail, one after the other: right, or an honest error. Failures of
memory are recognised by the errors that allocators really raise."""

from __future__ import annotations

from itertools import chain
from itertools import count as count_from

import pytest
import torch
from helpers.attention import assert_close, exact, inputs
from helpers.memory import FailingAllocations
from helpers.passes import pass_of
from helpers.plans import unpinned

import quorum_attention as qa
from quorum_attention.errors import is_out_of_memory

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("levels", "n_cap", "accumulator"),
    [((3,), 2, "device"), ((3,), 1, "host"), ((), 1, "host")],
    ids=str,
)
def test_one_failure_anywhere_is_recovered_from(
    backward, levels, n_cap, accumulator
) -> None:
    """Only what the call must have whole (its results, an accumulator) may end it: it
    fails at the first allocations, where there are results, accumulators and the first
    task, then at some."""
    given = inputs(100, heads=2, head_dim=4, dtype=torch.float16)
    plan = qa.plan(
        100, heads=2, head_dim=4, dtype=torch.float16, tile=8, is_causal=True, levels=levels,
        n_cap=n_cap, accumulator=accumulator, backward=backward,
    )  # fmt: skip
    run = pass_of(given, backward, is_causal=True, plan=unpinned(plan))
    wanted = exact(given, is_causal=True, gradients=True).of(backward)
    run()
    succeeded = []
    # A backward allocates three times as often.
    for n in chain(
        range(1, 12), count_from(12, (16 if backward else 3) if levels else 1)
    ):
        said = ""
        with FailingAllocations(n) as failing:
            try:
                found = run()
            except torch.OutOfMemoryError as error:
                said = str(error)
        if not said and failing.seen < n:
            break
        succeeded.append(not said)
        assert not said or "sabotaged" in said
        if not said:
            assert_close(found, wanted, 1e-2)
    first = succeeded.index(True)
    assert first <= 10, "before the arena: results, log-sum-exp, accumulators"
    assert all(succeeded[first:]) or not levels
    assert len(succeeded) > 16 or not levels


class DerivedError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (qa.OutOfMemoryError("ours"), True),
        (qa.BudgetError("ours"), True),
        (RuntimeError("std::bad_alloc"), True),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"
            ),
            True,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("out of memory"), False),
        (RuntimeError("std::bad_alloc was mentioned"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (DerivedError("std::bad_alloc"), False),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), False),
        (KeyboardInterrupt(), False),
        (OSError(12, "Cannot allocate memory"), False),
        (OSError(28, "No space left on device"), False),
    ],
)
def test_what_is_taken_for_a_failure_of_memory(
    error: BaseException, is_one: bool
) -> None:
    assert is_out_of_memory(error) == is_one


def test_the_cpu_allocators_own_failure_is() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
