"""Runs a kernel on tasks made by hand, and tells rounding from errors.

What counts as rounding follows from the dtype and the sizes of the numbers, not from the kernel's
errors: a kernel that is noisy or rounds too much must not widen its own limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quorum_attention.decomposition import Span, Task
from quorum_attention.execution.call import no_bias
from quorum_attention.kernels import CallShape, Gradients, InnerKernel, Statistics, TaskTensors
from quorum_attention.kernels import empty_ as make_empty

# How many units in the last place a score or an lse may be off. (The rounding of an lse changes the
# weight of a whole rectangle.) 16-bit inputs are summed in fp32, wider ones in their own dtype.
_ULPS, _ULPS_16_BITS = 6.0, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSizes(CallShape):
    """The sizes of the calls that a kernel is tried with, causal or not."""

    device: torch.device

    def inputs(self, seed: int, factor: float = 1.0) -> Sequence[torch.Tensor]:
        """Query, key, value and grad_out, normally distributed times ``factor``."""
        generator = torch.Generator().manual_seed(seed)

        def drawn(heads: int, tokens: int, width: int) -> torch.Tensor:
            shape = (self.batch, heads, tokens, width)
            wide = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
            return (wide * factor).to(self.dtype).to(self.device)

        return (
            drawn(self.heads, self.n_queries, self.head_dim),
            drawn(self.kv_heads, self.n_keys, self.head_dim),
            drawn(self.kv_heads, self.n_keys, self.value_dim),
            drawn(self.heads, self.n_queries, self.value_dim),
        )

    def finest(self, kernel: InnerKernel, is_causal: bool) -> CheckSizes:
        """The same sizes in the widest dtype that the kernel takes."""
        for dtype in (torch.float64, torch.float32):
            wider = replace(self, dtype=dtype)
            narrower = torch.finfo(self.dtype).eps < torch.finfo(dtype).eps
            if not narrower and kernel.refusal(replace(wider, is_causal=is_causal)) is None:
                return wider
        return self


@dataclass(frozen=True)
class Trial:
    """One task of a call.

    Attributes:
        tensors: query, key, value and grad_out of the task's tokens, (b, h, tokens, d).
        task, is_causal: which pairs it computes.
        scale, first_head, entries: as in ``TaskTensors``; usual ones by default.
    """

    kernel: InnerKernel
    tensors: Sequence[torch.Tensor]
    task: Task
    is_causal: bool
    scale: float | None = None
    first_head: int = 0
    entries: tuple[int, ...] | None = None

    def forward(self, state: Statistics | None = None) -> Statistics:
        """Out and lse, merged into ``state`` if there is one."""
        query, _, value, _ = self.tensors
        if state is None:
            rows = query.shape[:3]
            state = Statistics(_zeros(query, *rows, value.shape[3]), _zeros(query, *rows))
            make_empty(state.out, state.lse)
        with torch.no_grad():
            self.kernel.forward(self._task(), state)
        return state

    def backward(self, rows: Statistics, filled: float = 0.0) -> tuple[torch.Tensor, ...]:
        """The gradients, added to ``filled``; ``rows``: out and lse of whole rows."""
        *inputs, grad_out = self.tensors
        query, key, value = (_zeros(t, *t.shape) + filled for t in inputs)
        grads = Gradients(grad_out, rows.out.to(grad_out.dtype), rows.lse, query, key, value)
        with torch.no_grad():
            self.kernel.backward(self._task(), grads)
        return grads.grad_query, grads.grad_key, grads.grad_value

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight of each key in each row (b, h, rows, keys) and lse, float64: from the output
        for values that are 1 for one key."""
        query, key, value, _ = self.tensors
        n, width = key.shape[2], value.shape[3]
        shares = query.new_zeros((*query.shape[:3], n), dtype=torch.float64)
        for start in range(0, n, width):
            stop = min(n, start + width)
            one = torch.zeros_like(value)
            one[:, :, range(start, stop), range(stop - start)] = 1
            found = self.moved(2, one).forward()
            shares[..., start:stop] = found.out[..., : stop - start]
        return shares, found.lse.double()

    def moved(self, index: int, tensor: torch.Tensor) -> Trial:
        """The same with another query (0), key (1) or value (2)."""
        tensors = [tensor if i == index else t for i, t in enumerate(self.tensors)]
        return replace(self, tensors=tensors)

    def _task(self) -> TaskTensors:
        query, key, value, _ = self.tensors
        n = max(query.shape[2], key.shape[2])
        return TaskTensors(
            self.task, self.task.rectangles(self.is_causal), query, key, value,
            query.shape[3] ** -0.5 if self.scale is None else self.scale, self.is_causal, no_bias,
            n, n, first_head=self.first_head,
            entries=tuple(range(query.shape[0])) if self.entries is None else self.entries,
        )  # fmt: skip


def _zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    work = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.zeros(shape, dtype=work, device=like.device)


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


def limit(query: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, scale: float) -> float:
    """The largest error of a result that counts as rounding, as a share of its largest value.

    Rounding changes a score s by ``eps |s|``, and so the share of its key by this factor.
    """
    finite = lse[lse.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    norms = [float(t.double().norm(dim=-1).max()) if t.numel() else 0.0 for t in (query, key)]
    ulps = _ULPS if query.dtype.itemsize > 2 else _ULPS_16_BITS
    return ulps * torch.finfo(query.dtype).eps * (1.0 + max(largest, scale * norms[0] * norms[1]))


def distance(mine: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Absolute differences: 0 for equal infinities and for two NaN, infinite for a single NaN."""
    a, b = mine.double(), wanted.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)


def exceeds(mine: torch.Tensor, wanted: torch.Tensor, share: float) -> bool:
    """Whether any element differs by more than ``share`` of the largest."""
    return mine.numel() > 0 and float(distance(mine, wanted).max()) > share * size(wanted)


def size(tensor: torch.Tensor) -> float:
    """The largest finite magnitude; 1 if that is 0."""
    finite = tensor[tensor.isfinite()]
    return (float(finite.abs().max()) if finite.numel() else 0.0) or 1.0


def repeated(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether two results of one call differ by no more than the order of sums in fp32 (or fp64).

    In 16 bits another order changes the last digit of a few elements.
    """
    off = distance(one, other)
    if not off.numel() or float(off.max()) == 0.0:
        return True
    eps = torch.finfo(dtype).eps
    largest, typical = (64 * eps, 16 * eps) if eps < 1e-6 else (2 * eps, eps / 16)
    finite = other[other.isfinite()].double()
    middle = float(finite.square().mean().sqrt()) if finite.numel() else 1.0
    mean = float(off.square().mean().sqrt())
    return float(off.max()) <= largest * size(other) and mean <= typical * max(middle, 1e-30)
