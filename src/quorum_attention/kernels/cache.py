"""Caches that drop what was used longest ago, by themselves and of answers about a kernel."""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache[_Value]:
        """An empty one: what a copy finds out is its own."""
        return Cache(self._limit, self._size)

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


_Params = ParamSpec("_Params")
_Answer = TypeVar("_Answer")


def remembered(
    most: int, size: Callable[[Any], int] = lambda answer: 1
) -> Callable[[Callable[_Params, _Answer]], Callable[_Params, _Answer]]:
    """Decorator for a function with a positional parameter ``kernel``, or ``problem`` that has one:
    caches its answers.

    The last answers for each kernel, of at most ``most`` in ``size``, are held as long as the
    kernel lives; they must not refer to it. Nothing is remembered for a kernel that takes no weak
    reference.
    """

    def decorate(function: Callable[_Params, _Answer]) -> Callable[_Params, _Answer]:
        names = list(inspect.signature(function).parameters)
        at = names.index("kernel" if "kernel" in names else "problem")
        answers: WeakKeyDictionary[Any, Cache[_Answer]] = WeakKeyDictionary()

        @wraps(function)
        def ask(*args: _Params.args, **named: _Params.kwargs) -> _Answer:
            kernel: Any = getattr(args[at], "kernel", args[at])
            rest: tuple[Any, ...] = getattr(args[at], "without_kernel", ())
            try:
                known = answers.get(kernel)
                if known is None:
                    known = answers.setdefault(kernel, Cache(most, size))
            except TypeError:  # no weak reference
                return function(*args, **named)
            key = (*args[:at], *rest, *args[at + 1 :], *sorted(named.items()))
            return known.get(key, lambda: function(*args, **named))

        return ask

    return decorate
