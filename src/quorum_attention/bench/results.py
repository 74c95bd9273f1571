"""``results.json``: holds every measurement as soon as it is made."""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quorum_attention.bench.settings import Settings
from quorum_attention.bench.spec import FAILED, Answer, Spec
from quorum_attention.writing import check_target, write_text

NAME, REPORT = "results.json", "report.md"
# The entries of ``about`` that may differ between runs that add to one file.
_MAY_DIFFER = ("date", "matplotlib")


class Results:
    """The measurements in a folder; all have one machine, one version and the same settings.

    Attributes:
        path: the file.
        about: the machine and the versions.
        runs: for every run that added to the file: its start, its command, its experiments.
        records: every measurement as plain types, in order.
    """

    def __init__(self, folder: Path, settings: Settings, about: dict[str, str]) -> None:
        self.path = folder / NAME
        self.about = about
        self.runs: list[dict[str, Any]] = []
        self.records: list[dict[str, Any]] = []
        self._settings = _plain(asdict(settings))
        self._seen = self._stamp()
        if self._seen is not None:
            self._take_over()

    def begin(self, command: str, experiments: list[str]) -> None:
        """Begin a run: note it in the file."""
        self.runs.append({"started": _now(), "command": command, "experiments": experiments})
        self._write()

    def find(self, spec: Spec, *, failed: bool = False) -> Answer | None:
        """The answer to ``spec``, if it has been measured already.

        A failed measurement is found only with ``failed``, so that it is repeated otherwise.
        """
        asked = _plain(asdict(spec))
        for record in self.records:
            if record["spec"] == asked and (failed or record["answer"]["status"] != FAILED):
                return Answer(**record["answer"])
        return None

    def add(self, experiment: str, spec: Spec, answer: Answer) -> None:
        """Add a measurement; it replaces an earlier one of the same spec.

        Raises:
            OSError: it cannot be written; the file is unchanged.
        """
        asked = _plain(asdict(spec))
        kept = [record for record in self.records if record["spec"] != asked]
        found = {
            "experiment": experiment, "measured": _now(), "run": len(self.runs), "spec": asked,
            "answer": _plain(asdict(answer)),
        }  # fmt: skip
        before, self.records = self.records, [*kept, found]
        try:
            self._write()
        except OSError:
            self.records = before
            raise

    def _take_over(self) -> None:
        """Read the file, if this run can add to it."""
        way_out = "name another --output, or --fresh sets it aside and begins anew"
        try:
            there = json.loads(self.path.read_text(encoding="utf-8"))
            about, settings = dict(there["about"]), dict(there["settings"])
            self.runs, self.records = list(there["runs"]), list(there["measurements"])
            for record in self.records:
                Spec(**record["spec"])
                Answer(**record["answer"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"{self.path} cannot be added to, it is no file of this version's bench: {way_out}"
            ) from error
        now = {name: value for name, value in self.about.items() if name not in _MAY_DIFFER}
        then = {name: value for name, value in about.items() if name not in _MAY_DIFFER}
        for what, old, new in (("with", then, now), ("with the setting", settings, self._settings)):
            for name in sorted(old.keys() | new.keys()):
                if old.get(name) != new.get(name):
                    raise ValueError(
                        f"{self.path} was measured {what} {name} {_said(old.get(name))}, and here "
                        f"it is {_said(new.get(name))}: {way_out}"
                    )

    def _stamp(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _write(self) -> None:
        if self._stamp() != self._seen:
            raise OSError(
                f"{self.path} is not as this run left it: another one wrote it, or it was removed. "
                f"Nothing more is written to it"
            )
        whole = {
            "about": self.about, "settings": self._settings, "runs": self.runs,
            "measurements": self.records,
        }  # fmt: skip
        with naming(self.path, "; what it had before this it still has"):
            write_text(self.path, json.dumps(whole, indent=1))
        self._seen = self._stamp()


@contextmanager
def naming(path: Path, more: str = "") -> Iterator[None]:
    """In the block, an ``OSError`` of the system gets a message with ``path`` and ``more``."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(f"{path} cannot be written: {error.strerror}{more}") from error


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock ``folder`` during the block, so that no other run adds to its results.

    Raises:
        ValueError: another run has locked it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (NAME, REPORT):
        check_target(folder / name)
    # The folder is locked, because the file is replaced with every write. If the system cannot lock
    # a folder, a run still notices when it writes that another run has written.
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not _lock(handle):
            raise ValueError(f"another run is adding to {folder}: name another --output")
        yield
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Lock the folder; False if another run has locked it."""
    try:
        import fcntl  # not on every system

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True


def set_aside(folder: Path) -> Path | None:
    """Move results, report and figures into a new folder inside ``folder``.

    Returns:
        the new folder, or None if there was nothing to move.
    """
    names = [NAME, REPORT]
    report = folder / REPORT
    if report.exists():
        names += re.findall(r"\]\(([^()/]+\.png)\)", report.read_text(errors="replace"))
    there = [name for name in dict.fromkeys(names) if (folder / name).exists()]
    if not there:
        return None
    number = 1
    while (folder / f"earlier-{number}").exists():
        number += 1
    earlier = folder / f"earlier-{number}"
    earlier.mkdir()
    for name in there:
        os.rename(folder / name, earlier / name)
    return earlier


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """``value`` as it is after a round trip through JSON."""
    found: dict[str, Any] = json.loads(json.dumps(value))
    return found


def _said(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "nothing" if value is None else str(value)


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
