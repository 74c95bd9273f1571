"""Dilated attention (LongNet) as an inner kernel, exact relative to the same call in one piece.

A setting (segment w, dilation r) keeps a pair of head h when both tokens lie in the same segment
of w tokens and both positions are congruent to h modulo r. Results of several settings are weighted
by their softmax denominators. So a pair that m settings keep counts m times in numerator and
denominator, which is what merging the settings one after the other gives. Within a setting, the
kept tokens of a segment are a strided view, on which an ordinary kernel runs without a mask.
Positions are global: a task's tokens belong to segments by their positions in the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from quorum_attention.counts import shown, switch, whole_number
from quorum_attention.decomposition import (
    EMPTY,
    FULL,
    PARTIAL,
    Pairs,
    Ranges,
    Rows,
    Verdict,
)
from quorum_attention.kernels.merge import add_, merge_
from quorum_attention.kernels.protocol import (
    CallShape,
    Extent,
    Gradients,
    InnerKernel,
    Operator,
    Statistics,
    TaskTensors,
)
from quorum_attention.kernels.traits import Traits, operator


@dataclass(frozen=True, slots=True)
class DilatedSetting:
    """One (segment, dilation) pair, in tokens.

    Raises:
        TypeError: a number that is not whole.
        ValueError: the segment is no multiple of the dilation, or a number is below 1.
    """

    segment: int
    dilation: int

    def __post_init__(self) -> None:
        whole_number(self.segment, "segment", -(2**63))
        whole_number(self.dilation, "dilation", -(2**63))
        if self.segment < 1 or self.dilation < 1 or self.segment % self.dilation:
            raise ValueError(
                "a segment must be a positive multiple of its dilation, got "
                f"{self.segment} and {self.dilation}"
            )


@dataclass(frozen=True, slots=True)
class _Strided:
    """One plain or causal attention call: slices, with steps, of local tokens and of heads."""

    rows: slice
    columns: slice
    heads: slice
    causal: bool


class LongNetKernel:
    """Dilated attention, causal or not, forward and backward.

    Args:
        settings: (segment, dilation) pairs, or ``DilatedSetting``.
        inner: the kernel that runs the strided rectangles: a ``RectangleKernel``, or another whose
            traits say ``operator``; None for the first that can.
        full_precision: whether 16-bit tokens are converted to fp32 for the inner kernel. Then no
            partial result is rounded to 16 bits: slower, and more exact.

    Raises:
        ValueError: no settings, or one that makes no sense.
        TypeError: an inner kernel of another kind.

    Examples:
        >>> kernel = qa.LongNetKernel([(64, 1), (128, 2)])
        >>> q = torch.randn(1, 2, 300, 16)
        >>> out = qa.attention(q, q, q, kernel=kernel, depth=1)
    """

    name = "longnet"
    traits = Traits(own_attention=True, sparse=True)

    def __init__(
        self,
        settings: Sequence[DilatedSetting | tuple[int, int]],
        inner: InnerKernel | None = None,
        *,
        full_precision: bool = False,
    ) -> None:
        pairs = isinstance(settings, Sequence) and not isinstance(settings, str)
        if not pairs or not all(
            isinstance(s, DilatedSetting) or (isinstance(s, (tuple, list)) and len(s) == 2)
            for s in settings
        ):
            raise TypeError(f"settings must be (segment, dilation) pairs, got {shown(settings)}")
        if not settings:
            raise ValueError("settings must name at least one (segment, dilation)")
        self.settings = tuple(
            s if isinstance(s, DilatedSetting) else DilatedSetting(*s) for s in settings
        )
        self._inner = None if inner is None else operator(inner)
        if inner is not None and self._inner is None:
            raise TypeError(f"inner must be a RectangleKernel or None, not {type(inner).__name__}")
        self._verdict = _verdict_of(self.settings)
        self.full_precision = switch(full_precision, "full_precision")

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """The pairs of a call that lie within a segment of any setting."""
        n = max(n_queries, n_keys, 1)
        share = sum(min(s.segment, n) / (n * s.dilation**2) for s in self.settings)
        return Pairs(n_queries, n_keys, is_causal, self._verdict, share)

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        if call.mask is not None:
            return "it takes no attention mask"
        if call.query_heads != call.key_heads:
            return "it takes as many key heads as query heads: a head's offset is its own"
        return None if self._first(call) is not None else "no kernel can run its rectangles"

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        inner = self._first(call)
        if inner is None:
            return 0
        widened = self._widened(call)
        return inner.forward_workspace_bytes(widened, extent) + _copies(call, widened, extent, 1)

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        inner = self._first(call)
        if inner is None:
            return 0
        # A copy of lse without -inf.
        rows = extent.batch * extent.query_heads * extent.n_tokens
        widened = self._widened(call)
        inside = inner.backward_workspace_bytes(widened, extent)
        return inside + 9 * rows + _copies(call, widened, extent, 2)

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        inner = self._of(task)
        for part in self._parts(task):
            q = self._wide(task.query[:, part.heads, part.rows])
            k, v = (self._wide(t[:, part.heads, part.columns]) for t in (task.key, task.value))
            out, lse = inner.whole_forward(q, k, v, part.causal, task.scale, None)
            with task.timed("merge"):
                merge_(
                    state.out[:, part.heads, part.rows], state.lse[:, part.heads, part.rows], out,
                    lse,
                )  # fmt: skip

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        inner = self._of(task)
        lse = grads.lse.masked_fill(grads.lse == -torch.inf, 0.0)
        for part in self._parts(task):
            rows, columns = (slice(None), part.heads, part.rows), (slice(None), part.heads,
                                                                   part.columns)  # fmt: skip
            found = inner.whole_backward(
                self._wide(grads.grad_out[rows]),
                self._wide(task.query[rows]),
                self._wide(task.key[columns]),
                self._wide(task.value[columns]),
                self._wide(grads.out[rows]),
                lse[rows].contiguous(),
                part.causal,
                task.scale,
                None,
            )
            with task.timed("merge"):
                add_(grads.grad_query[rows], found[0])
                add_(grads.grad_key[columns], found[1])
                add_(grads.grad_value[columns], found[2])

    def _parts(self, task: TaskTensors) -> Iterator[_Strided]:
        n_heads = task.query.shape[1]
        if 0 in task.query.shape[:2]:
            return
        for r in task.rectangles:
            for rows, columns, causal in task.task.contiguous(r):
                for setting in self.settings:
                    for segment, keys in _in_segments(setting.segment, rows, columns):
                        for offset in range(setting.dilation):
                            first = (offset - task.first_head) % setting.dilation
                            if first >= n_heads:
                                continue
                            heads = slice(first, n_heads, setting.dilation)
                            chosen = _congruent(segment, offset, setting.dilation)
                            others = _congruent(keys, offset, setting.dilation)
                            if chosen is not None and others is not None:
                                yield _Strided(chosen, others, heads, causal)

    def _of(self, task: TaskTensors) -> Operator:
        query, value = task.query, task.value
        call = CallShape(
            query.device.type, query.dtype, query.shape[1], query.shape[1], query.shape[3],
            value.shape[3], task.is_causal, True,
        )  # fmt: skip
        inner = self._first(call)
        assert inner is not None, "refused before"
        return inner

    def _wide(self, tensor: torch.Tensor) -> torch.Tensor:
        narrow = self.full_precision and tensor.dtype.itemsize < 4
        return tensor.float() if narrow else tensor

    def _widened(self, call: CallShape) -> CallShape:
        narrow = self.full_precision and call.dtype.itemsize < 4
        return replace(call, dtype=torch.float32, exact_scale=False) if narrow else call

    def _first(self, call: CallShape) -> Operator | None:
        call = self._widened(call)
        if self._inner is not None:
            return self._inner if self._inner.refusal(call) is None else None
        from quorum_attention.kernels.registry import kernels

        for kernel in kernels().values():
            found = operator(kernel)
            if found is not None and found.refusal(call) is None:
                return found
        return None


def _verdict_of(settings: tuple[DilatedSetting, ...]) -> Callable[[Ranges], Verdict]:
    def verdict(block: Ranges) -> Verdict:
        (q0, q1), (k0, k1) = block
        found = EMPTY
        for setting in settings:
            w = setting.segment
            rows, columns = (q0 // w, (q1 - 1) // w), (k0 // w, (k1 - 1) // w)
            if rows[0] <= columns[1] and columns[0] <= rows[1]:
                if setting.dilation == 1 and rows[0] == rows[1] == columns[0] == columns[1]:
                    return FULL
                found = PARTIAL
        return found

    return verdict


def _copies(call: CallShape, widened: CallShape, extent: Extent, rows: int) -> int:
    """Bytes of a rectangle's tokens in the wider dtype: ``rows`` copies of queries, one of keys."""
    if call.dtype == widened.dtype:
        return 0
    queries = rows * extent.max_queries * extent.query_heads
    keys = extent.max_keys * extent.key_heads
    widths = call.head_dim + call.value_dim
    return extent.batch * (queries + keys) * widths * widened.dtype.itemsize


def _in_segments(width: int, rows: Rows, columns: Rows) -> Iterator[tuple[Rows, Rows]]:
    """(rows, columns) within each segment that has both."""
    first = max(rows.start, columns.start) // width
    last = (min(rows.stop, columns.stop) - 1) // width
    for number in range(first, last + 1):
        bounds = number * width, (number + 1) * width
        own, other = rows.within(*bounds), columns.within(*bounds)
        if own is not None and other is not None:
            yield own, other


def _congruent(rows: Rows, offset: int, step: int) -> slice | None:
    """Local positions of the rows whose global positions are ``offset`` modulo ``step``."""
    first = rows.start + (offset - rows.start) % step
    shift = rows.start - rows.local
    return slice(first - shift, rows.stop - shift, step) if first < rows.stop else None
