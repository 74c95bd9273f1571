"""A GPU as a device: copies, streams, page locks, clock and memory, each by itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from helpers.attention import Inputs
from helpers.cuda import both
from helpers.movers import HEADS, LAYS, PIECES, ROWS, Lay, loaded, n_bytes, stored
from helpers.processes import until

from quorum_attention.execution.control.visits import Rows
from quorum_attention.execution.device import host_memory, page_locks
from quorum_attention.execution.device.allocate import empty_accumulator, home_device
from quorum_attention.execution.device.clock import Clock
from quorum_attention.execution.device.cuda import Cuda
from quorum_attention.execution.device.lookup import best_device
from quorum_attention.execution.device.page_locks import Copied
from quorum_attention.files import create_tensors, open_tensors
from quorum_attention.kernels.merge import add_

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
MIB = 1 << 20


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    gc.collect()
    torch.cuda.empty_cache()
    yield best_device()
    torch.cuda.synchronize()


def test_what_is_locked_of_memory_of_which_others_lock_the_beginning(
    gpu: torch.device,
) -> None:
    """As the second worker of a pool does."""
    memory = torch.zeros(4 * MIB, dtype=torch.uint8, device="cpu")
    first, second = memory[: 2 * MIB], memory[2 * MIB :]
    runtime = torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(second.data_ptr(), second.nbytes, 0)) == 0
    try:
        assert host_memory.is_locked(second)
        assert not host_memory.is_locked(first)
    finally:
        runtime.cudaHostUnregister(second.data_ptr())
    assert not host_memory.is_locked(second)


def unit(
    mover, slot, source, target, pieces, compute, stored=None, carried: int = 0
) -> None:  # type: ignore[no-untyped-def]
    """One unit's stages, through the first slot."""
    with mover.input_stage(0):
        mover.load(slot, source, pieces)
    with mover.state_stage(0, carried):
        pass
    with mover.compute_stage(0):
        compute()
    with mover.store_stage(0):
        mover.store(slot if stored is None else stored, target, pieces)


@pytest.mark.parametrize("lay", LAYS, ids=str)
@pytest.mark.parametrize("where", ["cpu", "pinned", "cuda"])
def test_rows_go_there_and_back(gpu: torch.device, lay: Lay, where: str) -> None:
    backend = Cuda()
    far = lay.made("cpu" if where == "pinned" else where, pinned=where == "pinned")
    target = lay.made("cpu" if where == "pinned" else where, pinned=where == "pinned")
    state = torch.randn(HEADS, ROWS, lay.width)
    expected_in, expected_out = loaded(far.cpu()), stored(target, state)
    slot, full = torch.zeros(HEADS, ROWS, lay.width, device=gpu), state.to(gpu)
    copied = torch.zeros_like(slot)
    torch.cuda.synchronize()
    with backend.page_locks([Copied(far), Copied(target)]) as locks:
        mover = backend.mover(gpu, 2, locks, Clock())
        unit(
            mover,
            slot,
            far,
            target,
            PIECES,
            lambda: copied.copy_(slot),
            full,
            carried=1,
        )
        mover.finish(wait=True)
    assert torch.equal(copied.cpu(), expected_in)
    assert torch.equal(target.cpu(), expected_out)
    assert mover.loaded_bytes == mover.stored_bytes == n_bytes(slot)


def test_a_slot_is_loaded_again_only_after_it_was_read(gpu: torch.device) -> None:
    """Twenty units through one slot: each computes on what was loaded for it, and
    stores that."""
    backend, rows = Cuda(), 1 << 16
    source = torch.randn(20, rows, 16).pin_memory()
    results = torch.zeros_like(source).pin_memory()
    slot = torch.empty(1, rows, 16, device=gpu)
    whole = (Rows(0, rows, 0),)
    with backend.page_locks(()) as locks:
        mover = backend.mover(gpu, 1, locks, Clock())
        for n in range(20):
            here = slice(n, n + 1)
            unit(
                mover,
                slot,
                source[here],
                results[here],
                whole,
                lambda n=n: slot.mul_(2).add_(n),
            )
        mover.finish(wait=True)
    for number in range(20):
        assert torch.equal(results[number], source[number] * 2 + number)


