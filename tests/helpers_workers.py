"""Workers of a pool, started without importing torch for each."""

from __future__ import annotations

import multiprocessing.forkserver
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.multiprocessing

_WARM = ("torch", "torch._dynamo", "quorum_attention.devices.worker")


def warm_forks() -> Any:
    """A context of multiprocessing whose processes are forks of one that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_WARM))
    return context


@contextmanager
def quick_workers() -> Iterator[None]:
    """In here a worker is the fork of a process that has imported what a worker imports, and has
    done nothing else; a started one takes two seconds of a processor for that.

    With a GPU workers are started, as everywhere else: a fork can use none.
    """
    if torch.cuda.is_available() or not sys.platform.startswith("linux"):
        yield
        return
    get_context = torch.multiprocessing.get_context

    def quick(method: str | None = None) -> Any:
        return warm_forks() if method == "spawn" else get_context(method)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.multiprocessing, "get_context", quick)
        yield


def forks_workers() -> int | None:
    """The number of the process that quick workers are forked from, if there is one."""
    number: int | None = multiprocessing.forkserver._forkserver._forkserver_pid
    return number
