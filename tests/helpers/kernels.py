"""Inner kernels that watch, and fail when told to; and one that is taken as tried."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from quorum_attention.kernels import (
    CallShape,
    CpuKernel,
    DenseKernel,
    Extent,
    Gradients,
    InnerKernel,
    Statistics,
    TaskTensors,
    select,
)
from quorum_attention.kernels.probing import _KEYS, _QUERIES


def is_trial(task: TaskTensors) -> bool:
    """Whether this is the trial that every new kernel is put to, which no test
    counts."""
    return task.query.shape[2] == _QUERIES and task.key.shape[2] in (_QUERIES, _KEYS)


class WatchedKernel(DenseKernel):
    """The reference kernel; notes the path of every task it completes and can run out
    of memory.

    Attributes:
        started, completed: paths in order.
        fail_at: numbers of the calls (from 0) that raise, before or after doing their
            work.
        late: raise after the state has been changed, not before.
    """

    def __init__(self, fail_at: set[int] | None = None, *, late: bool = False) -> None:
        self.name = "watched"
        self.fail_at = fail_at or set()
        self.late = late
        self.started: list[tuple[int, ...]] = []
        self.completed: list[tuple[int, ...]] = []
        self.pairs: Counter[tuple[int, int]] = Counter()
        self.armed = False

    def arm(self) -> None:
        """Start counting, from nothing."""
        self.armed = True
        self.started.clear()
        self.completed.clear()

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        self._watch(task, lambda: super(WatchedKernel, self).forward(task, state))

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        self._watch(task, lambda: super(WatchedKernel, self).backward(task, grads))

    def _watch(self, task: TaskTensors, work) -> None:
        if not self.armed or is_trial(task):
            work()
            return
        number = len(self.started)
        self.started.append(task.task.path)
        fails = number in self.fail_at
        if fails and not self.late:
            raise torch.OutOfMemoryError(f"sabotaged call {number}")
        work()
        if fails:
            raise torch.OutOfMemoryError(f"sabotaged call {number}")
        self.completed.append(task.task.path)
        tokens = [t for a, b, _ in task.task.runs for t in range(a, b)]
        queries, keys = tokens[: task.query.shape[2]], tokens[: task.key.shape[2]]
        for r in task.rectangles:
            for i in range(r.query_start, r.query_stop):
                stop = min(i + 1, r.key_stop) if r.causal else r.key_stop
                for j in range(r.key_start, stop):
                    self.pairs[queries[i], keys[j]] += 1


class IdleKernel(DenseKernel):
    """Right when it is tried out; else does nothing at all, without any memory."""

    name = "idle"

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        return 0

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        return 0

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        if is_trial(task):
            super().forward(task, state)

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        if is_trial(task):
            super().backward(task, grads)


def taken_as_tried(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Without a GPU: the kernel of that name runs without the test that comes before
    first calls.

    For tests that compare its results themselves; what it does not take it still
    refuses.
    """
    tried = select.probe

    def asked(
        kernel: InnerKernel, shape: CallShape, device: torch.device | None = None
    ) -> str | None:
        return None if kernel.name == name else tried(kernel, shape, device)

    if not torch.cuda.is_available():
        monkeypatch.setattr(select, "probe", asked)


class Counted(CpuKernel):
    """Counts the pairs of calls that succeed, and runs out of memory in chosen
    calls."""

    name = "counted"

    def __init__(self) -> None:
        self.fail_at: set[int] = set()
        self.armed = False
        self.n_calls = 0
        self.pairs = 0

    def arm(self, fail_at: set[int]) -> None:
        self.armed, self.fail_at, self.n_calls, self.pairs = True, fail_at, 0, 0

    def rectangle_forward(self, call):
        return self._count(call, lambda: super(Counted, self).rectangle_forward(call))

    def rectangle_backward(self, call, saved):
        return self._count(
            call, lambda: super(Counted, self).rectangle_backward(call, saved)
        )

    def _count(self, call, work):
        query, key, causal = call.query, call.key, call.causal
        if not self.armed:
            return work()
        self.n_calls += 1
        found = work()
        if self.n_calls - 1 in self.fail_at:
            del found
            raise torch.OutOfMemoryError(f"sabotaged call {self.n_calls - 1}")
        rows, columns = query.shape[2], key.shape[2]
        one = rows * (rows + 1) // 2 if causal else rows * columns
        self.pairs += one * math.prod(query.shape[:2])
        return found
