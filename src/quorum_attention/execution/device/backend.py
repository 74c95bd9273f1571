"""The interface of a kind of device, for planning and running passes; and the CPU,
which is one."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from quorum_attention.execution.device.clock import Clock, HostClock
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.device.page_locks import Copied, PageLocks
from quorum_attention.execution.device.pinned_pool import PinnedPool
from quorum_attention.execution.device.streams import KernelStreams
from quorum_attention.units import counted

_NOTHING_TO_DO = nullcontext()
ROUNDING_BYTES = 512
"""Allocators round sizes up to multiples of this."""


@dataclass(frozen=True, slots=True)
class TrialSizes:
    """How large a calibration's measurements have to be (planner/calibration.py).

    Attributes:
        rows: rows of the side that a call is parallel over; whole waves on a GPU.
        other_rows: rows of the other side.
        copy_bytes: bytes of one copy.
        warm_seconds: seconds of work until the device's clock rate is steady.
    """

    rows: int
    other_rows: int
    copy_bytes: int
    warm_seconds: float


class Backend:
    """One kind of device. This one is the CPU, which computes in host memory, step by
    step; others say what they do otherwise.

    Attributes:
        kind: torch's name for it.
        own_memory: its memory is not the host's: tensors in host memory have to be
            copied to it, which is faster if they are page-locked, and do not count
            against its budget. Copies run beside compute, and the host runs ahead of
            it, so a second slot, or cutting a call that fits, can save time; so can two
            kernel calls in flight at once. An allocation that does not fit fails at
            once, so that the call can recover. (A system may promise more host memory
            than it has, and kill the process later.)
        pinned: the memory of results that is kept between calls; None: none is.
        word_bytes: the address and the size of each row must be multiples of this for
            its kernels.
    """

    kind = "cpu"
    own_memory = False
    word_bytes = 1
    pinned: PinnedPool | None = None

    def is_here(self) -> bool:
        """Whether this machine has such a device."""
        return True

    def free_bytes(self, device: torch.device) -> int:
        """Bytes that could be allocated now: what Linux calls ``MemAvailable``."""
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024

    def allocate(self, n_bytes: int, device: torch.device) -> torch.Tensor:
        """An arena: ``n_bytes`` uninitialised bytes, (n_bytes,) uint8."""
        return torch.empty(n_bytes, dtype=torch.uint8, device=device)

    def give_back_cached(self) -> None:
        """After a failure: give back memory that the allocator holds but no tensor
        uses."""
        gc.collect()
        if self.pinned is not None:
            self.pinned.give_back()

    def rounding(self, sizes: Sequence[int]) -> int:
        """Bytes that its allocator may take beyond the sum of tensors of ``sizes``
        bytes."""
        return ROUNDING_BYTES * len(sizes)

    def current(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context in which kernels run on ``device`` unless told otherwise."""
        return _NOTHING_TO_DO

    def clock(self) -> Clock:
        """A new clock that measures stages on it."""
        return HostClock()

    def kernel_streams(self, device: torch.device, count: int) -> KernelStreams | None:
        """``count`` streams for the kernel calls of a task; None: calls follow one
        another."""
        return None

    def page_locks(self, tensors: Iterable[Copied]) -> PageLocks:
        """Page locks for those of ``tensors`` that are in host memory and worth it.

        Args:
            tensors: ``by_address`` is whether they are copied without conversion to
                another dtype.
        """
        return PageLocks(())

    def mover(
        self, device: torch.device, n_slots: int, locks: PageLocks, clock: Clock
    ) -> Mover:
        """A mover of rows into and out of ``n_slots`` slots on ``device``."""
        return Mover(clock, n_slots)

    def count_peak(self, device: torch.device) -> Callable[[], int] | None:
        """Begin to count allocated bytes; None if the allocator does not count.

        Returns:
            A function that says how many more bytes than now were allocated at most.
        """
        return None

    def limit(self, extra_bytes: int, device: torch.device) -> None:
        """Let its allocator take at most ``extra_bytes`` more than it holds now.

        Raises:
            NotImplementedError: the allocator does not count.
        """
        raise NotImplementedError(f"torch's allocator for {self.kind!r} takes no limit")

    def synchronize(self, device: torch.device) -> None:
        """Hold the host until the device has done all its work."""

    def model(self, device: torch.device) -> str:
        """The device's model, for which a calibration is valid: its name, and how many
        threads torch uses."""
        threads = counted(torch.get_num_threads(), "thread")
        return f"cpu {cpu_name()}, {threads}"

    def rates_of(self, dtype: torch.dtype) -> str:
        """The dtypes that share their rates with ``dtype``, in words: all that are as
        wide, but for fp16 and bf16: processors have instructions for one or for
        both."""
        name = str(dtype).removeprefix("torch.")
        if dtype.itemsize == 2:
            return name
        return f"{dtype.itemsize * 8} bit"

    def known_rates(self, device: torch.device) -> dict[str, Any]:
        """Return the fields of a ``HardwareModel`` that torch knows of a device that is
        here."""
        return {}

    def trial_sizes(self, device: torch.device) -> TrialSizes:
        """How large a calibration's measurements have to be: short calls, copies of 32
        MiB."""
        return TrialSizes(2048, 2048, 32 << 20, 0.0)

    def both_ways(self, device: torch.device, n_bytes: int) -> Callable[[], object]:
        """A function that copies ``n_bytes`` to the device and as many back at the same
        time; here, where there is one direction, once."""
        source = torch.empty(n_bytes, dtype=torch.uint8, device="cpu")
        target = torch.empty(n_bytes, dtype=torch.uint8, device="cpu")
        return lambda: target.copy_(source)


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """The system's name for the CPU's model, on one line."""
    fields = _cpu_fields()
    # On ARM, Linux gives numbers instead of a name.
    name = fields.get("model name") or fields.get("CPU part")
    name = name or platform.machine()
    return " ".join(name.split())


def _cpu_fields() -> dict[str, str]:
    """The fields that Linux lists for the CPU."""
    fields: dict[str, str] = {}
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            fields[name.strip()] = value
    return fields
