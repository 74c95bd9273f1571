"""Tensors in safetensors files, mapped instead of read.

The mappings are shared: they do not count against a process's data-size limit, and the system pages
them in and out, so inputs and outputs may be larger than memory. (The safetensors library maps
privately, which counts.) Format:
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quorum_attention.writing import replacing, reserve

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
_LARGEST_HEADER = 100 << 20  # the format's own limit


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
        OSError: the file cannot be opened.
        ValueError: it is not a safetensors file, ends too early, or its header breaks the format;
            says what is wrong, and with which tensor.
    """
    size = Path(path).stat().st_size
    with open(path, "rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or not 2 <= length <= min(_LARGEST_HEADER, size - 8):
            raise ValueError(f"{path} is not a safetensors file: it has no header")
        text = file.read(length)
    entries = _entries(path, text, size - 8 - length)
    mode = "r+" if writable else "r"
    return {entry.name: _mapped(path, mode, 8 + length, entry) for entry in entries}


def metadata_of(path: Path_) -> dict[str, str]:
    """The metadata in the header of a safetensors file, of which ``open_tensors`` found no fault:
    texts by name."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        found = json.loads(file.read(length)).get(_METADATA) or {}
    return {str(name): str(value) for name, value in found.items()}


def create_tensors(path: Path_, tensors: Wanted) -> dict[str, torch.Tensor]:
    """Create a safetensors file that others can open at once, and map its tensors for writing.

    Not for results, which must not be seen unfinished: those are for ``writing_tensors``.

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
    return {e.name: _mapped(path, "r+", len(layout.header), e) for e in layout.entries}


@contextmanager
def writing_tensors(
    path: Path_, tensors: Wanted, metadata: Mapping[str, str]
) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of a new safetensors file, which replaces ``path`` when it is complete.

    Until the ``with`` block ends without an exception, the file at ``path`` is as it was. The new
    one has another name and no header, so half a result cannot be loaded. The disk must have room
    for both files.

    Args:
        path: of the file; replaced at the end if it exists (see ``writing.replacing``).
        tensors: shape and dtype by name.
        metadata: text by name, for the header; ``complete`` = ``true`` is added.

    Yields:
        The tensors by name, zeros, mapped: writes to them go to the file.

    Raises:
        OSError: the file cannot be written, or the disk has no room for it.
        TypeError: a dtype the format does not have.
    """
    layout = laid_out(tensors, {**metadata, "complete": "true"})
    with replacing(path) as file:
        reserve(file, layout.n_bytes, path)
        mapping = mmap.mmap(file.fileno(), layout.n_bytes)
        yield layout.tensors(mapping)
        mapping.flush()
        os.fsync(file.fileno())
        file.seek(0)
        file.write(layout.header)


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


class _RepeatedNameError(ValueError):
    """A name that occurs twice in a JSON object."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedNameError(next(name for name in names if names.count(name) > 1))
    return found


def _entries(path: Path_, text: bytes, n_bytes: int) -> list[Entry]:
    """The tensors of a header, in its order, checked as the safetensors library checks them.

    Args:
        text: the header.
        n_bytes: how many bytes of data follow it.

    Raises:
        ValueError: the header breaks the format.
    """
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_repeats)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a safetensors file: its header is not UTF-8") from error
    except _RepeatedNameError as error:
        raise ValueError(f"{path} is corrupt: its header has {error.args[0]!r} twice") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a safetensors file: its header is no JSON") from error
    if not isinstance(header, dict):
        raise ValueError(
            f"{path} is not a safetensors file: its header is a {type(header).__name__}, not an "
            f"object of tensors by name"
        )
    metadata = header.pop(_METADATA, None)
    if metadata is not None and not isinstance(metadata, dict):
        raise ValueError(f"{path} is corrupt: its {_METADATA} is no object")
    entries = [_entry(path, name, found) for name, found in header.items()]
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.stop > n_bytes:
            raise ValueError(
                f"{path} is truncated: {entry.name} ends at byte {entry.stop} of {n_bytes} of data"
            )
        if entry.start != end:
            wrong = "overlaps the tensor before it" if entry.start < end else "leaves a gap"
            raise ValueError(
                f"{path} is corrupt: {entry.name} {wrong}: it begins at byte {entry.start} of the "
                f"data, and {end} is the next"
            )
        end = entry.stop
    if end != n_bytes:
        raise ValueError(f"{path} is corrupt: its tensors end at byte {end} of {n_bytes} of data")
    return entries


def _entry(path: Path_, name: str, found: Any) -> Entry:
    """The tensor ``name`` from its part of a header, ``found``."""
    wrong = f"{path} is corrupt: {name}"
    if not isinstance(found, dict):
        raise ValueError(f"{wrong} is described by a {type(found).__name__}, not by an object")
    missing = [key for key in ("dtype", "shape", "data_offsets") if key not in found]
    if missing:
        raise ValueError(f"{wrong} has no {missing[0]}")
    shape, offsets = found["shape"], found["data_offsets"]
    if not isinstance(found["dtype"], str) or found["dtype"] not in _DTYPES:
        raise ValueError(
            f"{path}: {name} has dtype {found['dtype']!r}, which is not supported; it must be one "
            f"of {', '.join(_DTYPES)}"
        )
    if not _are_sizes(shape):
        raise ValueError(f"{wrong} has shape {shape!r}, which must be numbers of at least 0")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(
            f"{wrong} has data_offsets {offsets!r}, which must be its first byte and its end"
        )
    dtype = _DTYPES[found["dtype"]]
    if not holds(shape):
        raise ValueError(f"{wrong} has shape {shape}: more than a tensor can have")
    needed = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != needed:
        raise ValueError(
            f"{wrong} has shape {shape} of {found['dtype']}, {needed} bytes, but data_offsets "
            f"{offsets} are {offsets[1] - offsets[0]} bytes apart"
        )
    return Entry(name, dtype, tuple(shape), *offsets)


def holds(shape: Iterable[int]) -> bool:
    """Whether there can be a tensor of a shape, which may have a size of 0."""
    return math.prod(max(1, size) for size in shape) < 1 << 60  # 63 bits of bytes


def _are_sizes(found: Any) -> bool:
    return isinstance(found, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in found
    )


def _mapped(path: Path_, mode: str, begin: int, entry: Entry) -> torch.Tensor:
    """A tensor, mapped from a file whose data begin at byte ``begin``."""
    start, n_bytes = begin + entry.start, entry.stop - entry.start
    if n_bytes == 0:
        return as_tensor(None, start, entry)
    if mode != "r" and start % entry.dtype.itemsize:
        raise ValueError(f"{path}: {entry.name} is not aligned, so it cannot be written in place")
    array = np.memmap(path, dtype=np.uint8, mode=mode, offset=start, shape=(n_bytes,))  # type: ignore[call-overload]
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
