"""The mover of a CUDA device: a stream for each stage, tied by events."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

from quorum_attention.execution.control.visits import Rows
from quorum_attention.execution.device.clock import Clock
from quorum_attention.execution.device.mover import Mover, local_part
from quorum_attention.execution.device.page_locks import PageLocks
from quorum_attention.kernels.copies import copy_on_device


class _Stage:
    """Runs its block on a stream, after some events, and records one at the end; ``current``: the
    caller is on that stream already."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        after: list[torch.cuda.Event],
        done: torch.cuda.Event | None,
        copies: _Copies | None,
        timed: AbstractContextManager[None] | None,
        current: bool = False,
    ) -> None:
        self.stream, self.after, self.done, self.copies = stream, after, done, copies
        self.context: AbstractContextManager[Any] = (
            nullcontext() if current else torch.cuda.stream(stream)
        )
        self.timed = timed

    def __enter__(self) -> None:
        for event in self.after:
            self.stream.wait_event(event)
        self.context.__enter__()
        if self.timed is not None:
            self.timed.__enter__()

    def __exit__(self, *exc: Any) -> None:
        try:
            if self.copies is not None:
                self.copies.flush(self.stream, given_up=exc[0] is not None)
        finally:
            if self.timed is not None:
                self.timed.__exit__(*exc)
            self.context.__exit__(*exc)
        if self.done is not None:
            self.done.record(self.stream)


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


class CudaMover(Mover):
    """Host or device memory to and from the slots of one CUDA device, on three streams."""

    def __init__(self, device: torch.device, n_slots: int, locks: PageLocks, clock: Clock) -> None:
        super().__init__(clock)
        self.device = device
        self.locks = locks
        self._compute = torch.cuda.current_stream(device)
        # Otherwise the caller is on another device.
        self._at_home = device.index == torch.cuda.current_device()
        self._up = torch.cuda.Stream(device)
        self._down = torch.cuda.Stream(device)
        # What came before this call (the inputs, the arena's memory) comes first.
        self._up.wait_stream(self._compute)
        self._down.wait_stream(self._compute)
        self._ready = [torch.cuda.Event() for _ in range(n_slots)]
        self._computed = [torch.cuda.Event() for _ in range(n_slots)]
        self._stored = [torch.cuda.Event() for _ in range(n_slots)]
        self._handed_on = [torch.cuda.Event() for _ in range(n_slots)]
        self._pinned: dict[int, bool] = {}
        self._runtime = _cuda_runtime()
        self._copies = None if self._runtime is None else _Copies(self._runtime)

    def input_stage(self, slot: int) -> AbstractContextManager[Any]:
        """On the upward stream, once the slot's previous unit is stored and has handed on."""
        after = [self._stored[slot], self._handed_on[slot]]
        return _Stage(self._up, after, None, self._copies, self._clock.timed("h2d"))

    def state_stage(self, slot: int, after_store_of: int) -> AbstractContextManager[Any]:
        """On the upward stream, after the inputs and the store that wrote the state last."""
        timed, after = self._clock.timed("h2d"), [self._stored[after_store_of]]
        return _Stage(self._up, after, self._ready[slot], self._copies, timed)

    def carried_from(self, slot: int) -> None:
        """The compute stream has read what ``slot`` hands on."""
        self._handed_on[slot].record(self._compute)

    def compute_stage(self, slot: int) -> AbstractContextManager[Any]:
        """On the caller's stream, once the slot is loaded."""
        after, done = [self._ready[slot]], self._computed[slot]
        return _Stage(self._compute, after, done, None, None, current=self._at_home)

    def wait_computed(self, slot: int) -> None:
        """Hold the host until the unit in ``slot`` has been computed."""
        self._computed[slot].synchronize()

    def store_stage(self, slot: int) -> AbstractContextManager[Any]:
        """On the downward stream, once the slot is computed."""
        timed = self._clock.timed("d2h")
        return _Stage(self._down, [self._computed[slot]], self._stored[slot], self._copies, timed)

    def load(self, target: torch.Tensor, source: torch.Tensor, pieces: Sequence[Rows]) -> None:
        """Copy rows into a slot."""
        self.loaded_bytes += self._move(target, source, pieces, up=True)

    def store(self, target: torch.Tensor, source: torch.Tensor, pieces: Sequence[Rows]) -> None:
        """Copy rows out of a slot."""
        self.stored_bytes += self._move(source, target, pieces, up=False)

    def finish(self, *, wait: bool) -> None:
        """The caller's stream, and with ``wait`` the host, follow both copy streams."""
        self._compute.wait_stream(self._up)
        self._compute.wait_stream(self._down)
        if wait:
            self._compute.synchronize()

    def _is_pinned(self, host: torch.Tensor) -> bool:
        key = host.untyped_storage().data_ptr()
        if key not in self._pinned:
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
            and self._is_pinned(far)
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
        if converted or self._runtime is None or not self._is_pinned(far):
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