@pytest.mark.parametrize("offset", [0, 24])
def test_pageable_rows_are_copied_across_locked_pieces(
    gpu: torch.device, offset: int
) -> None:
    """As inputs of a call: locked 16 MiB at a time, unlocked head by head when they are
    left."""
    heads, rows, width = 3, 200_000, 64
    backend = Cuda()
    room = torch.randn(heads * rows * width + offset, dtype=torch.float32).half()
    far = room[offset:].view(heads, rows, width)
    target = torch.zeros_like(far)
    whole = (Rows(0, 1000, 0), Rows(1000, rows, 1000))
    slot = torch.zeros(heads, rows, width, dtype=torch.float16, device=gpu)
    torch.cuda.synchronize()
    with backend.page_locks(
        [Copied(far, by_address=True), Copied(target, by_address=True)]
    ) as locks:
        mover = backend.mover(gpu, 1, locks, Clock())
        assert locks.wants(far)
        unit(
            mover,
            slot,
            far,
            target,
            whole,
            lambda: slot.cpu().equal(far) or pytest.fail("off"),
        )
        mover.release([far[:2], target[:2]])
        mover.finish(wait=True)
        assert torch.equal(target, far)
        until(lambda: not locks.covers(far[:1]), 10)
        assert locks.covers(far[2])
    assert not far.is_pinned()


def test_a_merge_in_a_captured_graph_and_at_an_odd_address(gpu: torch.device) -> None:
    part = torch.ones(1, 1, 256, 64, device=gpu).half()
    state = (
        torch.zeros(1, 1, 257, 64, device=gpu)
        .flatten()[1 : 1 + 256 * 64]
        .view(1, 1, 256, 64)
    )
    assert state.data_ptr() % 16
    graph = torch.cuda.CUDAGraph()
    add_(state, part, 0.0)  # compiles
    with torch.cuda.graph(graph):
        add_(state, part, 2.0)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert bool((state == 6.0).all())


def test_merges_of_lanes_follow_each_other(gpu: torch.device) -> None:
    streams = Cuda().kernel_streams(gpu, 2)
    assert streams is not None
    total = torch.zeros(1 << 22, device=gpu)
    with streams.task():
        for number in range(8):
            with streams.call(number):
                part = torch.full_like(total, float(number + 1))
                with streams.merge(number):
                    # Neither associative nor commutative.
                    total.mul_(2).add_(part)
    wanted = 0.0
    for number in range(8):
        wanted = 2 * wanted + number + 1
    assert torch.equal(total, torch.full_like(total, wanted))


def test_memory_is_counted(gpu: torch.device) -> None:
    backend = Cuda()
    free = backend.free_bytes(gpu)
    counted = backend.count_peak(gpu)
    assert counted is not None
    arena = backend.allocate(64 * MIB, gpu)
    assert backend.free_bytes(gpu) <= free - 60 * MIB
    assert empty_accumulator(
        (4, 100), torch.float32, home_device("host", gpu), gpu
    ).is_pinned()
    del arena
    assert 64 * MIB <= counted() <= 66 * MIB
    backend.give_back_cached()
    assert abs(backend.free_bytes(gpu) - free) < 16 * MIB


@pytest.mark.parametrize("locked", [True, False])
def test_from_files_to_files(
    gpu: torch.device, locked: bool, tmp_path, monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    """Files that are mapped to be read are locked, those to be written go through
    buffers; without locks all do. The results are those of page-locked memory."""
    if not locked:
        monkeypatch.setattr(page_locks, "WORTH_LOCKING_BYTES", 1 << 60)
    shape, names = (1, 3, 65_536, 64), ("query", "key", "value", "grad_out")
    wanted = dict.fromkeys(names, (shape, torch.float16))
    for tensor in create_tensors(tmp_path / "in", wanted).values():
        tensor.copy_(torch.randn(shape))
    given = open_tensors(tmp_path / "in")
    results = create_tensors(tmp_path / "out", wanted)
    call = {"budget": "48MiB", "is_causal": True}
    right = both(Inputs(*(given[name].pin_memory() for name in names)), **call)
    pins = (
        {"out": results["grad_out"]},
        {"grads": tuple(results[name] for name in names[:3])},
    )
    found = both(Inputs(*(given[name] for name in names)), pins, **call)
    assert torch.equal(found["out"], right["out"])
    for name in names[:3]:
        off = found[name].float() - right[name].float()  # cuDNN adds dQ in any order
        assert torch.linalg.norm(off) < 1e-3 * right[name].float().norm()
    assert not any(
        tensor.is_pinned() for tensor in (*given.values(), *results.values())
    )
