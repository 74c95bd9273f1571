"""Copies of heads in one call reach the right addresses; without a GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quorum_attention.long_prompts import head_copies
from quorum_attention.long_prompts.head_copies import HeadCopies


class HostBatch:
    """Makes the copies that a GPU's driver would make."""

    def __init__(self, runtime: Any) -> None:
        self.noted: list[tuple[int, int, int]] = []

    def add(self, target: int, source: int, n_bytes: int) -> None:
        self.noted.append((target, source, n_bytes))

    def flush(self, stream: Any) -> None:
        for noted in self.noted:
            ctypes.memmove(*noted)
        self.noted.clear()


@pytest.mark.parametrize("leading", [(1,), (3,), (2, 4), (1, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_larger_tensor(
    leading: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To and from it: heads have gaps between them on one side."""
    monkeypatch.setattr(head_copies, "cuda_runtime", SimpleNamespace)
    monkeypatch.setattr(head_copies, "BatchedCopies", HostBatch)
    copies = HeadCopies(SimpleNamespace())  # type: ignore[arg-type]
    large = torch.randn(*leading, 50, 8).to(dtype)
    before = large.clone()
    rows = large.narrow(-2, 7, 20)
    tile = torch.empty_like(rows, memory_format=torch.contiguous_format)
    copies.copy(tile, rows)
    assert torch.equal(tile, rows)
    copies.copy(rows, tile + 1)
    assert torch.equal(rows, tile + 1)
    before.narrow(-2, 7, 20).add_(1)
    assert torch.equal(large, before)
