"""Tensors in safetensors and .npy files, mapped instead of read.

The mappings are shared: they do not count against a process's data-size limit, and the
system pages them in and out, so inputs and outputs may be larger than memory. The
libraries of the formats check the headers (safetensors' own mappings are private, which
counts).

A format is opened in ``inputs.py``, named in ``output.py``, and created and resumed in
``run_folder.py``.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from os import PathLike
from typing import Any, BinaryIO

import numpy as np
import torch

from quorum_attention.call.validation import as_tensor
from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.writing import open_regular, reserve_space, with_file_name

Path_ = str | PathLike[str]
TensorSpecs = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of tensors, by name."""

NPY_SUFFIX = ".npy"
npy: Any = np.lib.format  # it has no types


def _numpy_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
_NUMPY_NAMES = [name for name in map(_numpy_name, _NAMES) if name in np.sctypeDict]
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_ALIGNMENT = 64
_LARGEST_SIZE = 2**63 - 1


def open_tensors(path: Path_, *, writable: bool = False) -> NamedTensors:
    """The tensors of a safetensors file by name, mapped: nothing is read yet.

    With ``writable``, writes to the tensors go to the file. Without it, a write to one
    of them crashes the process (torch cannot know that they are read-only).

    Raises:
        OSError: the file cannot be opened, or is no regular file.
        ValueError: its header breaks the format, or has a tensor that torch cannot
            have.
    """
    with open_regular(path, "r+b" if writable else "rb") as file:
        _metadata(path, file)  # checks the header
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        mapping = mmap.mmap(file.fileno(), 0, access=access)
    header.pop(_METADATA, None)
    tensors: NamedTensors = {}
    for name, entry in header.items():
        label = f"{path}: {name}"
        dtype = _dtype_of(label, entry)
        shape = entry["shape"]
        _check_sizes(label, shape)
        n_bytes = math.prod(shape) * dtype.itemsize
        if not n_bytes:
            tensors[name] = torch.empty(shape, dtype=dtype, device="cpu")
            continue
        start = _LENGTH_BYTES + length + entry["data_offsets"][0]
        flat = as_tensor(np.frombuffer(mapping, np.uint8, n_bytes, start), name)
        if start % dtype.itemsize:
            if writable:
                raise ValueError(
                    f"{label} is not aligned, so it cannot be written in place"
                )
            flat = flat.clone()  # other programs write such files
        tensors[name] = flat.view(dtype).view(shape)
    return tensors


