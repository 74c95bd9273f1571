"""What is kept between calls, within a limit of bytes or of number; several threads may ask."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Value = TypeVar("_Value")
_MISSING = object()


class Kept(Generic[_Value]):
    """What was used last.

    Args:
        limit: of all together.
        size: of one, in bytes, or 1.
    """

    def __init__(self, limit: int, size: Callable[[_Value], int]) -> None:
        self._limit, self._size = limit, size
        self._bytes = 0
        self._values: OrderedDict[Hashable, _Value] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """What is kept under ``key``, made where there is none."""
        with self._lock:
            found = self._values.get(key, _MISSING)
            if found is not _MISSING:
                self._values.move_to_end(key)
                return found  # type: ignore[return-value]
        # Not under the lock: making may take long, and twice does no harm.
        value = make()
        with self._lock:
            if key in self._values:
                self._bytes -= self._size(self._values.pop(key))
            self._values[key] = value
            self._bytes += self._size(value)
            while self._bytes > self._limit:
                _, gone = self._values.popitem(last=False)
                self._bytes -= self._size(gone)
        return value
