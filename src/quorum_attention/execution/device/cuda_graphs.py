"""CUDA graphs that are recorded while a program runs, and replayed later."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CudaGraphs:
    """Makes graphs of one device.

    They share memory: what one has computed may be overwritten by those recorded behind
    it, unless somebody holds the tensor. So they are replayed in the order in which
    they were recorded, on one stream.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: Any = None
        self._graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()

    def __reduce__(self) -> Any:
        """Copy and pickle without memory."""
        return CudaGraphs, (self._device,)

    def stream(self) -> int:
        """Return the number of the stream that a graph would be replayed on."""
        number: int = torch.cuda.current_stream(self._device).cuda_stream
        return number

    def new(self) -> CudaGraph:
        """Return an empty graph."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        if not self._graphs:
            # torch refuses a pool whose graphs are all gone.
            self._pool = torch.cuda.graph_pool_handle()
        graph = CudaGraph(self._pool, self._stream)
        self._graphs.add(graph)
        return graph


class CudaGraph:
    """The launches of a program between two moments.

    Args:
        pool: the memory.
        stream: what is launched on this stream is recorded.
    """

    def __init__(self, pool: Any, stream: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        self._stream = stream

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is launched, and compute nothing."""
        with torch.cuda.stream(self._stream):
            try:
                # Other threads may allocate and wait meanwhile.
                self._graph.capture_begin(
                    pool=self._pool, capture_error_mode="thread_local"
                )
                try:
                    yield
                finally:
                    self._graph.capture_end()
            except RuntimeError:
                self._forget_random_numbers()
                raise

    def _forget_random_numbers(self) -> None:
        """Let the device's random numbers go on outside of a graph that failed."""
        generator = torch.cuda.default_generators[self._stream.device_index]
        outside = torch.Generator(self._stream.device)
        outside.set_state(generator.get_state())
        generator.graphsafe_set_state(outside)

    def replay(self) -> None:
        """Compute what was recorded, on the current stream."""
        self._graph.replay()
