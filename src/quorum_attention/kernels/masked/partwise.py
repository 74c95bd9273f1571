"""A task under a mask part by part, by a kernel that knows only plain and causal
rectangles.

The parts (``parts.py``) are plain rectangles, squares whose lower or upper triangle is
kept, and ragged ones, which are given an additive mask, made for them alone. An upper
triangle is a causal call with the orders of queries and keys turned round.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch

from quorum_attention.decomposition import Interval, Ranges, Rectangle
from quorum_attention.decomposition.bands import Kind
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.call_shape import BiasShape, CallShape, Extent
from quorum_attention.kernels.masked.block_evaluator import evaluated_bytes
from quorum_attention.kernels.masked.block_nodes import BLOCK
from quorum_attention.kernels.masked.block_table import blocks_key
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.masked.parts import (
    EVALUATED_BYTES,
    LEAF,
    WIDEST,
    Parts,
    Rectangles,
    parts_by_bands,
    parts_by_blocks,
)
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES, by_head
from quorum_attention.kernels.operator_call import four_dims
from quorum_attention.kernels.protocol import Kernel, refusal, workspace_bytes
from quorum_attention.kernels.rectangles import RectangleKernel
from quorum_attention.kernels.reference import TiledKernel
from quorum_attention.kernels.scaling import Scaling
from quorum_attention.kernels.score_tiles import ScoreTransform
from quorum_attention.kernels.task_tensors import Gradients, Statistics, TaskTensors

# Parts are joined to one call up to so many queries, and keys.
_JOINED = 8192
# Tasks whose parts are remembered.
_MOST_TASKS = 512
_ANY_MASK = BiasShape(batch=True, heads=True, rows=True)
# Bytes of a pair while it is tested, by its positions and by rules.
_POSITION_TEST_BYTES = 16
_RULE_TEST_BYTES = 64


class PartwiseKernel(Kernel):
    """Attention under a mask, part by part, for batch entries of one geometry.

    Args:
        base: the kernel that computes the parts: an operator, or ``TiledKernel``.
        scores: the change of scores that ``base`` makes.
    """

    name = "parts"

    def __init__(
        self, geometry: Geometry, base: Kernel, scores: ScoreTransform
    ) -> None:
        self._geometry = geometry
        self._tiles = TiledKernel(scores)
        keeps_blocks = all(band.keeps_all for band in geometry.block_bands)
        self._has_ragged = bool(geometry.rules) or not keeps_blocks
        self._operator = copy.copy(base)
        self._calls_rectangles = isinstance(base, RectangleKernel)
        self._has_bands = False
        if isinstance(self._operator, RectangleKernel):
            self._has_bands = self._operator.bands
            # Whole calls that regroup heads are run for all heads of a part at a time.
            self._operator.grouped = base.grouped or self._operator.regroups
        self._upper = copy.copy(self._operator)
        if isinstance(self._upper, RectangleKernel):
            self._upper.reversed_order = True
        self._parts: Cache[Parts] = Cache(_MOST_TASKS)

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it
        can."""
        return self._operator.refusal(shape)

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        n_bytes = self._calls_bytes(shape, extent, backward=False)
        if extent.direct:
            state_bytes = (shape.value_dim + 1) * shape.state_dtype.itemsize
            n_bytes += extent.token_rows * (state_bytes + shape.value_dim * 4)
        return n_bytes

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        n_bytes = self._calls_bytes(shape, extent, backward=True)
        if self._calls_rectangles:
            # The lse without rows that have no key.
            n_bytes += extent.token_rows * 2 * shape.state_dtype.itemsize
        is_scaled = shape.dtype in self._operator.scaled_backward
        if is_scaled and self._ragged_kernel(shape) is self._tiles:
            # An upstream gradient that is not scaled.
            n_bytes += extent.token_rows * 4 * shape.value_dim
        if extent.direct:
            key_rows = extent.key_lanes * extent.n_tokens
            numbers = extent.token_rows * shape.head_dim
            numbers += key_rows * shape.kv_width
            n_bytes += numbers * (shape.state_dtype.itemsize + 4)
        return n_bytes

    def _calls_bytes(self, shape: CallShape, extent: Extent, *, backward: bool) -> int:
        """Bytes of the largest call: of a clear part, or of a ragged one with its
        mask."""
        largest = self._limited(extent, shape)
        n_bytes = self._clear_bytes(shape, largest, backward=backward)
        if self._has_ragged:
            ragged_bytes = self._ragged_bytes(shape, largest, backward=backward)
            n_bytes = max(n_bytes, ragged_bytes)
        if self._geometry.functions:
            evaluated = evaluated_bytes(extent.lanes, EVALUATED_BYTES)
            n_bytes = max(n_bytes, evaluated)
        return n_bytes

    def _clear_bytes(self, shape: CallShape, extent: Extent, *, backward: bool) -> int:
        kernel = self._kernel_for(shape)
        causal = replace(shape, is_causal=True)
        n_bytes = workspace_bytes(kernel, causal, extent, backward=backward)
        if self._calls_rectangles:
            # Copies of a triangle's rows in the other order.
            copied_rows = extent.rows + extent.key_rows
            if backward:
                copied_rows += extent.rows
            row_bytes = shape.kv_width * shape.dtype.itemsize
            n_bytes += 2 * copied_rows * row_bytes
            n_bytes += 8 * extent.rows + MERGE_WORKSPACE_BYTES
        return n_bytes

    def _ragged_bytes(self, shape: CallShape, extent: Extent, *, backward: bool) -> int:
        most_queries = LEAF
        most_keys = LEAF
        test_bytes = _POSITION_TEST_BYTES
        if self._geometry.rules:
            most_queries = BLOCK
            most_keys = WIDEST
            test_bytes = _RULE_TEST_BYTES
        queries = min(most_queries, extent.max_queries)
        keys = min(most_keys, extent.max_keys)
        part = replace(extent, max_queries=queries, max_keys=keys)
        masked = replace(shape, bias=_ragged_mask(shape), is_causal=False)
        kernel = self._kernel_for(masked)
        n_bytes = workspace_bytes(kernel, masked, part, backward=backward)
        mask_bytes = 2 + 2 * masked.bias_dtype.itemsize
        pair_bytes = extent.lanes * mask_bytes + test_bytes
        return n_bytes + pair_bytes * queries * keys

    def _limited(self, extent: Extent, shape: CallShape) -> Extent:
        """The largest call, which allocates no results."""
        queries, keys = self._limits(extent.max_queries, extent.max_keys, shape)
        return replace(extent, max_queries=queries, max_keys=keys, direct=False)

    def _limits(self, n_queries: int, n_keys: int, shape: CallShape) -> tuple[int, int]:
        """The most queries and keys of one call: of the largest part, or of parts
        joined."""
        joined_queries = min(n_queries, _JOINED)
        joined_keys = min(n_keys, _JOINED)
        if not self._geometry.rules:
            n_queries, n_keys = self._geometry.largest_part(
                n_queries,
                n_keys,
                bands=self._takes_bands(shape),
            )
        return max(n_queries, joined_queries), max(n_keys, joined_keys)

    def _takes_bands(self, shape: CallShape) -> bool:
        # Operators with bands neither drop nor take a mask beside them.
        return self._has_bands and shape.bias is None and not shape.dropout

    def _kernel_for(self, shape: CallShape) -> Kernel:
        """The operator, or ``TiledKernel`` for a call's mask that it does not take."""
        return self._operator if shape.bias is None else self._ragged_kernel(shape)

    def _ragged_kernel(self, shape: CallShape) -> Kernel:
        """The kernel of ragged parts."""
        masked = replace(shape, bias=_ragged_mask(shape))
        if refusal(self._operator, masked) is None:
            return self._operator
        return self._tiles

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        for kernel, part in self._tasks(task, backward=False):
            kernel.forward(part, state)

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        for kernel, part in self._tasks(task, backward=True):
            is_reference = isinstance(kernel, TiledKernel)
            kernel.backward(part, _unscaled(grads) if is_reference else grads)

    def _tasks(
        self, task: TaskTensors, *, backward: bool
    ) -> Iterator[tuple[Kernel, TaskTensors]]:
        """The parts of the task: for the operator, upper triangles, and ragged ones."""
        rectangles = tuple(task.rectangles)
        if not rectangles:
            return
        mask = None
        if task.has_mask(rectangles[0]):
            mask = replace(_ANY_MASK, wide=task.has_wide_mask(rectangles[0]))
        # As its bytes are asked for.
        shape = task.shape(mask, needs_grad=backward)
        parts = self._parts_of(task, rectangles, shape)
        n_queries, n_keys = self._limits(task.max_queries, task.max_keys, shape)
        inside = replace(
            task,
            max_queries=n_queries,
            max_keys=n_keys,
            streams=None,
        )
        if parts.clear:
            yield self._kernel_for(shape), replace(inside, rectangles=parts.clear)
        if parts.upper:
            yield self._upper, replace(inside, rectangles=parts.upper)
        if parts.ragged:
            masks = _PartMasks(self._geometry, task)
            ragged = replace(inside, rectangles=parts.ragged, bias=masks.mask_of)
            yield self._ragged_kernel(shape), ragged

    def _parts_of(
        self, task: TaskTensors, rectangles: Rectangles, shape: CallShape
    ) -> Parts:
        """The parts of rectangles that the geometry keeps; it has the call's own causal
        rule."""
        geometry = self._geometry
        if geometry.rules:
            key = blocks_key(geometry, task, rectangles)
            return self._parts.get(
                key, lambda: parts_by_blocks(task, rectangles, geometry)
            )
        kinds: set[Kind] = {"plain", "ragged"}
        # Other kernels take no triangles off the diagonal of a task, nor does the tiled
        # loop, which runs the parts of a call whose mask the operator does not take.
        is_run_by_operator = self._kernel_for(shape) is self._operator
        if task.dropout is None and self._calls_rectangles and is_run_by_operator:
            kinds.add("lower")
            if shape.bias is None:
                kinds.add("upper")
        if self._takes_bands(shape):
            kinds.add("band")
        key = (task.task, rectangles, *sorted(kinds))
        return self._parts.get(
            key, lambda: parts_by_bands(task, rectangles, geometry, frozenset(kinds))
        )


