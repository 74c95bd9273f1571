"""Where results go: one safetensors file, one .npy file, or a folder of .npy files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quorum_attention.files import Layout, Wanted, laid_out
from quorum_attention.npy import SUFFIX, laid_out_npy
from quorum_attention.writing import check_target, follow_links


@dataclass(frozen=True, slots=True)
class Target:
    """A file of results.

    Attributes:
        path: with symbolic links followed.
        layout: of its bytes.
    """

    path: Path
    layout: Layout


@dataclass(frozen=True, slots=True)
class Output:
    """The files of a call's results.

    Attributes:
        name: as the user gave it.
        targets: one for each file.
        folder: the folder they are in, if it does not exist yet.
    """

    name: str
    targets: tuple[Target, ...]
    folder: Path | None = None


def output_of(name: str, wanted: Wanted, metadata: Mapping[str, str]) -> Output:
    """The files of results.

    Args:
        name: of a folder, if it ends in a slash: a .npy file for each result, called as it is; of a
            .npy file, for a single result; of a safetensors file, if it ends in .safetensors or has
            no suffix.
        wanted: shapes and dtypes of the results.
        metadata: for the header of a safetensors file; ``complete`` is added.

    Raises:
        OSError: a file cannot be written there. Nothing has been changed.
        ValueError: several results for one .npy file, or a name with another suffix.
        TypeError: a dtype that the format does not have.
    """
    if name.endswith(("/", os.sep)):
        return _in_folder(name, wanted)
    if os.path.isdir(name):
        raise IsADirectoryError(
            f"{name} cannot be written: it is a folder, not a regular file; {name}/, with a slash, "
            f"has {SUFFIX} files written into it"
        )
    if name.endswith(SUFFIX):
        if len(wanted) != 1:
            raise ValueError(
                f"{name} can have one result, and there are {', '.join(wanted)}: name a folder of "
                f"{SUFFIX} files, {name.removesuffix(SUFFIX)}/, or a safetensors file"
            )
        ((result, (shape, dtype)),) = wanted.items()
        layout = laid_out_npy(result, shape, dtype)
        return Output(name, (Target(check_target(name), layout),))
    if Path(name).suffix not in ("", ".safetensors"):
        raise ValueError(
            f"the output {name} ends in {Path(name).suffix}: it must be a safetensors file "
            f"(.safetensors, or no suffix), a {SUFFIX} file, or a folder of them (NAME/)"
        )
    layout = laid_out(wanted, {**metadata, "complete": "true"})
    return Output(name, (Target(check_target(name), layout),))


def _in_folder(name: str, wanted: Wanted) -> Output:
    folder = follow_links(name)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{name} cannot be written: {folder} is no folder")
    made = None if folder.exists() else folder
    layouts = [laid_out_npy(result, *described) for result, described in wanted.items()]
    paths = [folder / f"{result}{SUFFIX}" for result in wanted]
    if made is None:
        paths = [check_target(path) for path in paths]
    else:
        check_target(folder)
    return Output(name, tuple(map(Target, paths, layouts)), made)


def are_same(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether two names are one file, by whatever links; or would be."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def check_apart(output: Output, inputs: Sequence[str | os.PathLike[str]]) -> None:
    """Refuse an output that is an input, which is read until the end.

    Raises:
        ValueError: one of them is.
    """
    for target in output.targets:
        for given in inputs:
            if are_same(given, target.path):
                raise ValueError(
                    f"output {target.path if len(output.targets) > 1 else output.name} is the "
                    f"input {given}, which is read until the end: it must be another file"
                )


__all__ = ["Output", "Target", "are_same", "check_apart", "output_of"]
