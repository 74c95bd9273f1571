"""What a kernel is: a subclass that is complete, and an object that can be looked up."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import quorum_attention as qa
from quorum_attention.kernels import CpuKernel, get_kernel, is_kernel, register_kernel


def test_a_kernel_without_a_pass_cannot_be_made() -> None:
    class Half(qa.InnerKernel):
        name = "half"

    with pytest.raises(TypeError, match=r"abstract.*backward"):
        Half()  # type: ignore[abstract]


def test_what_is_no_kernel_is_refused() -> None:
    @dataclass
    class Compared(CpuKernel):
        size: int = 1

    for ask in (get_kernel, register_kernel):
        with pytest.raises(TypeError, match=r"lacks __hash__ \(a dataclass keeps it with eq=False"):
            ask(Compared())
        with pytest.raises(TypeError, match=r"not object: derive it.*InnerKernel"):
            ask(object())
        with pytest.raises(TypeError, match="not the class CpuKernel: make one"):
            ask(CpuKernel)
    assert is_kernel(CpuKernel)
    assert is_kernel(CpuKernel())
    assert not is_kernel(object)
