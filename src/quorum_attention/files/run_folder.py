"""``OUT.run/``: the folder that a run works in, and that it is resumed from.

It belongs to the user who runs the command, and nobody else may look into it. It has a ``lock``,
which a process holds while it works, the results so far, and ``progress.json``: what is computed
from what, and which parts are done. That is replaced after the parts' results are on the disk, and
is there from the first part on. At the end results are renamed, and the folder is removed.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch

from quorum_attention.files.output import Output
from quorum_attention.writing import locked, reserve, sync_directory, take_permissions, write_text

FORMAT = 1
LOCK, PROGRESS = "lock", "progress.json"
# Results, and folders of partial states beside them. Each beginning has a number of its own, so
# that a worker of an earlier one (on another machine, maybe) finds nothing to write to.
_OURS = re.compile(r"[0-9a-f]{8}-|progress\.json\.")

Mode = Literal["new", "resume", "restart"]
"""What to do with an unfinished run: refuse to touch it, go on with it, or remove it."""


class UnfinishedError(ValueError):
    """There is an unfinished run, and it was not said what becomes of it."""


@dataclass(slots=True)
class RunFolder:
    """The folder of a run, locked.

    Attributes:
        output: what is written.
        progress: what ``progress.json`` says; without parts done there is no such file.
        resumed: whether an earlier process did some.
        tensors: the results by name, mapped.
    """

    output: Output
    progress: dict[str, Any]
    resumed: bool
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _files: dict[Path, BinaryIO] = field(default_factory=dict)
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The folder."""
        return self.output.run

    @property
    def done(self) -> list[int]:
        """Numbers of the parts that are done."""
        found: list[int] = self.progress["done"]
        return found

    def open(self, stack: ExitStack) -> None:
        """Map the results: those that are there, or new ones.

        Raises:
            OSError: the disk has no room for them.
            ValueError: one that was there is gone, or of another size.
        """
        new = not self.progress["files"]
        if new:
            token, names = secrets.token_hex(4), enumerate(self.output.files)
            self.progress["files"] = [f"{token}-{number}{path.suffix}" for number, path in names]
        for name, target in zip(self.progress["files"], self.output.files, strict=True):
            self._open(target, self.path / name, stack, new=new)

    def _open(self, target: Path, path: Path, stack: ExitStack, *, new: bool) -> None:
        layout = self.output.files[target]
        if self.progress["complete"] and not path.exists():
            return  # it has its final name
        if not new and (not path.exists() or path.stat().st_size != layout.n_bytes):
            raise ValueError(
                f"{path} is gone or has another size: {self.output.name} cannot be resumed; begin "
                f"with --restart"
            )
        file = stack.enter_context(open(path, "x+b" if new else "r+b"))  # noqa: SIM115
        if new:
            reserve(file, layout.n_bytes, target)
        mapping = self._maps[target] = mmap.mmap(file.fileno(), layout.n_bytes)
        self._files[target] = file
        self.tensors |= layout.tensors(mapping)

    def keep(self, part: int) -> None:
        """Keep a part whose results have been written to ``tensors``.

        Raises:
            OSError: its results, or ``progress.json``, could not be written.
        """
        self._flush()
        self._write(done=[*self.done, part])

    def finish(self) -> None:
        """Give all files their names."""
        if not self.progress["complete"]:
            for target, mapping in self._maps.items():
                header = self.output.files[target].header
                mapping[: len(header)] = header
            self._flush()
            files = [os.fstat(file.fileno()).st_ino for file in self._files.values()]
            self._write(complete=files)
        names = dict(zip(self.output.files, self.progress["files"], strict=True))
        for target, file in self._files.items():
            take_permissions(file, target)
            os.replace(self.path / names[target], target)
        sync_directory(self.path.parent)
        (self.path / PROGRESS).unlink(missing_ok=True)

    def kept(self) -> list[int]:
        """Parts that ``progress.json`` says to be done, by itself: a signal may have come right
        after it was written."""
        with suppress(OSError, ValueError):
            left = _left(self.output)
            return left.done if left is not None else []
        return []

    def is_named(self) -> bool:
        """Whether all is complete, and the files of the output are this run's."""
        if not self.progress["complete"]:
            return False
        for target, number in zip(self.output.files, self.progress["complete"], strict=True):
            with suppress(OSError):
                seen, size = os.lstat(target), self.output.files[target].n_bytes
                if (seen.st_ino, seen.st_size) == (number, size):
                    continue
            return False
        return True

    def _flush(self) -> None:
        for target, mapping in self._maps.items():
            try:
                mapping.flush()
                os.fsync(self._files[target].fileno())
            except OSError as error:  # a full disk does not say which file it had no room for
                raise OSError(error.errno, error.strerror, str(target)) from error

    def _write(self, **changes: Any) -> None:
        made = self.progress | changes
        write_text(self.path / PROGRESS, json.dumps(made, indent=1))
        self.progress = made


