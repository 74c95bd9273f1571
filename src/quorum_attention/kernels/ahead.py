"""Prepares in threads what a first call will need soon: compiled kernels, slow imports.

A Triton kernel takes half a second and more to compile: Triton's passes, ptxas, and a C compiler
for the function that launches it. Most of that runs without the interpreter's lock, beside the
caller. What fails is left to the first use, which fails in the same way.

A thread that computes in Python keeps the interpreter's lock for 5 ms when others ask for it, and
whoever calls an operator gives it away and has to ask. While threads prepare, the caller would wait
so for every operator. So as long as they are at work it is kept for half a millisecond.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import torch

RUNNING: dict[str, threading.Thread] = {}
"""Threads at work, by what they prepare. If there are any, whoever needs it asks ``wait``."""
_lock = threading.Lock()
_SWITCH_SECONDS = 5e-4
_usual_switch: list[float] = []
"""The interval of others, while there are threads at work."""


def begin(name: str, device: torch.device, work: Callable[[], object]) -> None:
    """Begin to do ``work`` in a thread in which ``device`` (CUDA) is current.

    Args:
        name: what ``wait`` is asked for.
    """
    wait(name)  # for another dtype, perhaps

    def run() -> None:
        with suppress(Exception):
            torch.cuda.set_device(device)
            work()
        _over(name, threading.current_thread())

    thread = threading.Thread(target=run, name=f"prepares {name}")
    with _lock:
        if not RUNNING and sys.getswitchinterval() > _SWITCH_SECONDS:
            _usual_switch.append(sys.getswitchinterval())
            sys.setswitchinterval(_SWITCH_SECONDS)
        RUNNING[name] = thread
        try:
            thread.start()
        except BaseException:
            _remove(name)
            raise


def wait(name: str) -> None:
    """Wait until that is prepared, if a thread is at it."""
    thread = RUNNING.get(name)
    if thread is not None:
        thread.join()


def _over(name: str, thread: threading.Thread) -> None:
    with _lock:
        if RUNNING.get(name) is thread:
            _remove(name)


def _remove(name: str) -> None:
    del RUNNING[name]
    if _usual_switch and not RUNNING:
        usual = _usual_switch.pop()
        # Unless somebody else has set it meanwhile.
        if abs(sys.getswitchinterval() - _SWITCH_SECONDS) < 1e-6:
            sys.setswitchinterval(usual)


def _forget() -> None:
    """In a child of a fork, which has none of its parent's threads: nobody waits for them."""
    global _lock
    _lock = threading.Lock()  # one of them may have held it
    for name in list(RUNNING):
        _remove(name)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
