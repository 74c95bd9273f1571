"""Writing files so that each is complete or absent.

A new file is written beside the one it replaces, under a name that ends in ``UNFINISHED``, and
renamed at the end. If anything fails before that, the old file stays. A process that is killed
leaves its unfinished file; the next one that writes to the same path removes it.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import BinaryIO

from quorum_attention.sizes import format_bytes

UNFINISHED = ".unfinished"
# Of outputs that are kept when their process ends. Where the identity of one lies in its files: in
# the first bytes, which are zeros until the end. The very first stay zeros, so that nothing can be
# loaded.
RUN_UNFINISHED = f".run{UNFINISHED}"
IDENTITY = slice(16, 32)
_IN_USE = "in-use"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_LONGEST_NAME = 200  # bytes of the old name that are kept: file systems allow 255 in all
_BLOCK = 1 << 22


def check_target(path: str | PathLike[str]) -> Path:
    """The file that writing to ``path`` replaces: ``path`` with symbolic links followed.

    Raises:
        OSError: it is not a regular file, may not be written, or its directory does not exist or
            may not be written. Nothing has been changed.
    """
    if not os.fspath(path):
        raise FileNotFoundError("there is no file to write: its name is empty")
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no directory {target.parent}")
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        mode = None
    if mode is None:
        # A pipe that is reached by /dev/stdout has no name, and is there.
        with suppress(FileNotFoundError):
            mode = os.stat(path).st_mode
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
    """Whether ``target`` itself is a mount point, as files in containers can be: then it cannot be
    replaced."""
    with suppress(OSError), open("/proc/self/mountinfo", "rb") as mounts:
        # The table has blanks, tabs, newlines and backslashes as octal escapes.
        name = re.sub(rb"[ \t\n\\]", lambda c: b"\\%03o" % ord(c[0]), os.fsencode(target))
        return any(line.split(b" ", 5)[4] == name for line in mounts)
    return False


@contextmanager
def replacing(path: str | PathLike[str], *, durable: bool = True) -> Iterator[BinaryIO]:
    """A new empty file, open for reading and writing, that replaces ``path`` at the end.

    It does so when the ``with`` block ends without an exception, after its content is on the disk,
    and takes over the old file's permissions. Symbolic links stay: the file they lead to is
    replaced. Other hard links to the old file keep the old content.

    Args:
        durable: wait until the content is on the disk. Without, a power failure may leave any
            content, so whoever reads it must find that out; for caches, because to wait takes up to
            seconds where much else is being written.

    Raises:
        OSError: see ``check_target``; or the disk is full. The file at ``path`` is as it was.
    """
    target = check_target(path)
    remove_stale(target)
    file = _unfinished(target)
    try:
        with file:
            with suppress(FileNotFoundError):
                take_permissions(file.fileno(), os.stat(target))
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            # Before the lock is released: another process would remove it as stale.
            os.replace(file.name, target)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(file.name)
        if (
            isinstance(error, OSError)
            and error.errno in (*_NO_SPACE, errno.EFBIG)
            and error.filename is None
        ):
            # A full disk does not say which file it had no room for.
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise
    if durable:
        sync_directory(target.parent)


@contextmanager
def folder_of_now(prefix: str, within: str | PathLike[str] | None = None) -> Iterator[Path]:
    """A new folder for temporary files, removed at the end with all that is in it.

    A process that is killed leaves its folder; the next that asks for one of the same ``prefix``
    removes it.

    Args:
        within: the folder that it is made in; None: the system's for temporary files.
    """
    _remove_stale_folders(prefix, Path(within or tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=prefix, dir=within) as name:
        folder = Path(name)
        # Locked as long as it is in use.
        with open(folder / _IN_USE, "x+b") as mark:
            _lock(mark)
            yield folder


def _remove_stale_folders(prefix: str, within: Path) -> None:
    """Remove the folders of killed processes: those that have a mark, and no lock on it."""
    for folder in within.glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError), open(folder / _IN_USE, "r+b") as mark:
            if _lock(mark):
                shutil.rmtree(folder, ignore_errors=True)


def write_text(path: str | PathLike[str], text: str, *, durable: bool = True) -> None:
    """Write ``text`` to ``path``, completely or not at all (see ``replacing``)."""
    with replacing(path, durable=durable) as file:
        file.write(text.encode("utf-8"))


def reserve(file: BinaryIO, n_bytes: int, name: str | PathLike[str]) -> None:
    """Make ``file`` ``n_bytes`` long, zeros, with its space on the disk reserved.

    Without the reservation, writing to a mapping of the file kills the process (SIGBUS) when the
    disk is full.

    Args:
        name: of the file, for the message.

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
    # Without fallocate, only bytes that have been written are sure to have their space.
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


def stem_of(target: Path) -> str:
    """What names of files beside ``target`` begin with: its name, shortened where it is long."""
    return os.fsdecode(os.fsencode(target.name)[:_LONGEST_NAME])


def _unfinished(target: Path) -> BinaryIO:
    """A new file beside ``target``, locked as long as it is open."""
    while True:
        file = open(  # noqa: SIM115 - closed by replacing()
            target.with_name(f"{stem_of(target)}.{secrets.token_hex(4)}{UNFINISHED}"), "x+b"
        )
        _lock(file)
        # Before it was locked, another process may have removed it as stale.
        if os.path.exists(file.name):
            return file
        file.close()


def remove_stale(target: Path) -> None:
    """Remove the unfinished files of killed processes beside ``target``: those without a lock."""
    pattern = re.compile(re.escape(stem_of(target)) + r"\.[0-9a-f]{8}" + re.escape(UNFINISHED))
    with suppress(OSError):
        for name in os.listdir(target.parent):
            if pattern.fullmatch(name):
                with suppress(OSError), open(target.parent / name, "r+b") as file:
                    if _lock(file):
                        os.unlink(file.name)


def _lock(file: BinaryIO) -> bool:
    """Lock ``file`` without waiting. False where another process holds it, or the system has no
    locks."""
    return locked(file) is True


def locked(file: BinaryIO) -> bool | None:
    """Lock ``file`` without waiting: whether it could be. None where the system has no locks."""
    try:
        import fcntl  # not on every system
    except ImportError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def take_permissions(handle: int, old: os.stat_result) -> None:
    """Give an open file the owner and the permissions of the one that it replaces."""
    with suppress(OSError):  # only root may give files away
        os.fchown(handle, old.st_uid, old.st_gid)
    with suppress(OSError):
        os.fchmod(handle, stat.S_IMODE(old.st_mode))


def sync_directory(directory: Path) -> None:
    """Write the names in ``directory`` to the disk, where the system can: a new one then outlasts a
    power failure."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
