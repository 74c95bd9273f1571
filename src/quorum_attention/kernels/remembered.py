"""Remembering answers about a kernel, and not the kernel: users make and drop their own."""

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
    """Decorates a function with a parameter ``kernel``, given by position.

    Its last ``most`` answers for each kernel are kept as long as the kernel is; they must not hold
    it. Of a kernel that cannot be referred to weakly nothing is remembered.
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
