"""Preallocated results that autograd still needs: a backward says that they were written over."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import inputs

import quorum_attention as qa
from quorum_attention.execution.device.mover import Mover


@pytest.fixture
def by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows leave a slot as with pinned results of a GPU: by copies that torch never sees."""

    def store(self, target, source, pieces) -> None:  # type: ignore[no-untyped-def]
        for piece in pieces:
            rows = source[:, piece.local : piece.local + piece.stop - piece.start]
            target.numpy()[:, piece.start : piece.stop] = rows.numpy()

    monkeypatch.setattr(Mover, "store", store)


def plan(backward: bool) -> qa.Plan:
    return qa.plan(
        64, heads=2, head_dim=8, dtype=torch.float32, levels=(3,), tile=8, over_inputs=False,
        backward=backward,
    )  # fmt: skip


@pytest.mark.usefixtures("by_address")
@pytest.mark.parametrize("backward", [False, True])
def test_results_used_again(backward: bool) -> None:
    given, weight = inputs(64), torch.randn(8, 8, requires_grad=True)
    results = tuple(torch.empty(t.shape) for t in given.three[: 3 if backward else 1])
    saved = qa.attention_with_lse(*given.three)
    losses: list[torch.Tensor] = []
    for _ in range(2):
        if backward:
            call = (given.grad_out, *given.three, *saved)
            qa.attention_backward(*call, plan=plan(True), grads=results)
        else:
            qa.attention(*given.three, plan=plan(False), out=results[0])
        losses = losses or [(result @ weight).sum() for result in results]
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
