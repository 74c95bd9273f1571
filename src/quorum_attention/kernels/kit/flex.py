"""FlexAttention's score modifications and masks as an inner kernel, in global
positions.

By default on CUDA compiled FlexAttention runs them, one call for a whole task
(``FlexKernel``). Otherwise the reference does, on any device (``score_mod.py``). Block
lists (``block_table.py``) say which blocks of the task are run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

import torch

from quorum_attention.argument_checks import check_callable, shown, switch
from quorum_attention.arithmetic import ceil_div
from quorum_attention.decomposition import Rectangle
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.device_copies import to_device
from quorum_attention.kernels.kit.compiled_flex import FlexCall, compiled_flex
from quorum_attention.kernels.kit.flex_backward import gradients_of_rows, takes_rows
from quorum_attention.kernels.kit.function import gradients_by_autograd
from quorum_attention.kernels.kit.score_mod import ScoreModKernel
from quorum_attention.kernels.kit.word_layout import WORD_ELEMENTS, as_word_layout
from quorum_attention.kernels.limits import GRID_BLOCKS, runs
from quorum_attention.kernels.masked.block_evaluator import evaluated_bytes
from quorum_attention.kernels.masked.block_lists import block_lists
from quorum_attention.kernels.masked.block_nodes import BLOCK
from quorum_attention.kernels.masked.block_table import (
    blocks_key,
    listed_blocks,
    sides,
    whole_region,
)
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.masked.kernel import entries_of
from quorum_attention.kernels.masked.pair_functions import MaskMod, ScoreMod
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES
from quorum_attention.kernels.operator_call import (
    Call,
    OutLse,
    Saved,
    Three,
    whole_task,
)
from quorum_attention.kernels.operator_sizes import UNSPLIT_BYTES
from quorum_attention.kernels.protocol import Launches
from quorum_attention.kernels.task_calls import CallsKernel, TaskCall
from quorum_attention.kernels.task_tensors import TaskTensors
from quorum_attention.kernels.tensors import positions
from quorum_attention.kernels.torch_private import as_it_is, no_torch_modes
from quorum_attention.keywords import helps_with_names

# Device bytes for evaluating a mask's blocks, unless there are more heads than fit
# them.
_EVALUATED_BYTES = 96 << 20
# Tensors alive at once, each of which may be a block that the allocator does not split.
_UNSPLIT_TENSORS = 12
# Host memory for cached lists, and the number of compiled calls that are cached.
_CACHE_BYTES = 256 << 20
_CACHED_CALLS = 128
# Compiled calls, by their kind and the code of the modifications: masks that are
# created again for every batch are compiled once.
_COMPILED: Cache[Callable[..., Any]] = Cache(_CACHED_CALLS)
# Whether the backward of a kind takes the rows' results (flex_backward.py); empty: not
# known yet.
_TAKES_ROWS: Cache[list[bool]] = Cache(_CACHED_CALLS)


class FlexKernel(CallsKernel, ScoreModKernel):
    """The kernel of ``from_score_mod`` with a compiler: compiled ``flex_attention``."""

    launches = Launches.ONE
    launch_seconds = (0.7e-3, 2.3e-3)  # most of it torch.compile's
    rates = (0.84, 0.69)  # H200, causal, D = 64
    entries_limit = GRID_BLOCKS
    _compiled = _COMPILED
    _takes_rows = _TAKES_ROWS

    def __init__(
        self, score_mod: ScoreMod | None, mask_mod: MaskMod | None, name: str
    ) -> None:
        super().__init__(score_mod, mask_mod, name)
        self._lists: Cache[list[torch.Tensor]] = Cache(_CACHE_BYTES, _lists_bytes)

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it
        can."""
        if shape.bias is None and shape.dtype == torch.float64:
            return "compiled FlexAttention takes no float64: compiled=False"
        if shape.bias is None and shape.device_type == "cpu":
            return (
                "compiled FlexAttention has no lse and no backward on the CPU: "
                "compiled=False"
            )
        if shape.heads > GRID_BLOCKS:
            return (
                f"compiled FlexAttention takes {GRID_BLOCKS} heads at most: "
                "compiled=False"
            )
        return super().refusal(shape)

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        out = shape.value_dim * shape.dtype.itemsize
        lse_in_both_bases = 8
        return self._workspace_bytes(
            shape,
            extent,
            query_row_bytes=out + lse_in_both_bases,
            key_row_bytes=0,
        )

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        item = shape.dtype.itemsize
        # The part's own output, its gradient, a contiguous copy of that; and
        # grad_query.
        query_row_bytes = item * (3 * shape.value_dim + shape.head_dim)
        # The forms of lse, its gradient, and delta: in fp32.
        query_row_bytes += 5 * 8
        return self._workspace_bytes(
            shape,
            extent,
            query_row_bytes=query_row_bytes,
            key_row_bytes=item * shape.kv_width,
        )

    def _workspace_bytes(
        self,
        shape: CallShape,
        extent: Extent,
        *,
        query_row_bytes: int,
        key_row_bytes: int,
    ) -> int:
        """Bytes of a pass: rows, copies of the inputs, lists, evaluating a mask, and
        merging.

        Args:
            query_row_bytes: the pass's bytes for each query of a head.
            key_row_bytes: the pass's bytes for each key of a head.
        """
        if _copies_inputs(shape, extent):
            item = shape.dtype.itemsize
            query_row_bytes += shape.head_dim * item
            key_row_bytes += shape.kv_width * item
        token_bytes = (
            extent.query_heads * query_row_bytes + extent.key_heads * key_row_bytes
        )
        # Positions are there once for all batch entries.
        total = (extent.batch * token_bytes + 16) * extent.n_tokens
        total += self._list_bytes(extent)
        if self.geometry.functions:
            total += 32 * extent.n_tokens + evaluated_bytes(
                extent.lanes, _EVALUATED_BYTES
            )
        return total + MERGE_WORKSPACE_BYTES + _UNSPLIT_TENSORS * UNSPLIT_BYTES

    def _list_bytes(self, extent: Extent) -> int:
        """Bytes of the block lists of a task: two by query and two by key, in int32."""
        lanes = extent.lanes if self.geometry.functions else 1
        blocks = ceil_div(extent.n_tokens, BLOCK) + 1
        indices = 16 * blocks * self._longest_list(blocks)
        counts = 32 * blocks
        return lanes * (indices + counts)

    def _longest_list(self, blocks: int) -> int:
        """The most listed blocks of a line; a task's gaps bring distant tokens closer
        together."""
        band = self.geometry.band
        if band.low is None or band.high is None:
            return blocks
        return min(blocks, (band.high - band.low) // BLOCK + 3)

    def task_calls(
        self, task: TaskTensors, *, backward: bool
    ) -> Iterator[tuple[TaskCall]]:
        """Yield the calls of a task, each alone in its turn (``regions``).

        Rows that keep nothing come back as out 0 and lse -inf. A call has no more batch
        entries than a grid has blocks.
        """
        for entries in runs(slice(0, task.query.shape[0]), self.entries_limit):
            part = entries_of(task, entries)
            for region, rectangles in regions(part):
                flex_call = self._flex_call(part, region, rectangles)
                if flex_call is not None:
                    yield (self._task_call(flex_call, entries, region),)

    def _task_call(
        self, flex_call: FlexCall, entries: slice, region: Rectangle
    ) -> TaskCall:
        query_side, key_side = sides(region)
        heads = slice(None)
        return TaskCall(
            rows=itemgetter((entries, heads, slice(*query_side))),
            keys=itemgetter((entries, heads, slice(*key_side))),
            forward=partial(self._run_forward, flex_call),
            backward=partial(self._gradients, flex_call),
        )

    def takes_whole(self, shape: CallShape, tokens: int, all_heads: bool) -> bool:
        """All heads and entries are needed, because the modifications are given their
        numbers."""
        return all_heads and shape.bias is None and shape.batch <= self.entries_limit

    def whole_forward(self, call: Call) -> OutLse:
        """See ``Kernel``; ``out`` in the query's dtype."""
        only_call = self._only_call(call, backward=False)
        return super().whole_forward(call) if only_call is None else only_call.forward()

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``Kernel``; gradients in the query's dtype."""
        only_call = self._only_call(call, backward=True)
        if only_call is None:
            return super().whole_backward(call, saved)
        return only_call.backward(saved)

    def _only_call(self, call: Call, *, backward: bool) -> TaskCall | None:
        """The one call that a whole call is; None if it is several, or none."""
        turns = list(self.task_calls(whole_task(call), backward=backward))
        return turns[0][0] if len(turns) == 1 else None

    def _run_forward(self, flex_call: FlexCall) -> OutLse:
        attend = self._attend(flex_call, needs_grad=False)
        with torch.no_grad():
            out, lse = attend(*flex_call.inputs, flex_call.block_mask())
        return out, lse

    def _gradients(self, flex_call: FlexCall, saved: Saved) -> Three:
        """Gradients of a call, given the results of the whole rows."""
        attend = self._attend(flex_call, needs_grad=True)
        block_mask = flex_call.block_mask()
        # Empty, or the verdict on this kind of call.
        verdict = self._takes_rows.get(flex_call.kind(needs_grad=True), list)
        if verdict == [True]:
            gradients = gradients_of_rows(attend, flex_call.inputs, block_mask, saved)
            if gradients is not None:
                return gradients

        def run(*inputs: torch.Tensor) -> OutLse:
            # The caller's hooks see none of its tensors, which a checkpoint would
            # count. Without its graph: a saved output would hold the graph that has it,
            # for good.
            with torch.autograd.graph.saved_tensors_hooks(
                torch.Tensor.detach, as_it_is
            ):
                out, lse = attend(*inputs, block_mask)
            return out, lse

        gradients = gradients_by_autograd(run, flex_call.inputs, saved)
        if not verdict:
            takes = takes_rows(attend, flex_call.inputs, block_mask, saved, gradients)
            if takes is not None:
                verdict.append(takes)
        return gradients

    def _attend(self, flex_call: FlexCall, *, needs_grad: bool) -> Callable[..., Any]:
        """The compiled ``attend(query, key, value, block_mask) -> (out, lse)`` of a
        call."""
        make = partial(compiled_flex, in_blocks=flex_call.in_blocks)
        compiled = self._compiled.get(flex_call.kind(needs_grad), make)
        return partial(compiled, score_mod=flex_call.score_mod, scale=flex_call.scale)

    def _flex_call(
        self, task: TaskTensors, region: Rectangle, rectangles: tuple[Rectangle, ...]
    ) -> FlexCall | None:
        """The call for a region of a task; None if it keeps no pair."""
        if not rectangles:
            return None
        geometry = self.geometry_under(is_causal=task.is_causal)
        key = (task.is_causal, region, *blocks_key(geometry, task, rectangles))
        lists = self._lists.get(
            key, partial(_lists_of, geometry, task, region, rectangles)
        )
        if not lists:
            return None
        device = task.query.device
        query_side, key_side = sides(region)
        inputs = (
            as_word_layout(task.query[:, :, slice(*query_side)]),
            as_word_layout(task.key[:, :, slice(*key_side)]),
            as_word_layout(task.value[:, :, slice(*key_side)]),
        )
        mask_mod, score_mod = _in_global_numbers(task, region, geometry, self.score_mod)
        return FlexCall(
            inputs,
            [to_device(blocks, device).detach() for blocks in lists],
            mask_mod,
            score_mod,
            task.scale,
        )


def regions(task: TaskTensors) -> list[tuple[Rectangle, tuple[Rectangle, ...]]]:
    """The regions of a task that are one call each, with their rectangles.

    The whole task is one region, unless rectangles end within blocks. Rectangles are
    counted from their region's first query and key.
    """
    rectangles = tuple(task.rectangles)
    task_region = whole_region(task)
    if all(_ends_at_blocks(rectangle, task_region) for rectangle in rectangles):
        return [(task_region, rectangles)]
    return [
        (rectangle, (Rectangle(0, rectangle.n_queries, 0, rectangle.n_keys),))
        for rectangle in rectangles
    ]


def _ends_at_blocks(rectangle: Rectangle, task_region: Rectangle) -> bool:
    """Whether all four edges of a rectangle are edges of blocks, or the end of the
    task."""
    return all(
        edge % BLOCK == 0 or edge == n_tokens
        for side, (_, n_tokens) in zip(
            sides(rectangle), sides(task_region), strict=True
        )
        for edge in side
    )


def _copies_inputs(shape: CallShape, extent: Extent) -> bool:
    """Whether inputs may have to be copied into a ``WordLayout``.

    Slots of usual widths are not copied, unless they hold one head of several entries.
    """
    if extent.direct:
        return True
    if shape.head_dim % WORD_ELEMENTS or shape.value_dim % WORD_ELEMENTS:
        return True
    return extent.batch > 1 and min(extent.query_heads, extent.key_heads) <= 1


def _lists_of(
    geometry: Geometry,
    task: TaskTensors,
    region: Rectangle,
    rectangles: tuple[Rectangle, ...],
) -> list[torch.Tensor]:
    """The block lists of a region, on the host; none if no pair is kept."""
    full, partly, lanes = listed_blocks(
        geometry,
        task,
        region,
        rectangles,
        _EVALUATED_BYTES,
        by_lane=True,
    )
    return block_lists(
        region,
        full,
        partly,
        lanes,
        pinned=task.query.is_cuda,
    )


def _in_global_numbers(
    task: TaskTensors, region: Rectangle, geometry: Geometry, score_mod: ScoreMod | None
) -> tuple[MaskMod, ScoreMod | None]:
    """The mask and the score modification of a region by local indices."""
    device = task.query.device
    query_side, key_side = sides(region)
    stop_head = task.first_head + task.query.shape[1]
    head_numbers = range(task.first_head, stop_head)
    entries = _numbers_on(task.entries, device)
    heads = _numbers_on(head_numbers, device)
    queries = positions(
        task.task,
        *query_side,
        device,
        torch.int32,
    )
    keys = positions(
        task.task,
        *key_side,
        device,
        torch.int32,
    )
    keeps = geometry.mask_mod(device)

    def keeps_pair(b: Any, h: Any, q: Any, k: Any) -> Any:
        return keeps(
            entries[b],
            heads[h],
            queries[q],
            keys[k],
        )

    if score_mod is None:
        return keeps_pair, None

    def modify_score(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score_mod(
            score,
            entries[b],
            heads[h],
            queries[q],
            keys[k],
        )

    return keeps_pair, modify_score


@lru_cache(maxsize=64)
def _numbers_on(numbers: range, device: torch.device) -> torch.Tensor:
    """``numbers`` on the device; cached, because every task of a head group needs
    them."""
    # A backward may use them, so they must not be a tensor of inference mode.
    with no_torch_modes():
        return torch.tensor(numbers, dtype=torch.int32, device="cpu").to(device)


def _lists_bytes(lists: list[torch.Tensor]) -> int:
    return 4096 + sum(blocks.nbytes for blocks in lists)


@helps_with_names
def from_score_mod(
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    *,
    name: str = "flex",
    compiled: bool | None = None,
) -> ScoreModKernel:
    """An inner kernel from FlexAttention's ``score_mod`` and ``mask_mod``.

    Args:
        score_mod: ``score_mod(score, batch, head, query, key)`` -> score. The last four
            are numbers in the whole call.
        mask_mod: ``mask_mod(batch, head, query, key)`` -> which pairs are kept, by
            numbers in the whole call. A mask from
            ``quorum_attention.kernels.kit.masks`` (``sliding_window``, ``document``,
            ``prefix_lm``, ``causal``, combined with ``&`` and ``|``) knows which blocks
            it keeps. Any other mask is evaluated for every pair of a task. Neither
            function may change while the kernel lives (docs/kit.md). To change a value
            that they read, make another kernel. It compiles nothing again.
        name: for messages and reports.
        compiled: True computes a task by one call of compiled FlexAttention; this is
            the default if there is CUDA. False computes it tile by tile with torch's
            operators, on any device and in float64 too.

    A call's own ``is_causal`` applies in addition.

    Raises:
        TypeError: ``score_mod`` or ``mask_mod`` cannot be called.

    Examples:
        >>> def nearer(score, batch, head, query, key):
        ...     return score - 0.1 * (query - key).abs()
        >>> kernel = qa.from_score_mod(nearer, compiled=False)
        >>> q = torch.randn(1, 2, 300, 16)
        >>> out = qa.attention(q, q, q, kernel=kernel, depth=1)
    """
    check_callable(score_mod, "score_mod")
    check_callable(mask_mod, "mask_mod")
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a str of at least a letter, got {shown(name)}")
    if compiled is None:
        compiled = torch.cuda.is_available()
    if switch(compiled, "compiled"):
        return FlexKernel(score_mod, mask_mod, name)
    return ScoreModKernel(score_mod, mask_mod, name)
