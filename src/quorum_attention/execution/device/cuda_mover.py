"""How rows reach a CUDA device: by address where they can, a batch of copies for each stage."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

from quorum_attention.decomposition import Rows
from quorum_attention.execution.device.clock import Clock
from quorum_attention.execution.device.mover import local_part
from quorum_attention.execution.device.page_locks import PageLocks
from quorum_attention.execution.device.stream_mover import StreamMover
from quorum_attention.kernels.copies import copy_on_device


class _Copies:
    """Contiguous copies between page-locked memory and the device, issued many at a time.

    A copy costs the host 2 microseconds by itself and 0.6 in a batch (docs/kernels.md); a task of
    a fine decomposition makes hundreds.
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
        """Note a copy of ``n_bytes`` between two addresses."""
        self._targets.append(target)
        self._sources.append(source)
        self._sizes.append(n_bytes)

    def flush(self, stream: torch.cuda.Stream, *, given_up: bool = False) -> None:
        """Issue what has been noted, unless it is ``given_up``."""
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
            # A driver older than the bindings: one by one from now on.
            self._attributes = None
        kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
        for target, source, n_bytes in zip(self._targets, self._sources, self._sizes, strict=True):
            (status,) = runtime.cudaMemcpyAsync(target, source, n_bytes, kind, stream)
            if int(status) != 0:
                raise RuntimeError(f"cudaMemcpyAsync of {n_bytes} bytes failed: {status}")


class CudaMover(StreamMover):
    """Host or device memory to and from the slots of one CUDA device."""

    def __init__(self, device: torch.device, n_slots: int, locks: PageLocks, clock: Clock) -> None:
        compute = torch.cuda.current_stream(device)
        up, down = torch.cuda.Stream(device), torch.cuda.Stream(device)
        super().__init__(clock, n_slots, (up, compute, down), torch.cuda.Event)
        self.device = device
        self.locks = locks
        # Otherwise the caller is on another device.
        self._at_home = device.index == torch.cuda.current_device()
        self._pinned: dict[int, bool] = {}
        self._runtime = _cuda_runtime()
        self._copies = None if self._runtime is None else _Copies(self._runtime)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """The compute stream is the current one already, at home."""
        here = self._at_home and stream is self.compute
        return nullcontext() if here else torch.cuda.stream(stream)

    def issue(self, stream: Any, *, given_up: bool) -> None:
        """What a stage noted, in batches."""
        if self._copies is not None:
            self._copies.flush(stream, given_up=given_up)

    def load(self, target: torch.Tensor, source: torch.Tensor, pieces: Sequence[Rows]) -> None:
        """Copy rows into a slot."""
        self.loaded_bytes += self._move(target, source, pieces, up=True)

    def store(self, target: torch.Tensor, source: torch.Tensor, pieces: Sequence[Rows]) -> None:
        """Copy rows out of a slot."""
        self.stored_bytes += self._move(source, target, pieces, up=False)

    def _is_pinned(self, host: torch.Tensor, pieces: Sequence[Rows]) -> bool:
        """Whether ``pieces`` of ``host`` (heads, n, width) are page-locked; waits until they are
        ready to be written to, if they are only being made so."""
        key = host.untyped_storage().data_ptr()
        if key not in self._pinned:
            if self.locks.wants(host) and not self.locks.settled:
                # All are asked, whatever the first says: each has to be ready.
                found = [self.locks.covers(h[p.start : p.stop]) for h in host for p in pieces]
                return all(found)
            self._pinned[key] = self.locks.covers(host)
        return self._pinned[key]

    def _move(
        self, slot: torch.Tensor, far: torch.Tensor, pieces: Sequence[Rows], *, up: bool
    ) -> int:
        """Bytes of ``pieces``, now on their way; ``slot`` (heads, n, width), ``far`` longer."""
        if not pieces:
            return 0
        heads, _, width = slot.shape
        row = width * slot.element_size()
        dense = (width == 1 or far.stride(2) == 1) and far.stride(1) == width
        if (
            self._copies is not None
            and dense
            and far.dtype == slot.dtype
            and far.device.type == "cpu"
            and self._is_pinned(far, pieces)
        ):
            here, there = slot.data_ptr(), far.data_ptr()
            here_step = slot.stride(0) * slot.element_size()
            there_step = far.stride(0) * far.element_size()
            for piece in pieces:
                n_bytes = (piece.stop - piece.start) * row
                at, beyond = here + piece.local * row, there + piece.start * row
                for head in range(heads):
                    ours, theirs = at + head * here_step, beyond + head * there_step
                    if up:
                        self._copies.add(ours, theirs, n_bytes)
                    else:
                        self._copies.add(theirs, ours, n_bytes)
        else:
            for piece in pieces:
                part, other = local_part(slot, piece), far[:, piece.start : piece.stop]
                if up:
                    self._copy(part, other, other)
                else:
                    self._copy(other, part, other)
        return sum(piece.stop - piece.start for piece in pieces) * row * heads

    def _copy(self, target: torch.Tensor, source: torch.Tensor, far: torch.Tensor) -> None:
        """``far`` is the one of the two that is not the slot."""
        heads, rows, width = far.shape
        if far.device.type != "cpu":
            copy_on_device(target, source)
            return
        # A dtype to convert, or elements to gather one by one.
        converted = target.dtype != source.dtype or not (width == 1 or far.stride(2) == 1)
        pinned = self._is_pinned(far, (Rows(0, rows, 0),))
        if converted or self._runtime is None or not pinned:
            # So is what is pageable: staged, blocks the host, stays in stream order. Head
            # by head, so that torch needs no contiguous temporary on the device.
            for head in range(heads):
                target[head].copy_(source[head], non_blocking=True)
            return
        for head in range(heads):
            if rows == 1 or far.stride(1) == width:
                target[head].copy_(source[head], non_blocking=True)
            else:
                self._copy_2d(target[head], source[head], width, rows, 0)

    def _copy_2d(
        self, target: torch.Tensor, source: torch.Tensor, length: int, lines: int, dim: int
    ) -> None:
        """``lines`` pieces of ``length`` elements, a stride of dimension ``dim`` apart."""
        size = target.element_size()
        n_bytes = length * size
        target_pitch = target.stride(dim) * size if lines > 1 else n_bytes
        source_pitch = source.stride(dim) * size if lines > 1 else n_bytes
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
            torch.cuda.current_stream(self.device).cuda_stream,
        )
        if int(status) != 0:
            raise RuntimeError(
                f"cudaMemcpy2DAsync of {lines} x {n_bytes} bytes "
                f"(pitches {target_pitch}, {source_pitch}) failed: {status}"
            )


def _cuda_runtime() -> ModuleType | None:
    """cuda-bindings' runtime, for pitched copies; None where it is not installed."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    module: ModuleType = runtime
    return module
