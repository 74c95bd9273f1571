"""Compiles Triton kernels ahead of their first launch, each in a thread of its own.

One kernel takes half a second and more: Triton's passes, ptxas, and a C compiler for the function
that launches it. Most of that runs without the interpreter's lock. So where several are going to be
needed they are compiled side by side (``compiling.py`` says which), and the first launch of each
waits for its thread. Nothing is launched here. What fails is left to the first launch, which fails
in the same way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

RUNNING: dict[str, threading.Thread] = {}
"""Threads that compile, by the kernel's name. If there are any, whoever launches asks ``wait``."""
_lock = threading.Lock()
_driver_lock = threading.Lock()


def begin(name: str, device: torch.device, compiled: Callable[[], Any]) -> None:
    """Begin to compile and load a kernel.

    Args:
        name: what its launches ``wait`` for.
        device: a CUDA device.
        compiled: compiles it and returns it, as ``warmup`` of a Triton kernel does.
    """
    wait(name)  # of another dtype, perhaps

    def work() -> None:
        with suppress(Exception):
            torch.cuda.set_device(device)
            _prepare_driver()
            # At this Triton loads the kernel, and compiles what launches it.
            _ = compiled().run

    thread = threading.Thread(target=work, name=f"compiles {name}")
    with _lock:
        RUNNING[name] = thread
        thread.start()


def wait(name: str) -> None:
    """Wait until the kernel is compiled, if a thread is at it."""
    thread = RUNNING.get(name)
    if thread is None:
        return
    thread.join()
    with _lock:
        if RUNNING.get(name) is thread:
            del RUNNING[name]


def _prepare_driver() -> None:
    """Have Triton compile its own tools, which all kernels need, in one thread only."""
    import triton

    with _driver_lock:
        triton.runtime.driver.active.get_current_target()
