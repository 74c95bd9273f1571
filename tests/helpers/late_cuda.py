"""A CUDA mover without a GPU, whose copies happen as late as the events allow.

The runtime copies host memory; streams and events are the fake device's. Memory that a
copy was noted for is read and written when something waits for it, as a device would do
at the latest.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.fake_device import FakeDevice, FakeEvent, FakeStream
from quorum_attention.execution.device import cuda_mover, page_locks, staging
from quorum_attention.execution.device.clock import Clock
from quorum_attention.execution.device.cuda_mover import CudaMover, by_address
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.device.page_locks import Copied, PageLocks

GPU = torch.device("cuda", 0)


class LateStream(FakeStream):
    """As torch.cuda.Stream, as far as a mover uses it."""

    def __init__(self, *device: object) -> None:
        super().__init__()
        self.done = 0

    def reach(self, position: int) -> None:
        super().reach(position)
        self.done = max(self.done, position)

    @property
    def cuda_stream(self) -> LateStream:
        return self


class LateEvent(FakeEvent):
    """As torch.cuda.Event."""

    stream: LateStream | None

    def query(self) -> bool:
        """Whether it has happened. (Asked by another thread, which must not do the
        copies.)"""
        stream = self.stream
        return stream is None or stream.done >= self.position


class Driver:
    """cuda-bindings' runtime and torch's, on host memory: copies are put off.

    Attributes:
        refused: says of an address that is to be page-locked whether that is refused.
        locked: page-locked memory: where it ends, by where it begins.
        batches: whether it is new enough to copy in batches.
        status: what a copy answers.
    """

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)  # noqa: N815
    cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream=1)  # noqa: N815
    cudaMemcpyAttributes = SimpleNamespace  # noqa: N815

    def __init__(self, refused: Callable[[int], bool] = lambda start: False) -> None:
        self.refused = refused
        self.locked: dict[int, int] = {}
        self.copied = self.status = 0
        self.batches = True

    def within(self, start: int, size: int) -> list[tuple[int, int]]:
        """What is locked of some memory."""
        stop = start + size
        locked = list(self.locked.items())
        return [
            (max(a, start), min(b, stop)) for a, b in locked if a < stop and start < b
        ]

    def locked_bytes(self, tensor: torch.Tensor | None = None) -> int:
        """Of ``tensor``, or of all there is."""
        place = (0, 1 << 62) if tensor is None else (tensor.data_ptr(), tensor.nbytes)
        return sum(stop - start for start, stop in self.within(*place))

    def cudaHostRegister(self, start: int, n_bytes: int, flags: int) -> int:
        time.sleep(random.choice([0, 1e-5, 1e-3]))
        if self.refused(start):
            return 1
        assert not self.within(start, n_bytes), "locked twice"
        self.locked[start] = start + n_bytes
        return 0

    def lock(self, start: int, n_bytes: int) -> bool:
        return self.cudaHostRegister(start, n_bytes, 0) == 0

    def cudaHostUnregister(self, start: int) -> int:
        del self.locked[start]
        return 0

    def cudaMemcpyBatchAsync(self, targets, sources, sizes, count, a, b, c, stream):
        if not self.batches:
            return (1,)
        for target, source, size in zip(targets, sources, sizes, strict=True):
            self.cudaMemcpyAsync(target, source, size, None, stream)
        return (self.status,)

    def cudaMemcpyAsync(self, target, source, size, kind, stream):
        self.copied += size
        for start in (
            target,
            source,
        ):  # a driver refuses to copy a part of what is locked
            assert self.within(start, size) in ([], [(start, start + size)])
        if not self.status:
            stream.give(lambda: ctypes.memmove(target, source, size))
        return (self.status,)

    def cudaMemcpy2DAsync(
        self, target, pitch, source, source_pitch, length, lines, kind, stream
    ):
        def copy() -> None:
            for line in range(lines):
                ctypes.memmove(
                    target + line * pitch, source + line * source_pitch, length
                )

        stream.give(copy)
        return (self.status,)


class LateCuda(FakeDevice):
    """A device whose rows are moved by a ``CudaMover``."""

    def page_locks(self, tensors: Iterable[Copied]) -> PageLocks:
        return PageLocks(map(by_address, tensors), late=True)

    def mover(
        self, device: torch.device, n_slots: int, locks: PageLocks, clock: Clock
    ) -> Mover:
        return LateMover(GPU, n_slots, locks, Clock())


class LateMover(CudaMover):
    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Compute is not put off: first it does all that its stream waits for."""
        self._stream = stream
        if stream is self.compute:
            stream.synchronize()
        yield


def stand_in(
    monkeypatch: pytest.MonkeyPatch, *, refused: Callable[[int], bool] = lambda start: True,
    buffer_bytes: int = 1024, piece_bytes: int = 2048, buffers: bool = True,
) -> Driver:  # fmt: skip
    """Have a CUDA mover work here.

    Args:
        refused: says of an address whether it cannot be page-locked.
        buffer_bytes: of a staging buffer.
        piece_bytes: what is locked at a time, and what is worth it.
        buffers: whether there is memory for buffers.
    """
    driver = Driver(refused)

    @contextmanager
    def current(stream: LateStream) -> Iterator[None]:
        stream.synchronize()  # torch's copies of pageable memory hold the host
        yield

    compute = LateStream()
    fakes: dict[str, Any] = {
        "current_stream": lambda device: compute, "Stream": LateStream, "Event": LateEvent,
        "current_device": lambda: 0, "stream": current, "cudart": lambda: driver,
        "set_device": lambda device: None, "device": lambda device: nullcontext(),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)

    def memory(n_bytes: int) -> torch.Tensor:
        if not buffers:
            raise RuntimeError("made up")
        return torch.randint(0, 255, (n_bytes,), dtype=torch.uint8)

    monkeypatch.setattr(cuda_mover, "cuda_runtime", lambda: driver)
    monkeypatch.setattr(cuda_mover, "_locked_memory", memory)
    monkeypatch.setattr(staging, "BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(cuda_mover, "WORTH_BUFFERS_BYTES", 1)
    monkeypatch.setattr(staging, "_LEAST_SHARE", 200)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for name in ("WORTH_LOCKING_BYTES", "PIECE_BYTES"):
        monkeypatch.setattr(page_locks, name, piece_bytes)
    monkeypatch.setattr(page_locks, "PAGE_BYTES", 64)
    return driver
