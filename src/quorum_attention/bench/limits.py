"""Memory limits that the system or the allocator enforces, and peaks: for
demonstrations, tests."""

from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from quorum_attention.errors import is_out_of_memory
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.threads import try_start

_SAMPLE_SECONDS = 0.002


def data_bytes() -> int:
    """Bytes of private writable memory of this process (VmData): what RLIMIT_DATA
    limits."""
    with open("/proc/self/status", encoding="ascii") as file:
        return int(file.read().partition("VmData:")[2].split()[0]) * 1024


def warm_up() -> None:
    """Start torch's thread pools, whose stacks count as data, before anything is
    measured."""
    # Enough elements that every thread gets some.
    n_elements = torch.get_num_threads() << 17
    torch.ones(n_elements, device="cpu").add_(1.0)
    small = torch.randn(1, 2, 256, 16, requires_grad=True, device="cpu")
    out = scaled_dot_product_attention(small, small, small)
    # The first upstream gradient makes autograd import torch's symbolic shapes: 30 MiB.
    grad_out = torch.ones_like(out)
    torch.autograd.grad(out, small, grad_out)


def is_limit_error(error: BaseException | None) -> bool:
    """Whether ``error``, raised in a process with a memory limit, is due to the limit.

    The interpreter itself can run out of memory there: while it imports, opens a file,
    or creates the exception (a C function then fails "without setting an exception", a
    SystemError).
    """
    if error is None:
        return False
    without_memory = isinstance(error, OSError) and error.errno == errno.ENOMEM
    without_memory |= is_out_of_memory(error) or isinstance(error, SystemError)
    return without_memory or is_limit_error(error.__cause__ or error.__context__)


class PeakMemory:
    """The peak of memory in use during a ``with`` block, beyond what was in use at its
    start.

    Counted by the device's allocator (its peak counter is reset). Where that does not
    count, the process's data size is sampled every two milliseconds: everything that
    the process allocates.

    Attributes:
        peak_bytes: valid after the block; None if the system granted no thread that
            samples.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.backend = backend_of(device)
        self.peak_bytes: int | None = None
        self._before = 0
        self._highest = 0
        self._counted: Callable[[], int] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._is_sampled = False
        self._unlimited = resource.getrlimit(resource.RLIMIT_DATA)

    def __enter__(self) -> PeakMemory:
        self.backend.synchronize(self.device)
        self.backend.give_back_cached()
        self._counted = self.backend.count_peak(self.device)
        if self._counted is None:
            self._is_sampled = try_start(self._thread)
            # The stack of the sampling thread is in use by now.
            self._before = data_bytes()
            self._highest = self._before
        return self

    def limit(self, extra_bytes: int) -> None:
        """Limit memory to ``extra_bytes`` beyond what was in use at the start of the
        block.

        Where the device's allocator counts, the limit is on torch's allocator in this
        process, and stays after the block. Elsewhere it is on the process until the end
        of the block, and leaves out file mappings that are shared or read-only.
        """
        if self._counted is not None:
            self.backend.limit(extra_bytes, self.device)
            return
        # Counted from the same start as the peak, so that no peak can be above the
        # limit.
        resource.setrlimit(
            resource.RLIMIT_DATA, (self._before + extra_bytes, self._unlimited[1])
        )

    def __exit__(self, *error: object) -> None:
        if self._counted is not None:
            self.backend.synchronize(self.device)
            self.peak_bytes = self._counted()
            return
        resource.setrlimit(resource.RLIMIT_DATA, self._unlimited)
        if self._is_sampled:
            self._stop.set()
            self._thread.join()
            self.peak_bytes = self._highest - self._before

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            try:
                self._highest = max(self._highest, data_bytes())
            except (MemoryError, OSError, SystemError):
                continue  # no memory was left for this measurement