def _dtype_of(label: str, entry: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of a tensor in a header.

    Raises:
        ValueError: torch does not have it.
    """
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(
            f"{label} has dtype {entry['dtype']!r}, which is not supported; it must "
            f"be one of {', '.join(_DTYPES)}"
        )
    return dtype


def _check_sizes(label: str, shape: Sequence[int]) -> None:
    """Refuse sizes that no tensor of torch has, though a zero beside them leaves no
    elements.

    Raises:
        ValueError: a size, or the product of those that are not zero, has more than 63
            bits.
    """
    if math.prod(size for size in shape if size) > _LARGEST_SIZE:
        raise ValueError(
            f"{label} has shape {list(shape)}; the product of sizes must be at most "
            f"{_LARGEST_SIZE}"
        )


def metadata_of(path: Path_) -> dict[str, str]:
    """The metadata in the header of a safetensors file, texts by name.

    Raises:
        OSError, ValueError: as ``open_tensors``.
    """
    with open_regular(path) as file:
        return _metadata(path, file)


def _metadata(path: Path_, file: BinaryIO) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    try:
        # By its descriptor: at ``path`` may be another file by now.
        with safe_open(f"/proc/self/fd/{file.fileno()}", "numpy") as opened:
            return dict(opened.metadata() or {})
    except SafetensorError as error:
        if zipfile.is_zipfile(file):
            reason = "is a file of torch.save: write it by safetensors.torch.save_file"
        else:
            reason = f"is not a safetensors file, or is truncated: {error}"
        raise ValueError(f"{path} {reason}") from error


def create_tensors(
    path: Path_, tensors: TensorSpecs, metadata: Mapping[str, str] | None = None
) -> NamedTensors:
    """Create a safetensors file, which must not exist and can be opened at once.

    Returns:
        The tensors by name, mapped, zeros; writes to them go to the file.

    Raises:
        OSError: the file exists or cannot be created, or the disk has no room for it.
        TypeError: a dtype the format does not have.
    """
    header: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    start = 0
    # The widest dtype first: then every tensor begins at a multiple of its element
    # size.
    names = sorted(tensors, key=lambda name: -tensors[name][1].itemsize)
    for name in names:
        shape, dtype = tensors[name]
        if dtype not in _NAMES:
            raise TypeError(
                f"{name} has dtype {dtype}, which a safetensors file cannot hold here"
            )
        stop = start + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header).encode()
    # The format allows spaces after the header; they put the data on an aligned
    # address.
    n_spaces = -(_LENGTH_BYTES + len(text)) % _ALIGNMENT
    text += b" " * n_spaces
    _create(
        path,
        len(text).to_bytes(_LENGTH_BYTES, "little") + text,
        start,
    )
    return open_tensors(path, writable=True)


def _create(path: Path_, header: bytes, n_bytes: int) -> None:
    """Create a file of a header and ``n_bytes`` zeros, whose space on the disk is
    reserved."""
    with open(path, "x+b") as file:
        try:
            reserve_space(file, len(header) + n_bytes, path)
        except BaseException as error:
            with suppress(OSError):
                os.unlink(path)
            with_file_name(error, path)
            raise
        file.write(header)


def open_npy(path: Path_, *, writable: bool = False) -> torch.Tensor:
    """The tensor of a .npy file, mapped: nothing is read yet. Without ``writable`` a
    write to it crashes the process.

    Raises:
        OSError: the file cannot be opened, or is no regular file.
        ValueError: it is not a .npy file, is damaged or ends too early; or its elements
            are none that a tensor can have (.npy files know no bfloat16).
    """
    with open_regular(path, "r+b" if writable else "rb") as file:
        size = os.fstat(file.fileno()).st_size
        mode = "r+" if writable else "r"
        try:
            array = npy.open_memmap(f"/proc/self/fd/{file.fileno()}", mode=mode)
        except (OSError, MemoryError):
            raise
        except Exception as error:
            raise ValueError(
                f"{path} is not a .npy file, or is truncated: {error}"
            ) from error
    if str(array.dtype) not in _NUMPY_NAMES:
        may_be_bf16 = array.dtype.kind == "V" and array.dtype.itemsize == 2
        hint = " (bfloat16, maybe, which .npy files do not know: use safetensors)"
        raise ValueError(
            f"{path} has elements of {array.dtype.str!r}{hint if may_be_bf16 else ''}; "
            f"they must be one of {', '.join(_NUMPY_NAMES)}, of this machine's byte "
            "order"
        )
    if size != array.offset + array.nbytes:
        raise ValueError(
            f"{path} is corrupt: {size - array.offset} bytes for {array.nbytes}"
        )
    return as_tensor(array, os.fspath(path))


def create_npy(path: Path_, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Create a .npy file, which must not exist.

    Returns:
        The tensor, mapped, zeros; writes to it go to the file.

    Raises:
        OSError: as ``create_tensors``.
    """
    empty_array = np.empty(0, _numpy_name(dtype))
    fields = npy.header_data_from_array_1_0(empty_array)
    fields["shape"] = tuple(shape)
    header = io.BytesIO()
    npy.write_array_header_1_0(header, fields)
    n_bytes = math.prod(shape) * dtype.itemsize
    _create(path, header.getvalue(), n_bytes)
    return open_npy(path, writable=True)


def check_npy(name: str, dtype: torch.dtype) -> None:
    """Refuse a tensor that a .npy file cannot hold.

    Raises:
        TypeError: names it.
    """
    if _numpy_name(dtype) not in _NUMPY_NAMES:
        raise TypeError(
            f"{name} has dtype {_numpy_name(dtype)}, which .npy files do not know: "
            "write safetensors, or give another --out-dtype"
        )
