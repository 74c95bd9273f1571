"""Memory that other processes have: one memory, no copy, nothing left when it is gone."""

from __future__ import annotations

import gc
import mmap
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from quorum_attention.call.overlap import Mappings
from quorum_attention.devices.buffers import (
    InFile,
    MappedBuffers,
    Shared,
    give_back,
    handle_of,
    kept_room,
    opened,
    room,
)


def files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", ["room", "torch", "view", "file"])
def test_the_same_memory(tmp_path: Path, kind: str) -> None:
    shape = (2, 3, 700, 16)
    tensor = room(shape, torch.float32)
    if kind == "torch":
        tensor = torch.zeros(shape).share_memory_()
    elif kind == "file":
        tensor = torch.from_numpy(np.memmap(tmp_path / "x", np.float32, "w+", shape=shape))
    part = tensor[1:, :, 5:300].transpose(1, 2) if kind == "view" else tensor
    tensor.copy_(torch.randn(shape))
    found = Shared.of(part, Mappings.now())
    assert found.copied_bytes == 0
    assert isinstance(found.handle, InFile)
    there = opened(found.handle)
    assert torch.equal(there, part)
    part += 1  # seen there, however it was opened
    if kind != "file":
        assert torch.equal(there, part)
        there.mul_(2)
        assert torch.equal(there, part)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("seen", [True, False])
def test_files_that_torch_mapped(tmp_path: Path, kept: bool, seen: bool) -> None:
    """``torch.from_file`` calls its memory shared, and has no open file that others could use."""
    numbers = torch.randn(3, 50)
    file = tmp_path / "x"
    file.write_bytes(numbers.numpy().tobytes())
    tensor = torch.from_file(str(file), shared=seen, size=150).view(3, 50)
    if not kept:
        file.unlink()
    for given in (tensor, tensor[:, 5:9], tensor[:0]):
        found = Shared.of(given, Mappings.now())
        assert isinstance(found.handle, InFile)
        assert torch.equal(opened(found.handle), given)
        by_name = kept and seen and given.numel() > 0
        assert found.copied_bytes == (0 if by_name else given.nbytes)
    result = Shared.of(tensor, Mappings.now(), written=True)
    opened(result.handle).fill_(2)
    assert torch.equal(result.tensor, torch.full((3, 50), 2.0))
    assert (result.tensor.data_ptr() == tensor.data_ptr()) == (kept and seen)


def test_what_is_gone_leaves_nothing() -> None:
    gc.collect()
    before = files()
    tensor = room((1000, 100), torch.float64)
    assert not tensor.any()
    assert files() != before
    assert not os.path.exists("/dev/shm/quorum-attention")
    kept = tensor[3]
    del tensor
    gc.collect()
    assert files() != before  # a view holds it
    del kept
    gc.collect()
    assert files() == before


def test_ordinary_memory_is_copied() -> None:
    tensor = torch.randn(5, 7)
    found = Shared.of(tensor, Mappings.now())
    assert found.copied_bytes == tensor.nbytes
    assert torch.equal(opened(found.handle), tensor)
    target = Shared.of(tensor, Mappings.now(), written=True)
    assert target.tensor.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("planted", ["file", "pipe", "link", "room"])
def test_a_file_in_the_place_of_the_one_that_was_sent_is_refused(
    tmp_path: Path, planted: str
) -> None:
    """Numbers of open files are used again, and names can be given to other files."""
    path = tmp_path / "x"
    tensor = torch.from_numpy(np.memmap(path, np.float32, "w+", shape=(3, 50)))
    if planted == "room":
        tensor = room((3, 50), torch.float32)
    handle = Shared.of(tensor, Mappings.now()).handle
    assert isinstance(handle, InFile)
    assert torch.equal(handle.open(), tensor)
    if planted == "room":
        number = int(handle.path.rpartition("/")[2])
        other = os.memfd_create("other")
        os.ftruncate(other, 4096)
        kept = os.dup(number)
        os.dup2(other, number)
    else:
        path.rename(tmp_path / "moved")
        if planted == "file":
            path.write_bytes(bytes(600))
        elif planted == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("moved")
    before = files()
    try:
        if planted == "link":  # to the same file
            assert torch.equal(handle.open(), tensor)
        else:
            for opens in (handle.open, lambda: MappedBuffers().open(handle)):
                with pytest.raises(OSError, match="is another file") as raised:
                    opens()
                assert handle.path in str(raised.value)
    finally:
        if planted == "room":
            os.dup2(kept, number)
            for one in (kept, other):
                os.close(one)
            before -= {str(kept), str(other)}
    raised = None
    gc.collect()
    assert len(files()) <= len(before)


SHAPE = (2, 1 << 10, 1 << 10)


@pytest.fixture
def nothing_is_kept() -> object:
    gc.collect()
    give_back()
    yield
    gc.collect()
    give_back()


def file_of(tensor: torch.Tensor) -> str:
    handle = handle_of(tensor)
    assert isinstance(handle, InFile)
    return handle.path


@pytest.mark.usefixtures("nothing_is_kept")
def test_used_again_when_it_is_freed() -> None:
    first, fresh = kept_room(SHAPE, torch.uint8)
    assert fresh
    second, fresh = kept_room(SHAPE, torch.uint8)
    assert fresh
    assert file_of(first) != file_of(second)
    path, view = file_of(first), first[1, 5:]
    del first
    _third, fresh = kept_room(SHAPE, torch.uint8)
    assert fresh  # a view is still in use
    del view
    again, fresh = kept_room((1 << 20,), torch.float16)
    assert not fresh
    assert again.shape == (1 << 20,)
    assert file_of(again) == path
    again.fill_(3)
    assert (torch.from_file(path, True, 1 << 20, dtype=torch.float16) == 3).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("nothing_is_kept")
def test_nobody_shares_a_room(seed: int) -> None:
    draw = random.Random(seed)
    held: list[tuple[torch.Tensor, int]] = []
    for value in range(60):
        if held and draw.random() < 0.5:
            held.pop(draw.randrange(len(held)))
        made, _ = kept_room((draw.randint(1, 3), 1 << 20), torch.int8)
        made.fill_(value)
        held.append((made, value))
        # Memory is shared by whole pages, of each of which a byte is looked at.
        assert all(bool((t[:, :: mmap.PAGESIZE] == v).all()) for t, v in held)
