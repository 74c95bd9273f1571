"""What a process and its children hold at one moment."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Page-locked ranges: start and bytes, once ``watch_page_locks`` has been called.
_locked: dict[int, int] = {}


@dataclass(frozen=True)
class Reading:
    """What is held; bytes, or numbers of things.

    Attributes:
        rss, uss, anonymous: of this process: resident; of these what no other process has (other
            programs that load torch's libraries come and go); and what is of no file.
        device_allocated, device_reserved: by torch on the device.
        page_locked: host memory that this library has page-locked.
        pinned: in torch's own cache of page-locked memory.
        descriptors, threads: of this process.
        children: processes below this one that are no helpers of Python or torch.
        children_anonymous: what they hold, all together.
        shared_files: names in /dev/shm that this process or a child has made.
        temporary_files, temporary_bytes: below the soak's own folder.
    """

    rss: int
    uss: int
    anonymous: int
    device_allocated: int
    device_reserved: int
    page_locked: int
    pinned: int
    descriptors: int
    threads: int
    children: int
    children_anonymous: int
    shared_files: int
    temporary_files: int
    temporary_bytes: int


def read(folder: Path, shared_before: set[str]) -> Reading:
    """After garbage is collected and free memory is given back, so far as that can be asked for."""
    gc.collect()
    _trim()
    on_gpu = torch.cuda.is_initialized()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    rss, uss, anonymous = memory_of(os.getpid())
    below = children()
    files = [p for p in folder.rglob("*") if p.is_file()]
    return Reading(
        rss=rss,
        uss=uss,
        anonymous=anonymous,
        device_allocated=torch.cuda.memory_allocated() if on_gpu else 0,
        device_reserved=torch.cuda.memory_reserved() if on_gpu else 0,
        page_locked=sum(_locked.values()),
        pinned=_pinned() if on_gpu else 0,
        descriptors=len(os.listdir("/proc/self/fd")) - 1,
        threads=len(os.listdir("/proc/self/task")),
        children=len(below),
        children_anonymous=sum(memory_of(n)[2] for n in below),
        shared_files=len(shared_names() - shared_before),
        temporary_files=len(files),
        temporary_bytes=sum(_size(p) for p in files),
    )


def memory_of(process: int) -> tuple[int, int, int]:
    """Bytes: resident, of these in no other process, of these of no file; 0 of one that ended."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return _resident(process)
    found = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
    own = found["Private_Clean"] + found["Private_Dirty"]
    return found["Rss"] * 1024, own * 1024, found["Anonymous"] * 1024


def _resident(process: int) -> tuple[int, int, int]:
    """Where the system does not tell shares apart: all resident bytes, and less those of files."""
    try:
        _, pages, shared, *_ = map(int, Path(f"/proc/{process}/statm").read_text().split())
    except OSError:
        return 0, 0, 0
    size = os.sysconf("SC_PAGE_SIZE")
    return pages * size, (pages - shared) * size, (pages - shared) * size


_HELPERS = ("resource_tracker", "torch/_inductor", "forkserver")


def children() -> dict[int, str]:
    """Processes below this one by number, and their command lines, without helpers of Python."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    found: dict[int, str] = {}
    for number in parents:
        above: int | None = number
        while above in parents and above != os.getpid():
            above = parents[above]
        if above == os.getpid() and number != above:
            command = _command(number)
            if command is not None and not any(word in command for word in _HELPERS):
                found[number] = command
    return found


def _command(process: int) -> str | None:
    try:
        text = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return None
    return text.replace(b"\0", b" ").decode(errors="replace").strip() or "ended, not waited for"


def shared_names() -> set[str]:
    """Names in /dev/shm that belong to this user and, where they have a process in them, to a
    process below this one."""
    folder, found = Path("/dev/shm"), set()
    mine = {str(n) for n in (os.getpid(), *children())}
    for path in folder.iterdir() if folder.is_dir() else ():
        numbers = [part for part in path.name.split("_") if part.isdigit() and len(part) > 1]
        try:
            if path.stat().st_uid == os.getuid() and (not numbers or mine & set(numbers)):
                found.add(path.name)
        except OSError:
            continue
    return found


def thread_names() -> list[str]:
    """Of Python's threads."""
    return [thread.name for thread in threading.enumerate()]


def watch_page_locks() -> None:
    """From now on readings know what is locked through torch's runtime."""
    if not torch.cuda.is_available():
        return
    runtime = torch.cuda.cudart()
    lock, unlock = runtime.cudaHostRegister, runtime.cudaHostUnregister

    def locked(start: int, n_bytes: int, flags: int) -> Any:
        answer = lock(start, n_bytes, flags)
        if int(answer) == 0:
            _locked[start] = n_bytes
        return answer

    def unlocked(start: int) -> Any:
        _locked.pop(start, None)
        return unlock(start)

    runtime.cudaHostRegister, runtime.cudaHostUnregister = locked, unlocked


def _pinned() -> int:
    stats = getattr(torch.cuda, "host_memory_stats", None)
    return int(stats().get("allocated_bytes.current", 0)) if stats is not None else 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _trim() -> None:
    """glibc gives free pages back to the system; other libraries of C have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
