"""Kernels that passed their test on a device, remembered on disk.

A test takes a vendor's operator four shapes and more that no call will use, at 40 ms and more each
(docs/planner.md), in every new process. Its answer depends on the device, on the versions of
everything below, and on this package's own code, so all of that is in the entry's name. Only what
passed is remembered: a failure may be the machine's of that moment.
"""

from __future__ import annotations

import functools
import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from quorum_attention.cache_files import load, store

_FILE = "kernels.json"
# Most entries of the file: the oldest go first.
_MOST = 400


def is_proven(kernel: object, question: object, device: torch.device) -> bool:
    """Whether a kernel of this package is known to have passed this test.

    Args:
        question: what was tested; its text has to tell it from all others.
        device: a CUDA device; of all others nothing is remembered.
    """
    entry = _entry(kernel, question, device)
    return entry is not None and entry in _known()


def note_proven(kernel: object, question: object, device: torch.device) -> None:
    """Remember that it has passed. What cannot be written is not remembered."""
    _note(_entry(kernel, question, device))


def _note(entry: str | None) -> None:
    if entry is None or entry in _known():
        return
    _known().append(entry)
    del _known()[:-_MOST]
    with suppress(OSError):
        # Another process may have added to it.
        store(_FILE, lambda said: list(dict.fromkeys([*_entries(said), *_known()]))[-_MOST:])


def is_built(kernel: object, question: object, device: torch.device) -> bool:
    """Whether a process on this machine has built this kernel of the package, for this test, with
    these versions: what it compiled is probably still on disk."""
    entry = _entry_of_built(kernel, question, device)
    return entry is not None and entry in _known()


def note_built(kernel: object, question: object, device: torch.device) -> None:
    """Remember that it has been built here. What cannot be written is not remembered."""
    _note(_entry_of_built(kernel, question, device))


def read() -> None:
    """Read what is remembered, and the files that its names depend on."""
    _sources()
    _known()


@functools.cache
def _known() -> list[str]:
    return _entries(load(_FILE))


def _entries(said: Any) -> list[str]:
    return [e for e in said if isinstance(e, str)] if isinstance(said, list) else []


def _entry(kernel: object, question: object, device: torch.device) -> str | None:
    """The name of an entry; None for what is not remembered."""
    # Not kernels with options, which are more than their names.
    if getattr(kernel, "__dict__", None):
        return None
    return _named(kernel, question, device)


def _entry_of_built(kernel: object, question: object, device: torch.device) -> str | None:
    # Its options are compiled in, but for none of them does it take clearly longer.
    named = _named(kernel, question, device)
    return None if named is None else f"built: {named}"


def _named(kernel: object, question: object, device: torch.device) -> str | None:
    module, package = type(kernel).__module__, __name__.rpartition(".")[0]
    if device.type != "cuda" or not module.startswith(package):
        return None
    found = torch.cuda.get_device_properties(device)
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: None)()
    versions = (
        found.name, found.major, found.minor, torch.__version__, torch.version.cuda,
        torch.backends.cudnn.version(), driver, _sources(),
    )  # fmt: skip
    return f"{type(kernel).__qualname__} | {question} | {versions}"


@functools.cache
def _sources() -> str:
    """A hash of the code that a test runs."""
    folder = Path(__file__).parent
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]
