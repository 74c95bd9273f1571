"""Whether tensors share memory, and whether it may be written.

Interleaved views of one packed tensor (say query, key and value of one projection) lie
in the same range of addresses and share no byte, so comparing ranges is not enough.
NumPy solves the bounded linear Diophantine equation behind the question. It is given
addresses only; nothing is read.

A tensor does not know that its memory is a read-only map (writing to it ends the
process), nor that another tensor maps the same bytes of a file at another address. The
table of this process's mappings tells.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quorum_attention.execution.device.host_memory import (
    MappedRange,
    address_range,
    mapped_ranges,
)
from quorum_attention.execution.device.lookup import on_host

# NumPy gives up after so many steps, about a millisecond; the answer is then yes, to be
# safe. The layouts of ordinary views take a few steps.
_MAX_STEPS = 100_000
# Added to all addresses: only their differences matter, and NumPy takes 0 for no
# address.
_OFF_ZERO = 64


class _Addresses:
    """An array interface to the addresses of a tensor's elements."""

    def __init__(self, tensor: torch.Tensor, start: int) -> None:
        item_bytes = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (start + _OFF_ZERO, True),
            "typestr": f"|V{item_bytes}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * item_bytes for stride in tensor.stride()),
        }


def addresses(tensor: torch.Tensor, start: int | None = None) -> np.ndarray:
    """Return an array, which must not be read, over the addresses of a tensor.

    Args:
        start: the address of its first element; None: where it is.
    """
    if start is None:
        start = tensor.data_ptr()
    return np.asarray(_Addresses(tensor, start))


def may_share_memory(first: np.ndarray, second: np.ndarray) -> bool:
    """Tell whether any byte belongs to both; True also where that takes too long to
    tell."""
    # Where it runs out of steps this says True; ``shares_memory`` would raise.
    return bool(np.may_share_memory(first, second, max_work=_MAX_STEPS))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Tell whether two elements may share memory: unless each dimension steps over all
    shorter."""
    span = 1
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1 and stride < span:
            return tensor.numel() > 0
        span += (n - 1) * stride
    return False


@dataclass(frozen=True, slots=True)
class Mappings:
    """All mappings of this process, by ascending address."""

    ranges: tuple[MappedRange, ...]

    @classmethod
    def now(cls) -> Mappings:
        """Read them from the system's table; there are none where there is no such
        table."""
        return cls(tuple(mapped_ranges()))

    def ranges_of(self, tensor: torch.Tensor) -> list[MappedRange]:
        """Return the mappings that a tensor in host memory spans."""
        if not on_host(tensor.device) or tensor.numel() == 0:
            return []
        start, stop = address_range(tensor)
        return [
            mapped
            for mapped in self.ranges
            if mapped.start < stop and start < mapped.stop
        ]

    def is_read_only(self, tensor: torch.Tensor) -> bool:
        """Tell whether writing to ``tensor`` would end the process."""
        return any(not mapped.writable for mapped in self.ranges_of(tensor))

    def position_in_file(self, tensor: torch.Tensor) -> tuple[MappedRange, int] | None:
        """Return the file mapping in which ``tensor`` begins, and its first byte's
        position in the file; None where it begins in no file."""
        ranges = self.ranges_of(tensor)
        if not ranges or ranges[0].file is None:
            return None
        mapped = ranges[0]
        return mapped, tensor.data_ptr() - mapped.start + mapped.offset

    def share_memory(self, result: torch.Tensor, tensor: torch.Tensor) -> bool:
        """Tell whether a result and another tensor share memory, or bytes of a file
        that the result's mapping writes to."""
        if result.device != tensor.device:
            return False
        if may_share_memory(addresses(result), addresses(tensor)):
            return True
        of_result = self.position_in_file(result)
        of_tensor = self.position_in_file(tensor)
        if of_result is None or of_tensor is None:
            return False
        result_map, result_position = of_result
        tensor_map, tensor_position = of_tensor
        if not result_map.shared or result_map.file != tensor_map.file:
            return False
        return may_share_memory(
            addresses(result, result_position), addresses(tensor, tensor_position)
        )
