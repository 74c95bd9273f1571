"""What is remembered on disk, which only saves time: small files of JSON.

They say what earlier processes have measured, tried and found. They choose kernels and
plans, so nobody else may write them: they lie in a folder of this user's alone. Where
that cannot be trusted nothing is read or kept, and calls go on without.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from quorum_attention.writing import write_text

_LOG = logging.getLogger("quorum_attention")


def cache_folder() -> Path:
    """Return where the files are; ``QUORUM_ATTENTION_CACHE`` names another folder. It
    need not exist.

    Raises:
        OSError: the user's home is not known, as of one without a name in a container.
    """
    import platformdirs  # takes longer to import than everything else here

    named = os.environ.get("QUORUM_ATTENTION_CACHE")
    with suppress(RuntimeError):  # the home is not known; older versions say "~"
        folder = os.path.expanduser(
            named or platformdirs.user_cache_dir("quorum-attention")
        )
        if not folder.startswith("~"):
            return Path(folder)
    raise OSError(
        "this user's home is not known; QUORUM_ATTENTION_CACHE may name a folder"
    )


def private_folder(path: Path, *, make: bool = True) -> Path:
    """Return ``path`` with links followed: a folder that belongs to this user, and only
    he may write to.

    Args:
        make: make it, with the permissions 0700, if it is not there.

    Raises:
        PermissionError: it is somebody else's, or others may write to it.
        OSError: it is not there, or cannot be made.
    """
    if make:
        path.mkdir(0o700, parents=True, exist_ok=True)
    folder = Path(os.path.realpath(path))
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(
            f"{folder} belongs to user {status.st_uid}, and this is user {os.geteuid()}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"others may write to {folder} (mode {stat.S_IMODE(status.st_mode):04o}): "
            "look at what is in it, then chmod 700"
        )
    return folder


def load(name: str) -> Any:
    """Return the content of the file of that name; None where there is none, or it is
    broken or not to be trusted (the log says so, once)."""
    try:
        return _read_json(private_folder(cache_folder(), make=False) / name)
    except PermissionError as refused:
        _warn_once(str(refused))
    except OSError:
        pass
    return None


@cache
def _warn_once(refused: str) -> None:
    _LOG.warning("nothing is read from or kept in the cache: %s", refused)


def store(name: str, change: Callable[[Any], object], *, durable: bool = False) -> None:
    """Replace the content of a file.

    Two processes that do so at once leave a whole file, which may lack what one of them
    added.

    Args:
        change: makes the new content of the old one (None: there is none).
        durable: see ``writing.atomic_write``.

    Raises:
        OSError: it cannot be written, or is not to be trusted (``PermissionError``).
    """
    path = private_folder(cache_folder()) / name
    write_text(
        path,
        json.dumps(change(_read_json(path)), indent=1),
        durable=durable,
    )


def refusal() -> str | None:
    """Return why the cache is not used; None where nothing is wrong with it."""
    try:
        private_folder(cache_folder(), make=False)
    except FileNotFoundError:
        return None  # nothing was kept yet
    except OSError as error:
        return str(error)
    return None


def _read_json(path: Path) -> Any:
    """Return the content of a file of a private folder; None where there is none, or it
    is broken."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
