"""What is remembered in memory: the values that were used last."""

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


def _size_one(value: object) -> int:
    return 1


class Cache(Generic[_Value]):
    """Values by key, the most recently used ones.

    Args:
        limit: the largest sum of the sizes of the values held.
        size: the size of one value: its bytes, or 1 (the default) to limit the number
            of values.
    """

    def __init__(self, limit: int, size: Callable[[_Value], int] = _size_one) -> None:
        self._limit = limit
        self._size = size
        self._total = 0
        self._values: OrderedDict[Hashable, _Value] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle it as an empty one: what a copy finds out is its own."""
        return Cache, (self._limit, self._size)

    def get(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """Return the value held under ``key``; if there is none, ``make()``, which is
        then held."""
        with self._lock:
            value = self._values.get(key, _MISSING)
            if value is not _MISSING:
                self._values.move_to_end(key)
                return value  # type: ignore[return-value]
        # Made without the lock: it may take long, and making a value twice does no
        # harm.
        new_value = make()
        self.put(key, new_value)
        return new_value

    def put(self, key: Hashable, value: _Value) -> None:
        """Hold ``value`` under ``key``, in the place of what was."""
        with self._lock:
            if key in self._values:
                self._total -= self._size(self._values.pop(key))
            self._values[key] = value
            self._total += self._size(value)
            while self._total > self._limit:
                _, oldest = self._values.popitem(last=False)
                self._total -= self._size(oldest)


_Params = ParamSpec("_Params")


def remembered(
    limit: int,
) -> Callable[[Callable[_Params, _Value]], Callable[_Params, _Value]]:
    """Make a decorator that caches the answers of a function about a kernel.

    The function has a positional parameter ``kernel``, or ``problem`` that has a
    kernel. The last ``limit`` answers for each kernel are held as long as the kernel
    lives; they must not refer to it.
    """

    def decorate(function: Callable[_Params, _Value]) -> Callable[_Params, _Value]:
        names = list(inspect.signature(function).parameters)
        position = names.index("kernel" if "kernel" in names else "problem")
        answers_by_kernel: WeakKeyDictionary[Any, Cache[_Value]] = WeakKeyDictionary()

        @wraps(function)
        def ask(*args: _Params.args, **named: _Params.kwargs) -> _Value:
            subject: Any = args[position]
            kernel = getattr(subject, "kernel", subject)
            # Keys must not hold the kernel.
            subject_key: tuple[Any, ...] = getattr(subject, "without_kernel", ())
            answers = answers_by_kernel.get(kernel)
            if answers is None:
                answers = answers_by_kernel.setdefault(kernel, Cache(limit))
            key = (
                *subject_key,
                *args[:position],
                *args[position + 1 :],
                *sorted(named.items()),
            )
            return answers.get(key, lambda: function(*args, **named))

        return ask

    return decorate
