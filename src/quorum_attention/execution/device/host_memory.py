"""Host memory as the system sees it: addresses, pages, page locks, and which files are
mapped."""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

import torch

PAGE_BYTES = 4096
# The size of a huge page of Linux on x86-64. Elsewhere asking for huge pages may do
# nothing.
HUGE_PAGE_BYTES = 2 << 20
_TABLE_OF_MAPPINGS = "/proc/self/maps"


def address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses [start, stop) that ``tensor`` spans."""
    last_element = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last_element += (size - 1) * stride
    start = tensor.data_ptr()
    n_bytes = (last_element + 1) * tensor.element_size()
    return start, start + n_bytes


def is_locked(tensor: torch.Tensor) -> bool:
    """Whether a host tensor is page-locked at both ends.

    torch's ``is_pinned`` asks about the first byte of the storage, which need not be
    the tensor's: of memory that several processes share, each locks its own part.
    """
    if not tensor.nbytes:
        return bool(tensor.is_pinned())
    start, stop = address_range(tensor)
    return _is_byte_locked(start) and _is_byte_locked(stop - 1)


def _is_byte_locked(address: int) -> bool:
    """Whether the byte at ``address`` is page-locked."""
    byte = (ctypes.c_char * 1).from_address(address)
    return torch.frombuffer(byte, dtype=torch.uint8).is_pinned()


class MappedRange(NamedTuple):
    """A run of addresses that are mapped alike.

    Attributes:
        start, stop: first address, and the one after the last.
        writable: whether it may be written.
        shared: whether writes go to the file.
        file: device and inode of the mapped file; None where there is none.
        offset: position of ``start`` in the file, in bytes.
        path: of the file, as it was called when it was mapped; None where there is
            none.
    """

    start: int
    stop: int
    writable: bool
    shared: bool
    file: tuple[str, int] | None
    offset: int
    path: str | None = None


def mapped_ranges() -> list[MappedRange]:
    """All mappings of this process, by ascending address."""
    with open(_TABLE_OF_MAPPINGS, encoding="utf-8", errors="replace") as lines:
        return [_parse_mapping(line) for line in lines]


def _parse_mapping(line: str) -> MappedRange:
    """The mapping that a line of Linux's table describes."""
    addresses, permissions, offset, device, inode, *rest = line.split(maxsplit=5)
    start, stop = addresses.split("-")
    path = "".join(rest).strip()
    # Mappings of device nodes are a driver's memory: their offsets are no positions in
    # a file.
    is_device_node = path.startswith("/dev/") and not path.startswith("/dev/shm/")
    has_path = path.startswith("/") and not is_device_node
    is_file = has_path and inode != "0"
    return MappedRange(
        start=int(start, 16),
        stop=int(stop, 16),
        writable=permissions[1] == "w",
        shared=permissions[3] == "s",
        file=(device, int(inode)) if is_file else None,
        offset=int(offset, 16),
        path=path if is_file else None,
    )


def touch(start: int, n_bytes: int) -> None:
    """Write zeros to ``n_bytes`` from address ``start`` on, with as many threads as
    torch has.

    (Four of Python's threads made short calls slower.)
    """
    memory = (ctypes.c_char * n_bytes).from_address(start)
    torch.frombuffer(memory, dtype=torch.uint8).zero_()


def bytes_of_host(share: float) -> int:
    """Bytes of a share of the host's memory."""
    n_pages = os.sysconf("SC_PHYS_PAGES")
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return int(n_pages * page_bytes * share)
