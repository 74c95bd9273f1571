"""Writing files so that each is complete or absent.

A new file is written beside the one it replaces, under a name that ends in
``UNFINISHED``, and renamed at the end. If anything fails before that, the old file
stays.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import BinaryIO, Literal

from quorum_attention.units import format_bytes

UNFINISHED = ".unfinished"


def check_target(path: str | PathLike[str]) -> Path:
    """Return the file that writing to ``path`` replaces: ``path`` with symbolic links
    followed.

    Raises:
        OSError: it is not a regular file, may not be written, or its directory does not
            exist or may not be written; or it is another user's link in a folder that
            all may write to, or another user's file in a sticky folder. Nothing has
            been changed.
    """
    problem = f"{path} cannot be written"
    path = Path(path)
    with suppress(FileNotFoundError):
        status = os.lstat(path)
        folder_status = os.stat(path.absolute().parent)
        # Another user's link could aim at this user's files. Linux itself has this rule
        # for sticky folders (``fs.protected_symlinks``), also for links to links.
        is_link_open_to_all = (
            stat.S_ISLNK(status.st_mode) and folder_status.st_mode & stat.S_IWOTH
        )
        if is_link_open_to_all and status.st_uid not in (
            os.geteuid(),
            folder_status.st_uid,
        ):
            raise PermissionError(f"{problem}: it is a link of user {status.st_uid}")
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(f"{problem}: it is not a regular file")
    target = Path(os.path.realpath(path))
    folder = target.parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{problem}: there is no directory {folder}")
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(f"{problem}: it is read-only")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{problem}: {folder}, where it is made, may not be written"
        )
    if target.exists() and not _is_replaceable(target):
        raise PermissionError(
            f"{problem}: it belongs to user {os.stat(target).st_uid}, and {folder} "
            "lets users replace only their own files"
        )
    return target


def _is_replaceable(target: Path) -> bool:
    """Return whether a file may be replaced. In sticky folders, such as ``/tmp``, only
    its owner, the folder's owner and root may replace it."""
    folder_status = os.stat(target.parent)
    if not folder_status.st_mode & stat.S_ISVTX:
        return True
    return os.geteuid() in (0, os.stat(target).st_uid, folder_status.st_uid)


def open_regular(
    path: str | PathLike[str], mode: Literal["rb", "r+b"] = "rb"
) -> BinaryIO:
    """Open a regular file. Anything else is refused, and a pipe is not waited for.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """

    def opener(name: str, flags: int) -> int:
        handle = os.open(name, flags | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
        os.close(handle)
        raise OSError(f"{path} is not a regular file")

    return open(path, mode, opener=opener)


@contextmanager
def atomic_write(
    path: str | PathLike[str], *, durable: bool = True
) -> Iterator[BinaryIO]:
    """A new empty file, open for reading and writing, that replaces ``path`` at the
    end.

    It does so when the ``with`` block ends without an exception, after its content is
    on the disk, and takes over the old file's permissions. Symbolic links stay: the
    file they lead to is replaced. Other hard links to the old file keep the old
    content.

    Args:
        durable: wait until the content is on the disk. Without, a power failure may
            leave any content, so whoever reads it must find that out; for caches,
            because to wait takes up to seconds where much else is being written.

    Raises:
        OSError: see ``check_target``; or the disk is full. The file at ``path`` is as
            it was.
    """
    target = check_target(path)
    # A name may have 255 bytes, and a character four.
    name = f"{target.name[:50]}.{secrets.token_hex(4)}{UNFINISHED}"
    file = open(target.with_name(name), "x+b")  # noqa: SIM115
    try:
        with file:
            copy_permissions(file, target)
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            os.replace(file.name, target)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(file.name)
        with_file_name(error, path)
        raise
    if durable:
        sync_directory(target.parent)


def with_file_name(error: BaseException, path: str | PathLike[str]) -> BaseException:
    """``error``, with the name of the file: a full disk does not say what it had no
    room for."""
    if (
        isinstance(error, OSError)
        and error.errno is not None
        and error.filename is None
    ):
        error.filename = os.fspath(path)
    return error


def write_text(path: str | PathLike[str], text: str, *, durable: bool = True) -> None:
    """Write ``text`` to ``path``, completely or not at all (see ``atomic_write``)."""
    with atomic_write(path, durable=durable) as file:
        file.write(text.encode("utf-8"))


def reserve_space(file: BinaryIO, n_bytes: int, name: str | PathLike[str]) -> None:
    """Make ``file`` ``n_bytes`` long, zeros, with its space on the disk reserved.

    Without the reservation, writing to a mapping of the file kills the process (SIGBUS)
    when the disk is full.

    Args:
        name: of the file, for the message.

    Raises:
        OSError: there is no space; says how many bytes are missing.
    """
    try:
        os.posix_fallocate(file.fileno(), 0, n_bytes)
    except OSError as error:
        with suppress(OSError):
            file.truncate(0)  # what was reserved so far is free again
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            disk = os.fstatvfs(file.fileno())
            free = disk.f_bavail * disk.f_frsize
            raise OSError(
                f"{name} takes {format_bytes(n_bytes)}, and {format_bytes(free)} of "
                f"disk are free: {max(1, n_bytes - free)} bytes are missing"
            ) from error
        raise


def copy_permissions(file: BinaryIO, target: Path) -> None:
    """Give an open file the permissions of this user's regular file at ``target``,
    which it replaces. Those of another user's are not taken over: he may have put it
    there."""
    with suppress(OSError):
        old = os.lstat(target)
        if stat.S_ISREG(old.st_mode) and old.st_uid == os.geteuid():
            os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))


def sync_directory(directory: Path) -> None:
    """Write the names in ``directory`` to the disk, where the system can: a new one
    then outlasts a power failure."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
