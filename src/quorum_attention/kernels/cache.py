"""A cache that drops what was used longest ago; safe to use from several threads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Value = TypeVar("_Value")
_MISSING = object()


class Cache(Generic[_Value]):
    """Values by key, the most recently used ones.

    Args:
        limit: the largest sum of the sizes of the values held.
        size: the size of one value: its bytes, or 1 to limit the number of values.
    """

    def __init__(self, limit: int, size: Callable[[_Value], int]) -> None:
        self._limit, self._size = limit, size
        self._total = 0
        self._values: OrderedDict[Hashable, _Value] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """The value held under ``key``; if there is none, ``make()``, which is then held."""
        with self._lock:
            found = self._values.get(key, _MISSING)
            if found is not _MISSING:
                self._values.move_to_end(key)
                return found  # type: ignore[return-value]
        # Made without the lock: it may take long, and making a value twice does no harm.
        value = make()
        self.put(key, value)
        return value

    def put(self, key: Hashable, value: _Value) -> None:
        """Hold ``value`` under ``key``, in the place of what was."""
        with self._lock:
            if key in self._values:
                self._total -= self._size(self._values.pop(key))
            self._values[key] = value
            self._total += self._size(value)
            while self._total > self._limit:
                _, gone = self._values.popitem(last=False)
                self._total -= self._size(gone)
