"""Whether a tensor's memory may be written, and whether it is mapped from a file.

A tensor does not know that its memory is a read-only map (writing to it ends the process), nor that
another tensor maps the same bytes of a file at another address. On Linux the table of this
process's mappings tells; on other systems nothing is known.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch

from quorum_attention.execution.device.lookup import on_host

_TABLE = "/proc/self/maps"


@dataclass(frozen=True, slots=True)
class Mapping:
    """A run of addresses that are mapped alike.

    Attributes:
        start, stop: first address, and the one after the last.
        writable: whether it may be written.
        shared: whether writes go to the file.
        file: device and inode of the mapped file; None where there is none.
        offset: position of ``start`` in the file, in bytes.
        path: of the file, as it was called when it was mapped; None where there is none.
    """

    start: int
    stop: int
    writable: bool
    shared: bool
    file: tuple[str, int] | None
    offset: int
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Mappings:
    """All mappings of this process, by ascending address."""

    every: tuple[Mapping, ...]

    @classmethod
    def now(cls) -> Mappings:
        """Read from the system's table; empty where there is no such table."""
        try:
            with open(_TABLE, encoding="utf-8", errors="replace") as lines:
                return cls(tuple(_parsed(line) for line in lines))
        except OSError:
            return cls(())

    def of(self, tensor: torch.Tensor) -> tuple[Mapping, ...]:
        """The mappings that a tensor in host memory spans."""
        if not on_host(tensor.device) or tensor.numel() == 0:
            return ()
        start = tensor.data_ptr()
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        last = start + sum((n - 1) * s for n, s in sizes) * tensor.element_size()
        first = bisect_right(self.every, start, key=lambda m: m.start) - 1
        after = bisect_right(self.every, last, key=lambda m: m.start)
        return tuple(m for m in self.every[max(0, first) : after] if m.stop > start)

    def read_only(self, tensor: torch.Tensor) -> bool:
        """Whether writing to ``tensor`` would end the process."""
        return any(not m.writable for m in self.of(tensor))

    def in_file(self, tensor: torch.Tensor) -> tuple[Mapping, int] | None:
        """The file mapping that ``tensor`` begins in, and its first byte's position in the file;
        None where it begins in no file."""
        found = self.of(tensor)
        if not found or found[0].file is None:
            return None
        return found[0], tensor.data_ptr() - found[0].start + found[0].offset


def _parsed(line: str) -> Mapping:
    fields = line.split(maxsplit=5)
    start, stop = (int(part, 16) for part in fields[0].split("-"))
    path = fields[5].strip() if len(fields) > 5 else ""
    # Mappings of device nodes are a driver's memory: their offsets are no positions in a file.
    device_node = path.startswith("/dev/") and not path.startswith("/dev/shm/")
    is_file = path.startswith("/") and not device_node and fields[4] != "0"
    return Mapping(
        start=start,
        stop=stop,
        writable=fields[1][1] == "w",
        shared=fields[1][3] == "s",
        file=(fields[3], int(fields[4])) if is_file else None,
        offset=int(fields[2], 16),
        path=path if is_file else None,
    )
