"""Rows and states in files: whole or absent, and only in the files of the call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quorum_attention.call.block import Block, WholeCall
from quorum_attention.call.options import CallOptions
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.devices.buffers import InFile, file_id
from quorum_attention.ray.compute import Job
from quorum_attention.ray.units import Cut, Unit


def job_of(whole: torch.Tensor, path: Path, offset: int = 24) -> Job:
    """A job whose output, of some batch dimensions, is a file of zeros."""
    path.write_bytes(bytes(offset + whole.nbytes))
    target = InFile(
        str(path), offset, tuple(whole.shape), whole.stride(), whole.dtype, True,
        file=file_id(str(path)),
    )  # fmt: skip
    *batch, heads, rows, _ = whole.shape
    call = WholeCall(tuple(batch), heads, heads, rows, rows)
    (folder := path.with_name("states")).mkdir(exist_ok=True)
    return Job(
        Cut(call, 1),
        {},
        {"out": target},
        str(folder),
        torch.float32,
        whole.dtype,
        CallOptions(),
        1,
        0,
    )


def found(path: Path, like: torch.Tensor, offset: int = 24) -> torch.Tensor:
    raw = torch.frombuffer(bytearray(path.read_bytes()[offset:]), dtype=like.dtype)
    return raw.view(like.shape)


@pytest.mark.parametrize("batch", [(2,), (2, 3), ()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_is_written_is_read(
    batch: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    whole = torch.randn(*batch, 3, 50, 7).to(dtype)
    job = job_of(whole, tmp_path / "out")
    flat = whole.reshape(-1, 3, 50, 7)
    for entry in range(len(flat)):
        for heads in (Interval(0, 1), Interval(1, 3)):
            for rows in (Interval(0, 13), Interval(13, 50)):
                block = Block(Interval(entry, entry + 1), heads, rows, Interval(0, 50))
                part = flat[entry : entry + 1, slice(*heads), slice(*rows)]
                job.write(block, (part, torch.empty(0)))
    assert torch.equal(found(tmp_path / "out", whole), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_states(dtype: torch.dtype, tmp_path: Path) -> None:
    """Also of a single element, whatever its strides are, and of none."""
    every = torch.randn(2, 3, 50, 4, dtype=dtype)
    job = job_of(every, tmp_path / "out")
    for number, state in enumerate(
        ((every[:, :, ::2], every[..., 0]), (every[1:, :1, 7:8, 1::2][..., :1], every[:, :, :0]))
    ):
        job.leave(Unit("task", 0, 0, number), 3, state)
        for one, other in zip(job.read_state(Unit("merge", 0, 0, 3), number), state, strict=True):
            assert torch.equal(one, other)
    job.leave(Unit("task", 0, 0, 9), 3, [])
    assert job.read_state(Unit("merge", 0, 0, 3), 9) == []


def test_rows_are_written_only_into_the_files_of_a_call_that_runs(tmp_path: Path) -> None:
    """By the number of the file; by that of its device as well, on the program's own machine. A
    call that is over has removed its folder."""
    rows, path = torch.randn(1, 2, 5, 7), tmp_path / "rows"
    job = job_of(rows, path)
    sent = job.results["out"]
    assert sent.file is not None
    mine = sent.file
    block = Block(Interval(0, 1), Interval(0, 2), Interval(0, 5), Interval(0, 5))
    for machine, device, inode, is_same in (
        (mine[0], mine[1], mine[2], True),
        ("another", mine[1] + 1, mine[2], True),
        (mine[0], mine[1] + 1, mine[2], False),
        ("another", mine[1], mine[2] + 1, False),
    ):
        one = replace(job, results={"out": replace(sent, file=(machine, device, inode))})
        if is_same:
            one.write(block, (rows, rows))
            continue
        with pytest.raises(OSError, match=f"{path} is another file"):
            one.write(block, (-rows, rows))
    (tmp_path / "states").rmdir()
    with pytest.raises(RuntimeError, match="this call is over"):
        job.write(block, (-rows, rows))
    assert torch.equal(found(path, rows), rows)
