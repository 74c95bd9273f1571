"""The tensors of a call, from safetensors files, .npy files and folders of those, by name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from quorum_attention.files import open_tensors
from quorum_attention.npy import SUFFIX, is_npy, open_npy
from quorum_attention.on_disk.fingerprint import stamp

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
class Inputs:
    """What files hold for a call, mapped.

    Attributes:
        tensors: by role, as ``NAMES`` has them.
        unknown: the names of what they hold besides.
        files: all that was opened, without repeats.
        where: the file of each tensor, by role.
        stamps: of the files, taken before they were opened (on_disk/fingerprint.py).
    """

    tensors: dict[str, torch.Tensor]
    unknown: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    where: dict[str, Path] = field(default_factory=dict)
    stamps: dict[Path, tuple[int, ...]] = field(default_factory=dict)

    @property
    def mask(self) -> torch.Tensor | None:
        """The mask, if there is one."""
        return self.tensors.get("mask")


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
    found: dict[str, torch.Tensor] = {}
    whence: dict[str, tuple[str, Path]] = {}
    unknown: list[str] = []
    files: dict[Path, None] = {}
    folders = {Path(text) for text in named if os.path.isdir(text)}
    stamps: dict[Path, tuple[int, ...]] = {}
    for name, file, tensor in _opened(named, stamps):
        role = _ROLES.get(name)
        in_folder = file.parent in folders
        if role not in roles and in_folder:
            continue  # a folder may have results too, and they may be replaced
        files[file] = None
        if role not in roles:
            unknown.append(name)
        elif role in found:
            other, where = whence[role]
            if where == file:
                raise ValueError(f"{file} has both {other} and {name}: one of them must go")
            raise ValueError(
                f"{where} has {other} and {file} has {name}: one of them must go, because both are "
                f"the {role}"
            )
        else:
            found[role], whence[role] = tensor, (name, file)
    for role in needed:
        if role not in found:
            there = ", ".join([*(name for name, _ in whence.values()), *unknown])
            has = "have" if len(named) > 1 else "has"
            raise ValueError(
                f"{', '.join(named)} {has} no tensor named {' or '.join(NAMES[role])} ({role}); "
                f"there is {there or 'none'}"
            )
    of_role = {role: whence[role][1] for role in roles if role in whence}
    return Inputs(found, tuple(unknown), tuple(files), of_role, stamps)


def read_qkv(path: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of a file, mapped, for who takes no mask.

    Raises:
        ValueError: one of them is not in it, or a mask is.
    """
    inputs = read_inputs([path])
    if inputs.mask is not None:
        raise ValueError(f"{path} has a mask, which this command does not take")
    return inputs.tensors["query"], inputs.tensors["key"], inputs.tensors["value"]


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
    named: Iterable[str], stamps: dict[Path, tuple[int, ...]]
) -> Iterator[tuple[str, Path, torch.Tensor]]:
    """(name, file, tensor) of all there is; notes the stamps of files before it opens them."""
    for text in named:
        name, equals, rest = text.partition("=")
        if not text or (equals and name in _ROLES and not rest):
            raise ValueError(f"an input has no file: its name is {text!r}")
        if equals and name in _ROLES and not os.path.exists(text):
            stamps[Path(rest)] = stamp(rest)
            yield name, Path(rest), open_npy(rest)
            continue
        path = Path(text)
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix == SUFFIX)
            if not inside:
                raise ValueError(f"{text} is a folder without {SUFFIX} files")
            for file in inside:
                stamps[file] = stamp(file)
                yield file.stem, file, open_npy(file)
            continue
        stamps[path] = stamp(path)
        if is_npy(path):
            yield path.stem, path, open_npy(path)
        else:
            for found, tensor in open_tensors(path).items():
                yield found, path, tensor


__all__ = ["BACKWARD", "FORWARD", "NAMES", "Inputs", "read_inputs", "read_one", "read_qkv"]
