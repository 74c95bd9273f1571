"""Copies between a device and pageable host memory, through page-locked buffers.

A copy of memory that is not page-locked holds the host until the device has done everything before
it, at a fraction of the speed. Some memory cannot be locked: files that are mapped to be read only,
systems with limits; and small tensors are not worth it. Here the host's threads copy such memory
to a buffer and the device copies the buffer; results the other way round. The host waits only
where all buffers are in use.

What comes from the device is written to its place later: when its buffer is needed again, before
the same memory is read, and at the end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from quorum_attention.execution.device.stream_mover import Event

# Of a buffer, and how many there are each way. A buffer is filled while others are copied.
BUFFER_BYTES = 4 << 20
BUFFERS = 4
# Copies of smaller tensors are too short to make buffers for.
WORTH_BUFFERS_BYTES = 1 << 20
# Four threads of a host with an H200 copy 23 GB/s, one 8 (and eight no more).
_MOST_THREADS = 4
_LEAST_SHARE = 1 << 18
_ALIGNMENT = 256


class Copies(Protocol):
    """Notes copies between buffers and the device, and gives them to a stream."""

    def add(self, target: int, source: int, n_bytes: int) -> None:
        """Note a copy of ``n_bytes`` from address ``source`` to address ``target``."""
        ...

    def flush(self, stream: Any) -> None:
        """Give ``stream`` the copies noted since the last flush."""
        ...


@dataclass(slots=True, eq=False)
class _Buffer:
    """Page-locked memory.

    Attributes:
        memory: (BUFFER_BYTES,) uint8.
        event: after it the device has made all copies from and to the buffer.
        used: bytes from the beginning on that copies have been given.
        writes: what has to be written from it once ``event`` has happened: (from, to, bytes).
        issued: how many of ``writes`` the device has been told of.
        low, high: addresses between which all of ``writes`` are.
    """

    memory: torch.Tensor
    event: Event
    used: int = 0
    writes: list[tuple[int, int, int]] = field(default_factory=list)
    issued: int = 0
    low: int = 0
    high: int = 0

    @property
    def address(self) -> int:
        """Of its next free byte."""
        return self.memory.data_ptr() + self.used

    def owe(self, target: int, count: int) -> None:
        """Note that ``count`` bytes from the next free byte on have to be written to ``target``."""
        if not self.writes:
            self.low, self.high = target, target + count
        self.low, self.high = min(self.low, target), max(self.high, target + count)
        self.writes.append((self.address, target, count))


class Staging:
    """Two rings of buffers, one for each direction.

    Copies of each direction go to a stream of their own, in stages; ``ended`` is called at the end
    of each stage. Buffers are made when they are needed, at most ``BUFFERS`` each way.

    Args:
        allocate: makes page-locked memory: (bytes,) uint8; a RuntimeError says that there is none.
        event: makes an event.
        copies: what copies between buffers and the device are given to.
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        event: Callable[[], Event],
        copies: Copies,
    ) -> None:
        self._allocate, self._event, self._copies = allocate, event, copies
        # The first of each ring is the one in use, the second the oldest. More are made as they are
        # needed.
        self._ups, self._downs = ([self._made()] for _ in range(2))
        self._touched: list[list[_Buffer]] = []
        self._hands = _Hands()

    def up(self, near: int, far: int, n_bytes: int, stream: Any) -> None:
        """Copy pageable memory from address ``far`` on to address ``near`` of the device, within a
        stage on ``stream``. When it returns, the memory has been read."""
        while n_bytes > 0:
            buffer = self._room(self._ups, stream)
            count = min(n_bytes, BUFFER_BYTES - buffer.used)
            self._hands.copy(buffer.address, far, count)
            self._copies.add(near, buffer.address, count)
            _use(buffer, count)
            near, far, n_bytes = near + count, far + count, n_bytes - count

    def down(self, near: int, far: int, n_bytes: int, stream: Any) -> None:
        """Copy from address ``near`` of the device to pageable memory from address ``far`` on,
        within a stage on ``stream``. It is written later (``settle``, ``finish``)."""
        while n_bytes > 0:
            buffer = self._room(self._downs, stream)
            count = min(n_bytes, BUFFER_BYTES - buffer.used)
            self._copies.add(buffer.address, near, count)
            buffer.owe(far, count)
            _use(buffer, count)
            near, far, n_bytes = near + count, far + count, n_bytes - count

    def settle(self, far: int, n_bytes: int) -> None:
        """Write what earlier stages have yet to write to ``n_bytes`` from address ``far`` on.

        Whoever reads such memory, or writes to it in another way, has to ask for it first.
        """
        if not self.owes:
            return
        oldest_first = [*self._downs[1:], self._downs[0]]
        late = [
            place
            for place, buffer in enumerate(oldest_first)
            if buffer.low < far + n_bytes
            and far < buffer.high
            and any(to < far + n_bytes and far < to + count for _, to, count in buffer.writes)
        ]
        # What is older is written first: the same memory may be meant twice.
        for buffer in oldest_first[: late[-1] + 1] if late else ():
            self._write(buffer)

    def ended(self, stream: Any, *, given_up: bool) -> None:
        """Note that a stage is over and its copies have been given to ``stream``; or, with
        ``given_up``, that those noted last have been forgotten."""
        for ring in self._touched:
            if given_up:
                del ring[0].writes[ring[0].issued :]
            _issued(ring[0], stream)
        self._touched.clear()

    @property
    def owes(self) -> bool:
        """Whether anything has yet to be written."""
        return any(buffer.writes for buffer in self._downs)

    def finish(self) -> None:
        """Write all that is left, after the last stage."""
        for buffer in (*self._downs[1:], self._downs[0]):
            self._write(buffer)

    def _room(self, ring: list[_Buffer], stream: Any) -> _Buffer:
        """A buffer with free bytes."""
        if not any(ring is touched for touched in self._touched):
            self._touched.append(ring)
        if ring[0].used >= BUFFER_BYTES:
            self._copies.flush(stream)
            _issued(ring[0], stream)
            more = self._another() if len(ring) < BUFFERS else None
            ring.append(ring.pop(0))
            if more is not None:
                ring.insert(0, more)
            ring[0].event.synchronize()
            self._write(ring[0])
            ring[0].used = 0
        return ring[0]

    def _write(self, buffer: _Buffer) -> None:
        """Write what came from the device, once it is there."""
        if buffer.issued:
            buffer.event.synchronize()
            for source, target, count in buffer.writes[: buffer.issued]:
                self._hands.copy(target, source, count)
            del buffer.writes[: buffer.issued]
            buffer.issued = 0

    def _made(self) -> _Buffer:
        return _Buffer(self._allocate(BUFFER_BYTES), self._event())

    def _another(self) -> _Buffer | None:
        """One more buffer, if there is memory for it."""
        try:
            return self._made()
        except RuntimeError:
            return None


