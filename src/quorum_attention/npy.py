"""Tensors in NumPy's .npy files, mapped instead of read.

Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.
"""

from __future__ import annotations

import io
import math
import os
from contextlib import suppress
from os import PathLike
from typing import Any, BinaryIO

import numpy as np
import torch

from quorum_attention.files import Entry, Layout, as_tensor, holds
from quorum_attention.writing import open_regular

SUFFIX = ".npy"
# It has no types.
npy: Any = np.lib.format
_MAGIC = b"\x93NUMPY"
_DTYPES = {
    np.dtype(name): getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32",
        "uint16", "uint8", "bool", "complex64",
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def is_npy(path: str | PathLike[str]) -> bool:
    """Whether a file is called as .npy files are, or begins as they do."""
    if os.fspath(path).endswith(SUFFIX):
        return True
    with suppress(FileNotFoundError), open_regular(path) as file:
        return file.read(len(_MAGIC)) == _MAGIC
    return False


def open_npy(path: str | PathLike[str]) -> torch.Tensor:
    """The tensor of a .npy file, mapped: nothing is read yet. A write to it crashes the process.

    Raises:
        OSError: the file cannot be opened, or is no regular file.
        ValueError: it is not a .npy file, is damaged or ends too early; or its elements are none
            that a tensor can have (.npy files know no bfloat16).
    """
    with open_regular(path) as file:
        return _mapped(path, file)


def _mapped(path: str | PathLike[str], file: BinaryIO) -> torch.Tensor:
    size = os.fstat(file.fileno()).st_size
    shape, by_columns, dtype = _header(path, file)
    begin = file.tell()
    if dtype not in _DTYPES:
        bf16 = dtype.kind == "V" and dtype.itemsize == 2
        hint = " (bfloat16, maybe, which .npy files do not know: use safetensors)" if bf16 else ""
        raise ValueError(
            f"{path} has elements of {dtype.str!r}{hint}; they must be one of "
            f"{', '.join(str(known) for known in _DTYPES)}, of this machine's byte order"
        )
    n_bytes = math.prod(shape) * dtype.itemsize
    if size - begin != n_bytes:
        wrong = "truncated" if size - begin < n_bytes else "corrupt"
        raise ValueError(
            f"{path} is {wrong}: shape {shape} of {dtype} is {n_bytes} bytes, and it has "
            f"{size - begin} of data"
        )
    raw = np.memmap(file, np.uint8, "r", begin, (n_bytes,)) if n_bytes else None
    lies = shape[::-1] if by_columns else shape
    found = as_tensor(raw, begin, Entry("", _DTYPES[dtype], lies, 0, n_bytes))
    return found.permute(*reversed(range(len(shape)))) if by_columns else found


def _header(
    path: str | PathLike[str], file: BinaryIO
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether the first index is the quickest, and dtype."""
    try:
        version = npy.read_magic(file)
        if version == (1, 0):
            shape, by_columns, dtype = npy.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, by_columns, dtype = npy.read_array_header_2_0(file)
        else:
            raise ValueError(f"version {version} of the format is not known here")
    except Exception as error:
        raise ValueError(f"{path} is not a .npy file: {_first_line(error)}") from error
    # NumPy's reader takes truths for numbers.
    if any(type(n) is not int or n < 0 for n in shape) or (0 in shape and not holds(shape)):
        raise ValueError(f"{path} is corrupt: it has shape {shape}")
    return shape, bool(by_columns), dtype


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def laid_out_npy(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
    """A .npy file of one tensor.

    Args:
        name: of the tensor, for messages.

    Raises:
        TypeError: a dtype the format does not have.
    """
    if dtype not in _NAMES:
        raise TypeError(
            f"{name} has dtype {str(dtype).removeprefix('torch.')}, which .npy files do not know: "
            f"write safetensors, or give another --out-dtype"
        )
    text = io.BytesIO()
    described = {
        "descr": npy.dtype_to_descr(_NAMES[dtype]), "fortran_order": False, "shape": tuple(shape),
    }  # fmt: skip
    npy.write_array_header_1_0(text, described)
    n_bytes = math.prod(shape) * dtype.itemsize
    return Layout(text.getvalue(), (Entry(name, dtype, tuple(shape), 0, n_bytes),))


__all__ = ["SUFFIX", "is_npy", "laid_out_npy", "open_npy"]
