"""How a farm's workers get rows of inputs, and where they leave results and states."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from quorum_attention.decomposition.intervals import Interval
from quorum_attention.devices.buffers import InFile
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.writing import IDENTITY

# Of one write; the system takes 2 GiB less a page. Large tensors are written by several threads,
# because one thread fills fresh pages of a file at a fraction of what memory takes.
_PIECE_BYTES = 16 << 20
_WRITERS = 4


class Stored(Protocol):
    """A tensor (batch, heads, rows, ...) that is kept in pieces by somebody else."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""

    def rows(self, entry: int, heads: Interval, rows: Interval) -> torch.Tensor:
        """(1, heads, rows, ...), in host memory."""


Source = torch.Tensor | InFile | Stored


class Reader:
    """Rows of a tensor (batch, heads, rows, ...), wherever it is. A file is mapped for reading,
    which does not count as this process's memory."""

    def __init__(self, source: Source) -> None:
        self._source = source.open("r") if isinstance(source, InFile) else source

    def __call__(self, entry: int, heads: Interval, rows: Interval) -> torch.Tensor:
        """(1, heads, rows, ...); of a file a view, nothing is read yet."""
        source = self._source
        if isinstance(source, torch.Tensor):
            return source[entry : entry + 1, heads.start : heads.stop, rows.start : rows.stop]
        return source.rows(entry, heads, rows)

    def masked(self, entry: int, heads: Interval, rows: Interval, keys: Interval) -> torch.Tensor:
        """Of a mask (batch or 1, heads or 1, n_queries or 1, n_keys or 1), what some rows of some
        heads see of some keys."""
        batch, n_heads, n_rows, n_keys = self._source.shape
        one = Interval(0, 1)
        found = self(
            entry if batch > 1 else 0, heads if n_heads > 1 else one, rows if n_rows > 1 else one
        )
        return found[..., slice(*keys)] if n_keys > 1 else found


def write_rows(
    target: InFile, entry: int, heads: Interval, rows: Interval, of: torch.Tensor
) -> None:
    """Write rows (1, heads, rows, ...) of a contiguous tensor in a file.

    By writing, not through a mapping: of a page that two machines have mapped, a network file
    system may lose what one of them wrote.

    Raises:
        RuntimeError: a file of that name is another output by now; nothing is written there.
        OSError: it cannot be written, or is another file by now.
    """
    of = of.to(target.dtype)
    itemsize = target.dtype.itemsize
    handle = target.descriptor(os.O_RDWR if target.identity else os.O_WRONLY)
    try:
        if target.identity and _identity(handle) != target.identity:
            raise RuntimeError(f"{target.path} was begun anew, or is finished: this call is over")
        for number, head in enumerate(range(*heads)):
            first = entry * target.strides[0] + head * target.strides[1]
            first += rows.start * target.strides[2]
            _write(handle, of[0, number], target.offset + first * itemsize)
    finally:
        os.close(handle)


def _identity(handle: int) -> bytes:
    return os.pread(handle, IDENTITY.stop - IDENTITY.start, IDENTITY.start)


def _write(handle: int, tensor: torch.Tensor, at: int) -> None:
    if not tensor.numel():
        return
    raw: Any = memoryview(bytes_of(moved(tensor, torch.device("cpu"))).numpy())  # type: ignore[arg-type]
    if len(raw) <= _PIECE_BYTES:
        _write_bytes(handle, raw, at)
        return
    starts = range(0, len(raw), _PIECE_BYTES)
    with ThreadPoolExecutor(_WRITERS) as threads:
        pieces = (raw[start : start + _PIECE_BYTES] for start in starts)
        places = (at + start for start in starts)
        for _ in threads.map(partial(_write_bytes, handle), pieces, places):
            pass


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in host memory, in order, (n,) uint8; a view where it can be one."""
    flat = tensor.contiguous()
    # A single element is contiguous whatever its strides are, and a view of bytes is not.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def _write_bytes(handle: int, raw: Any, at: int) -> None:
    while raw:
        count = os.pwrite(handle, raw, at)
        raw, at = raw[count:], at + count


def moved(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """A tensor on a device, or in host memory.

    Between a GPU and the host through page-locked memory: torch fills it from a mapped file with
    all its threads, keeps it for the next one, and copies several times as fast from and to it.
    """
    if tensor.device == place or tensor.numel() == 0:
        return tensor.to(place)
    if on_host(tensor.device):
        return tensor.pin_memory().to(place, non_blocking=True)
    if on_host(place):
        locked = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
        return locked.copy_(tensor)
    return tensor.to(place)


def write_state(path: str, tensors: Sequence[torch.Tensor]) -> None:
    """Write a partial state to a new file: its tensors' bytes, one after the other.

    Raises:
        OSError: it cannot be written; no file is left.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        at = 0
        for tensor in tensors:
            _write(handle, tensor, at)
            at += tensor.nbytes
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(handle)


def read_state(path: str, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Map the tensors of a state, of the shapes and dtypes of ``likes``."""
    found, at = [], 0
    for like in likes:
        strides = torch.empty(like.shape, device="meta").stride()
        one = InFile(path, at, tuple(like.shape), strides, like.dtype, False)
        found.append(one.open("r"))
        at += like.nbytes
    return found


class Piece(NamedTuple):
    """Something that a worker sends back instead of writing it.

    Attributes:
        chunk: whose state it is; None: complete rows.
        tensors: forward: (out, lse); backward: the gradients of query, key and value.
    """

    chunk: int | None
    tensors: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class Back:
    """What came back from a worker."""

    pieces: list[Piece] = field(default_factory=list)


__all__ = [
    "Back",
    "Piece",
    "Reader",
    "Source",
    "Stored",
    "bytes_of",
    "moved",
    "read_state",
    "write_rows",
    "write_state",
]
