"""Measures and sabotages memory on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Usage:
    """Bytes of torch's CPU allocator during a call, inside operators too."""

    peak: int
    left: int


def usage(call: Callable[[], Any]) -> Usage:
    """What ``call`` allocates at most at any one time, results included, and what it
    leaves allocated once its result has been let go."""
    gc.collect()
    with profile(profile_memory=True) as profiled:
        result = call()
        del result
        gc.collect()
    live = peak = 0
    events = [e for e in profiled.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return Usage(peak, live)


class FailingAllocations(TorchDispatchMode):
    """Raises torch.OutOfMemoryError at chosen operators that return fresh memory.

    Counts them from 1; those with first <= number < first + count fail.
    """

    def __init__(self, first: int, count: int = 1) -> None:
        super().__init__()
        self.first, self.count = first, count
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if _returns_fresh_memory(func):
            self.seen += 1
            if self.first <= self.seen < self.first + self.count:
                raise torch.OutOfMemoryError(
                    f"sabotaged allocation {self.seen} in {func}"
                )
        return func(*args, **(kwargs or {}))


_fresh: dict[Any, bool] = {}


def _returns_fresh_memory(func: Any) -> bool:
    if func not in _fresh:
        _fresh[func] = any(
            r.alias_info is None and "Tensor" in str(r.type)
            for r in func._schema.returns
        )
    return _fresh[func]
