"""``OUT.run/``, the folder that a run works in.

The folder belongs to the user who runs the command, and nobody else may look into it.
It has a ``lock``, which a process holds while it works, the results so far, and
``progress.json``: what is computed from what, and which parts are done. That file is
replaced after the parts' results are on the disk, and is there from the first part on.
At the end results are renamed, and the folder is removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from quorum_attention import writing
from quorum_attention.files import formats
from quorum_attention.files.formats import NPY_SUFFIX, TensorSpecs
from quorum_attention.files.output import Output
from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.plain_types import JsonObject
from quorum_attention.units import counted

LOCK = "lock"
PROGRESS = "progress.json"
# Results, and folders of partial states beside them. Each beginning has a number of its
# own, so that a worker of an earlier one (on another machine, maybe) finds nothing to
# write to.
_OURS = re.compile(r"[0-9a-f]{8}-|progress\.json\.")
_MAX_SHOWN = 80

Mode = Literal["new", "resume", "restart"]
"""What to do with an unfinished run: refuse to touch it, go on with it, or remove
it."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The content of ``progress.json``.

    Attributes:
        begun: when the run began.
        call: what has to be the same when it is resumed.
        settings: the fields of its ``RunSettings``.
        files: the names of the files of results.
        done: the numbers of the parts that are done.
    """

    begun: str
    call: JsonObject
    settings: JsonObject
    files: list[str]
    done: list[int]


@dataclass(slots=True)
class RunFolder:
    """The folder of a run, locked.

    Attributes:
        output: the output of the run.
        progress: what ``progress.json`` has; without parts done there is no such file.
        resumed: whether an earlier process did some parts.
    """

    output: Output
    progress: RunProgress
    resumed: bool

    def open(self) -> NamedTensors:
        """Return the results by name, mapped: those that are there, or new ones.

        Raises:
            OSError: the disk has no room for them.
            ValueError: one that was there is damaged.
        """
        if not self.progress.files:
            return self._create()
        results: NamedTensors = {}
        for path, specs in zip(self._paths(), self.output.files.values(), strict=True):
            try:
                results |= _open(path, specs)
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"{self.output.name} cannot be resumed: {error}; --restart starts "
                    "again"
                ) from error
        return results

    def _create(self) -> NamedTensors:
        """Create the files of results."""
        results: NamedTensors = {}
        token = secrets.token_hex(4)
        for target, specs in self.output.files.items():
            number = len(self.progress.files)
            path = self.output.run / f"{token}-{number}{target.suffix}"
            self.progress.files.append(path.name)
            if target.suffix != NPY_SUFFIX:
                results |= formats.create_tensors(path, specs, self.output.metadata)
                continue
            for name, (shape, dtype) in specs.items():
                results[name] = formats.create_npy(path, shape, dtype)
        return results

    def keep(self, part: int) -> None:
        """Keep a part whose results have been written to their mappings.

        Raises:
            OSError: its results, or ``progress.json``, could not be written.
        """
        for path in self._paths():
            with open(path, "rb") as file:
                try:
                    os.fsync(file.fileno())
                except OSError as error:
                    raise writing.with_file_name(error, path) from None
        progress = replace(self.progress, done=[*self.progress.done, part])
        text = json.dumps(asdict(progress), indent=1)
        writing.write_text(self.output.run / PROGRESS, text)
        self.progress = progress

    def finish(self) -> None:
        """Give all files their names."""
        targets = self.output.files
        for path, target in zip(self._paths(), targets, strict=True):
            with open(path, "rb") as file:
                writing.copy_permissions(file, target)
            os.replace(path, target)
        run = self.output.run
        writing.sync_directory(run.parent)
        (run / PROGRESS).unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        return [self.output.run / name for name in self.progress.files]


def _open(path: Path, specs: TensorSpecs) -> NamedTensors:
    """Return the results in a file by name, mapped for writing.

    Raises:
        OSError, ValueError: it cannot be opened, or is damaged.
    """
    if path.suffix == NPY_SUFFIX:
        return dict.fromkeys(specs, formats.open_npy(path, writable=True))
    return formats.open_tensors(path, writable=True)


@contextmanager
def run_folder(
    output: Output, call: Mapping[str, Any], mode: Mode
) -> Iterator[RunFolder]:
    """Yield the folder of a run, which is this process's until the ``with`` block ends.

    It then stays if parts are done that are no output yet.

    Args:
        call: what the output is computed from and how, by the names that messages give
            it.

    Raises:
        OSError: another process works there; the folder is another user's, or no run's;
            it cannot be made.
        ValueError: there is an unfinished run, and ``mode`` is "new"; or what there is
            to resume is damaged, or of another call. Nothing has changed.
    """
    path = output.run
    with suppress(FileExistsError):
        path.parent.mkdir()  # of a folder of results
    with _locked(path, output.name):
        try:
            yield open_run(output, json.loads(json.dumps(call)), mode)
        finally:
            if not (path / PROGRESS).exists():
                _empty(path)
                (path / LOCK).unlink(missing_ok=True)
                with suppress(OSError):  # another process waits there already
                    path.rmdir()


def open_run(output: Output, call: JsonObject, mode: Mode) -> RunFolder:
    """Return the folder as an earlier process left it, if its run is resumed; else an
    empty one.

    Raises:
        ValueError: as ``run_folder``.
    """
    progress = None if mode == "restart" else load_progress(output)
    if progress is None:
        (output.run / PROGRESS).unlink(missing_ok=True)
        _empty(output.run)
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        return RunFolder(output, RunProgress(now, call, {}, [], []), resumed=False)
    if mode == "new":
        raise ValueError(
            f"{output.name} was started {progress.begun} and is not finished: "
            f"{len(progress.done)} of {counted(progress.settings['parts'], 'part')} "
            f"are done ({output.run}); --resume continues it, --restart discards it "
            "and starts again"
        )
    differences = [
        f"{name} was {_shown(progress.call.get(name))} and is {_shown(call.get(name))}"
        for name in {**progress.call, **call}
        if progress.call.get(name) != call.get(name)
    ]
    if differences:
        raise ValueError(
            f"{output.name} cannot be resumed, because it was started otherwise: "
            f"{'; '.join(differences)}. Give what was given then, or --restart"
        )
    return RunFolder(output, progress, resumed=True)


def load_progress(output: Output) -> RunProgress | None:
    """Return the progress of an earlier process, or None if it left nothing.

    Raises:
        ValueError: it is damaged.
    """
    path = output.run / PROGRESS
    try:
        fields = json.loads(path.read_bytes())
        for name in fields[
            "files"
        ]:  # killed between two of their new names: all are made again
            os.stat(output.run / name)
        return RunProgress(**fields)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged: {error}; --restart starts again"
        ) from error


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Lock the folder of a run, which is made if it is not there.

    Raises:
        OSError: as ``run_folder``.
    """
    busy = OSError(f"{name} is being written by another process ({path} is locked)")
    try:
        with suppress(FileExistsError):
            path.mkdir(0o700)
            writing.sync_directory(path.parent)
        _check_own(path)
        file = open(path / LOCK, "a+b")  # noqa: SIM115
    except FileNotFoundError:
        # Another process has just finished, and removed its folders.
        raise busy from None
    with file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        except OSError:
            pass  # a file system without locks
        if not os.fstat(lock.fileno()).st_nlink:
            raise busy  # the same
        yield


def _check_own(path: Path) -> None:
    """Refuse a folder that another user may have put there, and one that is no run's.

    Raises:
        OSError: it is.
    """
    status = os.lstat(path)
    problem = ""
    if not stat.S_ISDIR(status.st_mode):
        problem = "is no folder"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}, not to {os.geteuid()}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = "may be written by other users"
    elif not (path / LOCK).exists() and any(path.iterdir()):
        problem = "is not the folder of a run"
    if problem:
        raise PermissionError(f"{path} {problem}: it is not taken over; move it away")


def _empty(path: Path) -> None:
    """Remove what runs have left in their folder."""
    for entry in path.iterdir():
        if not _OURS.match(entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _shown(value: Any) -> str:
    text = "not given" if value is None else str(value)
    if len(text) <= _MAX_SHOWN:
        return text
    return f"{text[: _MAX_SHOWN - 3]}..."
