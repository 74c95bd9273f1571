"""Rows into and out of slots: by address, in batches, in pitches or by torch, the same rows.

The CUDA mover runs here with streams that do nothing and a runtime that copies host memory.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from helpers_movers import HEADS, LAYS, PIECES, ROWS, Lay, loaded, n_bytes, stored

from quorum_attention.execution.device import cuda_mover, page_locks
from quorum_attention.execution.device.cuda_mover import CudaMover
from quorum_attention.execution.device.mover import Clock, Mover
from quorum_attention.execution.device.page_locks import Copied, PageLocks

GPU = torch.device("cuda", 0)


class Runtime:
    """cuda-bindings' runtime, as far as the mover uses it, on host memory."""

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)  # noqa: N815
    cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream=1)  # noqa: N815
    cudaMemcpyAttributes = SimpleNamespace  # noqa: N815

    def __init__(self, batch_status: int = 0, status: int = 0) -> None:
        self.batch_status, self.status = batch_status, status

    def cudaMemcpyBatchAsync(self, targets, sources, sizes, count, *rest):  # type: ignore[no-untyped-def]
        if self.batch_status == 0:
            for target, source, size in zip(targets, sources, sizes, strict=True):
                ctypes.memmove(target, source, size)
        return (self.batch_status,)

    def cudaMemcpyAsync(self, target, source, size, kind, stream):  # type: ignore[no-untyped-def]
        if self.status == 0:
            ctypes.memmove(target, source, size)
        return (self.status,)

    def cudaMemcpy2DAsync(self, target, pitch, source, source_pitch, length, lines, kind, stream):  # type: ignore[no-untyped-def]
        for line in range(lines):
            ctypes.memmove(target + line * pitch, source + line * source_pitch, length)
        return (self.status,)


