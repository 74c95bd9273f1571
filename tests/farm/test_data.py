"""Rows and states in files, also of many pieces, written by several threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quorum_attention.call.mapped import Mappings
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.devices.buffers import InFile, file_id
from quorum_attention.farm import data
from quorum_attention.farm.call import _files_of
from quorum_attention.farm.data import Reader, bytes_of, read_state, write_rows, write_state


@pytest.mark.parametrize("piece", [100, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_is_written_is_read(
    piece: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_PIECE_BYTES", piece)
    whole = torch.randn(2, 3, 50, 7).to(dtype)
    path = tmp_path / "rows"
    path.write_bytes(bytes(24 + whole.nbytes))
    target = InFile(str(path), 24, tuple(whole.shape), whole.stride(), dtype, True)
    for entry in range(2):
        for heads in (Interval(0, 1), Interval(1, 3)):
            for rows in (Interval(0, 13), Interval(13, 50)):
                part = whole[entry : entry + 1, slice(*heads), slice(*rows)]
                write_rows(target, entry, heads, rows, part)
    got = Reader(target)
    assert torch.equal(got(1, Interval(0, 3), Interval(4, 50)), whole[1:, :, 4:])
    assert torch.equal(got(0, Interval(2, 3), Interval(0, 50)), whole[:1, 2:])
    state = (whole[:, :, ::2], torch.randn(2, 3, 50))
    write_state(str(tmp_path / "state"), state)
    for one, other in zip(read_state(str(tmp_path / "state"), state), state, strict=True):
        assert torch.equal(one, other)


def test_rows_are_not_written_to_an_output_that_was_begun_anew(tmp_path: Path) -> None:
    """By a worker of a process that was killed, and whose output another one has begun anew."""
    rows = torch.randn(1, 2, 5, 7)
    path = tmp_path / "out.run.unfinished"
    mine, others = b"m" * 16, b"o" * 16
    path.write_bytes(bytes(16) + mine + bytes(rows.nbytes))
    target = InFile(str(path), 32, tuple(rows.shape), rows.stride(), rows.dtype, True, mine)
    write_rows(target, 0, Interval(0, 2), Interval(0, 5), rows)
    assert torch.equal(Reader(target)(0, Interval(0, 2), Interval(0, 5)), rows)
    for start in (bytes(16) + others, bytes(32), b"", b"a header that can be loaded, and so on"):
        now = start + bytes(rows.nbytes if start else 0)
        path.write_bytes(now)
        with pytest.raises(RuntimeError, match="begun anew"):
            write_rows(target, 0, Interval(0, 2), Interval(0, 5), rows)
        assert path.read_bytes() == now


@pytest.mark.parametrize("name", ["out.run.unfinished", "out.12345678.unfinished", "out"])
def test_only_an_output_that_is_kept_has_an_identity(name: str, tmp_path: Path) -> None:
    """Elsewhere those bytes may be results."""
    path = tmp_path / name
    path.write_bytes(bytes(16) + b"i" * 16 + bytes(4 * 2 * 6 * 8))
    mapped = np.memmap(path, np.float32, "r+", 32, (1, 2, 6, 8))
    found = _files_of({"out": torch.from_numpy(mapped)}, Mappings.now())
    assert found is not None
    assert found["out"].identity == (b"i" * 16 if ".run." in name else b"")


def test_a_state_is_never_written_over(tmp_path: Path) -> None:
    write_state(str(tmp_path / "state"), [torch.ones(3)])
    with pytest.raises(FileExistsError):
        write_state(str(tmp_path / "state"), [torch.zeros(3)])
    (one,) = read_state(str(tmp_path / "state"), [torch.empty(3)])
    assert torch.equal(one, torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_bytes_of_single_elements_and_of_none(dtype: torch.dtype) -> None:
    """Which are contiguous whatever their strides are."""
    every = torch.arange(12.0).view(3, 4).to(dtype)
    for one in (every[1, 1::2][:1], every[::2, 2][1:], every[:, :0], every.t(), every[1:]):
        got = bytes_of(one)
        assert got.stride() == (1,)
        assert torch.equal(got.view(dtype), one.reshape(-1))


def test_files_of_workers_are_those_that_the_program_opened(tmp_path: Path) -> None:
    """By the number of the file; by that of its device as well, on the program's own machine."""
    rows, path = torch.randn(1, 2, 5, 7), tmp_path / "rows"
    path.write_bytes(rows.numpy().tobytes())
    mine = file_id(str(path))
    sent = InFile(str(path), 0, tuple(rows.shape), rows.stride(), rows.dtype, True, file=mine)
    heads, part = Interval(0, 2), Interval(0, 5)
    for machine, device, inode, is_same in (
        (mine[0], mine[1], mine[2], True),
        ("another", mine[1] + 1, mine[2], True),
        (mine[0], mine[1] + 1, mine[2], False),
        ("another", mine[1], mine[2] + 1, False),
    ):
        one = replace(sent, file=(machine, device, inode))
        if is_same:
            assert torch.equal(Reader(one)(0, heads, part), rows)
            write_rows(one, 0, heads, part, rows)
            continue
        for uses in (
            lambda one=one: Reader(one),
            lambda one=one: write_rows(one, 0, heads, part, -rows),
        ):
            with pytest.raises(OSError, match=f"{path} is another file"):
                uses()
    assert torch.equal(Reader(sent)(0, heads, part), rows)
