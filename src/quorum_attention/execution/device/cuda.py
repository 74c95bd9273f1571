"""The backend of CUDA devices: memory, streams, copies, page locks, by torch."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from quorum_attention.execution.device.backend import Backend, TrialSizes
from quorum_attention.execution.device.clock import Clock, CudaClock
from quorum_attention.execution.device.cuda_mover import CudaMover, by_address
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.device.page_locks import Copied, PageLocks
from quorum_attention.execution.device.pinned_pool import Locker, PinnedPool
from quorum_attention.execution.device.streams import KernelStreams
from quorum_attention.kernels.operator_sizes import UNSPLIT_BYTES
from quorum_attention.threads import try_start

# Rows of queries that a multiprocessor works on at a time.
_TILE_ROWS = 128


class Cuda(Backend):
    """The backend of CUDA devices."""

    kind = "cuda"
    own_memory = True
    word_bytes = 16

    def __init__(self) -> None:
        self.pinned = PinnedPool(Locker(_lock, _unlock, _wait_for_all))

    @functools.cache  # noqa: B019 (one backend, and one answer, in a process)
    def is_here(self) -> bool:
        """Whether torch finds a CUDA device."""
        return torch.cuda.is_available()

    def free_bytes(self, device: torch.device) -> int:
        """Free device memory plus what the caching allocator holds but no tensor uses,
        limited by the process's memory fraction."""
        device = with_index(device)
        free, total = torch.cuda.mem_get_info(device)
        # ``memory_stats`` flattens this dictionary, which takes longer than a short
        # attention call.
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        reserved = stats["reserved_bytes"]["all"]["current"] if stats else 0
        allocated = stats["allocated_bytes"]["all"]["current"] if stats else 0
        limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
        unused = free + reserved - allocated
        return max(0, min(unused, limit - allocated))

    def give_back_cached(self) -> None:
        """Collect garbage, give back what was kept of results, and empty the caching
        allocator."""
        super().give_back_cached()
        torch.cuda.empty_cache()

    def rounding(self, sizes: Sequence[int]) -> int:
        """A little for each tensor, and more for large ones, which get whole blocks."""
        unsplit = [size for size in sizes if size > UNSPLIT_BYTES]
        return super().rounding(sizes) + UNSPLIT_BYTES * len(unsplit)

    def current(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context in which ``device`` is current: kernels run there, wherever tensors
        are."""
        # By its number: torch looks up any other name of a device.
        return torch.cuda.device(device.index)

    def clock(self) -> Clock:
        """A clock that uses CUDA events."""
        return CudaClock()

    def kernel_streams(self, device: torch.device, count: int) -> KernelStreams | None:
        """``count`` streams, if that is more than one."""
        return KernelStreams(device, count) if count > 1 else None

    def page_locks(self, tensors: Iterable[Copied]) -> PageLocks:
        """Page locks for those of ``tensors`` that are in host memory and large."""
        return PageLocks(map(by_address, tensors), late=True, pool=self.pinned)

    def mover(
        self, device: torch.device, n_slots: int, locks: PageLocks, clock: Clock
    ) -> Mover:
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
        fraction = min(1.0, allowed / total)
        torch.cuda.set_per_process_memory_fraction(fraction, device)

    def synchronize(self, device: torch.device) -> None:
        """Hold the host until all streams of ``device`` are done."""
        torch.cuda.synchronize(device)

    def model(self, device: torch.device) -> str:
        """Its name, according to torch."""
        return torch.cuda.get_device_name(device)

    def known_rates(self, device: torch.device) -> dict[str, Any]:
        """Return the rows that occupy the multiprocessors once, and the cache for one
        operand."""
        properties = torch.cuda.get_device_properties(device)
        return {
            "wave_rows": properties.multi_processor_count * _TILE_ROWS,
            "cache_bytes": int(properties.L2_cache_size) // 3,
        }

    def trial_sizes(self, device: torch.device) -> TrialSizes:
        """Calls of whole waves: a last wave that is not full would make the rate look
        lower."""
        count = torch.cuda.get_device_properties(device).multi_processor_count
        # A GPU's clock rate falls during its first second of work.
        return TrialSizes(
            8 * _TILE_ROWS * count,
            65_536,
            256 << 20,
            0.7,
        )

    def rates_of(self, dtype: torch.dtype) -> str:
        """All dtypes that are as wide."""
        return f"{dtype.itemsize * 8} bit"

    def both_ways(self, device: torch.device, n_bytes: int) -> Callable[[], object]:
        """A function that copies ``n_bytes`` each way at once, on two streams."""
        on_host = torch.empty(n_bytes, dtype=torch.uint8, device="cpu")
        sent = on_host.pin_memory()
        received = on_host.pin_memory()
        up_target = torch.empty_like(sent, device=device)
        down_source = torch.empty_like(sent, device=device)
        up_stream = torch.cuda.Stream(device)
        down_stream = torch.cuda.Stream(device)

        def copy_both_ways() -> None:
            with torch.cuda.stream(up_stream):
                up_target.copy_(sent, non_blocking=True)
            with torch.cuda.stream(down_stream):
                received.copy_(down_source, non_blocking=True)

        return copy_both_ways


def _lock(address: int, n_bytes: int) -> bool:
    """Page-lock memory. In a thread, because a refusal sets CUDA's last error for its
    thread, where the next kernel would be blamed for it."""
    runtime: Any = torch.cuda.cudart()
    device = torch.cuda.current_device()
    statuses: list[int] = []

    def lock() -> None:
        torch.cuda.set_device(device)
        status = runtime.cudaHostRegister(address, n_bytes, 0)
        statuses.append(int(status))

    thread = threading.Thread(target=lock, name="locks a result")
    if try_start(thread):
        thread.join()
    return statuses == [0]


def _unlock(address: int) -> None:
    """Undo ``_lock``."""
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)


def _wait_for_all() -> None:
    """Hold the host until every device that this process uses has done all its work."""
    is_used = getattr(torch._C, "_cuda_hasPrimaryContext", lambda index: True)
    for index in range(torch.cuda.device_count()):
        if is_used(index):
            torch.cuda.synchronize(index)


def with_index(device: torch.device) -> torch.device:
    """``device`` with its number: without one it is the current device."""
    if device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())
