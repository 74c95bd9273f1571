"""Where results go: one safetensors file, one .npy file, or a folder of .npy files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quorum_attention.files.formats import SUFFIX, Layout, Wanted, laid_out, laid_out_npy
from quorum_attention.writing import check_target, follow_links


@dataclass(frozen=True, slots=True)
class Output:
    """The files of a call's results.

    Attributes:
        name: as the user gave it.
        files: paths, with symbolic links followed, and the layouts of their bytes.
        new_folder: the folder they are in, if it does not exist yet.
    """

    name: str
    files: Mapping[Path, Layout]
    new_folder: Path | None = None

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
        return Output(name, {check_target(name): laid_out_npy(result, shape, dtype)})
    if Path(name).suffix not in ("", ".safetensors"):
        raise ValueError(
            f"the output {name} ends in {Path(name).suffix}: it must be a safetensors file "
            f"(.safetensors, or no suffix), a {SUFFIX} file, or a folder of them (NAME/)"
        )
    layout = laid_out(wanted, {**metadata, "complete": "true"})
    return Output(name, {check_target(name): layout})


def _in_folder(name: str, wanted: Wanted) -> Output:
    folder = follow_links(name)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{name} cannot be written: {folder} is no folder")
    files = {
        folder / f"{result}{SUFFIX}": laid_out_npy(result, *described)
        for result, described in wanted.items()
    }
    if folder.exists():
        return Output(name, {check_target(path): layout for path, layout in files.items()})
    check_target(folder)
    return Output(name, files, folder)


def are_same(one: Path, other: Path) -> bool:
    """Whether two names are one file, by whatever links; or would be."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


__all__ = ["Output", "are_same", "output_of"]
