"""Small JSON files that only save time: what earlier processes have measured, tried and found.

They choose kernels and plans, so nobody else may write them: they lie in a folder of this user's
alone. Where that cannot be trusted nothing is read or kept, and calls go on without.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from quorum_attention.writing import write_text

_LOG = logging.getLogger("quorum_attention")
# Absent on systems that have no such thing. A pipe is opened without waiting for who writes to it.
_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_warned: set[str] = set()


class UntrustedCacheError(OSError):
    """A cache's folder or file may have been written by somebody else."""


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
        UntrustedCacheError: it, or the link in its place, is somebody else's, or others may write
            to it.
        OSError: it is not there, is no folder, or cannot be made.
    """
    if make and not os.path.lexists(path):
        path.mkdir(0o700, parents=True, exist_ok=True)
    real = Path(os.path.realpath(path))
    _check_owner(path, os.lstat(path))
    folder = os.stat(real)
    _check_owner(real, folder)
    mode = stat.S_IMODE(folder.st_mode)
    if not stat.S_ISDIR(folder.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(path))
    if hasattr(os, "geteuid") and mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedCacheError(
            f"others may write to {real} (mode {mode:04o}): look at what is in it, then chmod 700"
        )
    return real


def _check_owner(path: Path, about: os.stat_result) -> None:
    # On systems without such numbers a user's folders are his own.
    if hasattr(os, "geteuid") and about.st_uid != os.geteuid():
        raise UntrustedCacheError(
            f"{path} belongs to user {about.st_uid}, and this is user {os.geteuid()}"
        )


def load(name: str) -> Any:
    """What the file of that name says; None where there is none, or it is broken or not to be
    trusted (the log says so, once)."""
    try:
        return _read(private_folder(cache_folder(), make=False) / name)
    except UntrustedCacheError as refused:
        if str(refused) not in _warned:
            _warned.add(str(refused))
            _LOG.warning("nothing is read from or kept in the cache: %s", refused)
    except OSError:
        pass
    return None


def store(name: str, change: Callable[[Any], object], *, durable: bool = False) -> None:
    """Replace what a file says.

    Two processes that do so at once leave a whole file, which may lack what one of them added.

    Args:
        change: makes what it will say of what it says (None: nothing).
        durable: see ``writing.replacing``.

    Raises:
        OSError: it cannot be written, or is not to be trusted (``UntrustedCacheError``).
    """
    path = private_folder(cache_folder()) / name
    write_text(path, json.dumps(change(_read(path)), indent=1), durable=durable)


def refusal() -> str | None:
    """Why the cache is not used, or a file of it; None where nothing is wrong with it."""
    try:
        folder = private_folder(cache_folder(), make=False)
        for path in sorted(folder.glob("*.json")):
            _read(path)
    except FileNotFoundError:
        return None  # nothing was kept yet
    except OSError as error:
        return str(error)
    return None


def _read(path: Path) -> Any:
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, _FLAGS)) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise UntrustedCacheError(f"{path} is not a regular file")
            _check_owner(path, about)
            return json.loads(file.read())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise UntrustedCacheError(f"{path} is not a regular file") from error
        raise


__all__ = ["UntrustedCacheError", "cache_folder", "load", "private_folder", "refusal", "store"]
