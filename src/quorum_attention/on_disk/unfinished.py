"""An output that is being written: its files beside their places, locked, and its journal.

``NAME.run.unfinished`` has the results so far, without the first bytes that make it loadable, and
``NAME.run.journal`` says which parts of them are done. Of several files the first one's names are
the output's: its file is locked while a process writes the output, and the journal is its own.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch

from quorum_attention.on_disk import journal as journals
from quorum_attention.on_disk.journal import Header, Journal
from quorum_attention.on_disk.targets import Output, Target
from quorum_attention.writing import (
    IDENTITY,
    RUN_UNFINISHED,
    check_own,
    locked,
    open_regular,
    remove_stale,
    reserve,
    stem_of,
    sync_directory,
    take_permissions,
)

_JOURNAL = ".run.journal"

Mode = Literal["new", "resume", "restart"]
"""What to do with an unfinished output: refuse to touch it, go on with it, or remove it."""


class UnfinishedError(ValueError):
    """There is an unfinished output, and it was not said what becomes of it."""


@dataclass(slots=True)
class Unfinished:
    """An output that is being written, as ``writing`` yields it.

    Attributes:
        output: its files.
        tensors: the results by name, mapped.
        journal: which parts are done.
        resumed: whether some were done by an earlier process.
        files, maps: one for each target; None: it has its final name already.
        named: whether files have been given their names: they are no longer this process's then.
    """

    output: Output
    tensors: dict[str, torch.Tensor]
    journal: Journal
    resumed: bool
    files: list[BinaryIO | None]
    maps: list[mmap.mmap | None]
    named: bool = False

    def done(self, part: int) -> None:
        """Keep a part whose results have been written to ``tensors``.

        Raises:
            OSError: its results, or the journal, could not be written.
        """
        self._flush()
        self.journal.add(part)

    def _flush(self) -> None:
        for file, mapping, target in zip(self.files, self.maps, self.output.targets, strict=True):
            if mapping is not None and file is not None:
                with _named(target):
                    mapping.flush()
                    os.fsync(file.fileno())

    def finish(self) -> None:
        """Give all files their names."""
        if not self.journal.complete:
            self._flush()
            for file, target in zip(self.files, self.output.targets, strict=True):
                if file is not None:
                    with _named(target):
                        file.seek(0)
                        file.write(target.layout.header)
                        file.flush()
                        os.fsync(file.fileno())
            numbers = [os.fstat(file.fileno()).st_ino for file in self.files if file is not None]
            self.journal.finish(numbers)
        # The first last: its lock is the output's.
        pairs = list(zip(self.files, self.output.targets, strict=True))
        for file, target in reversed(pairs):
            self.named = True
            if file is not None:
                take_permissions(file, target.path)
                os.replace(file.name, target.path)
        for folder in {target.path.parent for target in self.output.targets}:
            sync_directory(folder)
        self.journal.remove()


@contextmanager
def _named(target: Target) -> Iterator[None]:
    """Errors in the block with the target's name, which a full disk does not say."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target.path)) from error


@contextmanager
def writing(output: Output, header: Header, mode: Mode) -> Iterator[Unfinished]:
    """The results of ``output``, mapped, which replace its files at the end.

    Until the ``with`` block ends without an exception, the files are as they were. If it ends with
    one, what was done is kept for ``resume``; if nothing was, nothing is left.

    Raises:
        OSError: a file cannot be written, or the disk has no room; another process writes there;
            what there is to resume is a link, has a second name, or belongs to another user.
        UnfinishedError: there is an unfinished output, and ``mode`` is "new".
        ValueError: what there is to resume is damaged, or of another call; nothing has changed.
    """
    if output.folder is not None:
        output.folder.mkdir()  # an error if another process has made it meanwhile
    kept = False
    try:
        with ExitStack() as stack:
            found = _opened(output, header, mode, stack)
            try:
                yield found
                found.finish()
            except BaseException:
                # By the file: an interrupt may have come right after it was made.
                kept = found.journal.path.exists()
                if not kept and not found.named:
                    _remove(output.targets)
                raise
            finally:
                found.tensors.clear()
    finally:
        if output.folder is not None and not kept:
            with suppress(OSError):  # it is not empty: there are results in it
                output.folder.rmdir()


def beside(target: Target) -> tuple[Path, Path]:
    """The unfinished file and the journal of a target."""
    name = stem_of(target.path)
    if name != target.path.name:
        name += "~" + hashlib.sha256(os.fsencode(target.path.name)).hexdigest()[:16]
    return target.path.with_name(name + RUN_UNFINISHED), target.path.with_name(name + _JOURNAL)