def _issued(buffer: _Buffer, stream: Any) -> None:
    buffer.issued = len(buffer.writes)
    buffer.event.record(stream)


def _use(buffer: _Buffer, count: int) -> None:
    buffer.used += -(-count // _ALIGNMENT) * _ALIGNMENT


class _Hands:
    """A few threads that copy bytes from one address to another, the caller's among them.

    torch's own threads would do it as fast, but all of them wake up for each copy, and keep the
    cores busy for a while after it.
    """

    def __init__(self) -> None:
        self._count = max(1, min(_MOST_THREADS, torch.get_num_threads()))
        # Its threads end when nobody holds it any more.
        self._pool: ThreadPoolExecutor | None = None

    def copy(self, target: int, source: int, n_bytes: int) -> None:
        """Copy ``n_bytes``; none of it is under way when it returns or raises."""
        share = max(_LEAST_SHARE, -(-n_bytes // self._count))
        if share >= n_bytes:
            ctypes.memmove(target, source, n_bytes)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._count - 1, "copies")
        others: list[Future[int]] = []
        interrupt: BaseException | None = None
        try:
            for at in range(share, n_bytes, share):
                given = target + at, source + at, min(share, n_bytes - at)
                try:
                    others.append(self._pool.submit(ctypes.memmove, *given))
                except RuntimeError:  # no thread can be started
                    self._pool.shutdown()
                    self._count = 1
                    ctypes.memmove(target + at, source + at, n_bytes - at)
                    break
            ctypes.memmove(target, source, share)
        finally:
            # The memory may be freed next, so an interrupt (Ctrl-C) is raised only after that.
            while not all(other.done() for other in others):
                try:
                    wait(others)
                except BaseException as error:
                    interrupt = error
        if interrupt is not None:
            raise interrupt
