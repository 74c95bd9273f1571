"""Runs a kernel on tasks made by hand, without planner and executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quorum_attention.decomposition import Span, Task
from quorum_attention.execution.call import no_bias
from quorum_attention.kernels import CallShape, Gradients, InnerKernel, Statistics, TaskTensors
from quorum_attention.kernels import empty_ as make_empty

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the calls that a kernel is tried with."""

    n_queries: int
    n_keys: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    backward: bool

    def call(self, is_causal: bool) -> CallShape:
        """The ``CallShape`` of such a call."""
        return CallShape(
            self.device.type, self.dtype, self.heads, self.kv_heads, self.head_dim, self.value_dim,
            is_causal, self.backward,
        )  # fmt: skip

    def inputs(self, generator: torch.Generator, factor: float = 1.0) -> list[torch.Tensor]:
        """Query, key, value and grad_out, normally distributed times ``factor``."""
        shapes = (
            (self.batch, self.heads, self.n_queries, self.head_dim),
            (self.batch, self.kv_heads, self.n_keys, self.head_dim),
            (self.batch, self.kv_heads, self.n_keys, self.value_dim),
            (self.batch, self.heads, self.n_queries, self.value_dim),
        )
        return [
            (torch.randn(s, generator=generator, dtype=torch.float64, device="cpu") * factor)
            .to(self.dtype)
            .to(self.device)
            for s in shapes
        ]

    def finest(self, kernel: InnerKernel, is_causal: bool) -> Sizes:
        """The same sizes in the widest dtype that the kernel takes."""
        for dtype in (torch.float64, torch.float32):
            wider = replace(self, dtype=dtype)
            narrower = torch.finfo(self.dtype).eps < torch.finfo(dtype).eps
            if not narrower and kernel.refusal(wider.call(is_causal)) is None:
                return wider
        return self


@dataclass(frozen=True, slots=True)
class Weights:
    """The weight of each key in each row, from a kernel's output for values that are 1 for one key.

    ``shares`` (b, h, rows, keys) and ``lse`` (b, h, rows), float64.
    """

    shares: torch.Tensor
    lse: torch.Tensor

    def scores(self) -> torch.Tensor:
        """The scores that the kernel must have used: -inf where a key has no weight."""
        return torch.log(self.shares) + self.lse.unsqueeze(-1)


@dataclass(frozen=True)
class Subject:
    """A kernel and the sizes of its calls."""

    kernel: InnerKernel
    sizes: Sizes

    def forward(
        self,
        tensors: Tensors,
        task: Task,
        is_causal: bool,
        *,
        scale: float | None = None,
        first_head: int = 0,
        entries: Sequence[int] | None = None,
        state: Statistics | None = None,
    ) -> Statistics:
        """The statistics of a task, merged into ``state`` if there is one.

        ``tensors`` hold the task's tokens, (b, h, tokens, d).
        """
        query, _, value = tensors
        if state is None:
            state = Statistics(
                self._zeros(*query.shape[:3], value.shape[3]), self._zeros(*query.shape[:3])
            )
            make_empty(state.out, state.lse)
        with torch.no_grad():
            self.kernel.forward(
                self._task(tensors, task, is_causal, scale, first_head, entries), state
            )
        return state

    def backward(
        self,
        tensors: Tensors,
        grad_out: torch.Tensor,
        rows: Statistics,
        task: Task,
        is_causal: bool,
        *,
        scale: float | None = None,
        first_head: int = 0,
        entries: Sequence[int] | None = None,
        filled: float = 0.0,
    ) -> Tensors:
        """The gradients of a task, added to ``filled``; ``rows``: out and lse of whole rows."""
        query, key, value = (self._zeros(*t.shape) + filled for t in tensors)
        grads = Gradients(grad_out, rows.out.to(grad_out.dtype), rows.lse, query, key, value)
        with torch.no_grad():
            self.kernel.backward(
                self._task(tensors, task, is_causal, scale, first_head, entries), grads
            )
        return grads.grad_query, grads.grad_key, grads.grad_value

    def weights(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        task: Task,
        is_causal: bool,
        *,
        scale: float | None = None,
    ) -> Weights:
        """The weight of every key of a task."""
        n, width = key.shape[2], self.sizes.value_dim
        shares = query.new_zeros((*query.shape[:3], n), dtype=torch.float64)
        lse = None
        for start in range(0, n, width):
            stop = min(n, start + width)
            value = key.new_zeros((*key.shape[:3], width))
            value[:, :, range(start, stop), range(stop - start)] = 1
            found = self.forward((query, key, value), task, is_causal, scale=scale)
            shares[..., start:stop] = found.out[..., : stop - start]
            lse = found.lse.double()
        assert lse is not None
        return Weights(shares, lse)

    def _zeros(self, *shape: int) -> torch.Tensor:
        work = torch.float64 if self.sizes.dtype == torch.float64 else torch.float32
        return torch.zeros(shape, dtype=work, device=self.sizes.device)

    def _task(
        self,
        tensors: Tensors,
        task: Task,
        is_causal: bool,
        scale: float | None,
        first_head: int,
        entries: Sequence[int] | None,
    ) -> TaskTensors:
        query, key, value = tensors
        n = max(query.shape[2], key.shape[2])
        return TaskTensors(
            task,
            task.rectangles(is_causal),
            query,
            key,
            value,
            query.shape[3] ** -0.5 if scale is None else scale,
            is_causal,
            no_bias,
            n,
            n,
            first_head=first_head,
            entries=tuple(range(query.shape[0])) if entries is None else tuple(entries),
        )


def square(n: int) -> Task:
    """A task that is the whole sequence and keeps every pair."""
    return Task((), (Span(0, n, 0),))


def rectangle(keys: tuple[int, int], queries: tuple[int, int]) -> Task:
    """A task of two spans; in a causal call it keeps ``queries`` against ``keys`` before them.

    Both are ranges of positions in the whole sequence.
    """
    return Task((0,), (Span(*keys, 1), Span(*queries, 2)))


def tokens(task: Task, device: torch.device) -> torch.Tensor:
    """Global positions of a task's tokens."""
    runs = [torch.arange(start, stop, device="cpu") for start, stop, _ in task.runs]
    return torch.cat(runs).to(device)
