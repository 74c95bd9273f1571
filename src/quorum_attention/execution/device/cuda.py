"""CUDA devices as computing devices.

Two streams of a GPU, so that a turn's kernel begins while that of the turn before still ends.

Memory belongs to the stream on which it was allocated, and may be given out again as soon as
it is freed. So what is used on another stream is recorded for that one, and what is being sent
is held until the streams have met.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch

from quorum_attention.execution.device.backend import Backend, TrialSizes, h200_rates
from quorum_attention.execution.device.cuda_mover import CudaMover, by_address
from quorum_attention.execution.device.mover import Clock, HostClock, Mover
from quorum_attention.execution.device.page_locks import Copied, Locker, PageLocks, PinnedPool
from quorum_attention.kernels.rectangles import UNSPLIT_BYTES
from quorum_attention.threads import started

# Rows of queries that a multiprocessor works on at a time.
_TILE_ROWS = 128
# With more pairs of events than this waiting to be read, those that have happened are read.
_MOST_PENDING = 4096


class Cuda(Backend):
    """The backend of CUDA devices."""

    kind = "cuda"
    own_memory = True
    word_bytes = 16

    def __init__(self) -> None:
        self.pinned = PinnedPool(Locker(_lock, _unlock, _wait_for_all))

    def is_here(self) -> bool:
        """Whether torch finds a CUDA device."""
        return torch.cuda.is_available()

    def free_bytes(self, device: torch.device) -> int:
        """Free device memory plus what the caching allocator holds but no tensor uses, limited by
        the process's memory fraction."""
        device = with_index(device)
        free, total = torch.cuda.mem_get_info(device)
        # ``memory_stats`` flattens this dictionary, which takes longer than a short attention call.
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        reserved, allocated = (
            stats[name]["all"]["current"] if stats else 0
            for name in ("reserved_bytes", "allocated_bytes")
        )
        limit = total
        if hasattr(torch.cuda, "get_per_process_memory_fraction"):
            limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
        return max(0, min(free + reserved - allocated, limit - allocated))

    def give_back_cached(self) -> None:
        """Collect garbage, give back what was kept of results, and empty the caching allocator."""
        super().give_back_cached()
        torch.cuda.empty_cache()

    def rounding(self, sizes: Sequence[int]) -> int:
        """A little for each tensor, and more for large ones, which get whole blocks."""
        unsplit = sum(size > UNSPLIT_BYTES for size in sizes)
        return super().rounding(sizes) + UNSPLIT_BYTES * unsplit

    def current(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context in which ``device`` is current: kernels run there, wherever tensors are."""
        return torch.cuda.device(device)

    def clock(self) -> Clock:
        """A clock that uses CUDA events."""
        return CudaClock()

    def kernel_streams(self, device: torch.device, count: int) -> KernelStreams | None:
        """``count`` streams, if that is more than one."""
        return KernelStreams(device, count) if count > 1 else None

    def page_locks(self, tensors: Iterable[Copied]) -> PageLocks:
        """Page locks for those of ``tensors`` that are in host memory and large."""
        return PageLocks(map(by_address, tensors), late=True)

    def mover(self, device: torch.device, n_slots: int, locks: PageLocks, clock: Clock) -> Mover:
        """A mover that copies on streams of its own."""
        return CudaMover(device, n_slots, locks, clock)

    def count_peak(self, device: torch.device) -> Callable[[], int] | None:
        """Count by torch's peak counter, which is reset."""
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        return lambda: torch.cuda.max_memory_allocated(device) - before

    def limit(self, extra_bytes: int, device: torch.device) -> None:
        """Limit torch's allocator for the rest of this process."""
        torch.cuda.init()
        # ``set_per_process_memory_fraction`` refuses "cuda" without a number.
        device = with_index(device)
        _, total = torch.cuda.mem_get_info(device)
        allowed = torch.cuda.memory_reserved(device) + extra_bytes
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)

    def synchronize(self, device: torch.device) -> None:
        """Hold the host until all streams of ``device`` are done."""
        torch.cuda.synchronize(device)

    def model(self, device: torch.device) -> str:
        """Its name, according to torch."""
        return torch.cuda.get_device_name(device)

    def rates(
        self, device: torch.device | None, dtype: torch.dtype, head_dim: int
    ) -> dict[str, Any]:
        """The rates of an H200, with the multiprocessors and cache of ``device`` if it is here."""
        found = h200_rates(dtype, head_dim)
        if device is not None and self.is_here():
            properties = torch.cuda.get_device_properties(device)
            found["wave_rows"] = properties.multi_processor_count * _TILE_ROWS
            found["cache_bytes"] = int(properties.L2_cache_size) // 3
        return found

    def trial_sizes(self, device: torch.device) -> TrialSizes:
        """Calls of whole waves: a last wave that is not full would make the rate look lower."""
        count = torch.cuda.get_device_properties(device).multi_processor_count
        # A GPU's clock rate falls during its first second of work.
        return TrialSizes(8 * _TILE_ROWS * count, 65_536, 256 << 20, 0.7)

    def rates_of(self, dtype: torch.dtype) -> str:
        """All dtypes that are as wide."""
        return f"{dtype.itemsize * 8} bit"

    def both_ways(self, device: torch.device, n_bytes: int) -> Callable[[], object]:
        """A function that copies ``n_bytes`` each way at once, on two streams."""
        near = [torch.empty(n_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        read, written = (
            torch.empty(n_bytes, dtype=torch.uint8, device="cpu").pin_memory() for _ in range(2)
        )
        streams = [torch.cuda.Stream(device) for _ in range(2)]

        def both() -> None:
            with torch.cuda.stream(streams[0]):
                near[0].copy_(read, non_blocking=True)
            with torch.cuda.stream(streams[1]):
                written.copy_(near[1], non_blocking=True)

        return both


def _lock(address: int, n_bytes: int) -> bool:
    """Page-lock memory. In a thread, because a refusal sets CUDA's last error for its thread, where
    the next kernel would be blamed for it."""
    runtime: Any = torch.cuda.cudart()
    device, found = torch.cuda.current_device(), []

    def lock() -> None:
        torch.cuda.set_device(device)
        found.append(int(runtime.cudaHostRegister(address, n_bytes, 0)) == 0)

    thread = threading.Thread(target=lock, name="locks a result")
    if started(thread):
        thread.join()
    return bool(found) and found[0]


def _unlock(address: int) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)


def _wait_for_all() -> None:
    """Hold the host until every device that this process uses has done all its work."""
    used = getattr(torch._C, "_cuda_hasPrimaryContext", lambda index: True)
    for index in range(torch.cuda.device_count()):
        if used(index):
            torch.cuda.synchronize(index)


def with_index(device: torch.device) -> torch.device:
    """``device`` with its number: without one it is the current device."""
    if device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


class CudaClock(HostClock):
    """Measures stages by pairs of CUDA events, which are read after they have happened."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """A context: what runs on the current stream in it counts as ``stage``."""
        first = torch.cuda.Event(enable_timing=True)
        last = torch.cuda.Event(enable_timing=True)
        first.record()
        try:
            yield
        finally:
            last.record()
            self._pending.append((stage, first, last))
            while len(self._pending) > _MOST_PENDING and self._pending[0][2].query():
                self._read()

    def seconds(self) -> dict[str, float]:
        """Seconds by stage so far, after all work is done; ``compute`` is without its merges."""
        while self._pending:
            self._pending[0][2].synchronize()
            self._read()
        return super().seconds()

    def _read(self) -> None:
        stage, first, last = self._pending.popleft()
        self.add(stage, first.elapsed_time(last) * 1e-3)


# Runs several operator calls of a task at once; their merges still follow each other.
#
# An attention kernel works in waves, each with as many tiles as there are multiprocessors. In the
# last wave part of the device is idle until the slowest tile is done. A second call on another
# stream uses that time (docs/kernels.md).


class KernelStreams:
    """Streams of one device, used in turn; created once for a pass."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]
        self._merged = [torch.cuda.Event() for _ in range(count)]
        self._last: torch.cuda.Event | None = None

    @contextmanager
    def task(self) -> Iterator[None]:
        """Around a task: its calls wait for the current stream, which then waits for them."""
        main = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(main)
        self._last = None
        try:
            yield
        finally:
            for stream in self._streams:
                main.wait_stream(stream)

    def call(self, number: int) -> AbstractContextManager[None]:
        """Around the ``number``-th call of a task: runs it on its stream."""
        return torch.cuda.stream(self._streams[number % len(self._streams)])

    @contextmanager
    def merge(self, number: int) -> Iterator[None]:
        """Around the merge of a call: it waits for the merge of the call before."""
        stream = self._streams[number % len(self._streams)]
        if self._last is not None:
            stream.wait_event(self._last)
        yield
        self._last = self._merged[number % len(self._streams)]
        self._last.record(stream)


class TwoStreams:
    """Turns are computed on the current stream and on one beside it, alternately.

    Made when everything that turns read has been enqueued on the current stream.

    Args:
        device: of the call.
        two: whether there are two; else everything is on the current stream, or on no GPU.
    """

    def __init__(self, device: torch.device, two: bool) -> None:
        self._main: Any = None
        self._held: list[Any] = []
        if two and device.type == "cuda":
            self._main, self._side = torch.cuda.current_stream(device), _beside(device)
            self._side.wait_stream(self._main)

    def turn(self, number: int) -> AbstractContextManager[Any]:
        """Within it, turn ``number`` is computed."""
        if self._main is None or number % 2 == 0:
            return nullcontext()
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._side)
        return stream

    def reads(self, number: int, *tensors: torch.Tensor | None) -> None:
        """Turn ``number`` reads what may be of the other stream; held until ``meet``."""
        if self._main is None:
            return
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self._side if number % 2 else self._main)
                self._held.append(tensor)

    def leaves(self, *tensors: torch.Tensor) -> None:
        """A turn has made what the current stream will read."""
        if self._main is not None:
            for tensor in tensors:
                tensor.record_stream(self._main)

    def meet(self) -> None:
        """The current stream goes on when all turns are done."""
        if self._main is not None:
            self._main.wait_stream(self._side)
        self._held.clear()


@lru_cache(maxsize=64)
def _beside(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