def _opened(output: Output, header: Header, mode: Mode, stack: ExitStack) -> Unfinished:
    """The files of an output, new or as an earlier process left them."""
    first, path = beside(output.targets[0])
    lock, is_new = _locked(first, output.name)
    stack.callback(lock.close)
    remove_stale(output.targets[0].path)
    journal = None
    try:
        if not is_new:
            _check_own(first, path, output.targets[0])
        if mode == "restart":
            _discard(path, output)
        else:
            journal = _left(path, is_new, output, mode, header)
    except BaseException:
        # Nothing of what there was is touched.
        if is_new:
            first.unlink(missing_ok=True)
        raise
    if journal is None:
        lock = lock if is_new else _anew(first, output.name, stack)
        return _created(output, header, path, lock, stack)
    if journal.complete and is_new:
        stack.callback(first.unlink, missing_ok=True)  # it was made as a lock alone
        nothing: list[Any] = [None] * len(output.targets)
        return Unfinished(output, {}, journal, True, nothing, list(nothing))
    return _continued(output, header, journal, lock, is_new, stack)


def _left(path: Path, is_new: bool, output: Output, mode: Mode, header: Header) -> Journal | None:
    """The journal of what an earlier process left; None where there is nothing to go on with."""
    try:
        journal = journals.read(path)
    except ValueError as error:
        raise ValueError(f"{error}; --restart removes it and begins anew") from error
    if journal is None:
        return None
    if journal.complete and is_new:
        # Its last file had its name: only the journal was left to remove.
        if mode == "resume" and not journal.header.differences(header) and _there(output, journal):
            return journal
        journal.remove()
        return None
    if mode == "resume":
        return journal
    many = journal.header.settings.get("parts", "?")
    raise UnfinishedError(
        f"{output.name} was begun {journal.header.begun} and is not finished: {len(journal.done)} "
        f"of {many} head groups are done ({path.parent / beside(output.targets[0])[0].name}); "
        f"--resume goes on with it, --restart removes it and begins anew"
    )


def _there(output: Output, journal: Journal) -> bool:
    """Whether the files of an output are those that its journal says are complete."""
    if len(journal.files) != len(output.targets):
        return False
    for target, number in zip(output.targets, journal.files, strict=True):
        try:
            with open_regular(target.path, follow=False) as file:
                seen = os.fstat(file.fileno())
                start = file.read(len(target.layout.header))
        except OSError:
            return False
        sizes = (seen.st_ino, seen.st_size) == (number, target.layout.n_bytes)
        if not sizes or start != target.layout.header:
            return False
    return True


def _locked(path: Path, name: str) -> tuple[BinaryIO, bool]:
    """The file at ``path``, locked, and whether it is new."""
    file: BinaryIO
    while True:
        try:
            file, is_new = open(path, "x+b"), True  # noqa: SIM115 - closed by the caller
        except FileExistsError:
            try:
                file, is_new = open_regular(path, "r+b", follow=False), False
            except FileNotFoundError:
                continue
        if locked(file) is False:
            file.close()
            raise OSError(f"{name} is being written by another process ({path} is locked)")
        # Before it was locked, the other process may have given it its name.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.lstat(path)):
                return file, is_new
        file.close()


def _anew(path: Path, name: str, stack: ExitStack) -> BinaryIO:
    """A new file, locked, in the place of one that was left and that this process has locked.

    A worker of the process that left it may still write there (a farm's, on another machine).
    """
    path.unlink()
    file, is_new = _locked(path, name)
    stack.callback(file.close)
    if not is_new:
        raise OSError(f"{name} is being written by another process ({path} was made meanwhile)")
    return file


def _created(
    output: Output, header: Header, path: Path, lock: BinaryIO, stack: ExitStack
) -> Unfinished:
    identity = secrets.token_bytes(IDENTITY.stop - IDENTITY.start)
    header = replace(header, settings={**header.settings, "identity": identity.hex()})
    files: list[BinaryIO] = [lock]
    maps: list[mmap.mmap] = []
    tensors: dict[str, torch.Tensor] = {}
    try:
        for target in output.targets[1:]:
            other, journal = beside(target)
            if journal.exists():
                raise UnfinishedError(
                    f"{target.path} is another output's, which is not finished ({journal}): finish "
                    f"or remove that first"
                )
            file, is_new = _locked(other, str(target.path))
            stack.callback(file.close)
            if not is_new:
                _check_own(other, path, target)
                file = _anew(other, str(target.path), stack)
            files.append(file)
        for file, target in zip(files, output.targets, strict=True):
            file.truncate(0)
            # Its owner comes last: only an own file may be resumed.
            take_permissions(file, target.path, owner=False)
            reserve(file, target.layout.n_bytes, target.path)
            mapping = mmap.mmap(file.fileno(), target.layout.n_bytes)
            mapping[IDENTITY] = identity
            # Workers on other machines read it before they write.
            mapping.flush(0, min(mmap.PAGESIZE, len(mapping)))
            maps.append(mapping)
            tensors |= target.layout.tensors(mapping)
    except BaseException:
        _remove(output.targets[: len(files)])
        raise
    return Unfinished(output, tensors, Journal(path, header), False, list(files), list(maps))


