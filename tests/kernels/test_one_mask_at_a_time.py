"""A kernel has the mask of one rectangle at a time: plans count no second one."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from helpers_kernels import taken_as_tried
from helpers_masks import few_at_a_time

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention.execution.call import MaskView
from quorum_attention.kernels.native import blocks


class Watched:
    """What a method returns, copied, as long as anybody holds it."""

    def __init__(self) -> None:
        self.made = 0
        self.together = 0
        self._alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def __call__(self, function: Any) -> Any:
        def watched(*args: Any) -> torch.Tensor:
            self.together = max(self.together, 1 + len(self._alive))
            found = function(*args).clone()
            self._alive.add(found)
            self.made += 1
            return found

        return watched


@pytest.fixture(autouse=True)
def not_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native's own test, in the interpreter, would take nearly all of the time."""
    taken_as_tried(monkeypatch, "native")


@pytest.mark.parametrize("kernel", ["cpu", "dense", "native"])
@pytest.mark.parametrize("boolean", [False, True])
def test_masks_of_rectangles(kernel: str, boolean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, bias = Watched(), MaskView.bias
    monkeypatch.setattr(MaskView, "bias", lambda self, *args: watched(bias(self, *args)))
    mask = torch.rand(24, 24) < 0.8 if boolean else torch.randn(24, 24)
    q, k, v = (torch.randn(1, 1, 24, 16) for _ in range(3))
    plan = qa.plan(
        24, heads=1, head_dim=16, dtype=torch.float32, is_causal=True, kernel=kernel,
        levels=(3,), layout="balanced", tile=8, device="cpu",
    )  # fmt: skip
    qa.attention(q, k, v, attn_mask=mask, is_causal=True, kernel=kernel, plan=plan)
    assert watched.made >= 3
    assert watched.together == 1


def test_words_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native kernel's table of pairs, made for a few blocks at a time."""
    watched = Watched()
    few_at_a_time(monkeypatch, 1)
    monkeypatch.setattr(blocks, "bits_of", watched(blocks.bits_of))
    mask = Mask(keeps=lambda b, h, q, k: (q + k) % 3 != 0)
    q, k, v = (torch.randn(1, 1, 130, 16, requires_grad=True) for _ in range(3))
    qa.attention(q, k, v, attn_mask=mask, kernel="native").sum().backward()
    assert watched.made > 4
    assert watched.together == 1
