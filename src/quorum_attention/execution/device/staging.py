"""Copies between the device and host memory that is not page-locked, through
page-locked buffers.

A copy of memory that is not page-locked holds the host until the device has done
everything before it, at a fraction of the speed. Some memory cannot be locked: files
that are mapped to be read only, systems with limits; and small tensors are not worth
it. So the host's threads copy such memory to a buffer and the device copies the buffer;
results the other way round. The host waits only where all buffers are in use. What
comes from the device is written to its place later: when its buffer is needed again,
before the same memory is read, and at the end.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from quorum_attention.arithmetic import ceil_div, round_up
from quorum_attention.threads import in_spite_of_interrupts, start_executors

# The size of a buffer, and the number of buffers in each direction. A buffer is filled
# while others are copied.
BUFFER_BYTES = 4 << 20
N_BUFFERS = 4
# Copies of smaller tensors are too short to make buffers for.
WORTH_BUFFERS_BYTES = 1 << 20
# Four threads of a host with an H200 copy 23 GB/s, one 8 (and eight no more).
_MOST_THREADS = 4
# A thread is not worth its start for fewer bytes.
_LEAST_SHARE = 1 << 18
_ALIGNMENT = 256


@dataclass(slots=True, eq=False)
class _Buffer:
    """Page-locked memory.

    Attributes:
        memory: (BUFFER_BYTES,) uint8.
        event: after it the device has made all copies from and to the buffer.
        used: bytes from the beginning on that copies have been given.
        writes: what has to be written from it once ``event`` has happened: (from, to,
            bytes).
        issued: how many of ``writes`` the device has been told of.
    """

    memory: torch.Tensor
    event: Any
    used: int = 0
    writes: list[tuple[int, int, int]] = field(default_factory=list)
    issued: int = 0

    @property
    def address(self) -> int:
        """The address of its next free byte."""
        return self.memory.data_ptr() + self.used

    def record(self, stream: Any) -> None:
        """Note that ``stream`` has been given all copies from and to it."""
        self.issued = len(self.writes)
        self.event.record(stream)

    def has_writes_to(self, start: int, stop: int) -> bool:
        """Whether anything has to be written to the addresses [start, stop) from it."""
        return any(
            target < stop and start < target + n_bytes
            for _, target, n_bytes in self.writes
        )


class BatchedCopies:
    """Contiguous copies between page-locked memory and the device, issued many at a
    time.

    Args:
        runtime: the module of cuda-bindings.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._noted: list[tuple[int, int, int]] = []
        # None: the driver takes copies one by one.
        self._attributes: list[Any] | None = None
        if hasattr(runtime, "cudaMemcpyBatchAsync") and hasattr(
            runtime, "cudaMemcpyAttributes"
        ):
            order = runtime.cudaMemcpySrcAccessOrder
            attributes = runtime.cudaMemcpyAttributes()
            attributes.srcAccessOrder = order.cudaMemcpySrcAccessOrderStream
            self._attributes = [attributes]

    def add(self, target: int, source: int, n_bytes: int) -> None:
        """Note a copy of ``n_bytes`` from address ``source`` to address ``target``."""
        self._noted.append((target, source, n_bytes))

    def forget(self) -> None:
        """Forget the copies noted since the last flush."""
        self._noted.clear()

    def flush(self, stream: Any) -> None:
        """Issue the copies noted since the last flush."""
        noted = self._noted
        self._noted = []
        if len(noted) > 1 and self._attributes is not None:
            if self._issue_batch(noted, self._attributes, stream):
                return
            # The driver is older than the bindings and has no batches: one by one from
            # now on.
            self._attributes = None
        for target, source, n_bytes in noted:
            self.issue(target, source, n_bytes, stream)

    def _issue_batch(
        self, copies: list[tuple[int, int, int]], attributes: list[Any], stream: Any
    ) -> bool:
        """Issue ``copies`` in one call; returns whether the driver took them."""
        targets = [target for target, _, _ in copies]
        sources = [source for _, source, _ in copies]
        sizes = [n_bytes for _, _, n_bytes in copies]
        result = self._runtime.cudaMemcpyBatchAsync(
            targets, sources, sizes, len(copies), attributes, [0], 1, stream.cuda_stream
        )
        return int(result[0]) == 0

    def issue(self, target: int, source: int, n_bytes: int, stream: Any) -> None:
        """Issue a single copy.

        Raises:
            RuntimeError: the driver refused it.
        """
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDefault
        (status,) = self._runtime.cudaMemcpyAsync(
            target,
            source,
            n_bytes,
            kind,
            stream.cuda_stream,
        )
        if int(status) != 0:
            raise RuntimeError(f"cudaMemcpyAsync of {n_bytes} bytes failed: {status}")