class _PartMasks:
    """The additive masks of the ragged parts of a task.

    The last one is kept, where it is the same for other parts at such a distance and
    size.
    """

    def __init__(self, geometry: Geometry, task: TaskTensors) -> None:
        self._geometry = geometry
        self._task = task
        self._place: object = None
        self._mask: torch.Tensor | None = None

    def mask_of(self, part: Rectangle) -> torch.Tensor:
        """The mask of a part, with the task's own mask, (b|1, h|1, q, k)."""
        mask = self._mask_at_place(part)
        bias = self._task.bias(part)
        return mask if bias is None else four_dims(bias) + mask

    def _mask_at_place(self, part: Rectangle) -> torch.Tensor:
        if self._geometry.rules:
            return self._tested(self._geometry, part)
        query = self._position(part.query_start)
        key = self._position(part.key_start)
        queries = Interval(query, query + part.n_queries)
        keys = Interval(key, key + part.n_keys)
        # A part lies in a block of the geometry: its band is all that is left.
        ((_, band),) = self._geometry.within(Ranges(queries, keys))
        place = (band.moved(query - key), part.n_queries, part.n_keys)
        if self._mask is None or place != self._place:
            self._mask = None  # freed before the next one is made
            self._mask = self._tested(Geometry(band), part)
            self._place = place
        return self._mask

    def _position(self, token: int) -> int:
        """The position of a token of the task."""
        return self._task.task.segments(token, token + 1)[0].start

    def _tested(self, geometry: Geometry, part: Rectangle) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            is_kept = geometry.keeps(self._task.indices(part))
        query = self._task.query
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        return torch.where(is_kept, zero, -torch.inf)


def _ragged_mask(shape: CallShape) -> BiasShape:
    """The mask of a ragged part: it has all dimensions, and is as wide as the call's
    own."""
    is_wide = shape.bias is not None and shape.bias.wide
    return replace(_ANY_MASK, wide=is_wide)


def _unscaled(grads: Gradients) -> Gradients:
    """Gradients whose upstream one is not divided: the reference computes in fp32."""
    factor = grads.scaling.unscale
    if factor is None:
        return grads
    factors = by_head(factor, grads.grad_out.shape[1])
    grad_out = grads.grad_out * factors
    return replace(grads, grad_out=grad_out, scaling=Scaling())
