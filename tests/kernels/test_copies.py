"""Copies in words move every bit, and nothing is returned before it has arrived."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quorum_attention.kernels.copies import copy_on_device, dense, in_words

BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def bits(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Any bits, NaN and infinities among them."""
    whole = torch.iinfo(BITS[dtype])
    return torch.randint(whole.min, whole.max, shape, dtype=BITS[dtype]).view(dtype)


@pytest.mark.parametrize("dtype", BITS)
def test_words_are_the_same_bits(dtype: torch.dtype) -> None:
    source, target = bits(2, 3, 50, 16, dtype=dtype), torch.zeros(2, 3, 70, 16, dtype=dtype)
    a, b = in_words(target[:, :, 7:47], source[:, :, 5:45])
    assert a.dtype == b.dtype == torch.complex128
    a.copy_(b)
    kind = BITS[dtype]
    assert torch.equal(target[:, :, 7:47].view(kind), source[:, :, 5:45].view(kind))
    assert not target[:, :, :7].any()
    assert not target[:, :, 47:].any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: bits(2, 3, 50, 12)[:, :, 5:45],
        lambda: bits(2, 3, 50, 32)[:, :, 5:45, 1:17],
        lambda: bits(2, 3, 16, 40).mT,
        lambda: bits(2, 3, 40, 16).float(),
        lambda: bits(4 + 2 * 3 * 40 * 16)[4:].view(2, 3, 40, 16),
    ],
)
def test_what_is_no_whole_words_stays_as_it_is(make) -> None:  # type: ignore[no-untyped-def]
    source = make()
    target = torch.zeros(source.shape, dtype=torch.float16)
    assert in_words(target, source)[0] is target


def test_a_copy_into_host_memory_is_waited_for() -> None:
    """Results may be in page-locked memory, into which a copy would only have begun."""
    seen: list[bool] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            if func is torch.ops.aten.copy_.default:
                seen.append(bool(args[2]) if len(args) > 2 else False)
            return func(*args, **(kwargs or {}))

    with Watching():
        copy_on_device(torch.zeros(3), torch.ones(3))
    assert seen == [False]


def test_dense() -> None:
    whole = bits(2, 3, 50, 16)
    assert dense(whole) is whole
    part = dense(whole[:, :, 5:45])
    assert part.is_contiguous()
    assert part.storage_offset() == 0
    assert torch.equal(part.view(torch.int16), whole[:, :, 5:45].view(torch.int16))
