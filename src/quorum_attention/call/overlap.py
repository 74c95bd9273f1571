"""Whether tensors share memory, and whether it may be written.

Interleaved views of one packed tensor (say query, key and value of one projection) lie in the same
range of addresses and share no byte, so comparing ranges is not enough. NumPy solves the bounded
linear Diophantine equation behind the question. It is given addresses only; nothing is read.

A tensor does not know that its memory is a read-only map (writing to it ends the process), nor that
another tensor maps the same bytes of a file at another address. On Linux the table of this
process's mappings tells; on other systems nothing is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quorum_attention.execution.device.host_memory import MappedRange, address_range, mapped_ranges
from quorum_attention.execution.device.lookup import on_host

# NumPy gives up after so many steps, about a millisecond; the answer is then yes, to be safe. The
# layouts of ordinary views take a few steps.
_MOST_STEPS = 100_000
# Added to all addresses: only their differences matter, and NumPy takes 0 for no address.
_OFF_ZERO = 64

# --- Addresses ------------------------------------------------------------------------------------


class _Addresses:
    def __init__(self, tensor: torch.Tensor, start: int) -> None:
        item = tensor.element_size()
        self.__array_interface__ = {
            "version": 3, "data": (start + _OFF_ZERO, True), "typestr": f"|V{item}",
            "shape": tuple(tensor.shape), "strides": tuple(s * item for s in tensor.stride()),
        }  # fmt: skip


def addresses(tensor: torch.Tensor, start: int | None = None) -> np.ndarray:
    """An array, which must not be read, where ``tensor`` lies; with its first element at ``start``
    where that is given."""
    return np.asarray(_Addresses(tensor, tensor.data_ptr() if start is None else start))


def may_share_memory(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether any byte belongs to both; True also where that takes too long to tell."""
    # Where it runs out of steps this says True; ``shares_memory`` would raise.
    return bool(np.may_share_memory(one, other, max_work=_MOST_STEPS))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory: unless each dimension steps over all shorter ones."""
    span = 1
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1 and stride < span:
            return tensor.numel() > 0
        span += (n - 1) * stride
    return False


# --- Mappings -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mappings:
    """All mappings of this process, by ascending address."""

    every: tuple[MappedRange, ...]

    @classmethod
    def now(cls) -> Mappings:
        """Read from the system's table; empty where there is no such table."""
        return cls(tuple(mapped_ranges()))

    def of(self, tensor: torch.Tensor) -> list[MappedRange]:
        """The mappings that a tensor in host memory spans."""
        if not on_host(tensor.device) or tensor.numel() == 0:
            return []
        start, stop = address_range(tensor)
        return [m for m in self.every if m.start < stop and start < m.stop]

    def is_read_only(self, tensor: torch.Tensor) -> bool:
        """Whether writing to ``tensor`` would end the process."""
        return any(not m.writable for m in self.of(tensor))

    def in_file(self, tensor: torch.Tensor) -> tuple[MappedRange, int] | None:
        """The file mapping that ``tensor`` begins in, and its first byte's position in the file;
        None where it begins in no file."""
        found = self.of(tensor)
        if not found or found[0].file is None:
            return None
        return found[0], tensor.data_ptr() - found[0].start + found[0].offset

    def share(self, result: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether a result and another tensor share memory, or bytes of a file that the result's
        mapping writes to."""
        if result.device != other.device:
            return False
        if may_share_memory(addresses(result), addresses(other)):
            return True
        one, two = self.in_file(result), self.in_file(other)
        if one is None or two is None or not one[0].shared or one[0].file != two[0].file:
            return False
        return may_share_memory(addresses(result, one[1]), addresses(other, two[1]))
