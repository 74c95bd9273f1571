"""Whether a file is still the one that was read: its size, its time, and samples of its bytes."""

from __future__ import annotations

import hashlib
import os
from os import PathLike
from typing import Any

from quorum_attention.writing import open_regular

_SAMPLES, _SAMPLE_BYTES = 64, 4096


def fingerprint(path: str | PathLike[str]) -> dict[str, Any]:
    """What is remembered of an input file, as JSON can hold it.

    The samples are 64 blocks of 4 KiB, the first and the last among them: milliseconds, whatever
    the file's size. A change between them that keeps size and time goes unseen.

    Raises:
        OSError: the file cannot be read, or is no regular file.
    """
    with open_regular(path) as file:
        found = os.fstat(file.fileno())
        last = max(0, found.st_size - _SAMPLE_BYTES)
        samples = hashlib.sha256()
        for number in range(_SAMPLES):
            file.seek(last * number // (_SAMPLES - 1))
            samples.update(file.read(_SAMPLE_BYTES))
            if last == 0:
                break
    return {
        "path": os.path.realpath(path),
        "size": found.st_size,
        "time": found.st_mtime_ns,
        "content": samples.hexdigest(),
    }


def stamp(path: str | PathLike[str]) -> tuple[int, int, int, int]:
    """What tells a file from another that takes its name, and from itself when it was written to.

    Raises:
        OSError: there is none.
    """
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def unchanged(before: dict[str, Any]) -> bool:
    """Whether size and time of the file are those of its fingerprint ``before``."""
    try:
        found = os.stat(before["path"])
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns) == (before["size"], before["time"])


__all__ = ["fingerprint", "stamp", "unchanged"]
