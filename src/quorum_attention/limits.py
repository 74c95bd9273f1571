"""Memory limits that the system or the allocator enforces, and peaks: for demonstrations, tests."""

from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Callable

import torch

from quorum_attention.errors import is_out_of_memory
from quorum_attention.execution.device.lookup import backend_of

_SAMPLE_SECONDS = 0.002


def data_bytes() -> int:
    """Bytes of private writable memory of this process (VmData): what RLIMIT_DATA limits."""
    with open("/proc/self/status", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    raise OSError("this system does not say how much data memory a process has")


def warm_up() -> None:
    """Start torch's thread pools, whose stacks count as data, before anything is measured."""
    # Enough elements that every thread gets some.
    torch.ones(torch.get_num_threads() << 17, device="cpu").add_(1.0)
    small = torch.randn(1, 2, 256, 16, requires_grad=True, device="cpu")
    out = torch.nn.functional.scaled_dot_product_attention(small, small, small)
    # The first gradient that is handed over imports torch's symbolic shapes: 30 MiB.
    torch.autograd.grad(out, small, torch.ones_like(out))


def ran_out(error: BaseException) -> bool:
    """Whether ``error``, raised in a process with a memory limit, is due to the limit.

    The interpreter itself can run out of memory there: while it imports, opens a file, or creates
    the exception (a C function then fails "without setting an exception", a SystemError).
    """
    chain: BaseException | None = error
    while chain is not None:
        if is_out_of_memory(chain) or isinstance(chain, SystemError):
            return True
        if isinstance(chain, OSError) and chain.errno == errno.ENOMEM:
            return True
        chain = chain.__cause__ or chain.__context__
    return False


class PeakMemory:
    """The peak of memory in use during a ``with`` block, beyond what was in use at its start.

    Counted by the device's allocator (its peak counter is reset). Where that does not count, the
    process's data size is sampled every two milliseconds: everything that the process allocates.

    Attributes:
        peak_bytes: valid after the block.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.backend = backend_of(device)
        self.peak_bytes = 0
        self._counted: Callable[[], int] | None = None
        self._ready, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._unlimited = resource.getrlimit(resource.RLIMIT_DATA)

    def __enter__(self) -> PeakMemory:
        self.backend.synchronize(self.device)
        self.backend.give_back_cached()
        self._counted = self.backend.count_peak(self.device)
        if self._counted is None:
            self._thread.start()
            self._ready.wait()  # the sampler's own stack belongs to the start
        return self

    def limit(self, extra_bytes: int) -> None:
        """Limit memory to ``extra_bytes`` beyond what was in use at the start of the block.

        Where the device's allocator counts, the limit is on torch's allocator in this process, and
        stays after the block. Elsewhere it is on the process until the end of the block, and leaves
        out file mappings that are shared or read-only.
        """
        if self._counted is not None:
            self.backend.limit(extra_bytes, self.device)
            return
        # Counted from the same start as the peak, so that no peak can be above the limit.
        resource.setrlimit(resource.RLIMIT_DATA, (self._before + extra_bytes, self._unlimited[1]))

    def __exit__(self, *error: object) -> None:
        if self._counted is not None:
            self.backend.synchronize(self.device)
            self.peak_bytes = self._counted()
            return
        resource.setrlimit(resource.RLIMIT_DATA, self._unlimited)
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        self._before = data_bytes()
        self._ready.set()
        while not self._stop.wait(_SAMPLE_SECONDS):
            try:
                self.peak_bytes = max(self.peak_bytes, data_bytes() - self._before)
            except (MemoryError, OSError, SystemError):
                continue  # no memory was left for this measurement
