"""A run from files to files: its output, and ``OUT.run/``, the folder that it works in.

The folder belongs to the user who runs the command, and nobody else may look into it. It has a
``lock``, which a process holds while it works, the results so far, and ``progress.json``: what is
computed from what, and which parts are done. That is replaced after the parts' results are on the
disk, and is there from the first part on. At the end results are renamed, and the folder is
removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import torch

import quorum_attention
from quorum_attention import writing
from quorum_attention.execution.device.lookup import backend_of, on_host
from quorum_attention.execution.report import Report
from quorum_attention.files import formats
from quorum_attention.files.compute import Compute, FileCall, Settings, Work, compute_here
from quorum_attention.files.formats import SUFFIX, Wanted
from quorum_attention.files.inputs import Seen
from quorum_attention.units import counted

LOCK, PROGRESS = "lock", "progress.json"
# Results, and folders of partial states beside them. Each beginning has a number of its own, so
# that a worker of an earlier one (on another machine, maybe) finds nothing to write to.
_OURS = re.compile(r"[0-9a-f]{8}-|progress\.json\.")

Ran = tuple[Settings, int | None]
"""What was chosen for a run, and how many parts an earlier process had done, if there was one."""
Mode = Literal["new", "resume", "restart"]
"""What to do with an unfinished run: refuse to touch it, go on with it, or remove it."""


@dataclass(frozen=True, slots=True)
class Output:
    """The files of a call's results.

    Attributes:
        name: as the user gave it.
        files: paths, with symbolic links followed, and what each has.
        metadata: of a safetensors file.
    """

    name: str
    files: Mapping[Path, Wanted]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        """The folder that a run works in, beside the first file."""
        first = next(iter(self.files))
        return first.with_name(f"{first.name}.run")

    def check_apart(self, inputs: Iterable[Path]) -> None:
        """Refuse an output that is an input, which is read until the end, and inputs in the folder
        that the run works in.

        Raises:
            ValueError: one of them is.
        """
        for given in inputs:
            for path in self.files:
                if are_same(given, path):
                    raise ValueError(
                        f"output {path if len(self.files) > 1 else self.name} is the input "
                        f"{given}, which is read until the end: it must be another file"
                    )
            if self.run in Path(os.path.realpath(given)).parents:
                raise ValueError(
                    f"the input {given} is in {self.run}, where the run works: move it"
                )


def output_of(name: str, wanted: Wanted, metadata: Mapping[str, str]) -> Output:
    """The files of results.

    Args:
        name: of a folder, if it ends in a slash: a .npy file for each result, called as it is; of a
            .npy file, for a single result; of a safetensors file, if it ends in .safetensors or has
            no suffix.
        wanted: shapes and dtypes of the results.
        metadata: for the header of a safetensors file.

    Raises:
        OSError: a file cannot be written there. Nothing has been changed.
        ValueError: several results for one .npy file, or a name with another suffix.
        TypeError: a dtype that the format does not have.
    """
    if name.endswith(("/", os.sep, SUFFIX)):
        for result, (_, dtype) in wanted.items():
            formats.check_npy(result, dtype)
    if name.endswith(("/", os.sep)):
        exists, folder = Path(name).exists(), Path(os.path.realpath(name))
        if exists and not folder.is_dir():
            raise NotADirectoryError(f"{name} cannot be written: {folder} is no folder")
        files = {folder / f"{n}{SUFFIX}": {n: described} for n, described in wanted.items()}
        if exists:
            return Output(name, {writing.check_target(path): one for path, one in files.items()})
        writing.check_target(folder)
        return Output(name, files)
    if name.endswith(SUFFIX) and len(wanted) != 1:
        raise ValueError(
            f"{name} can have one result, and there are {', '.join(wanted)}: name a folder of "
            f"{SUFFIX} files, {name.removesuffix(SUFFIX)}/, or a safetensors file"
        )
    if Path(name).suffix not in ("", ".safetensors", SUFFIX):
        raise ValueError(
            f"the output {name} ends in {Path(name).suffix}: it must be a safetensors file "
            f"(.safetensors, or no suffix), a {SUFFIX} file, or a folder of them (NAME/)"
        )
    return Output(name, {writing.check_target(name): wanted}, metadata)


def are_same(one: Path, other: Path) -> bool:
    """Whether two names are one file, by whatever links; or would be."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def described(
    call: FileCall, wanted: Wanted, arguments: Mapping[str, Any], inputs: Mapping[str, Seen]
) -> dict[str, Any]:
    """What has to be the same when a run is resumed, by the names that messages give it.

    Args:
        arguments: as JSON has them.
        inputs: the input files, by what they are for.
    """
    device = call.device
    found = {
        "quorum-attention's version": quorum_attention.__version__,
        "torch's version": torch.__version__,
        "the device": str(device) if on_host(device) else backend_of(device).model(device),
        **{f"the {name}'s shape": list(t.shape) for name, t in call.tensors.items()},
        **{f"the {name}'s dtype": str(t.dtype) for name, t in call.tensors.items()},
        "the results": [[name, list(shape), str(dtype)] for name, (shape, dtype) in wanted.items()],
        **arguments,
    }
    for role, seen in inputs.items():
        found |= seen.described(role)
    return found


