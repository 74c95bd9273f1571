"""Mapped safetensors files, both ways with the safetensors library."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from quorum_attention.files import create_tensors, open_tensors, writing_tensors


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


def raw(path: Path, header: object, n_bytes: int = 16) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(n_bytes))
    return path


def one(**changed: Any) -> dict[str, Any]:
    found = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changed}
    return {"x": {name: value for name, value in found.items() if value is not None}}


CORRUPT = {
    "shape smaller than offsets": (one(shape=[2]), "x has shape .* 16 bytes apart"),
    "shape larger than offsets": (one(shape=[2**56, 8]), "x has shape .* 16 bytes apart"),
    "more than a tensor has": (one(shape=[0, 2**62], data_offsets=[0, 0]), "x has shape .* more"),
    "negative shape": (one(shape=[-4]), "x has shape"),
    "shape of words": (one(shape=["4"]), "x has shape"),
    "shape of truths": (one(shape=[True]), "x has shape"),
    "no list": (one(shape=4), "x has shape"),
    "negative offsets": (one(data_offsets=[-16, 0]), "x has data_offsets"),
    "reversed offsets": (one(data_offsets=[16, 0]), "x has data_offsets"),
    "one offset": (one(data_offsets=[16]), "x has data_offsets"),
    "offsets of fractions": (one(data_offsets=[0.0, 16.0]), "x has data_offsets"),
    "no dtype": (one(dtype=None), "x has no dtype"),
    "no shape": (one(shape=None), "x has no shape"),
    "no offsets": (one(data_offsets=None), "x has no data_offsets"),
    "unknown dtype": (one(dtype="F12"), "x has dtype 'F12', which is not supported"),
    "a list for a dtype": (one(dtype=[1]), "x has dtype"),
    "overlapping": ({**one(), "y": one(shape=[2], data_offsets=[8, 16])["x"]}, "y overlaps"),
    "a gap": (one(shape=[2], data_offsets=[8, 16]), "x leaves a gap"),
    "bytes of nobody": (one(shape=[2], data_offsets=[0, 8]), "end at byte 8 of 16"),
    "too short": (one(shape=[8], data_offsets=[0, 32]), "truncated"),
    "a list": ([1, 2], "its header is a list"),
    "a list for a tensor": ({"x": [1]}, "x is described by a list"),
    "metadata no object": ({**one(), "__metadata__": 3}, "__metadata__ is no object"),
    "a name twice": (b'{"x": %b, "x": %b}' % ((json.dumps(one()["x"]).encode(),) * 2), "'x' twice"),
    "not UTF-8": (b'{"\xff": 1}', "not UTF-8"),
    "nested without end": (b"[" * 100_000, "no JSON"),
    "a number of many digits": (b'{"x": ' + b"9" * 10_000 + b"}", "no JSON"),
    "no text": (b"", "no header"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_corrupt_header_is_refused_by_name(tmp_path: Path, case: str) -> None:
    header, said = CORRUPT[case]
    path = raw(tmp_path / "x", header)
    with pytest.raises(ValueError, match=said):
        open_tensors(path)
    # Of these the library silently takes the last, or nothing.
    if case not in ("a name twice", "more than a tensor has"):
        with pytest.raises(safetensors.SafetensorError):
            safetensors.safe_open(path, "pt").keys()


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="no header"):
        open_tensors(tmp_path / "x")


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


def test_a_new_file_takes_its_place_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"earlier")
    wanted = {
        "half": ((3,), torch.float16),
        "wide": ((2,), torch.float64),
        "no": ((0,), torch.int8),
    }
    with writing_tensors(path, wanted, {"by": "us"}) as tensors:
        for tensor in tensors.values():
            tensor.fill_(3)
        assert path.read_bytes() == b"earlier"
    found = safetensors.torch.load_file(path)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "half": [3, 3, 3], "wide": [3, 3], "no": [],
    }  # fmt: skip
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"by": "us", "complete": "true"}
    with pytest.raises(RuntimeError), writing_tensors(path, wanted, {}):
        raise RuntimeError
    assert safetensors.torch.load_file(path).keys() == wanted.keys()
    assert [found.name for found in tmp_path.iterdir()] == ["a"]


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
