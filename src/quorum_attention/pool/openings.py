"""Shared memory of another process, mapped once for as long as it is of use.

Mapping a gibibyte, page after page, takes 0.1 to 0.2 s, and taking it apart a tenth of that. The
backward reads what the forward has read. So a worker keeps what its last pass had open until
another pass has had no use for it, or the other process has freed it; and a thread takes mappings
apart, beside the next pass.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from dataclasses import dataclass

import torch

from quorum_attention.pool.shared import Handle, InFile, opened

_FAILED = ctypes.c_void_p(-1).value
_File = tuple[int, int]


@dataclass(slots=True)
class _Mapping:
    memory: torch.Tensor
    path: str
    used: bool = True


class Openings:
    """The shared memory that a worker has open."""

    def __init__(self) -> None:
        self._every: dict[_File, _Mapping] = {}
        self._reaper = _Reaper()

    def __bool__(self) -> bool:
        return bool(self._every)

    def open(self, handle: Handle) -> torch.Tensor:
        """The tensor of a handle."""
        if not (isinstance(handle, InFile) and handle.in_memory and handle.written):
            return opened(handle)
        file = os.open(handle.path, os.O_RDWR)
        try:
            found = os.fstat(file)
            # As long as it is mapped here, no other file has these numbers.
            name = (found.st_dev, found.st_ino)
            if name not in self._every:
                self._every[name] = _Mapping(self._mapped(file, found.st_size), handle.path)
        finally:
            os.close(file)
        mapping = self._every[name]
        mapping.used = True
        memory = mapping.memory[handle.offset :]
        return memory[: len(memory) // handle.dtype.itemsize * handle.dtype.itemsize].view(
            handle.dtype
        ).as_strided(handle.shape, handle.strides)  # fmt: skip

    def forget_unused(self) -> None:
        """A pass has opened what it needs: let go of what the one before had beside that."""
        self._every = {name: one for name, one in self._every.items() if one.used}
        for one in self._every.values():
            one.used = False

    def forget_gone(self) -> None:
        """Let go of what the other process has no more, and what no tensor uses here."""
        self._every = {name: one for name, one in self._every.items() if _is(one.path, name)}

    def _mapped(self, file: int, n_bytes: int) -> torch.Tensor:
        """All of a file, (n_bytes,) uint8; taken apart when nothing refers to it any more."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
            ctypes.c_long,
        )  # fmt: skip
        both = mmap.PROT_READ | mmap.PROT_WRITE
        start = libc.mmap(None, n_bytes, both, mmap.MAP_SHARED, file, 0)
        if start is None or start == _FAILED:
            raise OSError(ctypes.get_errno(), f"shared memory of {n_bytes} bytes was not mapped")
        memory = (ctypes.c_char * n_bytes).from_address(start)
        # Not at the end of the process, which takes it apart itself.
        weakref.finalize(memory, self._reaper.add, start, n_bytes).atexit = False
        made: torch.Tensor = torch.frombuffer(memory, dtype=torch.uint8)
        return made


def _is(path: str, name: _File) -> bool:
    """Whether a path still leads to a file."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == name


class _Reaper:
    """Takes mappings apart in a thread: the call does not hold the interpreter."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int]] = []
        # Reentrant: a collection of garbage may call ``add`` anywhere.
        self._lock = threading.RLock()
        self._works = False

    def add(self, start: int, n_bytes: int) -> None:
        """Take the mapping at this address apart."""
        with self._lock:
            self._waiting.append((start, n_bytes))
            if self._works:
                return
            self._works = True
        threading.Thread(target=self._work, name="unmapping", daemon=True).start()

    def _work(self) -> None:
        unmap = ctypes.CDLL(None).munmap
        while True:
            with self._lock:
                if not self._waiting:
                    self._works = False
                    return
                start, n_bytes = self._waiting.pop()
            unmap(ctypes.c_void_p(start), ctypes.c_size_t(n_bytes))


__all__ = ["Openings"]
