"""Handles of tensors that lie in a file or in shared memory: other processes map them
by these."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quorum_attention.call.overlap import Mappings


class FileId(NamedTuple):
    """Which file a path or a descriptor leads to.

    Attributes:
        machine: the name of the machine.
        device, inode: the numbers that this machine has for the file's device and for
            the file.
    """

    machine: str
    device: int
    inode: int

    def is_same_file(self, other_id: FileId) -> bool:
        """Return whether both are one file, also where two machines have mounted it."""
        if self == other_id:
            return True
        # Each machine numbers devices itself, also the device of a network file system.
        return self.machine != other_id.machine and self.inode == other_id.inode


_NO_FILE = FileId("", 0, 0)


def file_id(file: int | str) -> FileId:
    """Return which file a descriptor or a path leads to.

    Raises:
        OSError: there is none.
    """
    status = os.stat(file)
    return FileId(os.uname().nodename, status.st_dev, status.st_ino)


def file_id_at(path: str) -> FileId:
    """Return which file a path leads to; an id that no file has if there is none."""
    try:
        return file_id(path)
    except OSError:
        return _NO_FILE


@dataclass(frozen=True, slots=True)
class TensorHandle:
    """A tensor in a file; each process maps the file for itself.

    Attributes:
        path: the path of the file.
        offset: the position of the tensor's first byte in the file.
        shape: the tensor's shape.
        strides: the tensor's strides, in elements.
        dtype: the tensor's dtype.
        writable: whether processes write to it.
        file: which file it is. By now the path may lead to another one.
    """

    path: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    writable: bool
    file: FileId

    @classmethod
    def from_tensor(
        cls, tensor: torch.Tensor, path: str, offset: int, writable: bool, file: FileId
    ) -> TensorHandle:
        """Return the handle of a tensor that begins at a byte of a file."""
        shape = tuple(tensor.shape)
        return cls(
            path,
            offset,
            shape,
            tensor.stride(),
            tensor.dtype,
            writable,
            file,
        )

    @property
    def is_shared_memory(self) -> bool:
        """Whether the file is shared memory of another process."""
        return self.path.startswith("/proc/")

    def open(self) -> torch.Tensor:
        """Map the tensor: for reading only, unless it is writable.

        Raises:
            OSError: there is no memory for it, or another file is there by now.
        """
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        flags = os.O_RDWR if self.writable else os.O_RDONLY
        access = mmap.ACCESS_WRITE if self.writable else mmap.ACCESS_READ
        with self.opened_file(flags) as file:
            memory = mmap.mmap(file, 0, access=access)
        return self.tensor_in(memory)

    def tensor_in(self, memory: mmap.mmap) -> torch.Tensor:
        """Return the tensor, a view of a mapping of the whole file."""
        sizes = zip(self.shape, self.strides, strict=True)
        last_element = sum((size - 1) * stride for size, stride in sizes)
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="The given buffer is not writable"
            )
            flat: torch.Tensor = torch.frombuffer(
                memory, dtype=self.dtype, count=last_element + 1, offset=self.offset
            )
        return flat.as_strided(self.shape, self.strides)

    @contextmanager
    def opened_file(self, flags: int) -> Iterator[int]:
        """Open the file, and yield its descriptor.

        Raises:
            OSError: it cannot be opened, or another file is there by now.
        """
        file = os.open(self.path, flags | os.O_NONBLOCK)  # a pipe is not waited for
        try:
            if not self.file.is_same_file(file_id(file)):
                raise OSError(
                    f"{self.path} is another file than the one that was opened before"
                )
            yield file
        finally:
            os.close(file)


Handles = Mapping[str, TensorHandle]
"""Handles by the names of tensors."""


def handle_in_open_file(tensor: torch.Tensor, file: int, offset: int) -> TensorHandle:
    """Return the handle of a tensor in a file that this process has open.

    Args:
        file: the descriptor of the file.
        offset: the position of the tensor's first byte in the file.
    """
    path = f"/proc/{os.getpid()}/fd/{file}"
    return TensorHandle.from_tensor(
        tensor,
        path,
        offset,
        True,
        file_id(file),
    )


def handle_in_mapped_file(
    tensor: torch.Tensor, mappings: Mappings, writable: bool
) -> TensorHandle | None:
    """Return the handle of a tensor that is mapped from a named file.

    Returns:
        None if other processes cannot open the file, or would not see the same bytes in
        it.
    """
    position = mappings.position_in_file(tensor)
    if position is None:
        return None
    mapped, offset = position
    # A private mapping that was written to differs from its file.
    if mapped.path is None or not mapped.shared:
        return None
    if writable and not mapped.writable:
        return None
    # A file of that name may be another one by now.
    file = file_id_at(mapped.path)
    device = f"{os.major(file.device):02x}:{os.minor(file.device):02x}"
    if (device, file.inode) != mapped.file:
        return None
    return TensorHandle.from_tensor(
        tensor,
        mapped.path,
        offset,
        writable,
        file,
    )
