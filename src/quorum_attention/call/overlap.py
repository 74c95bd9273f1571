"""Whether strided tensors share memory, decided exactly.

Interleaved views of one packed tensor (query, key and value of one projection, say) span each
other's memory and share none of it, so spans alone cannot tell. NumPy solves the bounded linear
Diophantine equation behind the question; it is asked about addresses, nothing is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

# Steps after which NumPy gives up, and the answer is yes to be safe: about a millisecond. Layouts
# of views take a handful.
_MOST_STEPS = 100_000
_LARGEST_ITEM = 1 << 30
# Only differences of addresses count, and NumPy takes 0 for no address.
_OFF_ZERO = 64


@dataclass(frozen=True, slots=True)
class Lie:
    """How elements lie in memory.

    Attributes:
        start: address of the first one, in bytes.
        item: bytes of one.
        dims: (size, stride in bytes) of every dimension of more than one, the longest stride first.
        empty: there is none.
    """

    start: int
    item: int
    dims: tuple[tuple[int, int], ...]
    empty: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor, start: int | None = None) -> Lie:
        """That of ``tensor``, as if its first element lay at ``start``."""
        item = tensor.element_size()
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        dims = sorted(((n, s * item) for n, s in sizes if n > 1), key=lambda d: (-d[1], d[0]))
        # A run without gaps is one element, only longer.
        while dims and dims[-1][1] == item and item * dims[-1][0] <= _LARGEST_ITEM:
            item *= dims.pop()[0]
        address = tensor.data_ptr() if start is None else start
        return cls(address, item, tuple(dims), tensor.numel() == 0)

    @property
    def stop(self) -> int:
        """The address after the last element."""
        return self.start + sum((n - 1) * stride for n, stride in self.dims) + self.item

    @property
    def nested(self) -> bool:
        """Whether every dimension steps over all that the shorter ones span."""
        span = self.item
        for n, stride in reversed(self.dims):
            if stride < span:
                return False
            span += (n - 1) * stride
        return True

    def array(self, start: int, sizes: tuple[int, ...]) -> np.ndarray:
        """Some of the elements, as an array that must not be read."""
        strides = tuple(stride for _, stride in self.dims)
        return np.asarray(_Addresses(start + _OFF_ZERO, self.item, sizes, strides))


class _Addresses:
    def __init__(
        self, start: int, item: int, sizes: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (start, True),
            "typestr": f"|V{item}",
            "shape": sizes,
            "strides": strides,
        }


def share_memory(one: Lie, other: Lie) -> bool:
    """Whether any byte belongs to both; yes too where that is too hard to tell."""
    if one.empty or other.empty or one.start >= other.stop or other.start >= one.stop:
        return False
    return _meet(
        one.array(one.start, tuple(n for n, _ in one.dims)),
        other.array(other.start, tuple(n for n, _ in other.dims)),
    )


def overlaps_itself(lie: Lie) -> bool:
    """Whether two elements share memory; yes too where that is too hard to tell."""
    if lie.empty or lie.nested:
        return False
    # Two elements first differ in some dimension: there one has an index of at least 1 more, and 0
    # may be taken for the other's; in the dimensions after it both may have any.
    for at, (n, stride) in enumerate(lie.dims):
        before = (1,) * at
        after = tuple(size for size, _ in lie.dims[at + 1 :])
        one = lie.array(lie.start, (*before, 1, *after))
        further = lie.array(lie.start + stride, (*before, n - 1, *after))
        if _meet(one, further):
            return True
    return False


def _meet(one: np.ndarray, other: np.ndarray) -> bool:
    # Where it runs out of steps this says True; ``shares_memory`` would raise.
    return bool(np.may_share_memory(one, other, max_work=_MOST_STEPS))
