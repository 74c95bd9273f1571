"""The tensors of a call, from safetensors files, .npy files and folders of those, by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quorum_attention.files.formats import SUFFIX, open_npy, open_tensors
from quorum_attention.writing import open_regular

# What a tensor is for, and the names that it may have in a file.
NAMES = {
    "query": ("query", "q"),
    "key": ("key", "k"),
    "value": ("value", "v"),
    "mask": ("attn_mask", "mask"),
    "grad_out": ("grad_out", "do"),
    "out": ("out", "o"),
    "lse": ("lse",),
}
_ROLES = {name: role for role, names in NAMES.items() for name in names}
FORWARD = ("query", "key", "value")
BACKWARD = (*FORWARD, "grad_out", "out", "lse")


@dataclass(frozen=True, slots=True)
class Seen:
    """What a file was when it was opened."""

    path: Path
    stat: tuple[int, int, int, int]

    @classmethod
    def of(cls, path: str | Path) -> Seen:
        """The file as it is now.

        Raises:
            OSError: it cannot be read, or is no regular file.
        """
        with open_regular(path) as file:
            return cls(Path(path), _stat(file.fileno()))

    def check(self) -> None:
        """Refuse a file that was changed or replaced since.

        Raises:
            ValueError: it was.
            OSError: it is gone.
        """
        if _stat(self.path) != self.stat:
            raise ValueError(
                f"the input {self.path} was changed while it was read: what was computed since is "
                f"not kept"
            )

    def described(self, role: str) -> dict[str, Any]:
        """What has to be the same when a run is resumed, wherever the file is by then."""
        names = ("inode", "size", "time")
        return {f"the {n} of the file of {role}": found for n, found in zip(names, self.stat[1:])}  # noqa: B905


def _stat(file: int | Path) -> tuple[int, int, int, int]:
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Inputs:
    """What files hold for a call, mapped.

    Attributes:
        tensors: by role, as ``NAMES`` has them.
        files: the file of each, by role, as it was when it was opened.
        unknown: the names of what they hold besides.
    """

    tensors: dict[str, torch.Tensor]
    files: dict[str, Seen]
    unknown: tuple[str, ...]


def read_inputs(named: Sequence[str], needed: Sequence[str] = FORWARD) -> Inputs:
    """The tensors of a call, by role.

    Args:
        named: safetensors files; .npy files, whose tensor is called as the file is, without .npy;
            folders of such; or NAME=FILE for a .npy file of another name.
        needed: roles that there have to be. Of the others only a mask is looked for.

    Raises:
        OSError: a file cannot be opened.
        ValueError: a tensor is missing, or there more than once; a file is damaged.
    """
    found: dict[str, tuple[str, Seen, torch.Tensor]] = {}
    unknown: list[str] = []
    for text in named:
        for name, file, tensor in _opened(text):
            role = _ROLES.get(name)
            if role in (*needed, "mask") and role in found:
                other, first, _ = found[role]
                raise ValueError(
                    f"{first.path} has {other} and {file.path} has {name}: one of them must go, "
                    f"because both are the {role}"
                )
            if role in (*needed, "mask"):
                found[str(role)] = name, file, tensor
            elif not os.path.isdir(text):  # a folder may have results too
                unknown.append(name)
    for role in needed:
        if role not in found:
            there = ", ".join([*(name for name, _, _ in found.values()), *unknown])
            has = "have" if len(named) > 1 else "has"
            raise ValueError(
                f"{', '.join(named)} {has} no tensor named {' or '.join(NAMES[role])}; "
                f"there is {there or 'none'}"
            )
    tensors = {role: tensor for role, (_, _, tensor) in found.items()}
    files = {role: file for role, (_, file, _) in found.items()}
    return Inputs(tensors, files, tuple(unknown))


def read_one(path: str, names: Sequence[str]) -> tuple[torch.Tensor, Seen]:
    """The tensor of a file that has one, or the one of ``names`` in a file that has more; and the
    file.

    Raises:
        ValueError: there are several, or none.
    """
    found = {name: (tensor, seen) for name, seen, tensor in _opened(path)}
    there = [name for name in names if name in found]
    if not there and len(found) == 1:
        there = list(found)
    if len(there) != 1:
        raise ValueError(
            f"{path} must have one tensor, or one of {', '.join(names)}; it has "
            f"{', '.join(found) or 'none'}"
        )
    return found[there[0]]


def _opened(text: str) -> Iterator[tuple[str, Seen, torch.Tensor]]:
    """(name, file, tensor) of all there is in an input. What a file is is noted before it is
    opened."""
    name, equals, rest = text.partition("=")
    is_named = equals and name in _ROLES
    if not text or (is_named and not rest):
        raise ValueError(f"an input has no file: its name is {text!r}")
    path = Path(text)
    files = {path: path.stem}
    if is_named and not path.exists():
        files = {Path(rest): name}
    elif path.is_dir():
        files = {file: file.stem for file in sorted(path.iterdir()) if file.suffix == SUFFIX}
        if not files:
            raise ValueError(f"{text} is a folder without {SUFFIX} files")
    for file, tensor in files.items():
        seen = Seen.of(file)
        if file is not path or file.suffix == SUFFIX:
            yield tensor, seen, open_npy(file)
        else:
            for found, mapped in open_tensors(file).items():
                yield found, seen, mapped
