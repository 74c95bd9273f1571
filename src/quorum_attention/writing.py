"""Writing files so that each is complete or absent.

A new file is written beside the one it replaces, under a name that ends in ``UNFINISHED``, and
renamed at the end. If anything fails before that, the old file stays. A process that is killed
leaves its unfinished file; who writes to the same path an hour later removes it.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import BinaryIO, Literal

from quorum_attention.sizes import format_bytes

UNFINISHED = ".unfinished"
_IN_USE = "in-use"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_STALE_SECONDS = 3600
_LONGEST_NAME = 200  # bytes of the old name that are kept: file systems allow 255 in all
_MOST_LINKS = 40  # as Linux follows


def check_target(path: str | PathLike[str]) -> Path:
    """The file that writing to ``path`` replaces: ``path`` with symbolic links followed.

    Raises:
        OSError: it is not a regular file, may not be written, or its directory does not exist or
            may not be written; ``path`` leads over another user's link in a folder that all may
            write to, or is another user's file in a sticky one. Nothing has been changed.
    """
    if not os.fspath(path):
        raise FileNotFoundError("there is no file to write: its name is empty")
    target = follow_links(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no directory {target.parent}")
    mode = None
    with suppress(FileNotFoundError):
        seen = os.lstat(target)
        mode = seen.st_mode
        if stat.S_ISREG(mode) and _is_planted(seen, target.parent):
            raise PermissionError(
                f"{path} cannot be written: it belongs to user {seen.st_uid}, in a folder where "
                f"only its owner may replace it"
            )
    if mode is None:
        # A pipe that is reached by /dev/stdout has no name, and is there.
        with suppress(FileNotFoundError):
            mode = os.stat(path).st_mode
    if mode is not None and not stat.S_ISREG(mode):
        raise OSError(f"{path} cannot be written: it is not a regular file")
    if mode is not None and not os.access(target, os.W_OK):
        raise PermissionError(f"{path} cannot be written: it is read-only")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{path} cannot be written: {target.parent} may not be written, and the new file is "
            f"made beside the old one"
        )
    return target


def follow_links(path: str | PathLike[str]) -> Path:
    """``path`` with symbolic links followed, as ``os.path.realpath`` does, if they may be.

    In a folder that all users may write to, another user could aim a link at this user's files: a
    link is followed only if it belongs to this user or to the folder's owner. Linux itself has this
    rule for sticky folders (``fs.protected_symlinks``), but not for a link in a path's middle.

    Raises:
        OSError: there is such a link; or links lead in a circle.
    """
    at = Path(os.sep) if os.path.isabs(path) else Path.cwd()
    ahead, links = os.fspath(path).split(os.sep)[::-1], 0
    while ahead:
        name = ahead.pop()
        here = at.parent if name == os.pardir else at / name
        seen = None
        with suppress(OSError):
            seen = os.lstat(here)
        if seen is None or not stat.S_ISLNK(seen.st_mode):
            at = here
            continue
        if _is_planted(seen, at):
            raise PermissionError(
                f"{path} cannot be written: {here} is a link of user {seen.st_uid}, in a folder "
                f"that all users may write to"
            )
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
        aim = os.readlink(here)
        at = Path(os.sep) if os.path.isabs(aim) else at
        ahead += aim.split(os.sep)[::-1]
    return at


def _is_planted(seen: os.stat_result, folder: Path) -> bool:
    """Whether a link or file may be another user's trap: in a folder that all may write to (for a
    file: and is sticky, because otherwise anybody may replace it), it belongs neither to this user
    nor to the folder's owner."""
    around = os.stat(folder)
    traps = stat.S_IWOTH if stat.S_ISLNK(seen.st_mode) else stat.S_IWOTH | stat.S_ISVTX
    open_to_all = around.st_mode & traps == traps
    return open_to_all and seen.st_uid not in (os.geteuid(), around.st_uid)


def open_regular(
    path: str | PathLike[str], mode: Literal["rb", "r+b"] = "rb", *, follow: bool = True
) -> BinaryIO:
    """Open a regular file. Anything else is refused, and a pipe is not waited for.

    Args:
        follow: whether ``path`` itself may be a symbolic link.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """

    def opener(name: str, flags: int) -> int:
        handle = os.open(name, flags | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
        os.close(handle)
        raise OSError(f"{path} is not a regular file")

    try:
        return open(path, mode, opener=opener)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise PermissionError(f"{path} is a symbolic link, which is not followed") from error
        raise


def _check_own(file: BinaryIO) -> None:
    """Refuse an open file that another user may have put in its place.

    Raises:
        PermissionError: it belongs to another user, or has a second name (a hard link).
    """
    seen = os.fstat(file.fileno())
    wrong = ""
    if seen.st_uid != os.geteuid():
        wrong = f"belongs to user {seen.st_uid}, not to {os.geteuid()}"
    elif seen.st_nlink > 1:
        wrong = f"has {seen.st_nlink} names (hard links)"
    if wrong:
        raise PermissionError(f"{file.name} {wrong}: it is not taken over")


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
    _remove_stale(target)
    name = f"{_stem_of(target)}.{secrets.token_hex(4)}{UNFINISHED}"
    file = open(target.with_name(name), "x+b")  # noqa: SIM115
    try:
        with file:
            take_permissions(file, target)
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
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
            locked(mark)
            yield folder


def _remove_stale_folders(prefix: str, within: Path) -> None:
    """Remove the folders of killed processes: those that have a mark, and no lock on it."""
    for folder in within.glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError), open_regular(folder / _IN_USE, "r+b", follow=False) as mark:
            _check_own(mark)
            if locked(mark) is True:
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
    # Space can only be counted here.
    if n_bytes > _free_bytes(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    file.truncate(n_bytes)


def _free_bytes(file: BinaryIO) -> int:
    disk = os.fstatvfs(file.fileno())
    return disk.f_bavail * disk.f_frsize


def _stem_of(target: Path) -> str:
    """What names of files beside ``target`` begin with: its name, shortened where it is long."""
    return os.fsdecode(os.fsencode(target.name)[:_LONGEST_NAME])


def _remove_stale(target: Path) -> None:
    """Remove the unfinished files of killed processes beside ``target``: those that are old."""
    pattern = re.compile(re.escape(_stem_of(target)) + r"\.[0-9a-f]{8}" + re.escape(UNFINISHED))
    with suppress(OSError):
        for name in os.listdir(target.parent):
            stale = target.parent / name
            old = time.time() - _STALE_SECONDS
            if pattern.fullmatch(name) and os.lstat(stale).st_mtime < old:
                os.unlink(stale)


def locked(file: BinaryIO) -> bool | None:
    """Lock ``file`` without waiting: whether it could be. None where the system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def take_permissions(file: BinaryIO, target: Path) -> None:
    """Give an open file the owner and the permissions of the regular file at ``target``, which it
    replaces. Where there is none, or one that another user may have put there, nothing changes."""
    with suppress(OSError):
        old = os.lstat(target)
        if not stat.S_ISREG(old.st_mode) or _is_planted(old, target.parent):
            return
        with suppress(OSError):  # only root may give files away
            os.fchown(file.fileno(), old.st_uid, old.st_gid)
        os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))


def sync_directory(directory: Path) -> None:
    """Write the names in ``directory`` to the disk, where the system can: a new one then outlasts a
    power failure."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
