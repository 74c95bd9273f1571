"""Remembering answers about a kernel, and not the kernel: users make and drop their own."""

from __future__ import annotations

import inspect
import threading
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

        lock = threading.Lock()

        @wraps(function)
        def ask(*args: _Params.args, **named: _Params.kwargs) -> _Answer:
            kernel: Any = args[at]
            key = (*args[:at], *args[at + 1 :], *sorted(named.items()))
            with lock:
                try:
                    known = answers.setdefault(kernel, OrderedDict())
                except TypeError:
                    known = OrderedDict()
                if key in known:
                    known.move_to_end(key)
                    return known[key]
            answer = function(*args, **named)
            with lock:
                known[key] = answer
                if len(known) > most:
                    known.popitem(last=False)
            return answer

        return ask

    return decorate
