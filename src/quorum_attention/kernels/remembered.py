"""Remembers answers about a kernel without keeping the kernel alive."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from quorum_attention.kernels.cache import Cache

_Params = ParamSpec("_Params")
_Answer = TypeVar("_Answer")


def remembered(most: int) -> Callable[[Callable[_Params, _Answer]], Callable[_Params, _Answer]]:
    """Decorator for a function with a positional parameter ``kernel``: caches its answers.

    The last ``most`` answers for each kernel are held as long as the kernel lives; they must not
    refer to it. Nothing is remembered for a kernel that takes no weak reference.
    """

    def decorate(function: Callable[_Params, _Answer]) -> Callable[_Params, _Answer]:
        at = list(inspect.signature(function).parameters).index("kernel")
        answers: WeakKeyDictionary[Any, Cache[_Answer]] = WeakKeyDictionary()

        @wraps(function)
        def ask(*args: _Params.args, **named: _Params.kwargs) -> _Answer:
            kernel: Any = args[at]
            try:
                known = answers.get(kernel)
                if known is None:
                    known = answers.setdefault(kernel, Cache(most, lambda answer: 1))
            except TypeError:  # no weak reference
                return function(*args, **named)
            key = (*args[:at], *args[at + 1 :])
            if named:
                key += tuple(sorted(named.items()))
            return known.get(key, lambda: function(*args, **named))

        return ask

    return decorate
