"""Remembering answers about a kernel, and not the kernel: users make and drop their own."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

_Params = ParamSpec("_Params")
_Answer = TypeVar("_Answer")


def remembered(most: int) -> Callable[[Callable[_Params, _Answer]], Callable[_Params, _Answer]]:
    """Decorates a function with a parameter ``kernel``, given by position.

    Its last ``most`` answers for each kernel are kept as long as the kernel is. Of a kernel that
    cannot be referred to weakly nothing is remembered.
    """

    def decorate(function: Callable[_Params, _Answer]) -> Callable[_Params, _Answer]:
        at = list(inspect.signature(function).parameters).index("kernel")
        answers: WeakKeyDictionary[Any, OrderedDict[Hashable, _Answer]] = WeakKeyDictionary()

        @wraps(function)
        def ask(*args: _Params.args, **named: _Params.kwargs) -> _Answer:
            kernel: Any = args[at]
            key = (*args[:at], *args[at + 1 :], *sorted(named.items()))
            try:
                known = answers.setdefault(kernel, OrderedDict())
            except TypeError:
                return function(*args, **named)
            if key not in known:
                answer = function(*args, **named)
                known[key] = answer
                while len(known) > most:
                    known.popitem(last=False)
                return answer
            return known[key]

        return ask

    return decorate
