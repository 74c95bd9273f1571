"""Moves rows to and from a CUDA device.

Rows without gaps are copied by address, in one batch for each stage: page-locked ones as they are,
others through page-locked buffers (``Staging``). Rows with gaps are copied in pitches or by
torch.

A copy of memory that is not page-locked holds the host until the device has done everything before
it, at a fraction of the speed. Some memory cannot be locked: files that are mapped to be read only,
systems with limits; and small tensors are not worth it. So the host's threads copy such memory to a
buffer and the device copies the buffer; results the other way round. The host waits only where all
buffers are in use. What comes from the device is written to its place later: when its buffer is
needed again, before the same memory is read, and at the end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch

from quorum_attention.arithmetic import ceil_div, round_up
from quorum_attention.decomposition import Rows
from quorum_attention.execution.device.mover import Clock, HostClock, Mover
from quorum_attention.execution.device.page_locks import Copied, PageLocks, address_range, is_locked
from quorum_attention.kernels.tensors import copy_on_device
from quorum_attention.threads import started_executors

# Of a buffer, and how many there are each way. A buffer is filled while others are copied.
BUFFER_BYTES = 4 << 20
BUFFERS = 4
# Copies of smaller tensors are too short to make buffers for.
WORTH_BUFFERS_BYTES = 1 << 20
# Four threads of a host with an H200 copy 23 GB/s, one 8 (and eight no more).
_MOST_THREADS = 4
_LEAST_SHARE = 1 << 18
_ALIGNMENT = 256


@dataclass(slots=True, eq=False)
class _Buffer:
    """Page-locked memory.

    Attributes:
        memory: (BUFFER_BYTES,) uint8.
        event: after it the device has made all copies from and to the buffer.
        used: bytes from the beginning on that copies have been given.
        writes: what has to be written from it once ``event`` has happened: (from, to, bytes).
        issued: how many of ``writes`` the device has been told of.
    """

    memory: torch.Tensor
    event: Any
    used: int = 0
    writes: list[tuple[int, int, int]] = field(default_factory=list)
    issued: int = 0

    @property
    def address(self) -> int:
        """Of its next free byte."""
        return self.memory.data_ptr() + self.used

    def record(self, stream: Any) -> None:
        """Note that ``stream`` has been given all copies from and to it."""
        self.issued = len(self.writes)
        self.event.record(stream)


class Staging:
    """Two rings of buffers, one for each direction.

    Copies of each direction go to a stream of their own, in stages; ``ended`` is called at the end
    of each stage.

    Args:
        allocate: makes page-locked memory: (bytes,) uint8; a RuntimeError says that there is none.
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
        self._ups, self._downs = (
            [_Buffer(allocate(BUFFER_BYTES), event()) for _ in range(BUFFERS)] for _ in range(2)
        )
        # The buffer that the present stage used last.
        self._touched: _Buffer | None = None
        n_threads = max(1, min(_MOST_THREADS, torch.get_num_threads()))
        # The caller's thread copies too. The others end when their executors are freed.
        self._helpers = started_executors(n_threads - 1, "copies")

    def move(self, near: int, far: int, n_bytes: int, stream: Any, *, up: bool) -> None:
        """Copy between address ``near`` of the device and pageable memory from address ``far`` on,
        within a stage on ``stream``.

        When it returns, memory that is copied ``up`` to the device has been read. What is copied
        down is written later (``settle``, ``finish``).
        """
        while n_bytes > 0:
            buffer = self._room(self._ups if up else self._downs, stream)
            count = min(n_bytes, BUFFER_BYTES - buffer.used)
            if up:
                self._copy(buffer.address, far, count)
                self._copies.add(near, buffer.address, count)
            else:
                self._copies.add(buffer.address, near, count)
                buffer.writes.append((buffer.address, far, count))
            buffer.used += round_up(count, _ALIGNMENT)
            near, far, n_bytes = near + count, far + count, n_bytes - count

    def settle(self, far: int, n_bytes: int) -> None:
        """Write what earlier stages have yet to write to ``n_bytes`` from address ``far`` on.

        Such memory must be settled before it is read, or written to in another way.
        """
        oldest_first = [*self._downs[1:], self._downs[0]]
        late = [
            place
            for place, buffer in enumerate(oldest_first)
            if any(to < far + n_bytes and far < to + count for _, to, count in buffer.writes)
        ]
        # What is older is written first: the same memory may be meant twice.
        for buffer in oldest_first[: late[-1] + 1] if late else ():
            self._write(buffer)

    def ended(self, stream: Any, *, given_up: bool) -> None:
        """Note that a stage is over and its copies have been given to ``stream``; or, with
        ``given_up``, that those noted last have been forgotten."""
        if self._touched is not None:
            if given_up:
                del self._touched.writes[self._touched.issued :]
            self._touched.record(stream)
            self._touched = None

    def finish(self) -> None:
        """Write all that is left, after the last stage."""
        for buffer in (*self._downs[1:], self._downs[0]):
            self._write(buffer)

    def _room(self, ring: list[_Buffer], stream: Any) -> _Buffer:
        """A buffer with free bytes."""
        if ring[0].used >= BUFFER_BYTES:
            self._copies.flush(stream)
            ring[0].record(stream)
            ring.append(ring.pop(0))
            ring[0].event.synchronize()
            self._write(ring[0])
            ring[0].used = 0
        self._touched = ring[0]
        return ring[0]

    def _write(self, buffer: _Buffer) -> None:
        """Write what came from the device, once it is there."""
        if buffer.issued:
            buffer.event.synchronize()
            for source, target, count in buffer.writes[: buffer.issued]:
                self._copy(target, source, count)
            del buffer.writes[: buffer.issued]
            buffer.issued = 0

    def _copy(self, target: int, source: int, n_bytes: int) -> None:
        """Copy ``n_bytes`` of host memory; none of it is under way when it returns or raises.

        torch's own threads would do it as fast, but all of them wake up for each copy, and keep the
        cores busy for a while after it.
        """
        share = max(_LEAST_SHARE, ceil_div(n_bytes, 1 + len(self._helpers)))
        others: list[Future[int]] = []
        interrupt: BaseException | None = None
        try:
            for helper, at in zip(self._helpers, range(share, n_bytes, share), strict=False):
                count = min(share, n_bytes - at)
                others.append(helper.submit(ctypes.memmove, target + at, source + at, count))
            ctypes.memmove(target, source, min(share, n_bytes))
        finally:
            # The memory may be freed next, so an interrupt (Ctrl-C) is raised only after that.
            while not all(other.done() for other in others):
                try:
                    wait(others)
                except BaseException as error:
                    interrupt = error
        if interrupt is not None:
            raise interrupt


