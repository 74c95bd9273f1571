"""Memory in a file that has no name: what it holds may be larger than the host's memory."""

from __future__ import annotations

import math
import mmap
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from quorum_attention.writing import reserve

_ALIGNMENT = 4096
Shapes = Sequence[tuple[int, ...]]


class Scratch:
    """Tensors in a mapped file, which the system writes to the disk and reads back as it likes."""

    def __init__(self, mapping: mmap.mmap | None) -> None:
        self._mapping = mapping

    def tensors(self, shapes: Shapes, dtype: torch.dtype) -> list[torch.Tensor]:
        """Tensors one after the other, from the file's start; their content is undefined."""
        found, begin = [], 0
        for shape in shapes:
            n_bytes = math.prod(shape) * dtype.itemsize
            if self._mapping is None or not n_bytes:
                found.append(torch.empty(shape, dtype=dtype, device="cpu"))
                continue
            raw = np.frombuffer(self._mapping, np.uint8, n_bytes, begin)
            found.append(torch.from_numpy(raw).view(dtype).view(shape))
            begin += bytes_of([shape], dtype)
        return found


def bytes_of(shapes: Shapes, dtype: torch.dtype) -> int:
    """Bytes that such tensors take there."""
    sizes = (math.prod(shape) * dtype.itemsize for shape in shapes)
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


@contextmanager
def scratch(folder: Path, n_bytes: int) -> Iterator[Scratch]:
    """Scratch space in ``folder``, which is free again at the end, or when the process is killed.

    Raises:
        OSError: the disk has no room for it.
    """
    if not n_bytes:
        yield Scratch(None)
        return
    with tempfile.TemporaryFile(dir=folder) as file:
        reserve(file, n_bytes, f"{folder}: space for accumulators")
        yield Scratch(mmap.mmap(file.fileno(), n_bytes))


__all__ = ["Scratch", "bytes_of", "scratch"]
