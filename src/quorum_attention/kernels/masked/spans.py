"""What a mask function says of whole blocks, by interval arithmetic: it is called with the ranges
of queries and keys of many blocks at once in place of numbers.

Results hold for every pair of a block, whatever the function is made of: an operation that has no
rule here is an error, and then pairs are tried (``trying.py``). Comparisons, sums, products,
quotients and remainders by a number, and reading a tensor at a position have rules.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.decomposition import CLEAR, MASKED, MIXED

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
# Beyond it sums and products might overflow: in the function, on tensors of 32 bits, or here.
_LARGEST = (1 << 31) - 1


class UndecidedError(TypeError):
    """An operation that has no rule for ranges."""


def verdicts(
    function: Callable[..., Any],
    lanes: tuple[tuple[int, int], tuple[int, int]],
    queries: tuple[Ints, Ints],
    keys: tuple[Ints, Ints],
) -> NDArray[np.int8] | None:
    """The verdicts of blocks: MASKED or CLEAR for certain, or MIXED; None: it cannot be asked.

    Args:
        function: ``mask_mod(batch, head, query, key)``.
        lanes: the first and the last batch entry, and head.
        queries, keys: the first and the last position of each block.
    """
    once = [Span(np.array([low]), np.array([high])) for low, high in lanes]
    try:
        found = function(*once, Span(*queries), Span(*keys))
    except Exception:
        # Whatever is wrong with it is found where its pairs are tried.
        return None
    if not isinstance(found, Truth):
        return None
    codes = np.full(len(queries[0]), MIXED, dtype=np.int8)
    codes[np.broadcast_to(found.every, codes.shape)] = CLEAR
    codes[~np.broadcast_to(found.some, codes.shape)] = MASKED
    return codes


class _Ranged:
    """What operations of numbers and tensors with ranges come to."""

    # numpy leaves operations with it to it.
    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise UndecidedError("a range has no truth value")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Reading a tensor at positions; anything else is undecided."""
        if function is torch.Tensor.__getitem__ and not kwargs:
            table, at = args
            return _read(table, at if isinstance(at, tuple) else (at,))
        raise UndecidedError(f"{function} has no rule for ranges")


