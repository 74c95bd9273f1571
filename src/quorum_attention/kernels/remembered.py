"""Remembering answers about a kernel, and not the kernel: users make and drop their own."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from quorum_attention.kernels.kept import Kept

_Params = ParamSpec("_Params")
_Answer = TypeVar("_Answer")


def remembered(most: int) -> Callable[[Callable[_Params, _Answer]], Callable[_Params, _Answer]]:
    """Decorates a function with a parameter ``kernel``, given by position.

    Its last ``most`` answers for each kernel are kept as long as the kernel is. Of a kernel that
    cannot be referred to weakly nothing is remembered.
    """

    def decorate(function: Callable[_Params, _Answer]) -> Callable[_Params, _Answer]:
        at = list(inspect.signature(function).parameters).index("kernel")
        answers: WeakKeyDictionary[Any, Kept[_Answer]] = WeakKeyDictionary()
        lock = threading.Lock()

        @wraps(function)
        def ask(*args: _Params.args, **named: _Params.kwargs) -> _Answer:
            kernel: Any = args[at]
            key = (*args[:at], *args[at + 1 :], *sorted(named.items()))
            with lock:
                known: Kept[_Answer] = Kept(most, lambda answer: 1)
                with suppress(TypeError):  # no weak reference
                    known = answers.setdefault(kernel, known)
            return known.get(key, lambda: function(*args, **named))

        return ask

    return decorate
