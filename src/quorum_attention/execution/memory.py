"""Taking memory, and telling an out-of-memory failure from any other."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

from quorum_attention.errors import OutOfMemoryError

# What torch's CPU allocator says; it has no type of its own for it (a plain RuntimeError).
_CPU_ALLOCATOR_SAYS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
_BAD_ALLOC = "std::bad_alloc"
_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out.

    By type (torch.OutOfMemoryError, MemoryError, an accelerator error with the code of a failed
    allocation); the CPU allocator raises a bare RuntimeError, which is known by its fixed text.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    accelerator_error = getattr(torch, "AcceleratorError", None)
    if accelerator_error is not None and isinstance(error, accelerator_error):
        return getattr(error, "error_code", None) == _CUDA_OUT_OF_MEMORY
    if type(error) is RuntimeError:
        text = str(error)
        return text == _BAD_ALLOC or any(said in text for said in _CPU_ALLOCATOR_SAYS)
    return False


def first_line(error: BaseException) -> str:
    """What an allocator said, in a line."""
    return next((line.strip() for line in str(error).split("\n") if line.strip()), repr(error))


@contextmanager
def named_out_of_memory(*, pinned: bool) -> Iterator[None]:
    """Whatever allocator fails in the block, and nobody recovered from: our own error leaves it.

    The allocator's error is not chained: its traceback would hold the failed call's tensors.
    """
    said = None
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        said = first_line(error)
    if said is not None:
        why = "the depth is pinned, so it is reported as it is"
        if not pinned:
            why = "it was the memory of results or accumulators, which a finer plan needs as well"
        raise OutOfMemoryError(f"out of memory: {why}. The allocator said: {said}")


def allocate(n_bytes: int, device: torch.device) -> torch.Tensor:
    """An arena: ``n_bytes`` uninitialised bytes on ``device`` (uint8)."""
    return torch.empty(n_bytes, dtype=torch.uint8, device=device)


def give_back_cached(device: torch.device) -> None:
    """After a failure: let the allocator return what it holds but nobody uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def available_bytes(device: torch.device) -> int:
    """Bytes that could be allocated on ``device`` now, as far as the system says.

    On CUDA that is free device memory plus what the caching allocator holds unused, within the
    process's memory fraction; on the CPU ``MemAvailable``.
    """
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        free, total = torch.cuda.mem_get_info(device)
        # As a nested dictionary: flattening it would take longer than a short attention call.
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        reserved, allocated = (
            stats[name]["all"]["current"] if stats else 0
            for name in ("reserved_bytes", "allocated_bytes")
        )
        unused = reserved - allocated
        limit = total
        if hasattr(torch.cuda, "get_per_process_memory_fraction"):
            limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
        within = limit - allocated
        return max(0, min(free + unused, within))
    return _host_available()


def _host_available() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 34  # no such file (not Linux): assume 16 GiB rather than refuse to work


# Registering costs about 0.1 s/GiB and saves eight times the copy time: not worth it below this.
_WORTH_LOCKING_BYTES = 16 << 20


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


class PageLocks:
    """Page-locks pageable host tensors for the length of a ``with`` block.

    What cannot be locked (a read-only file mapping, a system limit) is left pageable: copies
    from it are slower, never wrong. Everything locked here is unlocked on the way out.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        extents = sorted(
            _extent(t)
            for t in tensors
            if t.device.type == "cpu"
            and t.numel() * t.element_size() >= _WORTH_LOCKING_BYTES
            and not t.is_pinned()
        )
        self._wanted: list[tuple[int, int]] = []
        for start, stop in extents:
            if self._wanted and start < self._wanted[-1][1]:
                self._wanted[-1] = (self._wanted[-1][0], max(stop, self._wanted[-1][1]))
            else:
                self._wanted.append((start, stop))
        self._locked: list[tuple[int, int]] = []

    def __enter__(self) -> PageLocks:
        runtime = torch.cuda.cudart() if self._wanted else None
        for start, stop in self._wanted:
            assert runtime is not None
            if int(runtime.cudaHostRegister(start, stop - start, 0)) == 0:
                self._locked.append((start, stop))
            else:
                _clear_last_cuda_error()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        runtime = torch.cuda.cudart() if self._locked else None
        while self._locked:
            assert runtime is not None
            start, _ = self._locked.pop()
            runtime.cudaHostUnregister(start)

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` (on the host) is page-locked, by this object or by its owner."""
        start, stop = _extent(tensor)
        if any(low <= start and stop <= high for low, high in self._locked):
            return True
        return bool(tensor.is_pinned())


def _clear_last_cuda_error() -> None:
    """A refused registration leaves an error behind that the next launch would report."""
    try:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
