"""Memory that other processes have: one memory, no copy, nothing left when it is gone.
It is mapped once, and locked as a whole."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.late_cuda import Driver

from quorum_attention.call.overlap import Mappings
from quorum_attention.devices.shared_files import alloc_shared, handle_of
from quorum_attention.devices.shared_memory import give_back, shared_memory, to_handle
from quorum_attention.devices.worker_mappings import WorkerMappings
from quorum_attention.execution.device.pinned_pool import Locker


def files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", ["room", "torch", "view", "file"])
def test_the_same_memory(tmp_path: Path, kind: str) -> None:
    shape = (2, 3, 700, 16)
    tensor = alloc_shared(shape, torch.float32)
    if kind == "torch":
        tensor = torch.zeros(shape).share_memory_()
    elif kind == "file":
        tensor = torch.from_numpy(
            np.memmap(tmp_path / "x", np.float32, "w+", shape=shape)
        )
    part = tensor[1:, :, 5:300].transpose(1, 2) if kind == "view" else tensor
    tensor.copy_(torch.randn(shape))
    handle, own = to_handle(part, Mappings.now)
    assert own.data_ptr() == part.data_ptr()
    there = handle.open()
    assert torch.equal(there, part)
    part += 1  # seen there, however it was opened
    if kind != "file":
        assert torch.equal(there, part)
        there.mul_(2)
        assert torch.equal(there, part)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("seen", [True, False])
def test_files_that_torch_mapped(tmp_path: Path, kept: bool, seen: bool) -> None:
    """``torch.from_file`` calls its memory shared, and has no open file that others
    could use."""
    numbers = torch.randn(3, 50)
    file = tmp_path / "x"
    file.write_bytes(numbers.numpy().tobytes())
    tensor = torch.from_file(str(file), shared=seen, size=150).view(3, 50)
    if not kept:
        file.unlink()
    for given in (tensor, tensor[:, 5:9], tensor[:0]):
        handle, own = to_handle(given, Mappings.now)
        assert torch.equal(handle.open(), given)
        assert not given.numel() or (own.data_ptr() == given.data_ptr()) == (
            kept and seen
        )
    handle, own = to_handle(tensor, Mappings.now, writable=True)
    handle.open().fill_(2)
    assert torch.equal(own, torch.full((3, 50), 2.0))
    assert (own.data_ptr() == tensor.data_ptr()) == (kept and seen)


def test_what_is_gone_leaves_nothing() -> None:
    gc.collect()
    before = files()
    tensor = alloc_shared((1000, 100), torch.float64)
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


@pytest.mark.parametrize("planted", ["pipe", "link", "room"])
def test_a_file_in_the_place_of_the_one_that_was_sent_is_refused(
    tmp_path: Path, planted: str
) -> None:
    """Numbers of open files are used again, and names can be given to other files."""
    path = tmp_path / "x"
    tensor = torch.from_numpy(np.memmap(path, np.float32, "w+", shape=(3, 50)))
    if planted == "room":
        tensor = alloc_shared((3, 50), torch.float32)
    handle, _ = to_handle(tensor, Mappings.now)
    assert torch.equal(handle.open(), tensor)
    if planted == "room":
        number = int(handle.path.rpartition("/")[2])
        other = os.memfd_create("other")
        os.ftruncate(other, 4096)
        kept = os.dup(number)
        os.dup2(other, number)
    else:
        path.rename(tmp_path / "moved")
        if planted == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("moved")
    before = files()
    try:
        if planted == "link":  # to the same file
            assert torch.equal(handle.open(), tensor)
        else:
            for opens in (handle.open, lambda: WorkerMappings().open(handle)):
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


def test_used_again_when_it_is_freed() -> None:
    gc.collect()
    give_back()
    first, second = (shared_memory(SHAPE, torch.uint8) for _ in range(2))
    path, view = handle_of(first).path, first[1, 5:]
    assert path != handle_of(second).path
    del first
    third = shared_memory(SHAPE, torch.uint8)
    assert handle_of(third).path != path  # a view is still in use
    del view
    again = shared_memory((1 << 20,), torch.float16)
    assert again.shape == (1 << 20,)
    assert handle_of(again).path == path
    again.fill_(3)
    assert (torch.from_file(path, True, 1 << 20, dtype=torch.float16) == 3).all()


@pytest.mark.parametrize("seed", range(8))
def test_memory_is_locked_once_within_a_bound_and_unlocked(seed: int) -> None:
    draw = random.Random(seed)
    driver = Driver()
    most_bytes, locked = draw.choice([1 << 40, 12 << 20]), 0
    openings = WorkerMappings(
        Locker(driver.lock, driver.cudaHostUnregister, lambda: None), most_bytes
    )
    shape = (4, 6, draw.choice([1000, 2048, 3333]), 64)
    every = [alloc_shared(shape, torch.uint8) for _ in range(4)]
    for _ in range(40):
        if draw.random() < 0.1:
            every[draw.randrange(4)] = alloc_shared(shape, torch.uint8)
        openings.begin_pass()
        for tensor in draw.sample(every, draw.randint(1, 4)):
            low, high = sorted(draw.sample(range(7), 2))
            rows = draw.choice([slice(None), slice(draw.randint(0, 500), None)])
            handle = handle_of(
                draw.choice([tensor, tensor[draw.randrange(4)][low:high, rows]])
            )
            there = openings.open(handle)
            result = draw.random() < 0.5
            openings.lock(handle, is_result=result)
            locked += driver.locked_bytes(there) == there.nbytes
            assert driver.locked_bytes() <= most_bytes
    assert locked
    del tensor, there
    every.clear()
    gc.collect()
    openings.forget_gone()
    assert not driver.locked
