"""One task of a call as a kernel gets it: inputs, running results, and the numbers of
its pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from quorum_attention.decomposition import Rectangle, Task
from quorum_attention.kernels.call_shape import BiasShape, CallShape
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.scaling import Scaling
from quorum_attention.kernels.tensors import positions

if TYPE_CHECKING:
    from quorum_attention.execution.device.streams import KernelStreams

Bias = Callable[[Rectangle], torch.Tensor | None]
Timed = Callable[[str], AbstractContextManager[None]]


@dataclass(slots=True)
class TaskTensors:
    """One task's inputs, gathered.

    Attributes:
        task: which tokens these are.
        rectangles: its kept pairs, in local positions; none is empty, and there are
            none where there is no head or no batch entry.
        query, key, value: (b, hq, nq, d), (b, hk, nk, d), (b, hk, nk, dv), where nq and
            nk count the task's tokens that are queries and keys.
        scale: factor of the scores.
        is_causal: whether the call is causal.
        bias: ``bias(rectangle)`` is the additive mask of a rectangle, broadcastable to
            (b, hq, lq, lk), or None. It is of ``CallShape.bias_dtype``.
        max_queries, max_keys: bounds from the ``Extent`` by which the workspace was
            sized. Rectangles that go to an operator in one call stay within them
            together.
        timed: ``timed("merge")`` is a context around merging, for reports.
        streams: those over which operator calls are spread, or None. The workspace
            bound then holds for each of them.
        first_head: number of the first query head in the whole call.
        entries: numbers of the batch entries in the whole call (batch dimensions
            flattened).
        dropout: which probabilities are dropped, or None; of these heads and batch
            entries.
    """

    task: Task
    rectangles: Sequence[Rectangle]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    is_causal: bool
    bias: Bias
    max_queries: int
    max_keys: int
    timed: Timed = lambda stage: nullcontext()
    streams: KernelStreams | None = None
    first_head: int = 0
    entries: range = range(1)
    dropout: Dropout | None = None

    def has_mask(self, r: Rectangle) -> bool:
        """Whether there is a mask; it asks for that of the first pair of ``r``, which
        is cheap."""
        return self._bias_of_first_pair(r) is not None

    def has_wide_mask(self, r: Rectangle) -> bool:
        """Whether there is a mask of another dtype than the inputs', as cheaply."""
        bias = self._bias_of_first_pair(r)
        return bias is not None and bias.dtype != self.query.dtype

    def _bias_of_first_pair(self, r: Rectangle) -> torch.Tensor | None:
        q = r.query_start
        k = r.key_start
        return self.bias(
            Rectangle(
                q,
                q + 1,
                k,
                k + 1,
            )
        )

    def shape(
        self,
        bias: BiasShape | None = None,
        *,
        is_causal: bool = False,
        needs_grad: bool = True,
    ) -> CallShape:
        """Return the shape of calls of its rectangles, as kernels are asked about
        it."""
        return CallShape(
            device_type=self.query.device.type,
            dtype=self.query.dtype,
            heads=self.query.shape[1],
            kv_heads=self.key.shape[1],
            head_dim=self.query.shape[-1],
            value_dim=self.value.shape[-1],
            is_causal=is_causal,
            needs_grad=needs_grad,
            bias=bias,
            dropout=self.dropout is not None,
        )

    def indices(
        self,
        r: Rectangle,
        entries: slice = slice(None),
        heads: slice | None = None,
        device: torch.device | None = None,
    ) -> Indices:
        """Return the pairs of a rectangle, by their numbers in the whole call.

        Args:
            entries, heads: some of the task's batch entries and query heads; default
                all.
            device: the device of the numbers; None is the query's.
        """
        if device is None:
            device = self.query.device
        if heads is None:
            heads = slice(0, self.query.shape[1])
        first_head = self.first_head + heads.start
        stop_head = self.first_head + heads.stop
        entry_numbers = self.entries[entries]
        # Made on the device: a copy from the host would wait for the device, and cannot
        # be captured in a CUDA graph.
        return Indices(
            torch.arange(entry_numbers.start, entry_numbers.stop, device=device),
            torch.arange(first_head, stop_head, device=device),
            positions(
                self.task,
                r.query_start,
                r.query_stop,
                device,
            ),
            positions(
                self.task,
                r.key_start,
                r.key_stop,
                device,
            ),
        )


@dataclass(slots=True)
class Statistics:
    """Running softmax statistics of a task's rows, updated in place.

    Attributes:
        out: (b, hq, nq, dv) normalised output so far, fp32, or fp64 for fp64 inputs; 0
            in rows without keys so far.
        lse: (b, hq, nq) the natural-log log-sum-exp of the scores so far, same dtype;
            -inf in rows without keys so far.
    """

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(slots=True)
class Gradients:
    """The inputs of a backward (grad_out, out, lse), and the three gradients it adds to
    in place.

    Attributes:
        grad_out, out: (b, hq, nq, dv) in the input dtype.
        lse: (b, hq, nq) the *global* log-sum-exp in fp32 (fp64 for fp64 inputs), -inf
            in rows that have no key at all.
        grad_query, grad_key, grad_value: (b, hq, nq, d), (b, hk, nk, d), (b, hk, nk,
            dv) in fp32 (or fp64).
        scaling: what grad_out has been divided by, and the shift of the probabilities,
            which keep 16-bit ones out of the subnormal range; the kernel undoes both
            (kernels/scaling.py).
    """

    grad_out: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    grad_query: torch.Tensor
    grad_key: torch.Tensor
    grad_value: torch.Tensor
    scaling: Scaling = field(default_factory=Scaling)


@dataclass(frozen=True, slots=True)
class Indices:
    """Pairs of a call, by int64 tensors on one device.

    Attributes:
        entries: (b,) numbers of batch entries.
        heads: (h,) numbers of query heads.
        queries: (q,) positions of queries.
        keys: (k,) positions of keys.
    """

    entries: torch.Tensor
    heads: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
