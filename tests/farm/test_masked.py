"""Masks, sinks and dropout on a farm: as on one device, however heads are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_farm import MaskedCase

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention.farm import Farm
from quorum_attention.farm import compute as farm_compute
from quorum_attention.farm.crew import Alone


@pytest.mark.parametrize("seed", range(16))
def test_as_on_one_device(seed: int, tmp_path: Path) -> None:
    case, farm = MaskedCase(seed), Farm.of(Alone("cpu"))
    case.in_memory(farm)
    case.in_files(farm, tmp_path)


def test_what_a_mask_leaves_out_is_neither_read_nor_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 13 chunks, a window of half a chunk keeps pairs of neighbours alone."""
    q = torch.randn(1, 1, 13 * 20, 8)
    calls = []
    inner = farm_compute.attention_with_lse

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args[0].shape[2] * args[1].shape[2])
        return inner(*args, **options)

    monkeypatch.setattr(farm_compute, "attention_with_lse", counted)
    mask = Mask(causal=True, window=(10, 0))
    got = Farm.of(Alone("cpu")).attention(q, q, q, mask, chunks=13)
    assert torch.allclose(got, qa.attention(q, q, q, mask), atol=1e-5)
    assert len(calls) == 13 + 12
    assert set(calls) == {400}


def test_masks_with_several_batch_dimensions() -> None:
    q, farm = torch.randn(2, 3, 2, 30, 8), Farm.of(Alone("cpu"))
    for shape in ((2, 3, 2, 30, 30), (3, 1, 1, 30), (2, 1, 1, 30, 1)):
        mask = torch.randn(shape)
        for chunks in (1, 3):
            got = farm.attention(q, q, q, mask, chunks=chunks)
            assert torch.allclose(got, qa.attention(q, q, q, mask), atol=1e-5)


def test_sinks_without_keys() -> None:
    q, k, sinks = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 0, 8), torch.tensor([0.5, -1.0])
    out, lse = Farm.of(Alone("cpu")).attention_with_lse(q, k, k, Mask(sinks=sinks))
    assert torch.equal(out, torch.zeros(1, 2, 5, 8))
    assert torch.equal(lse, sinks[None, :, None].expand(1, 2, 5))
