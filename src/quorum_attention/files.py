"""Tensors in safetensors files, mapped instead of read.

The mappings are shared: they do not count against a process's data-size limit, and the system pages
them in and out, so inputs and outputs may be larger than memory. (The safetensors library maps
privately for torch, which counts; it checks the headers here.) Format:
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from typing import Any, BinaryIO

import numpy as np
import torch

from quorum_attention.writing import open_regular, reserve

Path_ = str | PathLike[str]
Wanted = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_ALIGNMENT = 64
_MOST_DIMS = 64
_CUT_OFF = ("IncompleteBuffer", "not fully covered")  # how the library says it


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file: bytes ``start`` to ``stop`` after the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def open_tensors(path: Path_, *, writable: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file by name, mapped: nothing is read yet.

    With ``writable``, writes to the tensors go to the file. Without it, a write to one of them
    crashes the process (torch cannot know that they are read-only).

    Raises:
        OSError: the file cannot be opened, or is no regular file.
        ValueError: it is not a safetensors file, ends too early, or its header breaks the format;
            says what is wrong.
    """
    with open_regular(path, "r+b" if writable else "rb") as file:
        begin, entries = _entries(path, file)
        mode = "r+" if writable else "r"
        return {entry.name: _mapped(file, mode, begin, entry) for entry in entries}


def metadata_of(path: Path_) -> dict[str, str]:
    """The metadata in the header of a safetensors file, texts by name.

    Raises:
        OSError, ValueError: as ``open_tensors``.
    """
    with open_regular(path) as file, _validated(path, file) as found:
        return found.metadata() or {}


def create_tensors(path: Path_, tensors: Wanted) -> dict[str, torch.Tensor]:
    """Create a safetensors file that others can open at once, and map its tensors for writing.

    Args:
        path: of the file, which must not exist.
        tensors: shape and dtype by name.

    Returns:
        The tensors by name, zeros; writes to them go to the file.

    Raises:
        OSError: the file exists or cannot be created, or the disk has no room for it.
        TypeError: a dtype the format does not have.
    """
    layout = laid_out(tensors, {})
    with open(path, "x+b") as file:
        try:
            reserve(file, layout.n_bytes, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise
        file.seek(0)
        file.write(layout.header)
        file.flush()
        return {e.name: _mapped(file, "r+", len(layout.header), e) for e in layout.entries}


@dataclass(frozen=True, slots=True)
class Layout:
    """The bytes of a file of tensors.

    Attributes:
        header: its first bytes; without them it cannot be loaded.
        entries: where each tensor is after them.
    """

    header: bytes
    entries: tuple[Entry, ...]

    @property
    def n_bytes(self) -> int:
        """Of the whole file."""
        return len(self.header) + max((entry.stop for entry in self.entries), default=0)

    def tensors(self, mapping: mmap.mmap) -> dict[str, torch.Tensor]:
        """The tensors of a file that is mapped whole, by name: writes to them go to the file."""
        found = {}
        for entry in self.entries:
            begin, n_bytes = len(self.header) + entry.start, entry.stop - entry.start
            raw = np.frombuffer(mapping, np.uint8, n_bytes, begin) if n_bytes else None
            found[entry.name] = as_tensor(raw, begin, entry)
        return found


def laid_out(tensors: Wanted, metadata: Mapping[str, str]) -> Layout:
    """A safetensors file of these tensors.

    Raises:
        TypeError: a dtype the format does not have.
    """
    header: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    entries = []
    end = 0
    # The widest dtype first: then every tensor begins at a multiple of its element size.
    for name, (shape, dtype) in sorted(tensors.items(), key=lambda item: -item[1][1].itemsize):
        if dtype not in _NAMES:
            raise TypeError(f"{name} has dtype {dtype}, which a safetensors file cannot hold here")
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        entries.append(Entry(name, dtype, tuple(shape), start, end))
    text = json.dumps(header).encode()
    # The format allows spaces after the header; they put the data on an aligned address.
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return Layout(len(text).to_bytes(8, "little") + text, tuple(entries))


@contextmanager
def _validated(path: Path_, file: BinaryIO) -> Iterator[Any]:
    """An open safetensors file as the safetensors library has it, which checks the header.

    Raises:
        ValueError: the header breaks the format.
    """
    from safetensors import SafetensorError, safe_open

    try:
        # By its descriptor: at ``path`` may be another file by now.
        found = safe_open(f"/proc/self/fd/{file.fileno()}", "numpy")
    except SafetensorError as error:
        said = str(error).removeprefix("Error while deserializing header: ")
        if any(words in said for words in _CUT_OFF):
            said += " (it is truncated, or has bytes of no tensor)"
        raise ValueError(f"{path} is not a safetensors file: {said}") from error
    with found:
        yield found


def _entries(path: Path_, file: BinaryIO) -> tuple[int, list[Entry]]:
    """Where the data of an open file begin, and its tensors.

    Raises:
        ValueError: the header breaks the format, or has a tensor that torch cannot have.
    """
    with _validated(path, file):
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_without_repeats)
        except ValueError as error:
            raise ValueError(f"{path} is corrupt: its header has {error}") from error
    header.pop(_METADATA, None)
    return 8 + length, [_entry(path, name, described) for name, described in header.items()]


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. The format forbids a name that is there twice; the library takes the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name, times = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{name!r} {times} times")
    return found


def _entry(path: Path_, name: str, described: dict[str, Any]) -> Entry:
    """The tensor ``name`` from its part of a header, in which the library found no fault."""
    dtype, shape = described["dtype"], described["shape"]
    if dtype not in _DTYPES:
        raise ValueError(
            f"{path}: {name} has dtype {dtype!r}, which is not supported; it must be one of "
            f"{', '.join(_DTYPES)}"
        )
    if not holds(shape):
        shown = shape if len(shape) <= _MOST_DIMS else f"of {len(shape)} dimensions"
        raise ValueError(f"{path}: {name} has shape {shown}: more than a tensor can have")
    return Entry(name, _DTYPES[dtype], tuple(shape), *described["data_offsets"])


def holds(shape: Sequence[int]) -> bool:
    """Whether there can be a tensor of a shape, which may have a size of 0."""
    return (
        len(shape) <= _MOST_DIMS and math.prod(max(1, size) for size in shape) < 1 << 60
    )  # 63 bits of bytes


def _mapped(file: BinaryIO, mode: str, begin: int, entry: Entry) -> torch.Tensor:
    """A tensor, mapped from an open file whose data begin at byte ``begin``."""
    start, n_bytes = begin + entry.start, entry.stop - entry.start
    if n_bytes == 0:
        return as_tensor(None, start, entry)
    if mode != "r" and start % entry.dtype.itemsize:
        raise ValueError(
            f"{file.name}: {entry.name} is not aligned, so it cannot be written in place"
        )
    array = np.memmap(file, dtype=np.uint8, mode=mode, offset=start, shape=(n_bytes,))  # type: ignore[call-overload]
    return as_tensor(array, start, entry)


def as_tensor(raw: Any, start: int, entry: Entry) -> torch.Tensor:
    """The tensor of the mapped bytes ``raw``, which begin at byte ``start`` of a file."""
    if raw is None:
        return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(raw)
    if start % entry.dtype.itemsize:
        # Files of other writers need not be aligned, and torch refuses such a view: copied.
        flat = flat.clone()
    return flat.view(entry.dtype).view(entry.shape)
