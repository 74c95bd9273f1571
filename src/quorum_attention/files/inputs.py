"""The tensors of a call, from safetensors files, .npy files and folders of those, by
name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from quorum_attention.files.formats import NPY_SUFFIX, open_npy, open_tensors
from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.plain_types import JsonObject
from quorum_attention.writing import open_regular

NAMES = {
    "query": ("query", "q"),
    "key": ("key", "k"),
    "value": ("value", "v"),
    "mask": ("attn_mask", "mask"),
    "grad_out": ("grad_out", "do"),
    "out": ("out", "o"),
    "lse": ("lse",),
}
"""The names that a tensor may have in a file, by its role in the call."""
_ROLES = {name: role for role, names in NAMES.items() for name in names}
FORWARD = ("query", "key", "value")
BACKWARD = (*FORWARD, "grad_out", "out", "lse")


class FileStatus(NamedTuple):
    """The numbers by which a change of a file is noticed.

    Attributes:
        device, inode: which file it is.
        size: in bytes.
        time: of the last change, in nanoseconds.
    """

    device: int
    inode: int
    size: int
    time: int


@dataclass(frozen=True, slots=True)
class FileStamp:
    """A file, and what it was when it was opened."""

    path: Path
    status: FileStatus

    @classmethod
    def now(cls, path: str | Path) -> FileStamp:
        """Return the stamp of a file as it is now.

        Raises:
            OSError: it cannot be read, or is no regular file.
        """
        with open_regular(path) as file:
            # A write to a mapped page changes the file's time once, until the page is
            # on the disk.
            with suppress(OSError):  # some file systems refuse
                os.fsync(file.fileno())
            return cls(Path(path), _status(file.fileno()))

    def check(self) -> None:
        """Refuse a file that was changed or replaced since.

        Raises:
            ValueError: it was.
            OSError: it is gone.
        """
        if _status(self.path) != self.status:
            raise ValueError(
                f"the input {self.path} was changed while it was read: what was "
                "computed since is not kept"
            )

    def fingerprint(self, role: str) -> JsonObject:
        """Return what has to be the same when a run is resumed, wherever the file is by
        then."""
        return {
            f"the inode of the file of {role}": self.status.inode,
            f"the size of the file of {role}": self.status.size,
            f"the time of the file of {role}": self.status.time,
        }


def _status(file: int | Path) -> FileStatus:
    status = os.stat(file)
    return FileStatus(
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
    )


class NamedTensor(NamedTuple):
    """A tensor of a file, mapped, by its name there."""

    name: str
    file: FileStamp
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of a call, mapped from files.

    Attributes:
        tensors: by role, as ``NAMES`` has them.
        files: the file of each, by role, as it was when it was opened.
        unknown: the names of what the files hold besides.
    """

    tensors: NamedTensors = field(default_factory=dict)
    files: dict[str, FileStamp] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


def read_inputs(sources: Sequence[str], needed: Sequence[str] = FORWARD) -> Inputs:
    """Return the tensors of a call, by role.

    Args:
        sources: safetensors files; .npy files, whose tensor is called as the file is,
            without .npy; folders of such; or NAME=FILE for a .npy file of another name.
        needed: the roles that there have to be. Of the others only a mask is looked
            for.

    Raises:
        OSError: a file cannot be opened.
        ValueError: a tensor is missing, or there more than once; a file is damaged.
    """
    inputs = Inputs()
    names: dict[str, str] = {}  # by role
    for source in sources:
        for name, file, tensor in open_source(source):
            role = _ROLES.get(name, "")
            if role not in (*needed, "mask"):
                if not os.path.isdir(source):  # a folder may have results too
                    inputs.unknown.append(name)
                continue
            if role in names:
                raise ValueError(
                    f"{inputs.files[role].path} has {names[role]} and {file.path} has "
                    f"{name}: one of them must go, because both are the {role}"
                )
            names[role] = name
            inputs.tensors[role] = tensor
            inputs.files[role] = file
    for role in needed:
        if role not in names:
            has = "have" if len(sources) > 1 else "has"
            present = ", ".join([*names.values(), *inputs.unknown]) or "none"
            hint = ""
            if any(source.endswith(".npy") for source in sources):
                hint = f"; name a .npy file by {role}=FILE.npy"
            raise ValueError(
                f"{', '.join(sources)} {has} no tensor named "
                f"{' or '.join(NAMES[role])}; there is {present}{hint}"
            )
    return inputs


def read_one(path: str, names: Sequence[str]) -> tuple[torch.Tensor, FileStamp]:
    """Return the tensor of a file that has one, or the one of ``names`` in a file that
    has more; and the file.

    Raises:
        ValueError: there are several, or none.
    """
    tensors = list(open_source(path))
    candidates = [tensor for tensor in tensors if tensor.name in names]
    if not candidates:
        candidates = tensors
    if len(candidates) != 1:
        present = ", ".join(tensor.name for tensor in tensors) or "none"
        raise ValueError(
            f"{path} must have one tensor, or one of {', '.join(names)}; it has "
            f"{present}"
        )
    return candidates[0].tensor, candidates[0].file


def open_source(source: str) -> Iterator[NamedTensor]:
    """Open all tensors of an input.

    Raises:
        OSError, ValueError: as ``read_inputs``.
    """
    for path, name in _files_of(source).items():
        file = FileStamp.now(path)  # before the file is opened
        if name is not None:
            yield NamedTensor(name, file, open_npy(path))
            continue
        for tensor_name, tensor in open_tensors(path).items():
            yield NamedTensor(tensor_name, file, tensor)


def _files_of(source: str) -> dict[Path, str | None]:
    """Return the files of an input: the name of a .npy file's tensor, None for other
    files.

    Raises:
        ValueError: there is none.
    """
    path = Path(source)
    name, equals_sign, named_path = source.partition("=")
    is_named = bool(equals_sign) and name in _ROLES
    if not source or (is_named and not named_path):
        raise ValueError(f"an input has no file: its name is {source!r}")
    if is_named and not path.exists():
        return {Path(named_path): name}
    if path.is_dir():
        return _files_in(path)
    return {path: path.stem if path.suffix == NPY_SUFFIX else None}


def _files_in(folder: Path) -> dict[Path, str | None]:
    """Return the .npy files of a folder, with the names of their tensors.

    Raises:
        ValueError: there is none.
    """
    names: dict[Path, str | None] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == NPY_SUFFIX:
            names[path] = path.stem
    if not names:
        raise ValueError(f"{folder} is a folder without {NPY_SUFFIX} files")
    return names
