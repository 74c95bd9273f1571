"""What those who run and plan a pass ask of a kind of device."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from quorum_attention.execution.device.clock import Clock, HostClock
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.device.page_locks import PageLocks
from quorum_attention.kernels.lanes import Lanes

ROUNDING_BYTES = 512
"""Allocators hand out multiples of this."""


@dataclass(frozen=True, slots=True)
class TrialSizes:
    """How large a calibration's measurements have to be (planner/calibration.py).

    Attributes:
        rows: of the side that a call is parallel over: whole waves, where a device has waves.
        other_rows: of the other side.
        copy_bytes: of one copy.
        warm_seconds: of work until the device's clock is steady.
        threads: of this process that do the work.
    """

    rows: int
    other_rows: int
    copy_bytes: int
    warm_seconds: float
    threads: int


class Backend(ABC):
    """One kind of device; as it stands one that does one thing after another in host memory.

    Attributes:
        kind: torch's name for it.
        own_memory: its memory is not the host's: tensors in host memory have to be copied, and do
            not count against its budget.
        refuses: memory that cannot be had is refused, which can be recovered from. (A system may
            hand out more of the host's than there is, and end the process later.)
        overlaps: copies run beside compute and the host runs ahead, so that a second slot, or
            cutting a call that fits, can pay.
        pins: what it copies from or to in host memory should be page-locked.
        most_streams: kernel calls in flight at once that can pay.
        word_bytes: what its kernels read and write at once, so that rows have to be whole words at
            whole words; 1: as they come.
    """

    kind: str
    own_memory = False
    refuses = False
    overlaps = False
    pins = False
    most_streams = 1
    word_bytes = 1

    def is_here(self) -> bool:
        """Whether there is one in this machine."""
        return True

    @abstractmethod
    def free_bytes(self, device: torch.device) -> int:
        """Bytes that could be allocated now, as far as the system says."""

    def allocate(self, n_bytes: int, device: torch.device) -> torch.Tensor:
        """An arena: so many uninitialised bytes (uint8)."""
        return torch.empty(n_bytes, dtype=torch.uint8, device=device)

    def give_back_cached(self) -> None:
        """After a failure: let the allocator return what it holds but nobody uses."""
        gc.collect()

    def rounding(self, sizes: Sequence[int]) -> int:
        """Bytes that its allocator may hand out beyond tensors of ``sizes`` bytes."""
        return ROUNDING_BYTES * len(sizes)

    def current(self, device: torch.device) -> AbstractContextManager[Any]:
        """Within it, what is launched without a word about where runs on ``device``."""
        return nullcontext()

    def clock(self) -> Clock:
        """A clock of its stages."""
        return HostClock()

    def lanes(self, device: torch.device, count: int) -> Lanes | None:
        """``count`` streams for the calls of a task; None where one call follows another."""
        return None

    def page_locks(
        self, tensors: Iterable[torch.Tensor], made: Iterable[torch.Tensor]
    ) -> PageLocks:
        """Locks of the tensors in host memory that are copied from or to; ``made``: of those, what
        holds nothing yet."""
        return PageLocks(())

    def mover(self, device: torch.device, n_slots: int, locks: PageLocks, clock: Clock) -> Mover:
        """What moves rows into and out of ``n_slots`` slots on ``device``."""
        return Mover(clock)

    def count_peak(self, device: torch.device) -> Callable[[], int] | None:
        """Begin to count what its allocator hands out; the answer says how many bytes more than now
        it was at most. None: it does not count."""
        return None

    def limit(self, extra_bytes: int, device: torch.device) -> None:
        """Let its allocator hand out at most ``extra_bytes`` more than it holds now. Only where it
        counts."""
        raise NotImplementedError(f"torch's allocator for {self.kind!r} takes no limit")

    def synchronize(self, device: torch.device) -> None:  # noqa: B027
        """Hold the host until everything is done."""

    @abstractmethod
    def model(self, device: torch.device) -> str:
        """What a calibration is valid for, of the device."""

    @abstractmethod
    def rates(
        self, device: torch.device | None, dtype: torch.dtype, head_dim: int
    ) -> dict[str, Any]:
        """The assumed fields of a ``planner.machine.Machine``; of ``device`` where it is here, of
        none in particular for None."""

    @abstractmethod
    def trial_sizes(self, device: torch.device) -> TrialSizes:
        """Of a calibration."""

    @abstractmethod
    def both_ways(self, device: torch.device, n_bytes: int) -> Callable[[], object]:
        """What copies ``n_bytes`` from the host and as many to it, at once where that can be; where
        it cannot, in one direction."""