class Staging:
    """Two rings of buffers, one for each direction.

    Copies of each direction go to a stream of their own, in stages; ``ended`` is called
    at the end of each stage.

    Args:
        allocate: makes page-locked memory: (bytes,) uint8; a RuntimeError says that
            there is none.
        event: makes an event.
        copies: what copies between buffers and the device are given to.
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        event: Callable[[], Any],
        copies: BatchedCopies,
    ) -> None:
        self._copies = copies
        # The first of each ring is the one in use, the second the oldest.
        self._up_ring: deque[_Buffer] = deque()
        self._down_ring: deque[_Buffer] = deque()
        for ring in (self._up_ring, self._down_ring):
            while len(ring) < N_BUFFERS:
                memory = allocate(BUFFER_BYTES)
                ring.append(_Buffer(memory, event()))
        # The buffer that the present stage used last.
        self._last_used: _Buffer | None = None
        n_threads = max(1, min(_MOST_THREADS, torch.get_num_threads()))
        # The caller's thread copies too. The others end when their executors are freed.
        self._helpers = start_executors(n_threads - 1, "copies")

    def move(self, near: int, far: int, n_bytes: int, stream: Any, *, up: bool) -> None:
        """Copy between address ``near`` of the device and pageable memory from address
        ``far`` on, within a stage on ``stream``.

        When it returns, memory that is copied ``up`` to the device has been read. What
        is copied down is written later (``settle``, ``finish``).
        """
        ring = self._up_ring if up else self._down_ring
        while n_bytes > 0:
            buffer = self._buffer_with_space(ring, stream)
            count = min(n_bytes, BUFFER_BYTES - buffer.used)
            if up:
                self._copy(buffer.address, far, count)
                self._copies.add(near, buffer.address, count)
            else:
                self._copies.add(buffer.address, near, count)
                buffer.writes.append((buffer.address, far, count))
            buffer.used += round_up(count, _ALIGNMENT)
            near += count
            far += count
            n_bytes -= count

    def settle(self, far: int, n_bytes: int) -> None:
        """Write what earlier stages have yet to write to ``n_bytes`` from address
        ``far`` on.

        Such memory must be settled before it is read, or written to in another way.
        """
        oldest_first = self._down_oldest_first()
        # Older buffers are written first, because several may write to the same memory.
        n_to_write = 0
        for number, buffer in enumerate(oldest_first, start=1):
            if buffer.has_writes_to(far, far + n_bytes):
                n_to_write = number
        for buffer in oldest_first[:n_to_write]:
            self._write(buffer)

    def ended(self, stream: Any, *, given_up: bool) -> None:
        """Note that a stage is over and its copies have been given to ``stream``; or,
        with ``given_up``, that those noted last have been forgotten."""
        buffer = self._last_used
        if buffer is None:
            return
        if given_up:
            del buffer.writes[buffer.issued :]
        buffer.record(stream)
        self._last_used = None

    def finish(self) -> None:
        """Write all that earlier stages have yet to write."""
        for buffer in self._down_oldest_first():
            self._write(buffer)

    def _down_oldest_first(self) -> list[_Buffer]:
        """The buffers of results, the one in use last."""
        in_use, *older = self._down_ring
        return [*older, in_use]

    def _buffer_with_space(self, ring: deque[_Buffer], stream: Any) -> _Buffer:
        """The buffer in use; the oldest takes its place once it is full."""
        if ring[0].used >= BUFFER_BYTES:
            self._copies.flush(stream)
            ring[0].record(stream)
            ring.rotate(-1)
            ring[0].event.synchronize()
            self._write(ring[0])
            ring[0].used = 0
        self._last_used = ring[0]
        return ring[0]

    def _write(self, buffer: _Buffer) -> None:
        """Write what came from the device, once it is there."""
        if not buffer.issued:
            return
        buffer.event.synchronize()
        for source, target, count in buffer.writes[: buffer.issued]:
            self._copy(target, source, count)
        del buffer.writes[: buffer.issued]
        buffer.issued = 0

    def _copy(self, target: int, source: int, n_bytes: int) -> None:
        """Copy ``n_bytes`` of host memory; none of it is under way when it returns or
        raises.

        torch's own threads would do it as fast, but all of them wake up for each copy,
        and keep the cores busy for a while after it.
        """
        share = max(_LEAST_SHARE, ceil_div(n_bytes, 1 + len(self._helpers)))
        futures: list[Future[int]] = []
        try:
            for helper, start in zip(
                self._helpers, range(share, n_bytes, share), strict=False
            ):
                count = min(share, n_bytes - start)
                future = helper.submit(
                    ctypes.memmove,
                    target + start,
                    source + start,
                    count,
                )
                futures.append(future)
            ctypes.memmove(target, source, min(share, n_bytes))
        finally:
            in_spite_of_interrupts(partial(wait, futures))
