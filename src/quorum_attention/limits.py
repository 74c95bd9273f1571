"""Real memory limits for a process, and what it used: for demonstrations and tests."""

from __future__ import annotations

import resource
import threading
from types import TracebackType

import torch

_SAMPLE_SECONDS = 0.002


def data_bytes() -> int:
    """Bytes of private writable memory of this process (VmData): what RLIMIT_DATA limits."""
    with open("/proc/self/status", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    raise OSError("this system does not say how much data memory a process has")


def limit_data_size(extra_bytes: int) -> None:
    """Let this process allocate at most ``extra_bytes`` more than it has now.

    File mappings that are shared or read-only do not count. Cannot be undone: for child processes.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + extra_bytes, hard))


def warm_up() -> None:
    """Start torch's thread pools, whose stacks count as data, before a limit is set."""
    small = torch.randn(1, 2, 256, 16, requires_grad=True)
    out = torch.nn.functional.scaled_dot_product_attention(small, small, small)
    out.sum().backward()


def limit_cuda_memory(extra_bytes: int, device: torch.device) -> None:
    """Let torch's CUDA allocator hold at most ``extra_bytes`` more than it has now."""
    torch.cuda.init()
    if device.index is None:
        # torch takes "cuda" without a number everywhere but here.
        device = torch.device("cuda", torch.cuda.current_device())
    _, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.memory_reserved(device) + extra_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)


class PeakMemory:
    """Most memory in use during a ``with`` block beyond what was in use at its start.

    On CUDA as torch's allocator counts it (its peak counter is reset), on the CPU by sampling the
    process's data size every two milliseconds.

    Attributes:
        peak_bytes: valid after the block.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
            return self
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._ready = threading.Event()
        self._thread.start()
        self._ready.wait()  # the sampler's own stack belongs to the start
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._before
            return
        self._stop.set()
        assert self._thread is not None
        self._thread.join()

    def _sample(self) -> None:
        before = data_bytes()
        self._ready.set()
        while not self._stop.wait(_SAMPLE_SECONDS):
            self.peak_bytes = max(self.peak_bytes, data_bytes() - before)
