"""Masks inside a graph of ``torch.compile``: a mask function is tried on symbols of positions.

Outside of a graph a mask function is known by its code and by what it was made with; the compiler
shows neither of a function that is made while it traces. So the function is called with symbols
of a query's and a key's position, which note what is asked of them: ``key <= query`` and
``key > query - window`` say everything about a causal mask and a window. A function that asks for
anything else is left to be read outside of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quorum_attention.integrations.transformers.described import DescribedMask
from quorum_attention.mask import Mask


class _UnknownError(Exception):
    """A mask function asks for more than how far a key is from its query."""


class _Symbol:
    """Something that a mask function may not decide by: it is told apart from nothing."""

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise _UnknownError

    def __eq__(self, _: object) -> bool:
        raise _UnknownError

    def __ne__(self, _: object) -> bool:
        raise _UnknownError


class _Kept(_Symbol):
    """Pairs with ``low <= key - query <= high``; None is no limit. It answers like a tensor."""

    device = None

    def __init__(self, low: int | None, high: int | None) -> None:
        self.low, self.high = low, high

    def to(self, *_: Any) -> _Kept:
        return self

    def __and__(self, other: Any) -> _Kept:
        if not isinstance(other, _Kept):
            raise _UnknownError
        lows = [low for low in (self.low, other.low) if low is not None]
        highs = [high for high in (self.high, other.high) if high is not None]
        return _Kept(max(lows) if lows else None, min(highs) if highs else None)


class _Apart(_Symbol):
    """A query's position less a key's, or the other way round; ``absolute``: without its sign."""

    def __init__(self, absolute: bool) -> None:
        self.absolute = absolute

    def __abs__(self) -> _Apart:
        return _Apart(True)

    def __le__(self, most: Any) -> _Kept:
        if not self.absolute or not isinstance(most, int):
            raise _UnknownError
        return _Kept(-most, most)


class _Position(_Symbol):
    """The position of a query, or of a key, and a number added to it."""

    def __init__(self, of_key: bool, shift: int = 0) -> None:
        self.of_key, self.shift = of_key, shift

    def new_ones(self, *_: Any, **__: Any) -> _Kept:
        return _Kept(None, None)

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, int):
            return _Position(self.of_key, self.shift - other)
        plain = isinstance(other, _Position) and other.of_key != self.of_key
        if not plain or self.shift != 0 or other.shift != 0:
            raise _UnknownError
        return _Apart(False)

    def _at_most(self, other: Any, more: int) -> _Kept:
        """Pairs with ``self <= other + more``."""
        if not isinstance(other, _Position) or other.of_key == self.of_key:
            raise _UnknownError
        bound = other.shift - self.shift + more
        return _Kept(None, bound) if self.of_key else _Kept(-bound, None)

    def __le__(self, other: Any) -> _Kept:
        return self._at_most(other, 0)

    def __lt__(self, other: Any) -> _Kept:
        return self._at_most(other, -1)

    def __ge__(self, other: Any) -> _Kept:
        if isinstance(other, int):
            if other > 0 or self.shift != 0:
                raise _UnknownError
            return _Kept(None, None)  # no position is below 0
        if not isinstance(other, _Position):
            raise _UnknownError
        return other._at_most(self, 0)

    def __gt__(self, other: Any) -> _Kept:
        if not isinstance(other, _Position):
            raise _UnknownError
        return other._at_most(self, -1)


def described_in_graph(
    sizes: tuple[int, int, int],
    offset: int | torch.Tensor,
    mask_function: Callable[..., Any],
    padding: torch.Tensor | None,
) -> DescribedMask | None:
    """What a mask keeps, found without leaving the graph; None: it has to be left.

    Args:
        sizes: batch entries, queries and keys.
        offset: the position of the first query relative to the first key.
        mask_function: of Transformers.
        padding: (batch, keys) bool, True where a token is kept.
    """
    if isinstance(offset, torch.Tensor):
        return None
    try:
        kept = mask_function(_Symbol(), _Symbol(), _Position(False), _Position(True))
    except (_UnknownError, TypeError, AttributeError, IndexError):
        return None
    if not isinstance(kept, _Kept):
        return None
    causal = kept.high is not None and kept.high == 0
    left = -1 if kept.low is None else -kept.low
    right = -1 if kept.high is None or causal else kept.high
    if (kept.low is not None and left < 0) or (kept.high is not None and kept.high < 0):
        return None  # a band beside the diagonal
    placed = causal or left >= 0 or right >= 0
    mask = Mask(
        causal=causal,
        offset=offset if placed and offset else None,
        window=(left, right) if left >= 0 or right >= 0 else None,
        key_padding=padding,
    )
    batch, queries, keys = sizes
    seen = min(keys, queries + offset) if causal else keys
    return DescribedMask(mask, (batch, 1, queries, keys), max(seen, 0))


__all__ = ["described_in_graph"]
