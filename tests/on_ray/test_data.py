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
from quorum_attention.ray.units import Cut


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
