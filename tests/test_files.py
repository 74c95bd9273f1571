"""Mapped safetensors files, both ways with the safetensors library."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from quorum_attention.files import create_tensors, open_tensors


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    right = torch.randn(2, 3, 5).to(dtype)
    made = create_tensors(tmp_path / "a", {"x": (right.shape, dtype), "e": ((0, 4), dtype)})
    made["x"].copy_(right)
    assert torch.equal(safetensors.torch.load_file(tmp_path / "a")["x"], right)
    safetensors.torch.save_file({"y": right}, tmp_path / "b")
    assert torch.equal(open_tensors(tmp_path / "b")["y"], right)


def test_what_is_no_such_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"abc")
    (tmp_path / "text").write_bytes(b"\x05\0\0\0\0\0\0\0hello and more")
    for name in ("short", "text"):
        with pytest.raises(ValueError, match="not a safetensors file"):
            open_tensors(tmp_path / name)
    safetensors.torch.save_file({"y": torch.zeros(100)}, tmp_path / "whole")
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-40])
    with pytest.raises(ValueError, match="truncated"):
        open_tensors(tmp_path / "cut")