class BatchedCopies:
    """Contiguous copies between page-locked memory and the device, issued many at a time.

    Args:
        runtime: the module of cuda-bindings.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._noted: list[tuple[int, int, int]] = []
        self._attributes: list[Any] | None = None
        if hasattr(runtime, "cudaMemcpyBatchAsync") and hasattr(runtime, "cudaMemcpyAttributes"):
            attributes = runtime.cudaMemcpyAttributes()
            attributes.srcAccessOrder = (
                runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
            )
            self._attributes = [attributes]

    def add(self, target: int, source: int, n_bytes: int) -> None:
        """Note a copy of ``n_bytes`` from address ``source`` to address ``target``."""
        self._noted.append((target, source, n_bytes))

    def forget(self) -> None:
        """Forget the copies noted since the last flush."""
        self._noted.clear()

    def flush(self, stream: Any) -> None:
        """Issue the copies noted since the last flush."""
        noted, self._noted = self._noted, []
        if len(noted) > 1 and self._attributes is not None:
            targets, sources, sizes = (list(column) for column in zip(*noted, strict=True))
            status = self._runtime.cudaMemcpyBatchAsync(
                targets, sources, sizes, len(noted), self._attributes, [0], 1, stream.cuda_stream
            )[0]
            if int(status) == 0:
                return
            # The driver is older than the bindings and has no batches: one by one from now on.
            self._attributes = None
        for copy in noted:
            self.issue(*copy, stream)

    def issue(self, target: int, source: int, n_bytes: int, stream: Any) -> None:
        """Issue a single copy."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDefault
        (status,) = self._runtime.cudaMemcpyAsync(target, source, n_bytes, kind, stream.cuda_stream)
        if int(status) != 0:
            raise RuntimeError(f"cudaMemcpyAsync of {n_bytes} bytes failed: {status}")