@contextmanager
def run_folder(output: Output, call: Mapping[str, Any], mode: Mode) -> Iterator[RunFolder]:
    """The folder of a run, which is this process's until the ``with`` block ends. It then stays if
    parts are done that are no output yet.

    Args:
        call: what the output is computed from and how, by the names that messages give it.

    Raises:
        OSError: another process works there; the folder is another user's, or no run's; it cannot
            be made.
        UnfinishedError: there is an unfinished run, and ``mode`` is "new".
        ValueError: what there is to resume is damaged, or of another call; nothing has changed.
    """
    path = output.run
    if output.new_folder is not None:
        output.new_folder.mkdir()  # an error if another process has made it meanwhile
    try:
        with _locked(path, output.name):
            try:
                yield _begun(output, json.loads(json.dumps(call)), mode)
            finally:
                if not (path / PROGRESS).exists():
                    _empty(path)
                    (path / LOCK).unlink(missing_ok=True)
                    with suppress(OSError):  # another process waits there already
                        path.rmdir()
    finally:
        if output.new_folder is not None:
            with suppress(OSError):  # it is not empty: there are results in it
                output.new_folder.rmdir()


def _begun(output: Output, call: dict[str, Any], mode: Mode) -> RunFolder:
    """What an earlier process left, if it is to be gone on with; else an empty folder."""
    path = output.run / PROGRESS
    left = None if mode == "restart" else _left(output)
    if left is not None and left.progress["complete"]:
        there = [name for name in left.progress["files"] if (output.run / name).exists()]
        if not there and (mode == "new" or not left.is_named()):
            left = None  # only the folder was left to remove
    if left is None:
        path.unlink(missing_ok=True)
        _empty(output.run)
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        begun = {"format": FORMAT, "begun": now, "call": call, "settings": {}, "files": []}
        return RunFolder(output, {**begun, "done": [], "complete": None}, False)
    if mode == "new":
        many = left.progress["settings"].get("parts", "?")
        raise UnfinishedError(
            f"{output.name} was begun {left.progress['begun']} and is not finished: "
            f"{len(left.done)} of {many} head groups are done ({output.run}); --resume goes on "
            f"with it, --restart removes it and begins anew"
        )
    before = left.progress["call"]
    differences = [
        f"{name} was {_shown(before.get(name))} and is {_shown(call.get(name))}"
        for name in {**before, **call}
        if before.get(name) != call.get(name)
    ]
    if differences:
        raise ValueError(
            f"{output.name} cannot be resumed, because it was begun otherwise: "
            f"{'; '.join(differences)}. Give what was given then, or --restart"
        )
    return left


def _left(output: Output) -> RunFolder | None:
    """What an earlier process left; None where it left nothing."""
    path = output.run / PROGRESS
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}; --restart begins anew") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is not of this version's format; --restart begins anew")
    return RunFolder(output, found, True)


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """The folder of a run, made if it is not there, locked."""
    while True:
        with suppress(FileExistsError):
            path.mkdir(0o700)
            sync_directory(path.parent)
        try:
            _check_own(path)
            lock = open(path / LOCK, "a+b")  # noqa: SIM115 - closed below
        except FileNotFoundError:
            continue  # another process has just finished, and removed it
        with lock:
            if locked(lock) is False:
                raise OSError(f"{name} is being written by another process ({path} is locked)")
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock.fileno()), os.stat(path / LOCK)):
                    yield
                    return


def _check_own(path: Path) -> None:
    """Refuse a folder that another user may have put there, and one that is no run's.

    Raises:
        OSError: it is.
    """
    seen, wrong = os.lstat(path), ""
    if not stat.S_ISDIR(seen.st_mode):
        wrong = "is no folder"
    elif seen.st_uid != os.geteuid():
        wrong = f"belongs to user {seen.st_uid}, not to {os.geteuid()}"
    elif seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        wrong = "may be written by other users"
    elif not (path / LOCK).exists() and any(path.iterdir()):
        wrong = "is not the folder of a run"
    if wrong:
        raise PermissionError(f"{path} {wrong}: it is not taken over; move it away")


def _empty(path: Path) -> None:
    """Remove what runs have left in their folder."""
    for one in path.iterdir():
        if _OURS.match(one.name):
            if one.is_dir() and not one.is_symlink():
                shutil.rmtree(one)
            else:
                one.unlink()


def _shown(value: Any) -> str:
    text = "not given" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


__all__ = ["Mode", "RunFolder", "UnfinishedError", "run_folder"]
