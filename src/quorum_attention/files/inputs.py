"""The tensors of a call, from safetensors files, .npy files and folders of those, by name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quorum_attention.files.formats import SUFFIX, is_npy, open_npy, open_tensors
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
_SAMPLES, _SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True, slots=True)
class Seen:
    """What a file was when it was opened: of its bytes 64 samples of 4 KiB, the first and the last
    among them. A change between them that keeps size and time goes unseen."""

    path: Path
    stat: tuple[int, int, int, int]
    content: str

    @classmethod
    def of(cls, path: str | Path) -> Seen:
        """The file as it is now.

        Raises:
            OSError: it cannot be read, or is no regular file.
        """
        with open_regular(path) as file:
            last = max(0, os.fstat(file.fileno()).st_size - _SAMPLE_BYTES)
            samples = hashlib.sha256()
            for number in range(_SAMPLES if last else 1):
                file.seek(last * number // (_SAMPLES - 1))
                samples.update(file.read(_SAMPLE_BYTES))
            return cls(Path(path), _stat(file.fileno()), samples.hexdigest())

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
        _, _, size, time = self.stat
        of = f"of the file of {role}"
        return {f"the size {of}": size, f"the time {of}": time, f"the content {of}": self.content}


def _stat(file: int | Path) -> tuple[int, int, int, int]:
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Inputs:
    """What files hold for a call, mapped.

    Attributes:
        tensors: by role, as ``NAMES`` has them.
        unknown: the names of what they hold besides.
        where: the file of each tensor, by role.
        seen: the files they are in, as they were when they were opened.
    """

    tensors: dict[str, torch.Tensor]
    unknown: tuple[str, ...]
    where: dict[str, Path]
    seen: dict[Path, Seen]


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
    roles = (*needed, "mask")
    tensors: dict[str, torch.Tensor] = {}
    whence: dict[str, tuple[str, Path]] = {}
    unknown: list[str] = []
    seen: dict[Path, Seen] = {}
    used: dict[Path, Seen] = {}
    folders = {Path(text) for text in named if os.path.isdir(text)}
    for name, file, tensor in _opened(named, seen):
        role = _ROLES.get(name)
        if role not in roles and file.parent in folders:
            continue  # a folder may have results too, and they may be replaced
        used[file] = seen[file]
        if role not in roles:
            unknown.append(name)
        elif role in tensors:
            other, first = whence[role]
            raise ValueError(
                f"{first} has {other} and {file} has {name}: one of them must go, because both are "
                f"the {role}"
            )
        else:
            tensors[role], whence[role] = tensor, (name, file)
    for role in needed:
        if role not in tensors:
            there = ", ".join([*(name for name, _ in whence.values()), *unknown])
            has = "have" if len(named) > 1 else "has"
            raise ValueError(
                f"{', '.join(named)} {has} no tensor named {' or '.join(NAMES[role])} ({role}); "
                f"there is {there or 'none'}"
            )
    where = {role: whence[role][1] for role in roles if role in whence}
    return Inputs(tensors, tuple(unknown), where, used)


def read_qkv(path: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of a file, mapped, for who takes no mask.

    Raises:
        ValueError: one of them is not in it, or a mask is.
    """
    tensors = read_inputs([path]).tensors
    if "mask" in tensors:
        raise ValueError(f"{path} has a mask, which this command does not take")
    return tensors["query"], tensors["key"], tensors["value"]


def read_one(path: str, names: Sequence[str]) -> tuple[torch.Tensor, Path]:
    """The tensor of a file that has one, or the one of ``names`` in a file that has more; and the
    file.

    Raises:
        ValueError: there are several, or none.
    """
    file = Path(path)
    if is_npy(file):
        return open_npy(file), file
    tensors = open_tensors(file)
    there = [name for name in names if name in tensors]
    if not there and len(tensors) == 1:
        there = list(tensors)
    if len(there) != 1:
        raise ValueError(
            f"{path} must have one tensor, or one of {', '.join(names)}; it has "
            f"{', '.join(tensors) or 'none'}"
        )
    return tensors[there[0]], file


def _opened(
    named: Iterable[str], seen: dict[Path, Seen]
) -> Iterator[tuple[str, Path, torch.Tensor]]:
    """(name, file, tensor) of all there is; notes what files are before it opens them."""
    for text in named:
        name, equals, rest = text.partition("=")
        if not text or (equals and name in _ROLES and not rest):
            raise ValueError(f"an input has no file: its name is {text!r}")
        path = Path(text)
        named_so = {path: path.stem}
        if equals and name in _ROLES and not path.exists():
            named_so = {Path(rest): name}
        elif path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix == SUFFIX)
            if not inside:
                raise ValueError(f"{text} is a folder without {SUFFIX} files")
            named_so = {file: file.stem for file in inside}
        for file, tensor in named_so.items():
            seen[file] = Seen.of(file)
            if file is not path or is_npy(file):
                yield tensor, file, open_npy(file)
            else:
                for found, mapped in open_tensors(file).items():
                    yield found, file, mapped


__all__ = ["BACKWARD", "FORWARD", "NAMES", "Inputs", "Seen", "read_inputs", "read_one", "read_qkv"]