class CudaMover(Mover):
    """Moves rows between the slots on one CUDA device and host or device memory.

    Args:
        locks: the page locks of the tensors that are moved.
    """

    def __init__(self, device: torch.device, n_slots: int, locks: PageLocks, clock: Clock) -> None:
        compute = torch.cuda.current_stream(device)
        streams = torch.cuda.Stream(device), compute, torch.cuda.Stream(device)
        super().__init__(clock, n_slots, streams, torch.cuda.Event)
        self._locks = locks
        self._is_current = device.index == torch.cuda.current_device()
        # By address: whether a tensor was page-locked before.
        self._was_locked: dict[int, bool] = {}
        # The stream of the present stage, and whether stages are timed on the current stream.
        self._stream: Any = compute
        self._timed = isinstance(clock, HostClock)
        self._runtime: Any = cuda_runtime()
        self._copies = None if self._runtime is None else BatchedCopies(self._runtime)
        # Made when something needs it.
        self._staging: Staging | None = None
        self._may_stage = self._copies is not None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A context with ``stream`` as the current stream."""
        self._stream = stream
        # On the current device the compute stream is the current stream already. Copies by address
        # name their stream: to make it current takes longer than to issue them.
        named = self._copies is not None and not self._timed
        here = self._is_current and (stream is self.compute or named)
        return nullcontext() if here else torch.cuda.stream(stream)

    def issue(self, stream: Any, *, given_up: bool) -> None:
        """Issue the copies that a stage noted, or forget them."""
        if self._copies is not None:
            if given_up:
                self._copies.forget()
            self._copies.flush(stream)
        if self._staging is not None:
            self._staging.ended(stream, given_up=given_up)

    def store_stage(self, slot: int) -> AbstractContextManager[None]:
        """See ``Mover.store_stage``. The device computes by then, so memory may be locked."""
        self._locks.begin()
        return super().store_stage(slot)

    def finish(self, *, wait: bool) -> None:
        """See ``Mover.finish``; with ``wait`` what is stored has arrived."""
        super().finish(wait=wait)
        if wait and self._staging is not None:
            self._staging.finish()

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """See ``Mover.release``; they are unlocked when the copies have been made."""
        events = [torch.cuda.Event() for _ in range(2)]
        for event, stream in zip(events, (self.up, self.down), strict=True):
            event.record(stream)
        self._locks.release(tensors, lambda: all(event.query() for event in events))

    def move(
        self, slot: torch.Tensor, far: torch.Tensor, pieces: Sequence[Rows], *, up: bool
    ) -> int:
        """See ``Mover.move``."""
        if not pieces:
            return 0
        heads, _, width = slot.shape
        row = width * slot.element_size()
        on_host = far.device.type == "cpu"
        by_address = (
            self._copies is not None
            and on_host
            and far.dtype == slot.dtype
            and _has_dense_rows(far)
        )
        if self._staging is not None and on_host and (up or not by_address):
            low, high = min(p.start for p in pieces), max(p.stop for p in pieces)
            start, stop = address_range(far[:, low:high])
            self._staging.settle(start, stop - start)
        if not by_address:
            with torch.cuda.stream(self._stream):
                return super().move(slot, far, pieces, up=up)
        assert self._copies is not None
        was_locked = self._is_locked_before(far)
        here_step = slot.stride(0) * slot.element_size()
        there_step = far.stride(0) * far.element_size()
        for piece in pieces:
            n_bytes = piece.length * row
            here = slot.data_ptr() + piece.local * row
            there = far.data_ptr() + piece.start * row
            for head in range(heads):
                near, away = here + head * here_step, there + head * there_step
                if not was_locked:
                    self._add_parts(far, near, away, n_bytes, up=up)
                elif up:
                    self._copies.add(near, away, n_bytes)
                else:
                    self._copies.add(away, near, n_bytes)
        return sum(piece.length for piece in pieces) * row * heads

    def _is_locked_before(self, host: torch.Tensor) -> bool:
        """Whether ``host`` was page-locked before the pass."""
        key = host.data_ptr()
        if key not in self._was_locked:
            self._was_locked[key] = not self._locks.wants(host) and is_locked(host)
        return self._was_locked[key]

    def _add_parts(
        self, far: torch.Tensor, near: int, away: int, n_bytes: int, *, up: bool
    ) -> None:
        """Note a copy in parts that do not reach from one locked piece of ``far`` into another.

        A part that is not locked goes through buffers; without them it is copied at once, because
        the driver takes such copies singly.
        """
        assert self._copies is not None
        buffers = self._buffers(far)
        for start, count, locked in self._locks.parts(away, n_bytes, wait=buffers is None):
            here = near + start - away
            target, source = (here, start) if up else (start, here)
            if locked:
                if buffers is not None and not up:
                    buffers.settle(start, count)
                self._copies.add(target, source, count)
            elif buffers is None:
                self._copies.issue(target, source, count, self._stream)
            else:
                buffers.move(here, start, count, self._stream, up=up)

    def _buffers(self, host: torch.Tensor) -> Staging | None:
        """The buffers for memory that is not page-locked, such as that of ``host``; None if there
        is no memory for them, or little to copy."""
        large = host.untyped_storage().nbytes() >= WORTH_BUFFERS_BYTES
        if self._staging is None and self._may_stage and large:
            assert self._copies is not None
            try:
                self._staging = Staging(_locked_memory, torch.cuda.Event, self._copies)
            except RuntimeError:
                self._may_stage = False
        return self._staging

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See ``Mover.copy``."""
        far = target if self._stream is self.down else source  # the one outside of the slot
        heads, rows, width = far.shape
        if far.device.type != "cpu":
            copy_on_device(target, source)
            return
        # Another dtype, or elements that do not lie side by side.
        converted = target.dtype != source.dtype or not (width == 1 or far.stride(2) == 1)
        # All are asked, even if the first is not locked: asking waits.
        locked = [self._is_locked_before(far) or self._locks.covers(head) for head in far]
        pitched = not converted and self._runtime is not None and all(locked)
        for head in range(heads):
            if pitched and rows > 1 and far.stride(1) != width:
                self._copy_2d(target[head], source[head])
            else:
                # What is converted or not locked torch stages: it holds the host, and stays in the
                # stream's order. Head by head it needs no temporary tensor on the device.
                target[head].copy_(source[head], non_blocking=True)

    def _copy_2d(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy (rows, width) with gaps between the rows of either, from two rows on."""
        lines, width = target.shape
        size = target.element_size()
        target_pitch, source_pitch = target.stride(0) * size, source.stride(0) * size
        (status,) = self._runtime.cudaMemcpy2DAsync(
            target.data_ptr(),
            target_pitch,
            source.data_ptr(),
            source_pitch,
            width * size,
            lines,
            self._runtime.cudaMemcpyKind.cudaMemcpyDefault,
            self._stream.cuda_stream,
        )
        if int(status) != 0:
            raise RuntimeError(
                f"cudaMemcpy2DAsync of {lines} x {width * size} bytes "
                f"(pitches {target_pitch}, {source_pitch}) failed: {status}"
            )


def _locked_memory(n_bytes: int) -> torch.Tensor:
    """(n_bytes,) uint8, page-locked; torch keeps such memory for the next time."""
    return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")


def by_address(copied: Copied) -> Copied:
    """``copied`` as a ``CudaMover`` copies it: by address only where there are bindings, and its
    rows lie in memory without gaps."""
    there = copied.by_address and cuda_runtime() is not None
    return replace(copied, by_address=there and _has_dense_rows(copied.tensor))


def _has_dense_rows(tensor: torch.Tensor) -> bool:
    """Whether the rows of each head lie in memory without gaps."""
    width = tensor.shape[-1]
    return (width == 1 or tensor.stride(-1) == 1) and tensor.stride(-2) == width


def cuda_runtime() -> ModuleType | None:
    """The runtime module of cuda-bindings; None if it is not installed."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    module: ModuleType = runtime
    return module
