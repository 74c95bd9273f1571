"""Out-of-memory failures are recognised by the errors that allocators really raise."""

from __future__ import annotations

import pytest
import torch

from quorum_attention import BudgetError, OutOfMemoryError
from quorum_attention.errors import is_out_of_memory


class DerivedError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (OutOfMemoryError("ours"), True),
        (BudgetError("ours"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("out of memory"), False),
        (RuntimeError("std::bad_alloc was mentioned"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (DerivedError("std::bad_alloc"), False),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), False),
        (KeyboardInterrupt(), False),
        (OSError(12, "Cannot allocate memory"), False),
    ],
)
def test_what_is_taken_for_it(error: BaseException, is_one: bool) -> None:
    assert is_out_of_memory(error) == is_one


def test_the_cpu_allocators_own_failure_is() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