@dataclass(slots=True)
class RunFolder:
    """The folder of a run, locked.

    Attributes:
        output: what is written.
        progress: what ``progress.json`` says; without parts done there is no such file.
        resumed: whether an earlier process did some.
    """

    output: Output
    progress: dict[str, Any]
    resumed: bool

    def open(self) -> dict[str, torch.Tensor]:
        """The results by name, mapped: those that are there, or new ones.

        Raises:
            OSError: the disk has no room for them.
            ValueError: one that was there is damaged.
        """
        found: dict[str, torch.Tensor] = {}
        if not self.progress["files"]:
            token = secrets.token_hex(4)
            for number, (target, wanted) in enumerate(self.output.files.items()):
                path = self.output.run / f"{token}-{number}{target.suffix}"
                self.progress["files"].append(path.name)
                if target.suffix != SUFFIX:
                    found |= formats.create_tensors(path, wanted, self.output.metadata)
                else:
                    found |= {n: formats.create_npy(path, *one) for n, one in wanted.items()}
            return found
        for path, wanted in zip(self._paths(), self.output.files.values(), strict=True):
            try:
                if path.suffix == SUFFIX:
                    found |= dict.fromkeys(wanted, formats.open_npy(path, writable=True))
                else:
                    found |= formats.open_tensors(path, writable=True)
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"{self.output.name} cannot be resumed: {error}; --restart starts again"
                ) from error
        return found

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
        progress = {**self.progress, "done": [*self.progress["done"], part]}
        writing.write_text(self.output.run / PROGRESS, json.dumps(progress, indent=1))
        self.progress = progress

    def finish(self) -> None:
        """Give all files their names."""
        for path, target in zip(self._paths(), self.output.files, strict=True):
            with open(path, "rb") as file:
                writing.copy_permissions(file, target)
            os.replace(path, target)
        writing.sync_directory(self.output.run.parent)
        (self.output.run / PROGRESS).unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        return [self.output.run / name for name in self.progress["files"]]


