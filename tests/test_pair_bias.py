"""Masks of tokens that become a bias, as they do on a GPU: right on the CPU, where the code is the
same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers_entries import masked_call

from quorum_attention.kernels.masked import pair_bias, ways

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The biases of calls; every mask of tokens that can become one does, on the CPU too."""
    monkeypatch.setattr(ways, "_DEVICES_FOR_BIAS", ("cpu", "cuda"))
    monkeypatch.setattr(ways, "_LITTLE", 1 << 62)
    biases: list[torch.Tensor] = []
    make = pair_bias.PairBias.of

    def counted(self: Any, call: Any) -> torch.Tensor:
        biases.append(make(self, call))
        return biases[-1]

    monkeypatch.setattr(pair_bias.PairBias, "of", counted)
    return biases


def test_random_masks_become_a_bias(
    made: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one call or by several; with learned biases, sinks, soft caps and budgets beside them."""
    for number in range(100):
        size = random.Random(number).choice([8, 12, 26])
        monkeypatch.setattr(pair_bias, "_MOST_BYTES", 1 << size)
        masked_call(70_000 + number)
    assert len(made) > 200
