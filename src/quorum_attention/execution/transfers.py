"""Copies between where tensors live and the slots, and the order in which they happen.

One unit of work goes through three stages: *load* (inputs and travelling state into a slot),
*compute*, *store* (state and results out of it). On CUDA each stage has a stream of its own, so
that the next unit's load and the last unit's store run beside the present unit's compute; on the
CPU they simply follow one another.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Protocol

import torch

from quorum_attention.execution.memory import PageLocks

# cudaMemcpy2D refuses pitches beyond this.
_MAX_PITCH_BYTES = (1 << 31) - 1


class Mover(Protocol):
    """Moves rows, and keeps the stages of units in order."""

    loaded_bytes: int
    stored_bytes: int

    def input_stage(self, slot: int) -> AbstractContextManager[Any]:
        """The load of a unit's inputs into ``slot``, once its previous unit has left it."""
        ...

    def state_stage(self, slot: int, after_store_of: int | None) -> AbstractContextManager[Any]:
        """The load of a unit's state; ``after_store_of``: the slot whose store comes first."""
        ...

    def carried_from(self, slot: int) -> None:
        """Within a compute stage: the state that ``slot`` had to hand on has been taken."""
        ...

    def compute_stage(self, slot: int) -> AbstractContextManager[Any]:
        """The compute of the unit in ``slot``, after its load."""
        ...

    def store_stage(self, slot: int) -> AbstractContextManager[Any]:
        """The store of the unit in ``slot``, after its compute."""
        ...

    def load(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy (heads, n, width) rows into a slot."""
        ...

    def store(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy (heads, n, width) rows out of a slot."""
        ...

    def finish(self, *, wait: bool) -> None:
        """All stages before everything that follows; ``wait`` also holds the host until then."""
        ...


class HostMover:
    """CPU to CPU: plain copies, in order."""

    def __init__(self) -> None:
        self.loaded_bytes = 0
        self.stored_bytes = 0

    def input_stage(self, slot: int) -> AbstractContextManager[Any]:
        """Nothing to wait for."""
        return nullcontext()

    def state_stage(self, slot: int, after_store_of: int | None) -> AbstractContextManager[Any]:
        """Nothing to wait for."""
        return nullcontext()

    def carried_from(self, slot: int) -> None:
        """Nothing to note."""

    def compute_stage(self, slot: int) -> AbstractContextManager[Any]:
        """Nothing to wait for."""
        return nullcontext()

    def store_stage(self, slot: int) -> AbstractContextManager[Any]:
        """Nothing to wait for."""
        return nullcontext()

    def load(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy rows in."""
        target.copy_(source)
        self.loaded_bytes += target.numel() * target.element_size()

    def store(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy rows out."""
        target.copy_(source)
        self.stored_bytes += target.numel() * target.element_size()

    def finish(self, *, wait: bool) -> None:
        """Everything has happened already."""


class _Stage:
    """Runs its block on a stream, after some events, and records one at the end."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        after: list[torch.cuda.Event],
        done: torch.cuda.Event | None,
    ) -> None:
        self.stream, self.after, self.done = stream, after, done
        self.context = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        for event in self.after:
            self.stream.wait_event(event)
        self.context.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self.context.__exit__(*exc)
        if self.done is not None:
            self.done.record(self.stream)


class CudaMover:
    """Host or device memory to and from the slots of one CUDA device, on three streams."""

    def __init__(self, device: torch.device, n_slots: int, locks: PageLocks) -> None:
        self.device = device
        self.locks = locks
        self.loaded_bytes = 0
        self.stored_bytes = 0
        self._compute = torch.cuda.current_stream(device)
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

    def input_stage(self, slot: int) -> AbstractContextManager[Any]:
        """On the upward stream, once the slot's previous unit is stored and has handed on."""
        return _Stage(self._up, [self._stored[slot], self._handed_on[slot]], None)

    def state_stage(self, slot: int, after_store_of: int | None) -> AbstractContextManager[Any]:
        """On the upward stream, after the inputs and the store that wrote the state last."""
        after = [] if after_store_of is None else [self._stored[after_store_of]]
        return _Stage(self._up, after, self._ready[slot])

    def carried_from(self, slot: int) -> None:
        """The compute stream has read what ``slot`` hands on."""
        self._handed_on[slot].record(self._compute)

    def compute_stage(self, slot: int) -> AbstractContextManager[Any]:
        """On the caller's stream, once the slot is loaded."""
        return _Stage(self._compute, [self._ready[slot]], self._computed[slot])

    def store_stage(self, slot: int) -> AbstractContextManager[Any]:
        """On the downward stream, once the slot is computed."""
        return _Stage(self._down, [self._computed[slot]], self._stored[slot])

    def load(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy rows into a slot."""
        self._copy(target, source, source)
        self.loaded_bytes += target.numel() * target.element_size()

    def store(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy rows out of a slot."""
        self._copy(target, source, target)
        self.stored_bytes += target.numel() * target.element_size()

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

    def _copy(self, target: torch.Tensor, source: torch.Tensor, far: torch.Tensor) -> None:
        """``far`` is the one of the two that is not the slot."""
        heads, rows, width = far.shape
        if far.device.type != "cpu" or not (width == 1 or far.stride(2) == 1):
            target.copy_(source, non_blocking=True)
            return
        if not self._is_pinned(far):
            # Pageable: the driver stages it; blocks the host, stays in stream order. Head by
            # head, so that torch needs no contiguous temporary.
            for head in range(heads):
                target[head].copy_(source[head], non_blocking=True)
            return
        if self._runtime is None:
            for head in range(heads):
                target[head].copy_(source[head], non_blocking=True)
            return
        whole_rows = rows == 1 or far.stride(1) == width
        pitch = far.stride(0) * far.element_size()
        if whole_rows and (heads == 1 or pitch <= _MAX_PITCH_BYTES):
            self._copy_2d(target, source, rows * width, heads, 0)
        else:
            for head in range(heads):
                if whole_rows:
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
