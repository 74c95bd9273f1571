"""Tensors in safetensors files, mapped instead of read.

The mappings are shared, so they do not count against a process's data-size limit, and the system
pages them in and out as it sees fit: inputs and outputs may be larger than memory. (The
safetensors library maps privately, which counts.) Format:
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

import numpy as np
import torch

from quorum_attention.sizes import format_bytes

Path_ = str | PathLike[str]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 64
_LARGEST_HEADER = 100 << 20  # the format's own limit


def open_tensors(path: Path_, *, writable: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file by name, mapped: nothing is read yet.

    With ``writable`` what is written to them goes to the file; without, writing to one of them
    crashes the process (torch cannot know that they are read-only).

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is not a safetensors file, or ends too early.
    """
    size = Path(path).stat().st_size
    with open(path, "rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(_LARGEST_HEADER, size - 8):
            raise ValueError(f"{path} is not a safetensors file: it has no header")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path} is not a safetensors file: its header is no JSON") from error
    mode = "r+" if writable else "r"
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{path}: {name} has dtype {entry['dtype']}, which is not supported")
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        if stop > size:
            raise ValueError(f"{path} is truncated: {name} ends at byte {stop} of {size}")
        tensors[name] = _mapped(path, mode, start, tuple(entry["shape"]), _DTYPES[entry["dtype"]])
    return tensors


def create_tensors(
    path: Path_, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, torch.Tensor]:
    """Create a safetensors file and map its tensors for writing.

    Args:
        path: of the file; replaced if it exists.
        tensors: shape and dtype by name.

    Returns:
        The tensors by name, zeros; what is written to them goes to the file.

    Raises:
        OSError: the file cannot be created, or the disk has no room for it.
        TypeError: a dtype the format does not have.
    """
    header: dict[str, object] = {}
    end = 0
    for name, (shape, dtype) in tensors.items():
        if dtype not in _NAMES:
            raise TypeError(f"{name} has dtype {dtype}, which a safetensors file cannot hold here")
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    # The format allows spaces after the header; they put the data on an aligned address.
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    target = Path(path)
    free = shutil.disk_usage(target.resolve().parent).free
    if end > free:
        raise OSError(
            f"{path} takes {format_bytes(end)}, and only {format_bytes(free)} of disk are free"
        )
    with open(target, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    offset = 8 + len(text)
    mapped = {}
    for name, (shape, dtype) in tensors.items():
        mapped[name] = _mapped(path, "r+", offset, shape, dtype)
        offset += math.prod(shape) * dtype.itemsize
    return mapped


def _mapped(
    path: Path_, mode: str, start: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    array = np.memmap(path, dtype=np.uint8, mode=mode, offset=start, shape=(n_bytes,))  # type: ignore[call-overload]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        raw = torch.from_numpy(array)
    if start % dtype.itemsize:
        # Files of other writers need not be aligned; a view would be refused.
        return raw.clone().view(dtype).view(shape)
    return raw.view(dtype).view(shape)
