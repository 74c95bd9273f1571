"""Moves rows to and from a CUDA device.

Rows without gaps are copied by address, in one batch for each stage: page-locked ones as they are,
others through page-locked buffers (``Staging``). Rows with gaps are copied in pitches or by
torch.

Copies between a device and pageable host memory, through page-locked buffers.

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
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Protocol

import torch

from quorum_attention.decomposition import Rows
from quorum_attention.execution.device.mover import Clock, Event, NoClock, StreamMover, local_part
from quorum_attention.execution.device.page_locks import Copied, PageLocks, addresses
from quorum_attention.kernels.tensors import copy_on_device

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

    def defer_write(self, target: int, count: int) -> None:
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
        self._copy_threads = _CopyThreads()

    def up(self, near: int, far: int, n_bytes: int, stream: Any) -> None:
        """Copy pageable memory from address ``far`` on to address ``near`` of the device, within a
        stage on ``stream``. When it returns, the memory has been read."""
        while n_bytes > 0:
            buffer = self._room(self._ups, stream)
            count = min(n_bytes, BUFFER_BYTES - buffer.used)
            self._copy_threads.copy(buffer.address, far, count)
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
            buffer.defer_write(far, count)
            _use(buffer, count)
            near, far, n_bytes = near + count, far + count, n_bytes - count

    def settle(self, far: int, n_bytes: int) -> None:
        """Write what earlier stages have yet to write to ``n_bytes`` from address ``far`` on.

        Such memory must be settled before it is read, or written to in another way.
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
                self._copy_threads.copy(target, source, count)
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


class _CopyThreads:
    """A few threads that copy bytes from one address to another, the caller's among them.

    torch's own threads would do it as fast, but all of them wake up for each copy, and keep the
    cores busy for a while after it.
    """

    def __init__(self) -> None:
        self._count = max(1, min(_MOST_THREADS, torch.get_num_threads()))
        # Its threads end when it is freed.
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


