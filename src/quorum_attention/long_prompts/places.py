"""The places that keys and values of a model may lie in, and the bytes that each has
left.

All layers of a model share one ``CachePlaces``. A layer asks it for memory; the memory
comes from the first place that has enough: the device, then page-locked host memory,
then mapped files.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import threading
import weakref
from enum import Enum
from pathlib import Path

import torch

from quorum_attention.arithmetic import round_up
from quorum_attention.errors import OutOfMemoryError, is_out_of_memory
from quorum_attention.execution.device.allocate import page_locked
from quorum_attention.execution.device.host_memory import PAGE_BYTES
from quorum_attention.execution.device.lookup import (
    HOST,
    available_device,
    backend_of,
    on_host,
)
from quorum_attention.units import format_bytes, parse_memory
from quorum_attention.writing import reserve_space

# A share of free memory that no cache takes: it is for other programs, and for
# computing.
_MARGIN = 1 / 16
# Bytes of a GPU that are set aside for copies: at most this many, and such a part of
# its limit.
_STAGING_BYTES = 256 << 20
_STAGING_SHARE = 8
# A place for fewer bytes, but for none, is a slip.
_LEAST_MEMORY = 1 << 10


class Place(Enum):
    """Where a segment lies."""

    DEVICE = "device"
    HOST = "host"
    FILE = "file"


class CachePlaces:
    """The memory that the caches of one model may take, place by place.

    On a machine without a GPU "device" is ordinary memory, and there is no other host
    memory.

    Args:
        device: where attention is computed.
        device_memory: bytes of the device that caches may take, as a number or text
            such as "16GiB"; None: what is free, less a margin. Computing needs memory
            too.
        host_memory: the same of page-locked host memory.
        folder: a folder for mapped files, which is made if it does not exist; None: no
            files. Files have no name in it, so that nothing is left when the process
            ends.

    Raises:
        TypeError, ValueError: an argument that makes no sense, by name.
        OSError: the folder cannot be made, or files cannot be made in it.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.device = available_device(device, "device")
        self._limits = {
            Place.DEVICE: _bytes_or_none(device_memory, "device_memory"),
            Place.HOST: _bytes_or_none(host_memory, "host_memory"),
        }
        if on_host(self.device):
            self._limits[Place.HOST] = 0
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._used = dict.fromkeys(Place, 0)
        self._staging_bytes = self._bytes_for_copies()
        self._lock = threading.Lock()

    def _bytes_for_copies(self) -> int:
        """The bytes of a GPU that are set aside for copies from host memory."""
        if on_host(self.device):
            return 0
        return staging_bytes(self._limits[Place.DEVICE])

    def staging_memory(self) -> torch.Tensor | None:
        """Allocate the bytes of a GPU that are set aside for copies from host memory.

        Returns:
            (n_bytes,) uint8 on the device; None where there is no GPU, or it has no
            memory left.
        """
        if self._staging_bytes == 0:
            return None
        try:
            return self._device_memory(self._staging_bytes)
        except OutOfMemoryError:
            return None

    def finish_copies(self) -> None:
        """Hold the host until tokens have reached the memory that they were appended
        to.

        Whoever reads or writes host memory by the processor calls this first.
        """
        backend_of(self.device).synchronize(self.device)

    def used(self, place: Place) -> int:
        """Return the bytes that caches have taken of a place."""
        return self._used[place]

    def remaining(self, place: Place) -> int:
        """Return the bytes that caches may still take of a place, as far as the system
        says."""
        if place is Place.FILE:
            return 0 if self.folder is None else shutil.disk_usage(self.folder).free
        limit = self._limits[place]
        if limit == 0:
            return 0
        memory = self.device if place is Place.DEVICE else HOST
        reserved = self._staging_bytes if place is Place.DEVICE else 0
        free = backend_of(memory).free_bytes(memory)
        free -= int(free * _MARGIN) + reserved
        if limit is not None:
            free = min(free, limit - self._used[place] - reserved)
        return max(0, free)

    def allocate(self, n_bytes: int, place: Place) -> torch.Tensor:
        """Take memory of one place. It counts as used until the returned tensor is
        freed.

        Returns:
            (n_bytes,) uint8, uninitialised; in host memory and files it begins at a
            page.

        Raises:
            OutOfMemoryError: the place cannot hold it.
            OSError: the file cannot be made.
        """
        if place is Place.FILE:
            memory = self._mapped_file(n_bytes)
        elif place is Place.HOST:
            memory = page_locked(n_bytes, self.device, "a segment of the cache")
        else:
            memory = self._device_memory(n_bytes)
        with self._lock:
            self._used[place] += n_bytes
        weakref.finalize(memory, self._give_back, n_bytes, place).atexit = False
        return memory

    def _give_back(self, n_bytes: int, place: Place) -> None:
        with self._lock:
            self._used[place] -= n_bytes

    def _device_memory(self, n_bytes: int) -> torch.Tensor:
        try:
            return backend_of(self.device).allocate(n_bytes, self.device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        raise OutOfMemoryError(
            f"{self.device} has no {format_bytes(n_bytes)} for the cache"
        )

    def _mapped_file(self, n_bytes: int) -> torch.Tensor:
        """(n_bytes,) uint8 in a new file without a name, whose space is reserved."""
        assert self.folder is not None
        with tempfile.TemporaryFile(dir=self.folder, prefix="segment-") as file:
            size = round_up(n_bytes, PAGE_BYTES)
            reserve_space(file, size, self.folder)
            mapping = mmap.mmap(file.fileno(), size)
        return torch.frombuffer(mapping, dtype=torch.uint8)[:n_bytes]

    def refusal(self, n_bytes: int) -> OutOfMemoryError:
        """Return the error for a request that no place can hold."""
        free = {place.value: format_bytes(self.remaining(place)) for place in Place}
        listed = ", ".join(f"{name} {text}" for name, text in free.items())
        advice = (
            "" if self.folder is not None else "; a folder= for mapped files holds more"
        )
        return OutOfMemoryError(
            f"the cache needs {format_bytes(n_bytes)} more, and no place has that: "
            f"{listed}{advice}"
        )

    def __repr__(self) -> str:
        used = (f"{place.value} {format_bytes(self._used[place])}" for place in Place)
        return f"CachePlaces({self.device}: {', '.join(used)})"


def staging_bytes(limit: int | None) -> int:
    """Return the bytes of a GPU that are set aside for copies, of those that caches may
    take; None: there is no limit."""
    if limit is None:
        return _STAGING_BYTES
    return min(_STAGING_BYTES, limit // _STAGING_SHARE)


def _bytes_or_none(value: int | str | None, name: str) -> int | None:
    if value is None:
        return None
    return parse_memory(value, name, lowest=_LEAST_MEMORY, or_zero=True)