class Nothing:
    """A stream or an event."""

    cuda_stream = 0

    def __init__(self, *device: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def record(self, stream: object) -> None: ...
    def synchronize(self) -> None: ...


class Locks:
    """Everything, or nothing, is page-locked."""

    def __init__(self, every: bool) -> None:
        self.every = every
        self.asked: list[int] = []

    def begin(self) -> None: ...

    def wants(self, tensor: torch.Tensor) -> bool:
        return True

    def covers(self, tensor: torch.Tensor) -> bool:
        self.asked.append(tensor.data_ptr())
        return self.every

    def parts(self, start: int, n_bytes: int, *, wait: bool) -> list[tuple[int, int, bool]]:
        assert wait, "there are no buffers for tensors as small as these"
        self.asked.append(start)
        return [(start, n_bytes, self.every)]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = {
        "current_stream": Nothing,
        "Stream": Nothing,
        "Event": Nothing,
        "current_device": lambda: 0,
        "stream": lambda stream: nullcontext(),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)


def made(monkeypatch, runtime: Runtime | None, locks: Locks | None = None) -> CudaMover:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(cuda_mover, "cuda_runtime", lambda: runtime)
    return CudaMover(GPU, 2, locks or Locks(True), Clock())  # type: ignore[arg-type]


def check(mover: Mover, lay: Lay) -> None:
    """There and back."""
    far = lay.made()
    slot = torch.zeros(HEADS, ROWS, lay.width)
    with mover.input_stage(0):
        mover.load(slot, far, PIECES)
    assert torch.equal(slot, loaded(far))
    target, state = lay.made(), torch.randn(HEADS, ROWS, lay.width)
    expected = stored(target, state)
    with mover.store_stage(0):
        mover.store(target, state, PIECES)
    mover.finish(wait=True)
    assert torch.equal(target, expected)
    assert mover.loaded_bytes == mover.stored_bytes == n_bytes(slot)


@pytest.mark.parametrize("lay", LAYS, ids=str)
def test_in_order(lay: Lay) -> None:
    check(Mover(Clock(), 2), lay)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("lay", LAYS, ids=str)
@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize("runtime", ["batches", "old driver", "none"])
def test_on_streams(lay: Lay, locked: bool, runtime: str, monkeypatch) -> None:
    """Every row is waited for, whatever way it is copied: until it is locked, or not, its memory
    may be written to by another thread."""
    bindings = None if runtime == "none" else Runtime(batch_status=runtime == "old driver")
    locks = Locks(locked)
    check(made(monkeypatch, bindings, locks), lay)
    assert len(set(locks.asked)) == len(PIECES) * HEADS * 2


class Driver(Runtime):
    """Locks memory, too, but for some pieces; refuses copies that a driver refuses."""

    def __init__(self, refused: int) -> None:
        super().__init__()
        self.locked: dict[int, int] = {}
        self.refused = refused
        self.asked = 0

    def cudaHostRegister(self, start: int, n_bytes: int, flags: int) -> int:
        self.asked += 1
        if self.refused and self.asked % self.refused == 0:
            return 1
        self.locked[start] = start + n_bytes
        return 0

    def cudaHostUnregister(self, start: int) -> int:
        del self.locked[start]
        return 0

    def in_one(self, start: int, size: int) -> bool:
        """Whether memory is locked, in one piece; raises if a part of it is."""
        touched = [(a, b) for a, b in self.locked.items() if a < start + size and start < b]
        assert not touched or (touched[0][0] <= start and start + size <= touched[0][1])
        return bool(touched)

    def cudaMemcpyBatchAsync(self, targets, sources, sizes, count, *rest):  # type: ignore[no-untyped-def]
        for target, source, size in zip(targets, sources, sizes, strict=True):
            assert self.in_one(target, size) or self.in_one(source, size), "pageable, in a batch"
        return super().cudaMemcpyBatchAsync(targets, sources, sizes, count, *rest)

    def cudaMemcpyAsync(self, target, source, size, kind, stream):  # type: ignore[no-untyped-def]
        self.in_one(target, size), self.in_one(source, size)
        return super().cudaMemcpyAsync(target, source, size, kind, stream)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("refused", [0, 1, 2, 5])
@pytest.mark.parametrize("piece_bytes", [64, 96, 1000])
@pytest.mark.parametrize("lay", LAYS[:3], ids=str)
def test_no_copy_reaches_from_one_locked_piece_into_another(
    lay: Lay, piece_bytes: int, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that were there before are locked in pieces, some of which may be refused."""
    driver = Driver(refused)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name, value in (("WORTH_LOCKING_BYTES", 1), ("PIECE_BYTES", piece_bytes)):
        monkeypatch.setattr(page_locks, name, value)
    monkeypatch.setattr(page_locks, "PAGE_BYTES", 32)
    far, target = lay.made(), lay.made()
    state = torch.randn(HEADS, ROWS, lay.width).to(lay.dtype)
    slot = torch.zeros_like(state)
    expected = stored(target, state)
    with PageLocks([Copied(far, by_address=True), Copied(target, by_address=True)]) as locks:
        mover = made(monkeypatch, driver, locks)  # type: ignore[arg-type]
        for _ in range(2):
            with mover.input_stage(0):
                mover.load(slot, far, PIECES)
            assert torch.equal(slot.float(), loaded(far))
            with mover.store_stage(0):
                mover.store(target, state, PIECES)
            assert torch.equal(target, expected)
    assert driver.asked > (far.nbytes - piece_bytes) // (2 * piece_bytes)
    assert not driver.locked


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("lay", [LAYS[0], LAYS[3]], ids=str)
def test_a_copy_that_fails_is_an_error(lay: Lay, monkeypatch) -> None:
    mover = made(monkeypatch, Runtime(batch_status=1, status=700))
    slot = torch.zeros(HEADS, ROWS, lay.width)

    def load() -> None:
        with mover.input_stage(0):
            mover.load(slot, lay.made(), PIECES)

    with pytest.raises(RuntimeError, match=r"failed: 700"):
        load()
