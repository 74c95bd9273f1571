"""What is remembered: in memory, what was used last; on disk, what only saves time.

The files on disk, small JSON, say what earlier processes have measured, tried and found. They
choose kernels and plans, so nobody else may write them: they lie in a folder of this user's alone.
Where that cannot be trusted nothing is read or kept, and calls go on without.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cache, wraps
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from quorum_attention.writing import write_text

_Value = TypeVar("_Value")
_MISSING = object()


def _one(value: object) -> int:
    return 1


class Cache(Generic[_Value]):
    """Values by key, the most recently used ones.

    Args:
        limit: the largest sum of the sizes of the values held.
        size: the size of one value: its bytes, or 1 (the default) to limit the number of values.
    """

    def __init__(self, limit: int, size: Callable[[_Value], int] = _one) -> None:
        self._limit, self._size = limit, size
        self._total = 0
        self._values: OrderedDict[Hashable, _Value] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle it as an empty one: what a copy finds out is its own."""
        return Cache, (self._limit, self._size)

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


def remembered(most: int) -> Callable[[Callable[_Params, _Value]], Callable[_Params, _Value]]:
    """Decorator for a function with a positional parameter ``kernel``, or ``problem`` that has one:
    caches its answers.

    The last ``most`` answers for each kernel are held as long as the kernel lives; they must not
    refer to it.
    """

    def decorate(function: Callable[_Params, _Value]) -> Callable[_Params, _Value]:
        names = list(inspect.signature(function).parameters)
        at = names.index("kernel" if "kernel" in names else "problem")
        answers: WeakKeyDictionary[Any, Cache[_Value]] = WeakKeyDictionary()

        @wraps(function)
        def ask(*args: _Params.args, **named: _Params.kwargs) -> _Value:
            kernel: Any = getattr(args[at], "kernel", args[at])
            rest: tuple[Any, ...] = getattr(args[at], "without_kernel", ())
            known = answers.get(kernel)
            if known is None:
                known = answers.setdefault(kernel, Cache(most))
            key = (*args[:at], *rest, *args[at + 1 :], *sorted(named.items()))
            return known.get(key, lambda: function(*args, **named))

        return ask

    return decorate


# --- On disk --------------------------------------------------------------------------------------

_LOG = logging.getLogger("quorum_attention")


def cache_folder() -> Path:
    """Where the files are; ``QUORUM_ATTENTION_CACHE`` names another folder. It need not exist.

    Raises:
        OSError: the user's home is not known, as of one without a name in a container.
    """
    import platformdirs  # takes longer to import than everything else here

    named = os.environ.get("QUORUM_ATTENTION_CACHE")
    with suppress(RuntimeError):  # the home is not known; older versions say "~"
        folder = os.path.expanduser(named or platformdirs.user_cache_dir("quorum-attention"))
        if not folder.startswith("~"):
            return Path(folder)
    raise OSError("this user's home is not known; QUORUM_ATTENTION_CACHE may name a folder")


def private_folder(path: Path, *, make: bool = True) -> Path:
    """``path`` with links followed: a folder that belongs to this user, and only he may write to.

    Args:
        make: make it, with the permissions 0700, if it is not there.

    Raises:
        PermissionError: it is somebody else's, or others may write to it.
        OSError: it is not there, or cannot be made.
    """
    if make:
        path.mkdir(0o700, parents=True, exist_ok=True)
    real = Path(os.path.realpath(path))
    about = real.stat()
    # On systems without such numbers a user's folders are his own.
    if hasattr(os, "geteuid"):
        if about.st_uid != os.geteuid():
            raise PermissionError(
                f"{real} belongs to user {about.st_uid}, and this is user {os.geteuid()}"
            )
        if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(
                f"others may write to {real} (mode {stat.S_IMODE(about.st_mode):04o}): look at "
                "what is in it, then chmod 700"
            )
    return real


def load(name: str) -> Any:
    """What the file of that name says; None where there is none, or it is broken or not to be
    trusted (the log says so, once)."""
    try:
        return _read(private_folder(cache_folder(), make=False) / name)
    except PermissionError as refused:
        _warn(str(refused))
    except OSError:
        pass
    return None


@cache
def _warn(refused: str) -> None:
    """Say it once."""
    _LOG.warning("nothing is read from or kept in the cache: %s", refused)


def store(name: str, change: Callable[[Any], object], *, durable: bool = False) -> None:
    """Replace what a file says.

    Two processes that do so at once leave a whole file, which may lack what one of them added.

    Args:
        change: makes what it will say of what it says (None: nothing).
        durable: see ``writing.atomic_write``.

    Raises:
        OSError: it cannot be written, or is not to be trusted (``PermissionError``).
    """
    path = private_folder(cache_folder()) / name
    write_text(path, json.dumps(change(_read(path)), indent=1), durable=durable)


def refusal() -> str | None:
    """Why the cache is not used; None where nothing is wrong with it."""
    try:
        private_folder(cache_folder(), make=False)
    except FileNotFoundError:
        return None  # nothing was kept yet
    except OSError as error:
        return str(error)
    return None


def _read(path: Path) -> Any:
    """What a file of a private folder says; None where there is none, or it is broken."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
