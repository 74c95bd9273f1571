"""Who reads the log-sum-exp of a call: told for the call's time, in its own thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.kernels import CpuKernel
from quorum_attention.kernels.lse_use import lse_is_used, lse_use


def test_told_for_the_time_of_a_context() -> None:
    assert lse_is_used()
    with lse_use(False):
        assert not lse_is_used()
        with lse_use(True):
            assert lse_is_used()
        assert not lse_is_used()
    assert lse_is_used()
    with pytest.raises(ZeroDivisionError), lse_use(False):
        1 / 0  # noqa: B018
    assert lse_is_used()


def test_other_threads_hear_nothing_of_it() -> None:
    heard: list[bool] = []
    with lse_use(False):
        thread = threading.Thread(target=lambda: heard.append(lse_is_used()))
        thread.start()
        thread.join()
    assert heard == [True]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_kernel_is_told_by_calls(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By those that return it, and those whose gradients are recorded; and not by plain ones."""
    told: list[bool] = []
    forward = CpuKernel.rectangle_forward

    def watched(self: CpuKernel, *given: Any) -> Any:
        told.append(lse_is_used())
        return forward(self, *given)

    monkeypatch.setattr(CpuKernel, "rectangle_forward", watched)

    def call(*, grad: bool, lse: bool) -> set[bool]:
        told.clear()
        three = [torch.randn(1, 2, 90, 8, dtype=torch.bfloat16) for _ in range(3)]
        three[0].requires_grad_(grad)
        asked = qa.attention_with_lse if lse else qa.attention
        asked(*three, kernel=CpuKernel(), depth=depth)
        return set(told)

    assert call(grad=False, lse=False) == {False}
    assert call(grad=True, lse=False) == {True}
    assert call(grad=False, lse=True) == {True}
