"""Moves rows to and from a CUDA device.

Rows without gaps are copied by address, in one batch for each stage: page-locked ones
as they are, others through page-locked buffers (staging.py). Rows with gaps are copied
in pitches or by torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import product
from operator import mul
from types import ModuleType
from typing import Any, NamedTuple

import torch

from quorum_attention.decomposition import Rows
from quorum_attention.execution.device.clock import Clock, HostClock
from quorum_attention.execution.device.host_memory import address_range, is_locked
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.device.page_locks import Copied, PageLocks
from quorum_attention.execution.device.staging import (
    WORTH_BUFFERS_BYTES,
    BatchedCopies,
    Staging,
)
from quorum_attention.kernels.device_copies import copy_on_device

# Bytes of short heads that are copied together: as many as a staging buffer has. A
# longer copy would wait for more page locks before it begins.
RUN_BYTES = 4 << 20


class CudaMover(Mover):
    """Moves rows between the slots on one CUDA device and host or device memory.

    Args:
        locks: the page locks of the tensors that are moved.
    """

    def __init__(
        self, device: torch.device, n_slots: int, locks: PageLocks, clock: Clock
    ) -> None:
        compute = torch.cuda.current_stream(device)
        streams = (torch.cuda.Stream(device), compute, torch.cuda.Stream(device))
        super().__init__(
            clock,
            n_slots,
            streams,
            torch.cuda.Event,
        )
        self._locks = locks
        self._is_current = device.index == torch.cuda.current_device()
        # By address: whether a tensor was page-locked before.
        self._was_locked: dict[int, bool] = {}
        # The stream of the present stage, and whether stages are timed on the current
        # stream.
        self._stream: Any = compute
        self._timed = isinstance(clock, HostClock)
        # None: there are no bindings of the driver, so torch makes all copies.
        self._runtime: Any = cuda_runtime()
        self._copies = None if self._runtime is None else BatchedCopies(self._runtime)
        # Made when something needs it.
        self._staging: Staging | None = None
        self._may_stage = self._copies is not None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A context with ``stream`` as the current stream."""
        self._stream = stream
        # On the current device the compute stream is the current stream already. Copies
        # by address name their stream: to make it current takes longer than to issue
        # them.
        copies_name_stream = self._copies is not None and not self._timed
        if self._is_current and (stream is self.compute or copies_name_stream):
            return nullcontext()
        return torch.cuda.stream(stream)

    def issue(self, stream: Any, *, given_up: bool) -> None:
        """Issue the copies that a stage noted, or forget them."""
        if self._copies is not None:
            if given_up:
                self._copies.forget()
            self._copies.flush(stream)
        if self._staging is not None:
            self._staging.ended(stream, given_up=given_up)

    def store_stage(self, slot: int) -> AbstractContextManager[None]:
        """See ``Mover.store_stage``. The device computes by then, so memory may be
        locked."""
        self._locks.begin()
        return super().store_stage(slot)

    def finish(self, *, wait: bool) -> None:
        """See ``Mover.finish``; with ``wait`` what is stored has arrived."""
        super().finish(wait=wait)
        if wait:
            self._write_results()

    def _write_results(self) -> None:
        """See ``Mover._write_results``."""
        if self._staging is not None:
            self._staging.finish()

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """See ``Mover.release``; they are unlocked when the copies have been made."""
        last_load = torch.cuda.Event()
        last_load.record(self.up)
        last_store = torch.cuda.Event()
        last_store.record(self.down)
        self._locks.release(tensors, lambda: last_load.query() and last_store.query())

    def move(
        self, slot: torch.Tensor, far: torch.Tensor, pieces: Sequence[Rows], *, up: bool
    ) -> int:
        """See ``Mover.move``."""
        if not pieces:
            return 0
        if not _is_on_host(far):
            return self._move_by_torch(slot, far, pieces, up=up)
        moves_by_address = self._moves_by_address(slot, far)
        if far.dim() > 3 and not moves_by_address:
            n_bytes = 0
            for near_entry, far_entry in zip(slot, far, strict=True):
                n_bytes += self.move(
                    near_entry,
                    far_entry,
                    pieces,
                    up=up,
                )
            return n_bytes
        # Results that wait in buffers for this memory are written before it is read, or
        # written to in another way.
        if self._staging is not None and (up or not moves_by_address):
            first = min(piece.start for piece in pieces)
            last = max(piece.stop for piece in pieces)
            start, stop = address_range(far[..., first:last, :])
            self._staging.settle(start, stop - start)
        if moves_by_address:
            return self._move_by_address(slot, far, pieces, up=up)
        return self._move_by_torch(slot, far, pieces, up=up)

    def _move_by_torch(
        self, slot: torch.Tensor, far: torch.Tensor, pieces: Sequence[Rows], *, up: bool
    ) -> int:
        """``move`` by one copy for each piece."""
        if up and self._copies is not None:
            # A copy within the device is a kernel, which waits until a kernel that
            # fills the device ends. The copies noted so far need not wait for it.
            self._copies.flush(self._stream)
        with torch.cuda.stream(self._stream):
            return super().move(slot, far, pieces, up=up)

    def _moves_by_address(self, slot: torch.Tensor, far: torch.Tensor) -> bool:
        """Whether rows of ``far``, in host memory, are copied by their addresses."""
        if self._copies is None:
            return False
        return far.dtype == slot.dtype and _has_dense_rows(far)

    def _move_by_address(
        self, slot: torch.Tensor, far: torch.Tensor, pieces: Sequence[Rows], *, up: bool
    ) -> int:
        """``move`` for rows without gaps in host memory: one copy for each head of a
        piece, or of many short ones that follow each other."""
        assert self._copies is not None
        row_bytes = slot.shape[-1] * slot.element_size()
        was_locked = self._is_locked_before(far)
        n_bytes = 0
        for piece in pieces:
            near_start = slot.data_ptr() + piece.local * row_bytes
            far_start = far.data_ptr() + piece.start * row_bytes
            head_bytes = piece.length * row_bytes
            for run in contiguous_runs(slot, far, head_bytes):
                near = near_start + run.near
                away = far_start + run.far
                n_bytes += run.n_bytes
                if not was_locked:
                    self._add_parts(
                        far,
                        near,
                        away,
                        run.n_bytes,
                        up=up,
                    )
                elif up:
                    self._copies.add(near, away, run.n_bytes)
                else:
                    self._copies.add(away, near, run.n_bytes)
        return n_bytes

    def _is_locked_before(self, host: torch.Tensor) -> bool:
        """Whether ``host`` was page-locked before the pass."""
        key = host.data_ptr()
        if key not in self._was_locked:
            self._was_locked[key] = not self._locks.wants(host) and is_locked(host)
        return self._was_locked[key]

    def _add_parts(
        self, far: torch.Tensor, near: int, away: int, n_bytes: int, *, up: bool
    ) -> None:
        """Note a copy in parts that do not reach from one locked piece of ``far`` into
        another.

        A part that is not locked goes through buffers; without them it is copied at
        once, because the driver takes such copies singly.
        """
        assert self._copies is not None
        parts = self._locks.parts(away, n_bytes)
        buffers = self._staging
        if not all(locked for _, _, locked in parts):
            # Only now, because to make them takes longer than to lock a result.
            buffers = self._buffers(far)
            if buffers is None:
                parts = self._locks.parts(away, n_bytes, wait=True)
        for start, count, locked in parts:
            near_start = near + start - away
            target, source = (near_start, start) if up else (start, near_start)
            if locked:
                if buffers is not None and not up:
                    buffers.settle(start, count)
                self._copies.add(target, source, count)
            elif buffers is None:
                self._copies.issue(
                    target,
                    source,
                    count,
                    self._stream,
                )
            else:
                buffers.move(
                    near_start,
                    start,
                    count,
                    self._stream,
                    up=up,
                )

    def _buffers(self, host: torch.Tensor) -> Staging | None:
        """The buffers for memory that is not page-locked, such as that of ``host``;
        None if there is no memory for them, or little to copy."""
        is_large = host.untyped_storage().nbytes() >= WORTH_BUFFERS_BYTES
        if self._staging is None and self._may_stage and is_large:
            assert self._copies is not None
            try:
                self._staging = Staging(_locked_memory, torch.cuda.Event, self._copies)
            except RuntimeError:
                self._may_stage = False
        return self._staging

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See ``Mover.copy``."""
        # The tensor outside of the slot.
        far = target if self._stream is self.down else source
        if not _is_on_host(far):
            copy_on_device(target, source)
            return
        n_heads, n_rows, width = far.shape
        # All heads are asked, even if the first is not locked: asking waits.
        locked = [
            self._is_locked_before(far) or self._locks.covers(head) for head in far
        ]
        has_gaps = n_rows > 1 and far.stride(1) != width
        needs_conversion = target.dtype != source.dtype or not _has_dense_elements(far)
        in_pitches = has_gaps and all(locked) and not needs_conversion
        for head in range(n_heads):
            if in_pitches and self._runtime is not None:
                self._copy_2d(target[head], source[head])
            else:
                # torch stages what is converted or not locked: it holds the host, and
                # stays in the stream's order. Head by head it needs no temporary tensor
                # on the device.
                target[head].copy_(source[head], non_blocking=True)

    def _copy_2d(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy (rows, width) with gaps between the rows of either, from two rows on.

        Raises:
            RuntimeError: the driver refused it.
        """
        n_rows, width = target.shape
        size = target.element_size()
        target_pitch = target.stride(0) * size
        source_pitch = source.stride(0) * size
        (status,) = self._runtime.cudaMemcpy2DAsync(
            target.data_ptr(),
            target_pitch,
            source.data_ptr(),
            source_pitch,
            width * size,
            n_rows,
            self._runtime.cudaMemcpyKind.cudaMemcpyDefault,
            self._stream.cuda_stream,
        )
        if int(status) != 0:
            raise RuntimeError(
                f"cudaMemcpy2DAsync of {n_rows} x {width * size} bytes "
                f"(pitches {target_pitch}, {source_pitch}) failed: {status}"
            )


