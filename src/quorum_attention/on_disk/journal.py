"""The journal of an unfinished output: what it is of, and which parts of it are done.

Lines of JSON, each after its own checksum. The first says what is computed from what (``Header``),
every other one that a part is done: it is written after the part's results are on the disk. A line
that was torn by a kill, or damaged, and all lines after it do not count: those parts are computed
again.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from quorum_attention.writing import check_own, open_regular, replacing

FORMAT = 1
_LARGEST_BYTES = 1 << 28
_COMPLETE, _FILES = "complete", "files"


@dataclass(frozen=True, slots=True)
class Header:
    """What an output is of. Plain values, as JSON holds them.

    Attributes:
        call: arguments and versions, by the names that messages give them.
        inputs: what was seen of each input file (on_disk/fingerprint.py), by its role.
        settings: what was chosen when the output was begun, and has to stay the same.
        begun: when that was, for people.
    """

    call: Mapping[str, Any]
    inputs: Mapping[str, Any]
    settings: Mapping[str, Any]
    begun: str = ""

    def differences(self, now: Header) -> list[str]:
        """How ``now``, the header of the same command today, differs; a line for each, by name."""
        found = []
        for name in {**self.call, **now.call}:
            before, after = self.call.get(name), now.call.get(name)
            if before != after:
                found.append(f"{name} was {_shown(before)} and is {_shown(after)}")
        for name in {**self.inputs, **now.inputs}:
            before, after = self.inputs.get(name), now.inputs.get(name)
            if not isinstance(before, Mapping) or not isinstance(after, Mapping):
                if before != after:
                    found.append(f"{name} was {_shown(before)} and is {_shown(after)}")
                continue
            # Where a file lies makes no difference.
            words = [
                f"its {key} was {_shown(before.get(key))} and is {_shown(after.get(key))}"
                for key in {**before, **after}
                if key != "path" and before.get(key) != after.get(key)
            ]
            if words:
                found.append(f"{name} ({after.get('path')}) has changed: {', '.join(words)}")
        return found


def _named(writes: Callable[[Journal, bytes], None]) -> Callable[[Journal, bytes], None]:
    """Errors with the file's name, which a full disk does not say."""

    @wraps(writes)
    def write(journal: Journal, lines: bytes) -> None:
        try:
            writes(journal, lines)
        except OSError as error:
            if error.errno is None:  # one of our own
                raise
            raise OSError(error.errno, error.strerror, str(journal.path)) from error

    return write


@dataclass(slots=True)
class Journal:
    """The journal at ``path``.

    Attributes:
        header: what the output is of.
        done: numbers of the parts that are done.
        complete: whether all is, and only names have to be changed.
        files: numbers that the file system has for the complete files, in the output's order.
        torn: how many lines at the end do not count.
        end: bytes of the lines that do; 0: there is no file yet.
    """

    path: Path
    header: Header
    done: set[int] = field(default_factory=set)
    complete: bool = False
    files: tuple[int, ...] = ()
    torn: int = 0
    end: int = 0

    def add(self, part: int) -> None:
        """Note that a part is done, whose results are on the disk.

        The first one makes the file: a journal without a part would be of no use.

        Raises:
            OSError: it cannot be written; it then says what it said before.
        """
        line = _line({"part": part})
        if self.end:
            self._append(line)
        else:
            self._create(_line(_header_record(self.header)) + line)
        self.done.add(part)

    def finish(self, files: Sequence[int] = ()) -> None:
        """Note that all is done, and in which files.

        Raises:
            OSError: it cannot be written; it then says what it said before.
        """
        if self.end:
            self._append(_line({_COMPLETE: True, _FILES: list(files)}))
        self.complete, self.files = True, tuple(files)

    @_named
    def _create(self, lines: bytes) -> None:
        """A new file, which is there whole or not at all."""
        with replacing(self.path) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(lines)
        self.end = len(lines)

    @_named
    def _append(self, lines: bytes) -> None:
        with open_regular(self.path, "r+b", follow=False) as file:
            check_own(file, private=True)
            # Lines that did not count go: what is written next must not come after them.
            file.truncate(self.end)
            file.seek(self.end)
            try:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                os.ftruncate(file.fileno(), self.end)
                raise
        self.end += len(lines)

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
        self.end = 0


def read(path: Path) -> Journal | None:
    """The journal at ``path``, without what does not count at its end; None where there is none.

    Raises:
        OSError: it cannot be read, or other users may have written it.
        ValueError: its first line is damaged, or of another version of this format.
    """
    try:
        with open_regular(path, follow=False) as file:
            check_own(file, private=True)
            text = file.read(_LARGEST_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(text) > _LARGEST_BYTES:
        raise ValueError(f"{path} is no journal: it is larger than one can be")
    records, torn, good = _records(text.split(b"\n"))
    if not records:
        raise ValueError(f"{path} is damaged: its first line cannot be read")
    journal = Journal(path, _header(path, records[0]), torn=torn, end=good)
    for record in records[1:]:
        if record.get(_COMPLETE) is True:
            journal.complete = True
            found = record.get(_FILES, ())
            journal.files = tuple(found) if isinstance(found, list) else ()
        elif _is_count(record.get("part")):
            journal.done.add(record["part"])
        else:
            raise ValueError(f"{path} has a line that this version does not know: {record}")
    return journal


def _records(lines: Iterable[bytes]) -> tuple[list[dict[str, Any]], int, int]:
    """The lines that count, how many do not, and at which byte those that do end."""
    *whole, rest = lines
    records: list[dict[str, Any]] = []
    good = 0
    for number, line in enumerate(whole):
        record = _record(line)
        if record is None:
            return records, len(whole) - number + bool(rest), good
        records.append(record)
        good += len(line) + 1
    return records, int(bool(rest)), good


def _line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _record(line: bytes) -> dict[str, Any] | None:
    """What a line says; None where it is not whole."""
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _header_record(header: Header) -> dict[str, Any]:
    return {
        "journal": FORMAT,
        "begun": header.begun,
        "call": dict(header.call),
        "inputs": dict(header.inputs),
        "settings": dict(header.settings),
    }


def _header(path: Path, record: dict[str, Any]) -> Header:
    if record.get("journal") != FORMAT:
        raise ValueError(
            f"{path} is a journal of format {record.get('journal')!r}; this version has {FORMAT}"
        )
    parts = [record.get(name) for name in ("call", "inputs", "settings")]
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError(f"{path} is damaged: its first line is no header")
    call, inputs, settings = parts
    assert call is not None
    assert inputs is not None
    assert settings is not None
    return Header(call, inputs, settings, str(record.get("begun", "")))


def _is_count(found: Any) -> bool:
    return isinstance(found, int) and not isinstance(found, bool) and found >= 0


def _shown(value: Any) -> str:
    text = "not given" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


__all__ = ["FORMAT", "Header", "Journal", "read"]