class _Copies:
    """Contiguous copies between page-locked memory and the device, issued many at a time.

    Issuing a copy takes the host 2 microseconds by itself and 0.6 in a batch (docs/kernels.md). A
    task of a deep decomposition makes hundreds.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._targets: list[int] = []
        self._sources: list[int] = []
        self._sizes: list[int] = []
        self._attributes: list[Any] | None = None
        if hasattr(runtime, "cudaMemcpyBatchAsync") and hasattr(runtime, "cudaMemcpyAttributes"):
            attributes = runtime.cudaMemcpyAttributes()
            attributes.srcAccessOrder = (
                runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
            )
            self._attributes = [attributes]

    def add(self, target: int, source: int, n_bytes: int) -> None:
        """Note a copy of ``n_bytes`` from address ``source`` to address ``target``."""
        self._targets.append(target)
        self._sources.append(source)
        self._sizes.append(n_bytes)

    def flush(self, stream: torch.cuda.Stream, *, given_up: bool = False) -> None:
        """Issue the copies noted since the last flush; with ``given_up`` forget them."""
        count = len(self._sizes)
        if count == 0:
            return
        try:
            if not given_up:
                self._issue(count, stream.cuda_stream)
        finally:
            self._targets, self._sources, self._sizes = [], [], []

    def _issue(self, count: int, stream: int) -> None:
        runtime = self._runtime
        if count > 1 and self._attributes is not None:
            status = runtime.cudaMemcpyBatchAsync(
                self._targets, self._sources, self._sizes, count, self._attributes, [0], 1, stream
            )[0]
            if int(status) == 0:
                return
            # The driver is older than the bindings and has no batches: one by one from now on.
            self._attributes = None
        for target, source, n_bytes in zip(self._targets, self._sources, self._sizes, strict=True):
            self._one(target, source, n_bytes, stream)

    def at_once(self, target: int, source: int, n_bytes: int, stream: torch.cuda.Stream) -> None:
        """Issue a single copy."""
        self._one(target, source, n_bytes, stream.cuda_stream)

    def _one(self, target: int, source: int, n_bytes: int, stream: int) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDefault
        (status,) = self._runtime.cudaMemcpyAsync(target, source, n_bytes, kind, stream)
        if int(status) != 0:
            raise RuntimeError(f"cudaMemcpyAsync of {n_bytes} bytes failed: {status}")


class CudaMover(StreamMover):
    """Moves rows between the slots on one CUDA device and host or device memory.

    Attributes:
        device: where the slots are.
        locks: the page locks of the tensors that are moved.
    """

    def __init__(self, device: torch.device, n_slots: int, locks: PageLocks, clock: Clock) -> None:
        compute = torch.cuda.current_stream(device)
        up, down = torch.cuda.Stream(device), torch.cuda.Stream(device)
        super().__init__(clock, n_slots, (up, compute, down), torch.cuda.Event)
        self.device = device
        self.locks = locks
        self._is_current = device.index == torch.cuda.current_device()
        self._locked: dict[int, bool] = {}
        # The stream of the present stage, and whether stages are timed on the current stream.
        self._stage: Any = compute
        self._timed = not isinstance(clock, NoClock)
        self._runtime = cuda_runtime()
        self._copies = None if self._runtime is None else _Copies(self._runtime)
        # Made when something needs it; False: its memory cannot be had.
        self._staging: Staging | bool | None = None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A context with ``stream`` as the current stream."""
        self._stage = stream
        # On the current device the compute stream is the current stream already. Copies by address
        # name their stream: to make it current takes longer than to issue them.
        named = self._copies is not None and not self._timed
        here = self._is_current and (stream is self.compute or named)
        return nullcontext() if here else torch.cuda.stream(stream)

    def issue(self, stream: Any, *, given_up: bool) -> None:
        """Issue the copies that a stage noted, or forget them."""
        if self._copies is not None:
            self._copies.flush(stream, given_up=given_up)
        if isinstance(self._staging, Staging):
            self._staging.ended(stream, given_up=given_up)

    def store_stage(self, slot: int) -> AbstractContextManager[Any]:
        """See ``Mover.store_stage``. The device computes by then, so memory may be locked."""
        self.locks.begin()
        return super().store_stage(slot)

    def finish(self, *, wait: bool) -> None:
        """See ``Mover.finish``; with ``wait`` what is stored has arrived."""
        super().finish(wait=wait)
        if wait and isinstance(self._staging, Staging):
            self._staging.finish()

    def load(self, target: torch.Tensor, source: torch.Tensor, pieces: Sequence[Rows]) -> None:
        """See ``Mover.load``."""
        self.loaded_bytes += self._move(target, source, pieces, up=True)

    def store(self, target: torch.Tensor, source: torch.Tensor, pieces: Sequence[Rows]) -> None:
        """See ``Mover.store``."""
        self.stored_bytes += self._move(source, target, pieces, up=False)

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """See ``Mover.release``; they are unlocked when the copies have been made."""
        both: tuple[Any, Any] = (self.up, self.down)
        events = [torch.cuda.Event() for _ in both]
        for event, stream in zip(events, both, strict=True):
            event.record(stream)
        self.locks.release(tensors, lambda: all(event.query() for event in events))

    def _is_locked(self, host: torch.Tensor, pieces: Sequence[Rows]) -> bool:
        """Whether ``pieces`` of ``host`` (heads, n, width) are page-locked.

        If they are just being locked, it waits until that is done and they may be written to.
        """
        key = host.data_ptr()
        if key not in self._locked:
            if self.locks.wants(host) and not self.locks.settled:
                # A list, so that all are asked even if the first is not locked: asking waits.
                found = [self.locks.covers(h[p.start : p.stop]) for h in host for p in pieces]
                return all(found)
            self._locked[key] = self.locks.covers(host)
        return self._locked[key]

    def _is_locked_now(self, host: torch.Tensor, pieces: Sequence[Rows]) -> bool:
        """As ``_is_locked``, but it does not wait where copies can go through buffers meanwhile:
        then ``_add_parts`` finds out."""
        known = self._locked.get(host.data_ptr())
        if known is not None:
            return known
        on_the_way = self.locks.wants(host) and not self.locks.settled
        if on_the_way and self._through_buffers(host) is not None:
            return False
        return self._is_locked(host, pieces)

    def _settle(self, far: torch.Tensor, pieces: Sequence[Rows]) -> None:
        """Have what was stored to ``pieces`` of ``far`` (heads, n, width) by buffers arrive."""
        if isinstance(self._staging, Staging) and self._staging.owes and far.device.type == "cpu":
            low, high = min(p.start for p in pieces), max(p.stop for p in pieces)
            start, stop = addresses(far[:, low:high])
            self._staging.settle(start, stop - start)

    def _move(
        self, slot: torch.Tensor, far: torch.Tensor, pieces: Sequence[Rows], *, up: bool
    ) -> int:
        """Copy ``pieces`` between a slot's field and ``far``; returns how many bytes that is.

        Args:
            slot: (heads, n, width), on the device.
            far: (heads, N, width), the tensor outside of the slot.
            up: from ``far`` to ``slot``.
        """
        if not pieces:
            return 0
        heads, _, width = slot.shape
        row = width * slot.element_size()
        by_address = (
            self._copies is not None
            and far.device.type == "cpu"
            and far.dtype == slot.dtype
            and _has_dense_rows(far)
        )
        locked = by_address and self._is_locked_now(far, pieces)
        if up or locked or not by_address:
            self._settle(far, pieces)
        if by_address and (
            locked or self.locks.is_cut(far) or self._through_buffers(far) is not None
        ):
            assert self._copies is not None
            # None: copies need not be compared with the cuts.
            cuts = self.locks.cuts if not locked or self.locks.is_cut(far) else None
            here, there = slot.data_ptr(), far.data_ptr()
            here_step = slot.stride(0) * slot.element_size()
            there_step = far.stride(0) * far.element_size()
            for piece in pieces:
                n_bytes = (piece.stop - piece.start) * row
                at, beyond = here + piece.local * row, there + piece.start * row
                for head in range(heads):
                    ours, theirs = at + head * here_step, beyond + head * there_step
                    if cuts is not None and (not locked or _cut_inside(cuts, theirs, n_bytes)):
                        self._add_parts(far, ours, theirs, n_bytes, up=up)
                    elif up:
                        self._copies.add(ours, theirs, n_bytes)
                    else:
                        self._copies.add(theirs, ours, n_bytes)
        else:
            with torch.cuda.stream(self._stage):
                for piece in pieces:
                    part, other = local_part(slot, piece), far[:, piece.start : piece.stop]
                    if up:
                        self._copy(part, other, other)
                    else:
                        self._copy(other, part, other)
        return sum(piece.stop - piece.start for piece in pieces) * row * heads

    def _add_parts(
        self, far: torch.Tensor, ours: int, theirs: int, n_bytes: int, *, up: bool
    ) -> None:
        """Note a copy in parts that do not reach from one locked piece of ``far`` into another.

        A part that is not locked goes through buffers; without them it is copied at once, because
        the driver takes such copies singly.
        """
        assert self._copies is not None
        for start, count, locked in self.locks.parts(theirs, n_bytes):
            near = ours + start - theirs
            target, source = (near, start) if up else (start, near)
            if locked:
                if isinstance(self._staging, Staging) and not up:
                    self._staging.settle(start, count)
                self._copies.add(target, source, count)
            elif (buffers := self._through_buffers(far)) is None:
                self._copies.at_once(target, source, count, self._stage)
            elif up:
                buffers.up(near, start, count, self._stage)
            else:
                buffers.down(near, start, count, self._stage)

    def _through_buffers(self, host: torch.Tensor) -> Staging | None:
        """The buffers for memory that is not page-locked, such as that of ``host``; None if there
        is no memory for them, or little to copy."""
        if self._staging is None:
            if host.untyped_storage().nbytes() < WORTH_BUFFERS_BYTES:
                return None
            assert self._copies is not None
            try:
                self._staging = Staging(_locked_memory, torch.cuda.Event, self._copies)
            except RuntimeError:
                self._staging = False
        return self._staging if isinstance(self._staging, Staging) else None

    def _copy(self, target: torch.Tensor, source: torch.Tensor, far: torch.Tensor) -> None:
        """Copy (heads, rows, width); ``far`` is the one of the two tensors outside of the slot."""
        heads, rows, width = far.shape
        if far.device.type != "cpu":
            copy_on_device(target, source)
            return
        # Another dtype, or elements that do not lie side by side.
        converted = target.dtype != source.dtype or not (width == 1 or far.stride(2) == 1)
        locked = self._is_locked(far, (Rows(0, rows, 0),))
        if converted or self._runtime is None or not locked:
            # torch stages such copies: they hold the host, and stay in the stream's order. Head by
            # head, torch needs no contiguous temporary tensor on the device.
            for head in range(heads):
                target[head].copy_(source[head], non_blocking=True)
            return
        for head in range(heads):
            if rows == 1 or far.stride(1) == width:
                target[head].copy_(source[head], non_blocking=True)
            else:
                self._copy_2d(target[head], source[head])

    def _copy_2d(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy (rows, width) with gaps between the rows of either, from two rows on."""
        lines, width = target.shape
        size = target.element_size()
        n_bytes = width * size
        target_pitch, source_pitch = target.stride(0) * size, source.stride(0) * size
        assert self._runtime is not None
        runtime: Any = self._runtime
        (status,) = runtime.cudaMemcpy2DAsync(
            target.data_ptr(),
            target_pitch,
            source.data_ptr(),
            source_pitch,
            n_bytes,
            lines,
            runtime.cudaMemcpyKind.cudaMemcpyDefault,
            self._stage.cuda_stream,
        )
        if int(status) != 0:
            raise RuntimeError(
                f"cudaMemcpy2DAsync of {lines} x {n_bytes} bytes "
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


def _cut_inside(cuts: list[int], start: int, n_bytes: int) -> bool:
    return bisect_right(cuts, start) < bisect_left(cuts, start + n_bytes)


def cuda_runtime() -> ModuleType | None:
    """The runtime module of cuda-bindings; None if it is not installed."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    module: ModuleType = runtime
    return module