class Span(_Ranged):
    """Integers that lie between ``low`` and ``high``, (blocks,) int64 each, or (1,)."""

    def __init__(self, low: Ints, high: Ints) -> None:
        self.low, self.high = low, high
        for side in (low, high):
            if side.size and max(-int(side.min()), int(side.max())) > _LARGEST:
                raise UndecidedError("too large a number")

    def _with(self, other: Any) -> Span:
        if isinstance(other, Span):
            return other
        number = _number(other)
        return Span(np.array([number]), np.array([number]))

    def __add__(self, other: Any) -> Span:
        other = self._with(other)
        return Span(self.low + other.low, self.high + other.high)

    __radd__ = __add__

    def __neg__(self) -> Span:
        return Span(-self.high, -self.low)

    def __pos__(self) -> Span:
        return self

    def __sub__(self, other: Any) -> Span:
        other = self._with(other)
        return Span(self.low - other.high, self.high - other.low)

    def __rsub__(self, other: Any) -> Span:
        return self._with(other) - self

    def __mul__(self, other: Any) -> Span:
        other = self._with(other)
        corners = [a * b for a in (self.low, self.high) for b in (other.low, other.high)]
        return Span(np.minimum.reduce(np.broadcast_arrays(*corners)),
                    np.maximum.reduce(np.broadcast_arrays(*corners)))  # fmt: skip

    __rmul__ = __mul__

    def __abs__(self) -> Span:
        low = np.maximum(0, np.maximum(self.low, -self.high))
        return Span(low, np.maximum(-self.low, self.high))

    def abs(self) -> Span:
        """See ``Tensor.abs``."""
        return abs(self)

    def __floordiv__(self, other: Any) -> Span:
        by = _above_0(other)
        return Span(self.low // by, self.high // by)

    def __mod__(self, other: Any) -> Span:
        by = _above_0(other)
        together = self.low // by == self.high // by
        return Span(
            np.where(together, self.low % by, 0), np.where(together, self.high % by, by - 1)
        )

    def __lt__(self, other: Any) -> Truth:
        other = self._with(other)
        return Truth(self.low < other.high, self.high < other.low)

    def __le__(self, other: Any) -> Truth:
        other = self._with(other)
        return Truth(self.low <= other.high, self.high <= other.low)

    def __gt__(self, other: Any) -> Truth:
        return self._with(other) < self

    def __ge__(self, other: Any) -> Truth:
        return self._with(other) <= self

    def __eq__(self, other: Any) -> Truth:  # type: ignore[override]
        other = self._with(other)
        some = (self.low <= other.high) & (other.low <= self.high)
        alone = (self.low == self.high) & (other.low == other.high)
        return Truth(some, some & alone)

    def __ne__(self, other: Any) -> Truth:  # type: ignore[override]
        found: Truth = self == other
        return ~found


class Truth(_Ranged):
    """Whether something holds for some pair of each block, as far as is known, and for every one:
    where ``some`` is False it holds for none for certain. (blocks,) bool each, or (1,)."""

    def __init__(self, some: Bools, every: Bools) -> None:
        self.some, self.every = some, every

    def _with(self, other: Any) -> Truth:
        if isinstance(other, Truth):
            return other
        if isinstance(other, torch.Tensor) and other.dim() == 0:
            other = other.item()
        if type(other) is not bool:
            raise UndecidedError(f"{type(other).__name__} beside a truth value")
        return Truth(np.array([other]), np.array([other]))

    def __and__(self, other: Any) -> Truth:
        other = self._with(other)
        return Truth(self.some & other.some, self.every & other.every)

    __rand__ = __and__

    def __or__(self, other: Any) -> Truth:
        other = self._with(other)
        return Truth(self.some | other.some, self.every | other.every)

    __ror__ = __or__

    def __invert__(self) -> Truth:
        return Truth(~self.every, ~self.some)

    def __xor__(self, other: Any) -> Truth:
        other = self._with(other)
        found: Truth = (self & ~other) | (~self & other)
        return found

    __rxor__ = __xor__

    def __eq__(self, other: Any) -> Truth:  # type: ignore[override]
        found: Truth = self ^ other
        return ~found

    def __ne__(self, other: Any) -> Truth:  # type: ignore[override]
        found: Truth = self ^ other
        return found


def _number(value: Any) -> int:
    """``value`` as a whole number of Python."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise UndecidedError(f"a tensor of {value.dtype} beside a range")
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise UndecidedError(f"{type(value).__name__} beside a range")
    return operator.index(value)


def _above_0(value: Any) -> int:
    by = _number(value)
    if by < 1:
        raise UndecidedError("a divisor that is not above 0")
    return by


def _read(table: torch.Tensor, at: tuple[Any, ...]) -> Span | Truth:
    """What a tensor holds in ranges of positions: of its last dimension, by block; of those before,
    of entries and heads, the same for all blocks."""
    if not (
        isinstance(table, torch.Tensor)
        and len(at) == table.dim()
        and all(isinstance(one, Span) for one in at)
    ):
        raise UndecidedError("a tensor that is not read at ranges alone")
    if table.dtype not in (torch.int64, torch.int32, torch.bool):
        # Numbers of fewer bits begin again at their least one.
        raise UndecidedError(f"a tensor of {table.dtype}")
    if any(one.low.size != 1 for one in at[:-1]):
        raise UndecidedError("positions in a dimension that is not the last")
    of_bools = table.dtype == torch.bool
    held = table.detach().cpu().numpy().astype(np.int64)
    low = high = held
    for one in at[:-1]:
        rows = _inside(int(one.low[0]), int(one.high[0]), low.shape[0])
        low, high = low[rows].min(axis=0), high[rows].max(axis=0)
    last = at[-1]
    if last.low.size and not (int(last.low.min()) >= 0 and int(last.high.max()) < len(low)):
        raise UndecidedError("positions outside of a tensor")
    least, most = _over(low, last, np.minimum), _over(high, last, np.maximum)
    return Truth(most > 0, least > 0) if of_bools else Span(least, most)


def _inside(low: int, high: int, size: int) -> slice:
    if not 0 <= low <= high < size:
        raise UndecidedError("positions outside of a tensor")
    return slice(low, high + 1)


def _over(held: Ints, at: Span, pick: np.ufunc) -> Ints:
    """The smallest or largest of ``held`` in each range: of two runs of a power of two, made by
    doubling, that cover it."""
    lengths = at.high - at.low + 1
    found = np.empty(lengths.shape, dtype=np.int64)
    level, runs = 0, held
    while True:
        size = 1 << level
        here = (lengths >= size) & (lengths < 2 * size)
        found[here] = pick(runs[at.low[here]], runs[at.high[here] + 1 - size])
        if not (lengths >= 2 * size).any():
            return found
        runs = pick(runs[:-size], runs[size:])
        level += 1
