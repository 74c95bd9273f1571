"""Out-of-memory failures are recognised by the errors that allocators really raise."""

from __future__ import annotations

import pytest
import torch

from quorum_attention import BudgetError, OutOfMemoryError
from quorum_attention.errors import is_out_of_memory


def test_the_cpu_allocators_own_failure_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        OutOfMemoryError("ours"),
        BudgetError("ours"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_other_ways_to_say_it_are_recognised(error: BaseException) -> None:
    assert is_out_of_memory(error)


class DerivedError(RuntimeError):
    pass


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("out of memory"),
        RuntimeError("std::bad_alloc was mentioned"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        DerivedError("std::bad_alloc"),
        ValueError("DefaultCPUAllocator: can't allocate memory"),
        KeyboardInterrupt(),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_nothing_else_is_taken_for_it(error: BaseException) -> None:
    assert not is_out_of_memory(error)
