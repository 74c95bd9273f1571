"""Tensors in .npy and safetensors files, mapped, both ways with the formats' own
libraries; damaged ones and strange dtypes are refused by name."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

import quorum_attention as qa
from quorum_attention.cli import main
from quorum_attention.files import create_tensors, metadata_of, open_tensors
from quorum_attention.files.formats import create_npy, open_npy

CPU = ["--device", "cpu"]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        np.asfortranarray(np.arange(24, dtype=np.float16).reshape(2, 3, 4)),
        np.array(3.5),
        np.zeros((0, 7), np.float64),
        np.array([True, False]),
        np.arange(5, dtype=np.int64),
        np.arange(5, dtype=np.uint32),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_what_numpy_wrote_is_read(tmp_path: Path, array: np.ndarray) -> None:
    path = tmp_path / "a.npy"
    np.save(path, array)
    found = open_npy(path)
    assert tuple(found.shape) == array.shape
    np.testing.assert_array_equal(found.numpy(), array)
    assert found.numpy().dtype == array.dtype
    # The second version of the format.
    with open(path, "wb") as file:
        np.lib.format.write_array(file, array, (2, 0))
    np.testing.assert_array_equal(open_npy(path).numpy(), array)


@pytest.mark.parametrize("shape", [(), (0,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_what_is_created_is_read_by_numpy(
    tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    values = torch.randn(shape).to(dtype)
    create_npy(tmp_path / "x.npy", shape, dtype).copy_(values)
    found = np.load(tmp_path / "x.npy")
    np.testing.assert_array_equal(found, values.numpy())
    assert found.dtype == values.numpy().dtype


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros(3, ">f4"), "byte order"),
        (np.zeros(3, "V2"), "bfloat16, maybe"),
        (np.zeros(3, "U4"), "elements of '<U4'"),
        (np.zeros(3, np.complex128), "elements of '<c16'"),
        (np.zeros(3, [("a", "f4")]), "elements of"),
        (lambda data: data[:-1], "truncated"),
        (lambda data: data + b"x", "corrupt"),
        (lambda data: data.replace(b"(3,)", b"(-3,"), "not a .npy file"),
    ],
)
def test_other_elements_and_damaged_files_are_refused_by_name(
    tmp_path: Path, array: Any, said: str
) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.zeros(3) if callable(array) else array)
    if callable(array):
        path.write_bytes(array(path.read_bytes()))
    with pytest.raises(ValueError, match=said) as raised:
        open_npy(path)
    assert str(path) in str(raised.value)


@pytest.fixture
def arrays(tmp_path: Path) -> dict[str, np.ndarray]:
    made = {name: np.random.default_rng(1).normal(size=(2, 3, 40, 8)) for name in "qkv"}
    made = {name: array.astype(np.float32) for name, array in made.items()}
    (tmp_path / "call").mkdir()
    for name, array in made.items():
        np.save(tmp_path / f"{name}.npy", array)
        np.save(tmp_path / "call" / f"{name}.npy", array)
    return made


def test_npy_files_in_and_out(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    """A file for each tensor, a folder, or other names; results in one file or in a
    folder."""
    q, k, v = arrays.values()
    wanted, lse = (
        t.numpy() for t in qa.attention_with_lse(q, k, v, is_causal=True, devices="cpu")
    )
    options = [*CPU, "--causal"]
    each = [str(tmp_path / f"{name}.npy") for name in "qkv"]
    (tmp_path / "q.npy").rename(tmp_path / "layer 3.npy")
    each[0] = f"q={tmp_path / 'layer 3.npy'}"
    # Options stand anywhere between names.
    assert main(["run", each[0], *options, *each[1:], str(tmp_path / "out.npy")]) == 0
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), wanted, atol=1e-6)
    folder = tmp_path / "results"
    assert main(["run", str(tmp_path / "call"), f"{folder}/", *options, "--lse"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["lse.npy", "out.npy"]
    np.testing.assert_allclose(np.load(folder / "out.npy"), wanted, atol=1e-6)
    np.testing.assert_allclose(np.load(folder / "lse.npy"), lse, atol=1e-5)
    upstream = np.random.default_rng(2).normal(size=wanted.shape).astype(np.float32)
    np.save(tmp_path / "do.npy", upstream)
    given = [str(tmp_path / "call"), f"{folder}/", str(tmp_path / "do.npy")]
    assert main(["run", "--backward", *given, f"{folder}/", *options]) == 0
    tensors = [torch.from_numpy(array).requires_grad_() for array in arrays.values()]
    qa.attention(*tensors, is_causal=True).backward(torch.from_numpy(upstream))
    for name, tensor in zip(("dq", "dk", "dv"), tensors, strict=True):
        torch.testing.assert_close(
            torch.from_numpy(np.load(folder / f"{name}.npy")), tensor.grad
        )


def test_what_npy_files_cannot_have_is_said_before_any_work(
    tmp_path: Path, arrays: dict[str, np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert main(["run", *arguments, *CPU]) == 2
        assert sorted(tmp_path.rglob("*")) == before
        return capsys.readouterr().err

    call, out = str(tmp_path / "call"), str(tmp_path / "out.npy")
    assert "can have one result, and there are out, lse" in said(call, out, "--lse")
    assert "bfloat16, which .npy files do not know" in said(
        call, out, "--out-dtype", "bf16"
    )
    assert "both are the query" in said(call, str(tmp_path / "q.npy"), out)
    half = {name: torch.zeros(1, 1, 4, 4, dtype=torch.bfloat16) for name in "qkv"}
    safetensors.torch.save_file(half, tmp_path / "half")
    assert "give another --out-dtype" in said(str(tmp_path / "half"), out)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    right = torch.randn(2, 3, 5).to(dtype)
    made = create_tensors(
        tmp_path / "a", {"x": (right.shape, dtype), "e": ((0, 4), dtype)}
    )
    made["x"].copy_(right)
    assert torch.equal(safetensors.torch.load_file(tmp_path / "a")["x"], right)
    safetensors.torch.save_file({"y": right}, tmp_path / "b")
    assert torch.equal(open_tensors(tmp_path / "b")["y"], right)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    for opens in (open_tensors, metadata_of):
        with pytest.raises(OSError, match="not a regular file"):
            opens(tmp_path / "x")


def test_damaged_files_are_read_as_the_library_reads_them(tmp_path: Path) -> None:
    """Whatever single bytes are changed: the same tensors, or a ValueError; never a
    crash."""
    tensors = {
        "x": torch.randn(3, 2),
        "y": torch.arange(5),
        "z": torch.zeros(0, 3).half(),
    }
    safetensors.torch.save_file(tensors, tmp_path / "good", {"a": "b"})
    good = (tmp_path / "good").read_bytes()
    begin = 8 + int.from_bytes(good[:8], "little")
    draw = random.Random(0)
    outcomes, named = set(), True
    for _ in range(600):
        damaged = bytearray(good)
        for _ in range(draw.choice((1, 1, 2))):
            damaged[draw.randrange(begin)] = draw.choice(
                b'0123456789-[]{},:"FIxyz \xff'
            )
        path = tmp_path / "damaged"
        path.write_bytes(damaged)
        try:
            theirs = safetensors.torch.load_file(path)
        except (safetensors.SafetensorError, ValueError, KeyError):
            theirs = None
        try:
            ours = open_tensors(path)
        except ValueError as error:
            ours, named = None, named and str(error).startswith(str(path))
        outcomes.add((ours is None, theirs is None))
        if ours is not None:
            assert theirs is not None
            assert ours.keys() == theirs.keys()
            for name, tensor in ours.items():
                assert tensor.dtype == theirs[name].dtype
                assert torch.equal(tensor.nan_to_num(), theirs[name].nan_to_num())
    assert {(True, True), (False, False)} <= outcomes
    assert named


def test_creating_never_replaces(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"earlier")
    with pytest.raises(FileExistsError):
        create_tensors(tmp_path / "a", {"x": ((3,), torch.float32)})
    assert (tmp_path / "a").read_bytes() == b"earlier"


def test_what_cannot_be_mapped_is_refused(tmp_path: Path) -> None:
    """A tensor off its alignment is a copy: what is written to it would be lost."""
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "x": {"dtype": "F32", "shape": [4], "data_offsets": [1, 17]},
    }
    path, text = tmp_path / "x", json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(17))
    assert open_tensors(path)["x"].tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="x is not aligned"):
        open_tensors(path, writable=True)
    unknown = path.read_bytes().replace(b'"F32", "shape": [4]', b'"F4", "shape": [32]')
    path.write_bytes(unknown)
    with pytest.raises(ValueError, match="x has dtype 'F4'"):
        open_tensors(path)


_SIZES = (
    0,
    1,
    2,
    3,
    -1,
    2**31,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    1.5,
    "3",
    None,
    True,
    [],
)
_TYPES = ("F32", "F64", "BF16", "U8", "BOOL", "F4", "F8_E8M0", "f32", "", None, 3)


def _drawn_header(draw: random.Random) -> tuple[dict[str, Any], int]:
    """A right header of one to three tensors, and the bytes of its data."""
    header: dict[str, Any] = {}
    end = 0
    for name in draw.sample(["query", "key", "value"], draw.randint(1, 3)):
        dtype, width = draw.choice([("F32", 4), ("F64", 8), ("BF16", 2), ("U8", 1)])
        shape = [draw.randint(0, 3) for _ in range(draw.randint(0, 4))]
        start, end = end, end + width * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    return header, end


def _damage(header: dict[str, Any], draw: random.Random) -> None:
    """Change one thing in a header."""
    tensor = header[draw.choice(list(header))]
    damages: dict[str, Callable[[], Any]] = {
        "dtype": lambda: draw.choice(_TYPES),
        "shape": lambda: draw.choices(_SIZES, k=draw.randint(0, 4)),
        "data_offsets": lambda: draw.choices(_SIZES, k=draw.choice([1, 2, 2, 2, 3])),
    }
    field = draw.choice(list(damages))
    tensor[field] = damages[field]()
    if draw.random() < 0.3:  # sizes that leave no elements
        tensor["shape"] = draw.sample(
            [0, draw.choice([2**33, 2**62, 2**63, -1]), 3, 2**33], 4
        )
        tensor["data_offsets"] = [0, 0]


def test_whatever_a_header_says_it_opens_or_is_refused_in_words(tmp_path: Path) -> None:
    """A size of 2**63 beside a zero ended in a traceback of torch's."""
    draw, path = random.Random(45), tmp_path / "x.safetensors"
    opened = refused = 0
    for _ in range(400):
        header, n_bytes = _drawn_header(draw)
        for _ in range(draw.randint(0, 2)):
            _damage(header, draw)
        text = bytearray(json.dumps(header).encode())
        if draw.random() < 0.1:
            text[draw.randrange(len(text))] = draw.randrange(256)
        length = draw.choice([len(text)] * 20 + [0, 1, 2**20, 2**63, 2**64 - 1])
        path.write_bytes(length.to_bytes(8, "little") + text + bytes(n_bytes))
        try:
            tensors = open_tensors(path)
        except ValueError:
            refused += 1
            continue
        for name, tensor in tensors.items():
            assert list(tensor.shape) == json.loads(text)[name]["shape"]
            tensor.clone()  # all of it can be read
        opened += 1
    assert opened > 50
    assert refused > 50


def test_a_shape_that_no_tensor_has_is_refused_though_it_has_no_elements(
    tmp_path: Path,
) -> None:
    header = {"query": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}}
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ValueError, match=r"query has shape \[0, 9223372036854775808\]"):
        open_tensors(tmp_path / "x")