def run_call(
    call: FileCall,
    output: Output,
    header: Mapping[str, Any],
    inputs: Iterable[Seen],
    report: Report,
    *,
    mode: Mode = "new",
    heads: int | None = None,
    compute: Compute = compute_here,
    say: Callable[[str], None] = lambda text: None,
) -> Ran:
    """Compute a call into the files of ``output``, which are replaced when all of them are whole.

    Args:
        header: from ``described``.
        inputs: files that must not change meanwhile.
        report: filled with what the last part did; its total has all.
        mode: what becomes of a run that an earlier process left unfinished.
        heads: key/value heads of a part; None: as many as take some seconds.
        say: is told, in sentences, what users should know.

    Raises:
        BudgetError, NotImplementedError: the call cannot be run; nothing has been written.
        OSError: no room, or another process writes the same output.
        ValueError: see ``run_folder``; or an input changed meanwhile.
    """
    inputs = set(inputs)
    with run_folder(output, header, mode) as folder:
        if not folder.progress["settings"]:
            folder.progress["settings"] = asdict(Settings.of(call, heads))
        settings = Settings(**folder.progress["settings"])
        call = replace(call, options=call.options._replace(budget=settings.budget_bytes))
        done = list(folder.progress["done"])
        left = [number for number in range(settings.parts) if number not in done]
        if folder.resumed:
            say(f"resumed: {len(done)} of {counted(settings.parts, 'part')} were done")
        results = call.with_heads(folder.open())
        work = Work(call, settings, results, output.run, report)
        try:
            for number in compute(work, left) if left else ():
                for seen in inputs:
                    seen.check()
                folder.keep(number)
            folder.finish()
        except BaseException:
            if kept := len(folder.progress["done"]):
                of_all = f"{kept} of {counted(settings.parts, 'part')}"
                say(f"{of_all} are done and kept: --resume continues")
            raise
    return settings, len(done) if folder.resumed else None


@contextmanager
def run_folder(output: Output, call: Mapping[str, Any], mode: Mode) -> Iterator[RunFolder]:
    """The folder of a run, which is this process's until the ``with`` block ends. It then stays if
    parts are done that are no output yet.

    Args:
        call: what the output is computed from and how, by the names that messages give it.

    Raises:
        OSError: another process works there; the folder is another user's, or no run's; it cannot
            be made.
        ValueError: there is an unfinished run, and ``mode`` is "new"; or what there is to resume is
            damaged, or of another call. Nothing has changed.
    """
    path = output.run
    with suppress(FileExistsError):
        path.parent.mkdir()  # of a folder of results
    with _locked(path, output.name):
        try:
            yield _begun(output, json.loads(json.dumps(call)), mode)
        finally:
            if not (path / PROGRESS).exists():
                _empty(path)
                (path / LOCK).unlink(missing_ok=True)
                with suppress(OSError):  # another process waits there already
                    path.rmdir()


def _begun(output: Output, call: dict[str, Any], mode: Mode) -> RunFolder:
    """What an earlier process left, if it is to be gone on with; else an empty folder."""
    left = None if mode == "restart" else _left(output)
    if left is None:
        (output.run / PROGRESS).unlink(missing_ok=True)
        _empty(output.run)
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        begun = {"begun": now, "call": call, "settings": {}, "files": [], "done": []}
        return RunFolder(output, begun, False)
    if mode == "new":
        raise ValueError(
            f"{output.name} was started {left['begun']} and is not finished: {len(left['done'])} "
            f"of {counted(left['settings']['parts'], 'part')} are done ({output.run}); --resume "
            f"continues it, --restart discards it and starts again"
        )
    before = left["call"]
    differences = [
        f"{name} was {_shown(before.get(name))} and is {_shown(call.get(name))}"
        for name in {**before, **call}
        if before.get(name) != call.get(name)
    ]
    if differences:
        raise ValueError(
            f"{output.name} cannot be resumed, because it was started otherwise: "
            f"{'; '.join(differences)}. Give what was given then, or --restart"
        )
    return RunFolder(output, left, True)


def _left(output: Output) -> dict[str, Any] | None:
    """What an earlier process left; None where it left nothing."""
    path = output.run / PROGRESS
    try:
        found = json.loads(path.read_bytes())
        for name in found["files"]:  # killed between two of their new names: all are computed again
            os.stat(output.run / name)
        return {name: found[name] for name in ("begun", "call", "settings", "files", "done")}
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}; --restart starts again") from error


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """The folder of a run, made if it is not there, locked."""
    busy = OSError(f"{name} is being written by another process ({path} is locked)")
    try:
        with suppress(FileExistsError):
            path.mkdir(0o700)
            writing.sync_directory(path.parent)
        _check_own(path)
        file = open(path / LOCK, "a+b")  # noqa: SIM115
    except FileNotFoundError:
        raise busy from None  # another process has just finished, and removed its folders
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
