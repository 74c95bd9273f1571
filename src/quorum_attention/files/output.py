"""The files of a call's results."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quorum_attention import writing
from quorum_attention.files.formats import NPY_SUFFIX, TensorSpecs, check_npy


@dataclass(frozen=True, slots=True)
class Output:
    """The files of a call's results.

    Attributes:
        name: as the user gave it.
        files: paths, with symbolic links followed, and the tensors of each.
        metadata: of a safetensors file.
    """

    name: str
    files: Mapping[Path, TensorSpecs]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        """The folder that a run works in, beside the first file."""
        first = next(iter(self.files))
        return first.with_name(f"{first.name}.run")

    def check_apart(self, inputs: Iterable[Path]) -> None:
        """Refuse an output that is an input, which is read until the end, and inputs in
        the folder that the run works in.

        Raises:
            ValueError: one of them is.
        """
        for input_path in inputs:
            for path in self.files:
                if is_same_file(input_path, path):
                    raise ValueError(
                        f"output {path if len(self.files) > 1 else self.name} is the "
                        f"input {input_path}, which is read until the end: it must be "
                        "another file"
                    )
            if self.run in Path(os.path.realpath(input_path)).parents:
                raise ValueError(
                    f"the input {input_path} is in {self.run}, where the run works: "
                    "move it"
                )


def is_same_file(path: Path, other_path: Path) -> bool:
    """Return whether two names lead to one file, by whatever links; or would."""
    if os.path.realpath(path) == os.path.realpath(other_path):
        return True
    if not os.path.exists(path) or not os.path.exists(other_path):
        return False
    return os.path.samefile(path, other_path)


def output_of(name: str, specs: TensorSpecs, metadata: Mapping[str, str]) -> Output:
    """Return the files of results.

    Args:
        name: of a folder, if it ends in a slash: a .npy file for each result, called as
            it is; of a .npy file, for a single result; of a safetensors file, if it
            ends in .safetensors or has no suffix.
        specs: shapes and dtypes of the results.
        metadata: for the header of a safetensors file.

    Raises:
        OSError: a file cannot be written there. Nothing has been changed.
        ValueError: several results for one .npy file, or a name with another suffix.
        TypeError: a dtype that the format does not have.
    """
    is_folder = name.endswith(("/", os.sep))
    if is_folder or name.endswith(NPY_SUFFIX):
        for result, (_, dtype) in specs.items():
            check_npy(result, dtype)
    if is_folder:
        return _folder_output(name, specs)
    if name.endswith(NPY_SUFFIX) and len(specs) != 1:
        raise ValueError(
            f"{name} can have one result, and there are {', '.join(specs)}: name a "
            f"folder of {NPY_SUFFIX} files, {name.removesuffix(NPY_SUFFIX)}/, or a "
            "safetensors file"
        )
    if Path(name).suffix not in ("", ".safetensors", NPY_SUFFIX):
        raise ValueError(
            f"the output {name} ends in {Path(name).suffix}: it must be a safetensors "
            f"file (.safetensors, or no suffix), a {NPY_SUFFIX} file, or a folder of "
            "them (NAME/)"
        )
    return Output(name, {writing.check_target(name): specs}, metadata)


def _folder_output(name: str, specs: TensorSpecs) -> Output:
    """Return a .npy file for each result, in a folder.

    Raises:
        OSError: a file cannot be written there. Nothing has been changed.
    """
    exists = Path(name).exists()
    folder = Path(os.path.realpath(name))
    if exists and not folder.is_dir():
        raise NotADirectoryError(f"{name} cannot be written: {folder} is no folder")
    if not exists:
        writing.check_target(folder)
    files: dict[Path, TensorSpecs] = {}
    for result, spec in specs.items():
        path = folder / f"{result}{NPY_SUFFIX}"
        files[writing.check_target(path) if exists else path] = {result: spec}
    return Output(name, files)