def _continued(
    output: Output,
    header: Header,
    journal: Journal,
    lock: BinaryIO,
    is_new: bool,
    stack: ExitStack,
) -> Unfinished:
    """What an earlier process left, if it is of this call.

    Raises:
        ValueError: it is not; it is as it was.
    """
    first = beside(output.targets[0])[0]
    if is_new:
        first.unlink(missing_ok=True)
        raise ValueError(f"{first} is gone: {output.name} cannot be resumed; begin with --restart")
    differences = journal.header.differences(header)
    if differences:
        raise ValueError(
            f"{output.name} cannot be resumed, because it was begun otherwise: "
            f"{'; '.join(differences)}. Give what was given then, or --restart"
        )
    identity = journal.header.settings.get("identity")
    files: list[BinaryIO | None] = []
    maps: list[mmap.mmap | None] = []
    tensors: dict[str, torch.Tensor] = {}
    for number, target in enumerate(output.targets):
        path = beside(target)[0]
        if number and journal.complete and not path.exists():
            files.append(None)
            maps.append(None)
            continue
        file, is_new = (_locked(path, str(target.path))) if number else (lock, False)
        stack.callback(file.close)
        if is_new:
            path.unlink()
            raise ValueError(
                f"{path} is gone: {output.name} cannot be resumed; begin with --restart"
            )
        _check(file, path, target, identity)
        mapping = mmap.mmap(file.fileno(), target.layout.n_bytes)
        files.append(file)
        maps.append(mapping)
        tensors |= target.layout.tensors(mapping)
    return Unfinished(output, tensors, journal, True, files, maps)


def _check(file: BinaryIO, path: Path, target: Target, identity: object) -> None:
    check_own(file)
    size, wanted = os.fstat(file.fileno()).st_size, target.layout.n_bytes
    if size != wanted:
        raise ValueError(
            f"{path} has {size} bytes and must have {wanted}: it cannot be resumed; begin with "
            f"--restart"
        )
    file.seek(0)
    start = file.read(len(target.layout.header))
    if start != target.layout.header and start[IDENTITY].hex() != identity:
        raise ValueError(
            f"{path} is not the file that its journal is of: it cannot be resumed; begin with "
            f"--restart"
        )


def _identity(path: Path) -> str:
    """The identity of the output that an unfinished file is of; empty where it has none."""
    with suppress(OSError), open_regular(path, follow=False) as file:
        found = file.read(IDENTITY.stop)[IDENTITY]
        return found.hex() if any(found) else ""
    return ""


def _check_own(path: Path, own: Path, target: Target) -> None:
    """Refuse to take over an unfinished file that another output's journal is of.

    Raises:
        UnfinishedError: it is.
    """
    identity = _identity(path)
    for journal in path.parent.glob(f"*{_JOURNAL}") if identity else ():
        if journal != own and _of(journal) == identity:
            raise UnfinishedError(
                f"{target.path} is another output's, which is not finished ({journal}): finish or "
                f"remove that first"
            )


def _of(journal: Path) -> object:
    """The identity of the output that a journal is of; None where it has none."""
    with suppress(OSError, ValueError):
        found = journals.read(journal)
        return None if found is None else found.header.settings.get("identity")
    return None


def _discard(path: Path, output: Output) -> None:
    """Remove the journal of what is begun anew, and those of its files that are not written now."""
    identity = _of(path)
    path.unlink(missing_ok=True)
    now = [beside(target)[0] for target in output.targets]
    for file in path.parent.glob(f"*{RUN_UNFINISHED}") if identity else ():
        if file not in now and _identity(file) == identity:
            file.unlink(missing_ok=True)


def _remove(targets: Sequence[Target]) -> None:
    """Remove unfinished files that this process has locked."""
    for target in targets:
        with suppress(OSError):
            beside(target)[0].unlink()


def settings_of(output: Output) -> Mapping[str, Any] | None:
    """What was chosen when an unfinished output was begun; None where there is none."""
    try:
        found = journals.read(beside(output.targets[0])[1])
    except ValueError:
        return None  # ``writing`` says what is wrong with it
    return None if found is None else found.header.settings


__all__ = ["Mode", "Unfinished", "UnfinishedError", "beside", "settings_of", "writing"]
