"""Files that are whole or not there.

What replaces a file is written beside it, under a name that says that it is unfinished, and moved
over it at the end. Whatever goes wrong before that, what was there stays. A process that is killed
outright leaves the unfinished file; the next one that writes to the same place removes it.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import BinaryIO

from quorum_attention.sizes import format_bytes

UNFINISHED = ".unfinished"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_LONGEST_NAME = 200  # bytes, of the 255 that file systems have for a name and its ending
_BLOCK = 1 << 22


def check_target(path: str | PathLike[str]) -> Path:
    """The file that writing to ``path`` replaces: where its symbolic links lead.

    Raises:
        OSError: it is not a regular file, may not be written, or its directory is not there or
            may not be written. Nothing has been touched.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no directory {target.parent}")
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not stat.S_ISREG(mode):
        raise OSError(f"{path} cannot be written: it is not a regular file")
    if mode is not None and not os.access(target, os.W_OK):
        raise PermissionError(f"{path} cannot be written: it is read-only")
    if mode is not None and _is_mounted(target):
        raise OSError(f"{path} cannot be replaced: it is mounted; name a file in its directory")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{path} cannot be written: {target.parent} may not be written, and the new file is "
            f"made beside the old one"
        )
    return target


def _is_mounted(target: Path) -> bool:
    """Whether ``target`` is a mount of its own, as files of containers can be: nothing can take its
    place."""
    with suppress(OSError), open("/proc/self/mountinfo", "rb") as mounts:
        # In octal, where they are blanks and the like.
        name = re.sub(rb"[ \t\n\\]", lambda c: b"\\%03o" % ord(c[0]), os.fsencode(target))
        return any(line.split(b" ", 5)[4] == name for line in mounts)
    return False


@contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[BinaryIO]:
    """A new empty file, open for reading and writing, that takes the place of ``path`` at the end.

    It does so when the ``with`` block ends without an exception, with everything on the disk
    first, and keeps the permissions of the file it replaces. Symbolic links stay: the file they
    lead to is replaced. Other hard links to the old file keep the old content.

    Raises:
        OSError: see ``check_target``; or the disk is full. The file at ``path`` is as it was.
    """
    target = check_target(path)
    _remove_stale(target)
    file = _unfinished(target)
    try:
        with file:
            with suppress(FileNotFoundError):
                _take_permissions(file.fileno(), os.stat(target))
            yield file
            file.flush()
            os.fsync(file.fileno())
            # Still locked: nobody takes it for a stale one before it has its name.
            os.replace(file.name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(file.name)
        raise
    _sync_directory(target.parent)


def write_text(path: str | PathLike[str], text: str) -> None:
    """Write ``text`` to ``path``, whole or not at all (see ``replacing``)."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def reserve(file: BinaryIO, n_bytes: int, name: str | PathLike[str]) -> None:
    """Make ``file`` that long, zeros, with its space on the disk: a mapping of it can be filled.

    (Writing to a mapping for which the disk has no space kills the process: SIGBUS.)

    Args:
        name: the file's, for the message.

    Raises:
        OSError: there is no space; says how many bytes are missing.
    """
    try:
        _allocate(file, n_bytes)
    except OSError as error:
        with suppress(OSError):
            file.truncate(0)  # what was reserved so far is free again
        if error.errno in _NO_SPACE:
            free = _free_bytes(file)
            missing = max(1, n_bytes - free)
            raise OSError(
                f"{name} takes {format_bytes(n_bytes)}, and {format_bytes(free)} of disk are "
                f"free: {missing} bytes ({format_bytes(missing)}) are missing"
            ) from error
        if error.errno == errno.EFBIG:
            raise OSError(
                f"{name} takes {format_bytes(n_bytes)}, more than a file may have here (see "
                f"ulimit -f, and the file system's limit)"
            ) from error
        raise


def _allocate(file: BinaryIO, n_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, n_bytes)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
        else:
            return
    # Only what has been written is sure to have its space.
    if n_bytes > _free_bytes(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    zeros = bytes(_BLOCK)
    file.seek(0)
    for start in range(0, n_bytes, _BLOCK):
        file.write(zeros[: n_bytes - start])
    file.flush()
    os.fsync(file.fileno())


def _free_bytes(file: BinaryIO) -> int:
    disk = os.fstatvfs(file.fileno())
    return disk.f_bavail * disk.f_frsize


def _stem(target: Path) -> str:
    return os.fsdecode(os.fsencode(target.name)[:_LONGEST_NAME])


def _unfinished(target: Path) -> BinaryIO:
    """A new file beside ``target``, locked as long as it is open."""
    while True:
        file = open(  # noqa: SIM115 - closed by replacing()
            target.with_name(f"{_stem(target)}.{secrets.token_hex(4)}{UNFINISHED}"), "x+b"
        )
        _lock(file)
        # Another process may have taken it for a stale one before it was locked.
        if os.path.exists(file.name):
            return file
        file.close()


def _remove_stale(target: Path) -> None:
    """Remove what killed processes left beside ``target``: whatever nobody holds locked."""
    pattern = re.compile(re.escape(_stem(target)) + r"\.[0-9a-f]{8}" + re.escape(UNFINISHED))
    with suppress(OSError):
        for name in os.listdir(target.parent):
            if pattern.fullmatch(name):
                with suppress(OSError), open(target.parent / name, "r+b") as file:
                    if _lock(file):
                        os.unlink(file.name)


def _lock(file: BinaryIO) -> bool:
    """Whether ``file`` is locked now; not where another has it, or nothing can be locked."""
    try:
        import fcntl  # not on every system

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def _take_permissions(handle: int, old: os.stat_result) -> None:
    with suppress(OSError):  # only root may give files away
        os.fchown(handle, old.st_uid, old.st_gid)
    with suppress(OSError):
        os.fchmod(handle, stat.S_IMODE(old.st_mode))


def _sync_directory(directory: Path) -> None:
    """Make a new name in ``directory`` outlast a power failure, where that can be asked for."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
