"""Whether strided tensors share memory, decided exactly.

Interleaved views of one packed tensor (say query, key and value of one projection) lie in the same
range of addresses and share no byte, so comparing ranges is not enough. NumPy solves the bounded
linear Diophantine equation behind the question. It is given addresses only; nothing is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

# NumPy gives up after so many steps, about a millisecond; the answer is then yes, to be safe. The
# layouts of ordinary views take a few steps.
_MOST_STEPS = 100_000
_LARGEST_ITEM = 1 << 30
# Added to all addresses: only their differences matter, and NumPy takes 0 for no address.
_OFF_ZERO = 64


@dataclass(frozen=True, slots=True)
class Lie:
    """The addresses of a tensor's elements.

    Attributes:
        start: address of the first element, in bytes.
        item: bytes of an element.
        dims: (size, stride in bytes) of every dimension larger than 1, the longest stride first.
        empty: whether there are no elements.
    """

    start: int
    item: int
    dims: tuple[tuple[int, int], ...]
    empty: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor, start: int | None = None) -> Lie:
        """The lie of ``tensor``, with its first element at ``start`` where that is given."""
        item = tensor.element_size()
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        dims = sorted(((n, s * item) for n, s in sizes if n > 1), key=lambda d: (-d[1], d[0]))
        # Elements without gaps between them count as one longer element.
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
        """Whether every stride is at least what the dimensions of shorter strides span: then no
        two elements overlap."""
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
    """Whether any byte belongs to both; True also where that takes too long to tell."""
    if one.empty or other.empty or one.start >= other.stop or other.start >= one.stop:
        return False
    return _meet(
        one.array(one.start, tuple(n for n, _ in one.dims)),
        other.array(other.start, tuple(n for n, _ in other.dims)),
    )


def overlaps_itself(lie: Lie) -> bool:
    """Whether two elements share memory; True also where that takes too long to tell."""
    if lie.empty or lie.nested:
        return False
    # Take two elements, and the first dimension in which their indices differ. There the lower one
    # can be taken as 0 and the higher is at least 1; in later dimensions both are arbitrary.
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
