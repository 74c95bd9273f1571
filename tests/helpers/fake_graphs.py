"""Graphs of a CPU: operators that run while one is recorded run again when it is
replayed, on the same tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FakeGraphs:
    """Stands for ``CudaGraphs``.

    Attributes:
        n_replays: of all graphs.
        fails: whether a recording runs out of memory.
    """

    def __init__(self) -> None:
        self.n_replays = 0
        self.fails = False

    def stream(self) -> int:
        return 0

    def new(self) -> FakeGraph:
        return FakeGraph(self)


class _NumbersStayOnDevice(TorchFunctionMode):
    """Refuses to give the host a list of numbers, as a GPU does while a graph is
    recorded: experts of some models ask how many tokens each gets."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.tolist:
            raise RuntimeError("operation not permitted when stream is capturing")
        return function(*args, **(kwargs or {}))


class FakeGraph(TorchDispatchMode):
    def __init__(self, graphs: FakeGraphs) -> None:
        super().__init__()
        self._graphs = graphs
        self._operators: list[Any] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        if self._graphs.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
        with _NumbersStayOnDevice(), self:
            yield

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        self._operators.append((operator, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        self._graphs.n_replays += 1
        for operator, args, kwargs, result in self._operators:
            again = operator(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