class ContiguousRun(NamedTuple):
    """Bytes without gaps, both in a slot and outside.

    Attributes:
        near, far: where they begin in the slot and outside, in bytes.
        n_bytes: how many there are.
    """

    near: int
    far: int
    n_bytes: int


def contiguous_runs(
    slot: torch.Tensor, far: torch.Tensor, head_bytes: int
) -> Iterator[ContiguousRun]:
    """The runs of a piece of rows, in the order of addresses of the slot.

    Heads, and batch entries, that follow each other in both are runs of ``RUN_BYTES``
    together; a head that is longer is a run by itself.

    Args:
        slot, far: (*entries, heads, rows, width).
        head_bytes: of the rows of one head.
    """
    itemsize = slot.element_size()
    near_steps = [stride * itemsize for stride in slot.stride()[:-2]]
    far_steps = [stride * itemsize for stride in far.stride()[:-2]]
    sizes = list(slot.shape[:-2])
    n_bytes = head_bytes
    # The dimensions without gaps in both, from the inside out.
    while sizes:
        near_step = near_steps[-1]
        far_step = far_steps[-1]
        has_gaps = near_step != n_bytes or far_step != n_bytes
        if sizes[-1] > 1 and has_gaps:
            break
        n_bytes *= sizes.pop()
        near_steps.pop()
        far_steps.pop()
    longest = max(head_bytes, RUN_BYTES)
    for index in product(*map(range, sizes)):
        near = sum(map(mul, index, near_steps))
        away = sum(map(mul, index, far_steps))
        for start in range(0, n_bytes, longest):
            n_left = n_bytes - start
            length = min(longest, n_left)
            yield ContiguousRun(
                near + start,
                away + start,
                length,
            )


def _locked_memory(n_bytes: int) -> torch.Tensor:
    """(n_bytes,) uint8, page-locked; torch keeps such memory for the next time."""
    return torch.empty(
        n_bytes,
        dtype=torch.uint8,
        pin_memory=True,
        device="cpu",
    )


def by_address(copied: Copied) -> Copied:
    """``copied`` as a ``CudaMover`` copies it: by address only where there are
    bindings, and its rows lie in memory without gaps."""
    if not copied.by_address or cuda_runtime() is None:
        return replace(copied, by_address=False)
    return replace(copied, by_address=_has_dense_rows(copied.tensor))


def _is_on_host(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is in host memory."""
    return tensor.device.type == "cpu"


def _has_dense_rows(tensor: torch.Tensor) -> bool:
    """Whether the rows of each head lie in memory without gaps."""
    return _has_dense_elements(tensor) and tensor.stride(-2) == tensor.shape[-1]


def _has_dense_elements(tensor: torch.Tensor) -> bool:
    """Whether the numbers of a row lie side by side."""
    return tensor.shape[-1] == 1 or tensor.stride(-1) == 1


def cuda_runtime() -> ModuleType | None:
    """The runtime module of cuda-bindings; None if it is not installed."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    module: ModuleType = runtime
    return module
