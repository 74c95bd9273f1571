"""Turn a plain attention operator into an inner kernel: a call for every few rectangles.

The kept pairs of a task are a short list of rectangles, each plain or causal and with no mask
inside (paper, section 4), so an operator that returns ``(out, lse)`` and whose backward takes an
lse from outside needs no conversion at all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from quorum_attention.decomposition import Rectangle
from quorum_attention.decomposition.batches import Batch, batches
from quorum_attention.decomposition.rectangles import cut
from quorum_attention.kernels.bias import dead_rows
from quorum_attention.kernels.merge import add_, add_all_, merge_
from quorum_attention.kernels.protocol import (
    CallShape,
    Extent,
    Gradients,
    Statistics,
    TaskTensors,
)
from quorum_attention.kernels.remembered import remembered
from quorum_attention.kernels.traits import Traits
from quorum_attention.kernels.views import Pick, jth_of_group, key_rows, query_rows, runs_as_batch


@dataclass(frozen=True, slots=True)
class TaskSizes:
    """What the calls of a task depend on beside its rectangles.

    Attributes:
        batch: entries.
        query_lanes, key_lanes: entries times heads.
        row_bytes: of a key and its value.
        device: where it runs.
        max_queries, max_keys: as in ``TaskTensors``.
    """

    batch: int
    query_lanes: int
    key_lanes: int
    row_bytes: int
    device: torch.device
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, task: TaskTensors) -> TaskSizes:
        """Those of ``task``."""
        query, value = task.query, task.value
        batch = query.shape[0]
        return cls(
            batch=batch,
            query_lanes=batch * query.shape[1],
            key_lanes=batch * value.shape[1],
            row_bytes=(query.shape[-1] + value.shape[-1]) * query.element_size(),
            device=query.device,
            max_queries=task.max_queries,
            max_keys=task.max_keys,
        )


class RectangleKernel(ABC):
    """Base class: implement the two ``rectangle_`` methods, ``refusal`` and the two bounds.

    Attributes:
        name: what users write as ``kernel=``.
        grouped: the operator takes fewer key/value heads than query heads as they are. Where it
            does not, the query heads of a group are run one after the other on views.
        masked_limit: most queries or keys of one call under a mask; None for no limit.
        lowest_score: so low a score, or a lower one, is none to the operator.
        row_unit: the operator's temporaries are in whole units of so many rows, for every batch
            entry.
    """

    name: str
    grouped: bool = False
    masked_limit: int | None = None
    lowest_score: float = -math.inf
    row_unit: int = 1
    traits: Traits = Traits(
        several_streams=True,
        scaled_backward=frozenset({torch.float16}),
        whole_calls=True,
        operator=True,
    )

    @abstractmethod
    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""

    @abstractmethod
    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""

    @abstractmethod
    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""

    @abstractmethod
    def rectangle_forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        scale: float,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over one rectangle.

        Args:
            query: (b, h, lq, d); strided, the last dimension contiguous.
            key: (b, hk, lk, d).
            value: (b, hk, lk, dv).
            causal: mask keys after the query; the rectangle is then a square.
            scale: factor of the scores, above 0 (``signed`` sees to that).
            bias: additive mask broadcastable to (b, h, lq, lk), or None.

        Returns:
            out (b, h, lq, dv), normalised, in any floating dtype, and its natural-log lse
            (b, h, lq). Rows that the bias leaves no key may hold anything.
        """

    @abstractmethod
    def rectangle_backward(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of one rectangle, given the *global* out and lse of its rows.

        ``lse`` is finite everywhere, ``scale`` above 0. Returns the gradients of query, key and
        value.
        """

    def takes_whole(
        self, query_heads: int, key_heads: int, tokens: int, masked: bool, every: bool
    ) -> bool:
        """Whether a monolithic call can be handed to the operator as it is (``WholeCalls``)."""
        heads_fit = self.grouped or query_heads == key_heads
        unlimited = not masked or self.masked_limit is None
        return heads_fit and (unlimited or tokens <= (self.masked_limit or 0))

    def whole_forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        scale: float,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``rectangle_forward`` with rows that have no key mended: out 0, lse -inf.

        ``out_dtype`` is what the output will be stored as; a kernel that can returns it so.
        """
        upright, factor, _ = signed(query, scale)
        out, lse = self.rectangle_forward(upright, key, value, causal, factor, bias)
        if bias is not None:
            # Operators differ on rows without keys (0 with lse 0, NaN); only those rows are mended.
            dead = dead_rows(four_dims(bias), query.shape[2], causal, self.lowest_score)
            # Most masks leave none; a GPU is not waited for to say so.
            if dead.is_cuda or bool(dead.any()):
                out.masked_fill_(dead.unsqueeze(-1), 0.0)
                lse.masked_fill_(dead, -torch.inf)
        return out, lse

    def whole_backward(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
        bias: torch.Tensor | None,
        grad_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``rectangle_backward`` of everything; lse is 0 in rows without keys.

        ``grad_dtype`` is what the gradients will be stored as; a kernel that can returns them so.
        """
        upright, factor, sign = signed(query, scale)
        grad_query, grad_key, grad_value = self.rectangle_backward(
            grad_out, upright, key, value, out, lse, causal, factor, bias
        )
        return grad_query if sign == 1 else grad_query.mul_(sign), grad_key, grad_value

    def preferred_sizes(self, sizes: TaskSizes, r: Rectangle, backward: bool) -> tuple[int, int]:
        """Most (queries, keys) in one plain call, for speed alone; as they are unless overridden.

        Args:
            sizes: of the task.
            r: the rectangle at hand.
        """
        return r.n_queries, r.n_keys

    def backward_parts(self, batch_and_heads: int) -> int:
        """Into how many equal runs of query rows a plain rectangle is cut in backward.

        The runs go to the operator as extra batch entries, which helps one that is parallel
        over batch and heads only.
        """
        return 1

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        lanes = task.lanes
        with nullcontext() if lanes is None else lanes.task():
            for number, batch in enumerate(self._calls(task, backward=False)):
                with nullcontext() if lanes is None else lanes.call(number):
                    self._forward_batch(task, batch, state, number)

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        lanes = task.lanes
        lse = _shifted_lse(grads.lse, grads.scaling.shift)
        with nullcontext() if lanes is None else lanes.task():
            for number, batch in enumerate(self._calls(task, backward=True)):
                with nullcontext() if lanes is None else lanes.call(number):
                    self._backward_batch(task, batch, grads, lse, number)

    # One call at a time, so that its mask is let go before the next one is made.

    def _forward_batch(
        self, task: TaskTensors, batch: Batch, state: Statistics, number: int
    ) -> None:
        given = task.bias(batch.first)
        bias = None if given is None else four_dims(given)
        for pick in self._head_views(task):
            self._merge_rectangle(
                query_rows(pick(task.query), batch),
                key_rows(task.key, batch),
                key_rows(task.value, batch),
                batch.first.causal,
                task.scale,
                None if bias is None else _pick_bias(pick, bias, task.query.shape[1]),
                Statistics(query_rows(pick(state.out), batch), query_rows(pick(state.lse), batch)),
                partial(_merging, task, number),
            )

    def _backward_batch(
        self,
        task: TaskTensors,
        batch: Batch,
        grads: Gradients,
        lse: torch.Tensor,
        number: int,
    ) -> None:
        given = task.bias(batch.first)
        bias = None if given is None else four_dims(given)
        scaling = grads.scaling
        undo = _Undo(2.0**-scaling.shift, scaling.unscale, scaling.overflow)
        for pick in self._head_views(task):
            piece = _BackwardPiece(
                query=query_rows(pick(task.query), batch),
                key=key_rows(task.key, batch),
                value=key_rows(task.value, batch),
                grad_out=query_rows(pick(grads.grad_out), batch),
                out=query_rows(pick(grads.out), batch),
                lse=query_rows(pick(lse), batch),
                grad_query=query_rows(pick(grads.grad_query), batch),
                grad_key=key_rows(grads.grad_key, batch),
                grad_value=key_rows(grads.grad_value, batch),
                bias=None if bias is None else _pick_bias(pick, bias, task.query.shape[1]),
            )
            for part in self._parts(piece, batch.first.causal):
                self._add_gradients(part, batch.first.causal, task, undo, number)

    def _calls(self, task: TaskTensors, *, backward: bool) -> Iterator[Batch]:
        """The operator calls of a task, by its rectangles."""
        if 0 in task.query.shape[:2]:
            return
        # Some operators divide by the number of keys.
        rectangles = [r for r in task.rectangles if r.n_queries > 0 and r.n_keys > 0]
        # Whether there is a mask at all is asked of a single pair, which costs next to nothing.
        if rectangles and task.bias(_first_pair(rectangles[0])) is not None:
            limit = self.masked_limit
            cuts = rectangles if limit is None else cut(rectangles, limit, limit)
            yield from (Batch(r) for r in cuts)
            return
        yield from _planned_calls(self, TaskSizes.of(task), tuple(rectangles), backward)

    def _most(self, batch: Batch, sizes: TaskSizes) -> int:
        """How many rectangles of a batch the workspace bound allows in one call."""
        unit, first = self.row_unit, batch.first
        rows = -(-first.n_queries // unit) * unit
        columns = -(-first.n_keys // unit) * unit
        return max(1, min(sizes.max_queries // rows, sizes.max_keys // columns))

    @staticmethod
    def _bounded(batch: Batch, most: int) -> Iterator[Batch]:
        """``batch`` in runs of at most ``most`` rectangles."""
        every = batch.rectangles()
        for start in range(0, batch.count, most):
            count = min(most, batch.count - start)
            yield replace(batch, first=every[start], count=count)

    def _merge_rectangle(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        scale: float,
        bias: torch.Tensor | None,
        state: Statistics,
        merging: Callable[[], AbstractContextManager[None]],
    ) -> None:
        out, lse = self.whole_forward(query, key, value, causal, scale, bias)
        with merging():
            merge_(state.out, state.lse, out, lse)

    def _add_gradients(
        self, p: _BackwardPiece, causal: bool, task: TaskTensors, undo: _Undo, number: int
    ) -> None:
        grad_query, grad_key, grad_value = self.whole_backward(
            p.grad_out, p.query, p.key, p.value, p.out, p.lse, causal, task.scale, p.bias
        )
        with _merging(task, number):
            # Row runs that went in as batch entries each return a share of the key gradients.
            n_shares = grad_key.shape[0] // p.grad_key.shape[0]
            if n_shares == 1:
                targets = (p.grad_query, p.grad_key, p.grad_value)
                found = (grad_query, grad_key, grad_value)
                add_all_(targets, found, undo.factor, undo.unscale, undo.overflow)
                return
            add_(p.grad_query, grad_query, undo.factor, undo.unscale, undo.overflow)
            for share in grad_key.chunk(n_shares):
                add_(p.grad_key, share, undo.factor, undo.unscale, undo.overflow)
            for share in grad_value.chunk(n_shares):
                add_(p.grad_value, share, undo.factor, undo.unscale, undo.overflow)

    def _parts(self, piece: _BackwardPiece, causal: bool) -> Iterator[_BackwardPiece]:
        batch, heads, rows = piece.query.shape[:3]
        n_parts = self.backward_parts(batch * heads)
        even = rows - rows % n_parts
        # A batch of several cannot take row runs as a view; a mask would need cutting as well.
        if n_parts == 1 or even == 0 or causal or batch > 1 or piece.bias is not None:
            yield piece
            return
        yield piece.rows(slice(0, even)).stacked(n_parts)
        if even < rows:
            yield piece.rows(slice(even, rows))

    def _head_views(self, task: TaskTensors) -> Iterator[Pick]:
        query_heads, key_heads = task.query.shape[1], task.key.shape[1]
        if self.grouped or query_heads == key_heads:
            yield lambda tensor: tensor
            return
        for j in range(query_heads // key_heads if key_heads else 0):
            yield partial(jth_of_group, key_heads, j)


@contextmanager
def _merging(task: TaskTensors, number: int) -> Iterator[None]:
    """Brackets the merging of the ``number``-th call's results."""
    with nullcontext() if task.lanes is None else task.lanes.merge(number), task.timed("merge"):
        yield


@dataclass(frozen=True, slots=True)
class _Undo:
    """What turns a call's gradients into true ones, and where it says that they are not finite."""

    factor: float
    unscale: torch.Tensor | None
    overflow: torch.Tensor | None


@dataclass(slots=True)
class _BackwardPiece:
    """Views of everything the backward of (a part of) one rectangle reads and adds to."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_out: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    grad_query: torch.Tensor
    grad_key: torch.Tensor
    grad_value: torch.Tensor
    bias: torch.Tensor | None

    def rows(self, rows: slice) -> _BackwardPiece:
        """The same keys for some of the query rows (no bias)."""
        return self._map_rows(lambda tensor: tensor[:, :, rows], lambda tensor: tensor)

    def stacked(self, parts: int) -> _BackwardPiece:
        """Equal runs of rows as batch entries that share their keys (batch 1, no bias)."""
        return self._map_rows(
            partial(runs_as_batch, parts),
            lambda tensor: tensor.expand(parts, -1, -1, -1),
        )

    def _map_rows(self, on_rows: Pick, on_keys: Pick) -> _BackwardPiece:
        return _BackwardPiece(
            query=on_rows(self.query),
            key=on_keys(self.key),
            value=on_keys(self.value),
            grad_out=on_rows(self.grad_out),
            out=on_rows(self.out),
            lse=on_rows(self.lse),
            grad_query=on_rows(self.grad_query),
            grad_key=self.grad_key,
            grad_value=self.grad_value,
            bias=None,
        )


@remembered(512)
def _planned_calls(
    kernel: RectangleKernel, sizes: TaskSizes, rectangles: tuple[Rectangle, ...], backward: bool
) -> tuple[Batch, ...]:
    """The operator calls of an unmasked task; remembered, because tasks of a level are alike."""
    pieces: list[Rectangle] = []
    for r in rectangles:
        if r.causal:
            pieces.append(r)
        else:
            pieces.extend(cut([r], *kernel.preferred_sizes(sizes, r, backward)))
    alone = sizes.max_queries == 0 or sizes.batch > 1
    return tuple(
        part
        for batch in batches(tuple(pieces))
        for part in kernel._bounded(batch, 1 if alone else kernel._most(batch, sizes))
    )


def signed(query: torch.Tensor, scale: float) -> tuple[torch.Tensor, float, float]:
    """The queries and the factor above 0 that give the same scores as ``query`` and ``scale``.

    Operators take the maximum of a row, and mask it with -inf, before they multiply by the factor:
    with one of 0 or below they return NaN, or weights of the wrong end. The sign is exact anywhere
    else: a query times -1, or for a factor of 0, times 0.

    Returns:
        queries (``query`` itself where ``scale`` is above 0), the factor, and the sign -1.0, 0.0 or
        1.0, by which the gradient of these queries is to be multiplied.
    """
    if scale > 0:
        return query, scale, 1.0
    sign = -1.0 if scale < 0 else 0.0
    # 0 times NaN or infinity is NaN, as in the scores.
    return query * sign, abs(scale) or 1.0, sign


def _first_pair(rectangle: Rectangle) -> Rectangle:
    q, k = rectangle.query_start, rectangle.key_start
    return Rectangle(q, q + 1, k, k + 1)


def four_dims(bias: torch.Tensor) -> torch.Tensor:
    """(b, h, lq, lk) of a mask, dimensions of size 1 before what it has."""
    return bias[(None,) * (4 - bias.dim())]


def _pick_bias(pick: Pick, bias: torch.Tensor, query_heads: int) -> torch.Tensor:
    return pick(bias) if bias.shape[1] == query_heads and query_heads > 1 else bias


def _shifted_lse(lse: torch.Tensor, shift: int) -> torch.Tensor:
    """``lse - shift ln 2``, with 0 for rows without keys: exp(-inf - 0) = 0, where -inf is NaN."""
    return (lse - shift * math.log(2.0)).masked_fill_(lse == -torch.inf, 0.0)
