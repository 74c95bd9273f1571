"""Mapped safetensors files, both ways with the safetensors library."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from quorum_attention.files import create_tensors, metadata_of, open_tensors


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    right = torch.randn(2, 3, 5).to(dtype)
    made = create_tensors(tmp_path / "a", {"x": (right.shape, dtype), "e": ((0, 4), dtype)})
    made["x"].copy_(right)
    assert torch.equal(safetensors.torch.load_file(tmp_path / "a")["x"], right)
    safetensors.torch.save_file({"y": right}, tmp_path / "b")
    assert torch.equal(open_tensors(tmp_path / "b")["y"], right)


def raw(path: Path, header: object, n_bytes: int = 16) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(n_bytes))
    return path


def one(**changed: Any) -> dict[str, Any]:
    found = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changed}
    return {"x": {name: value for name, value in found.items() if value is not None}}


WRONG = {
    "a dtype that torch has not": (one(dtype="F8_E8M0", shape=[16]), "x has dtype 'F8_E8M0'"),
    "too short": (one(shape=[8], data_offsets=[0, 32]), "or is truncated"),
    "no JSON": (b"[" * 100_000, "not a safetensors file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_header_is_refused_by_name(tmp_path: Path, case: str) -> None:
    header, said = WRONG[case]
    path = raw(tmp_path / "x", header)
    with pytest.raises(ValueError, match=said) as raised:
        open_tensors(path)
    assert str(raised.value).startswith(str(path))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    for opens in (open_tensors, metadata_of):
        with pytest.raises(OSError, match="not a regular file"):
            opens(tmp_path / "x")


def test_damaged_files_are_read_as_the_library_reads_them(tmp_path: Path) -> None:
    """Whatever single bytes are changed: the same tensors, or a ValueError; never a crash."""
    tensors = {"x": torch.randn(3, 2), "y": torch.arange(5), "z": torch.zeros(0, 3).half()}
    safetensors.torch.save_file(tensors, tmp_path / "good", {"a": "b"})
    good = (tmp_path / "good").read_bytes()
    begin = 8 + int.from_bytes(good[:8], "little")
    draw = random.Random(0)
    outcomes = set()
    for _ in range(600):
        damaged = bytearray(good)
        for _ in range(draw.choice((1, 1, 2))):
            damaged[draw.randrange(begin)] = draw.choice(b'0123456789-[]{},:"FIxyz \xff')
        path = tmp_path / "damaged"
        path.write_bytes(damaged)
        try:
            theirs = safetensors.torch.load_file(path)
        except (safetensors.SafetensorError, ValueError, KeyError):
            theirs = None
        try:
            ours = open_tensors(path)
        except ValueError:
            ours = None
        outcomes.add((ours is None, theirs is None))
        if ours is not None:
            assert theirs is not None
            assert ours.keys() == theirs.keys()
            for name, tensor in ours.items():
                assert tensor.dtype == theirs[name].dtype
                assert torch.equal(tensor.nan_to_num(), theirs[name].nan_to_num())
    assert {(True, True), (False, False)} <= outcomes


def test_creating_never_replaces(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"earlier")
    with pytest.raises(FileExistsError):
        create_tensors(tmp_path / "a", {"x": ((3,), torch.float32)})
    assert (tmp_path / "a").read_bytes() == b"earlier"


def test_what_cannot_be_mapped_for_writing_is_refused(tmp_path: Path) -> None:
    """A tensor off its alignment is a copy: what is written to it would be lost."""
    header = {"a": one(dtype="U8", shape=[1], data_offsets=[0, 1])["x"]}
    header["x"] = one(data_offsets=[1, 17])["x"]
    path = raw(tmp_path / "x", header, 17)
    assert open_tensors(path)["x"].tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="x is not aligned"):
        open_tensors(path, writable=True)
