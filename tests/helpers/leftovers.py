"""What a test could leave behind for the next one: memory, locks, threads, processes,
files."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from helpers.processes import NEST, forks_workers
from quorum_attention.devices.shared_memory import give_back
from quorum_attention.execution.device.lookup import BACKENDS

ON_GPU = torch.cuda.is_available()
# Kernels keep small tables of numbers on the device, on purpose.
_KEPT_BYTES = 1 << 20
# Of torch's compiler and of Python: they outlive whoever asked for them first.
_THREADS_NOT_OURS = ("torch", "triton", "tqdm", "multiprocessing")
_PROCESSES_NOT_OURS = ("torch/_inductor", "resource_tracker", NEST)
# FlashAttention-4 is told where to keep what it compiles, for good, as it is imported.
_FA4_VARIABLES = ("FLASH_ATTENTION_CUTE_DSL_", "CUTE_", "QUACK_")
_VARIABLES_NOT_OURS = (
    "PYTEST_",
    "TORCH",
    "TRITON",
    "CUDA",
    "KINETO",
    "KMP_",
    *_FA4_VARIABLES,
)
_FILES_NOT_OURS = ("torchinductor_", "torch_", "pytest-of-", "pymp-")

page_locked: set[int] = set()
Standing = dict[str, Any]


def standing() -> Standing:
    """How things stand now; without memory of results, which is kept for the next
    call."""
    kept = BACKENDS["cuda"].pinned
    if kept is not None:
        kept.give_back()
    give_back()
    devices = range(torch.cuda.device_count()) if ON_GPU else ()
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(_VARIABLES_NOT_OURS)
    }
    return {
        "bytes": sum(map(torch.cuda.memory_allocated, devices)),
        "locks": set(page_locked),
        "threads": {t.ident for t in threading.enumerate()},
        "processes": _children(),
        "files": set(os.listdir(tempfile.gettempdir())),
        "settings": {
            "threads of torch": torch.get_num_threads(),
            "the default dtype": torch.get_default_dtype(),
            "the default device": torch.get_default_device(),
            "gradients": torch.is_grad_enabled(),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "the precision of fp32 products": torch.get_float32_matmul_precision(),
            "the working directory": os.getcwd(),
            "the environment": environment,
        },
    }


def left_since(before: Standing, *, patience_s: float = 5.0) -> list[str]:
    """What is there now and was not there ``before``, in words; nothing is as it should
    be.

    What is on its way out (a thread that was told to stop) gets ``patience_s`` for it.
    """
    if not _differences(before, standing()):
        return []
    gc.collect()
    if ON_GPU:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
    until = time.monotonic() + patience_s
    while left := _differences(before, standing()):
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return left


def _differences(before: Standing, now: Standing) -> list[str]:
    left = []
    if now["bytes"] > before["bytes"] + _KEPT_BYTES:
        left.append(f"{now['bytes'] - before['bytes']:,} bytes on the device")
    if now["locks"] - before["locks"]:
        left.append(f"{len(now['locks'] - before['locks'])} page-locked ranges")
    for thread in threading.enumerate():
        if thread.ident in now["threads"] - before["threads"] and not _not_ours(thread):
            left.append(f"the thread {thread.name}")
    for number in sorted(now["processes"] - before["processes"]):
        command = _command(number)
        if command is not None and not any(
            name in command for name in _PROCESSES_NOT_OURS
        ):
            left.append(f"the process {number}: {command}")
    for name in sorted(now["files"] - before["files"]):
        if not name.startswith(_FILES_NOT_OURS):
            left.append(f"the file {Path(tempfile.gettempdir(), name)}")
    for name, value in now["settings"].items():
        if value != before["settings"][name]:
            left.append(f"{name}: {value} instead of {before['settings'][name]}")
    return left


def count_page_locks() -> None:
    """From now on ``page_locked`` has the addresses of what is locked through torch's
    runtime."""
    if not ON_GPU:
        return
    runtime = torch.cuda.cudart()
    lock, unlock = runtime.cudaHostRegister, runtime.cudaHostUnregister

    def locked(start: int, n_bytes: int, flags: int) -> Any:
        answer = lock(start, n_bytes, flags)
        if int(answer) == 0:
            page_locked.add(start)
        return answer

    def unlocked(start: int) -> Any:
        page_locked.discard(start)
        return unlock(start)

    runtime.cudaHostRegister, runtime.cudaHostUnregister = locked, unlocked


def _not_ours(thread: threading.Thread) -> bool:
    """Whether other libraries started the thread, or native code did: on a GPU autograd
    runs the backward in threads that never end, which Python knows as dummies."""
    if isinstance(thread, threading._DummyThread):
        return True
    runs = getattr(thread, "_target", None) or type(thread).run
    return (getattr(runs, "__module__", None) or "").partition(".")[
        0
    ] in _THREADS_NOT_OURS


def _children() -> set[int]:
    """Processes that this one started and that are not waited for yet; its workers
    among them, whoever forked them (helpers/processes.py)."""
    found: set[int] = set()
    for thread in threading.enumerate():
        found |= _children_of("self", thread.native_id)
    if (server := forks_workers()) in found:
        found.remove(server)
        found |= _children_of(server, server)
    return found


def _children_of(process: int | str, thread: int | None) -> set[int]:
    try:
        text = Path(f"/proc/{process}/task/{thread}/children").read_text()
    except OSError:  # a thread that ended meanwhile, or a system that does not tell
        return set()
    return set(map(int, text.split()))


def _command(number: int) -> str | None:
    try:
        raw = Path(f"/proc/{number}/cmdline").read_bytes()
    except OSError:
        return None
    return (
        raw.replace(b"\0", b" ").decode(errors="replace").strip()
        or "ended, not waited for"
    )
