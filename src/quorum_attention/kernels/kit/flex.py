"""FlexAttention, compiled, with one call for a whole task.

The modifications and the mask get global positions; block lists (``block_masks.py``) say which
parts of the task are run. Both passes run over the range of queries and of keys that any listed
block needs, and over nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from quorum_attention.decomposition import Decomposition, Rectangle
from quorum_attention.kernels.kit.block_masks import (
    BLOCK,
    BlockLists,
    block_lists,
    geometry,
    listed_nodes,
)
from quorum_attention.kernels.kit.flex_backward import (
    Attend,
    Rows,
    Three,
    Trust,
    UnfitError,
    exchanged_gradients,
    recomputed_gradients,
)
from quorum_attention.kernels.kit.flex_compiled import compiled_flex
from quorum_attention.kernels.kit.flex_launch import SAMPLE, Indexed, Launch, has_diagonal, launch
from quorum_attention.kernels.kit.masks import BlockMask
from quorum_attention.kernels.kit.trials import TRIAL_BYTES, task_indices, tried_nodes
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES, add_, merge_
from quorum_attention.kernels.protocol import (
    CallShape,
    Extent,
    Gradients,
    Statistics,
    TaskTensors,
)

if TYPE_CHECKING:
    from quorum_attention.kernels.kit.score_mod import ScoreModKernel

# Host memory for finished lists.
_KEPT_BYTES = 256 << 20


class FlexKernel:
    """See ``from_score_mod``: a compiled ``flex_attention`` for a task. float64 runs in memory.

    Attributes:
        score_mod, mask_mod: the modifications.
        name: for messages and reports.
        pruned: rectangles left out so far because the mask empties them.
        run: those that were run.
    """

    own_attention = True
    """It is no plain attention, so comparing it with the reference says nothing."""

    whole_tasks = True
    """A task is one launch: nothing to gain from several at a time."""

    compiled = True

    def __init__(self, in_memory: ScoreModKernel) -> None:
        self.name = in_memory.name
        self.score_mod, self.mask_mod = in_memory.score_mod, in_memory.mask_mod
        self._in_memory = in_memory
        self._pruned = self._run = 0
        self._lists = _Kept(_KEPT_BYTES)
        self._calls: dict[Hashable, Callable[..., Any]] = {}
        self._trust = Trust()

    @property
    def pruned(self) -> int:
        """Rectangles left out so far because the mask empties them."""
        return self._pruned + self._in_memory.pruned

    @property
    def run(self) -> int:
        """Rectangles run so far."""
        return self._run + self._in_memory.run

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        if call.mask is None and call.device_type == "cpu" and call.dtype != torch.float64:
            return "compiled FlexAttention has no lse and no backward on the CPU: compiled=False"
        return self._in_memory.refusal(call)

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        if call.dtype == torch.float64:
            return self._in_memory.forward_workspace_bytes(call, extent)
        rows = extent.batch * extent.query_heads * extent.n_tokens
        # The output, and lse to both bases.
        own = rows * (call.value_dim * call.dtype.itemsize + 8)
        return own + _copied_bytes(call, extent) + self._common_bytes(extent)

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        if call.dtype == torch.float64:
            return self._in_memory.backward_workspace_bytes(call, extent)
        item, d, dv = call.dtype.itemsize, call.head_dim, call.value_dim
        # By query: its own output, the upstream or the whole row's output laid out again, a
        # contiguous grad_out, grad_query; and lse to both bases and exchanged, its gradient, delta.
        by_query = item * (3 * dv + d) + 4 * 8
        by_key = item * (d + dv)
        lanes = extent.batch * extent.query_heads
        rows = lanes * by_query + extent.batch * extent.key_heads * by_key
        # The sample: inputs, two results, and comparing them in fp32.
        sample = SAMPLE * (3 * rows + lanes * 4 * 12 * (d + dv))
        own = rows * extent.n_tokens + sample + _copied_bytes(call, extent)
        return own + self._common_bytes(extent)

    def _common_bytes(self, extent: Extent) -> int:
        """Positions, pieces, lists, trying a mask, merging."""
        lanes = extent.batch * extent.query_heads if self._tries else 1
        blocks = -(-extent.n_tokens // BLOCK) + 1
        # Two lists by query and two by key, of int32, each as long as it can be; and counts, theirs
        # once more as zeros.
        lists = lanes * (16 * blocks * blocks + 32 * blocks)
        tokens = 16 * extent.n_tokens
        if self._tries:
            tokens += 32 * extent.n_tokens
        tried = TRIAL_BYTES if self._tries else 0
        return lists + tokens + tried + MERGE_WORKSPACE_BYTES + (1 << 20)

    @property
    def _tries(self) -> bool:
        return self.mask_mod is not None and not isinstance(self.mask_mod, BlockMask)

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        if task.query.dtype == torch.float64:
            self._in_memory.forward(task, state)
            return
        made = self._launch(task)
        if made is not None:
            self._merge(made, task, state)

    def _merge(self, made: Launch, task: TaskTensors, state: Statistics) -> None:
        # Rows that keep nothing come back as out 0 and lse -inf.
        out, lse = self._run_forward(made)
        with task.timed("merge"):
            merge_(made.of_rows(state.out), made.of_rows(state.lse), out, lse)

    def _run_forward(self, made: Launch) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            found: tuple[torch.Tensor, torch.Tensor] = self._attend(made, needs_grad=False)(
                *made.inputs, made.block_mask()
            )
        return found

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        if task.query.dtype == torch.float64:
            self._in_memory.backward(task, grads)
            return
        made = self._launch(task)
        if made is not None:
            self._add(made, task, grads)

    def _add(self, made: Launch, task: TaskTensors, grads: Gradients) -> None:
        given = (grads.grad_out, grads.out, grads.lse)
        found = self._gradients(made, Rows(*map(made.of_rows, given)))
        targets = (
            made.of_rows(grads.grad_query),
            made.of_columns(grads.grad_key),
            made.of_columns(grads.grad_value),
        )
        with task.timed("merge"):
            for target, part in zip(targets, found, strict=True):
                add_(target, part)

    def takes_whole(self, query_heads: int, key_heads: int, tokens: int, masked: bool) -> bool:
        """Yes: a monolithic call is its task of everything."""
        return not masked

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
        """See ``WholeCalls``; ``out`` in the query's dtype."""
        task = _everything_of(query, key, value, causal, scale)
        in_memory = query.dtype == torch.float64
        made = None if in_memory else self._launch(task)
        if made is not None and made.of_rows(query).shape == query.shape:
            return self._run_forward(made)
        # Some rows keep nothing: they are not run.
        wide = torch.promote_types(query.dtype, torch.float32)
        shape = (*query.shape[:3], value.shape[-1])
        state = Statistics(
            torch.zeros(shape, dtype=wide, device=query.device),
            torch.full(shape[:3], -torch.inf, dtype=wide, device=query.device),
        )
        if in_memory:
            self._in_memory.forward(task, state)
        elif made is not None:
            self._merge(made, task, state)
        return state.out.to(query.dtype), state.lse

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
    ) -> Three:
        """See ``WholeCalls``; gradients in the query's dtype."""
        task = _everything_of(query, key, value, causal, scale)
        in_memory = query.dtype == torch.float64
        made = None if in_memory else self._launch(task)
        if made is not None and _covers(made, query, key):
            return self._gradients(made, Rows(grad_out, out, lse))
        wide = torch.promote_types(query.dtype, torch.float32)
        sums = [torch.zeros_like(t, dtype=wide) for t in (query, key, value)]
        grads = Gradients(grad_out, out, lse, sums[0], sums[1], sums[2])
        if in_memory:
            self._in_memory.backward(task, grads)
        elif made is not None:
            self._add(made, task, grads)
        found = [total.to(query.dtype) for total in sums]
        return found[0], found[1], found[2]

    def _gradients(self, made: Launch, rows: Rows) -> Three:
        attend, block_mask = self._attend(made, True), made.block_mask()
        kind = made.kind(True)
        if self._trust.earned(kind, lambda: self._sample(made)):
            try:
                return exchanged_gradients(attend, made.inputs, block_mask, rows)
            except UnfitError as error:
                self._trust.distrust(kind, str(error))
        return recomputed_gradients(attend, made.inputs, block_mask, rows)

    def _attend(
        self, made: Launch, needs_grad: bool, indexed: Indexed | None = None
    ) -> Callable[..., Any]:
        kind = made.kind(needs_grad)
        if kind not in self._calls:
            self._calls[kind] = compiled_flex(in_blocks=made.in_blocks)
        score_mod = (indexed or made.indexed).score(self.score_mod)
        return partial(self._calls[kind], score_mod=score_mod, scale=made.scale)

    def _sample(self, made: Launch) -> tuple[Attend, Three, Any]:
        inputs, indexed, block_mask = made.sample()
        return self._attend(made, True, indexed), inputs, block_mask

    def _launch(self, task: TaskTensors) -> Launch | None:
        if 0 in task.query.shape[:3] or 0 in task.key.shape[1:3]:
            return None
        lists = self._listed(task)
        rectangles = sum(1 for r in task.rectangles if r.n_queries and r.n_keys)
        self._run += 0 if lists is None else lists.run
        self._pruned += rectangles if lists is None else lists.pruned
        if lists is None:
            return None
        return launch(task, lists, self.mask_mod)

    def _listed(self, task: TaskTensors) -> BlockLists | None:
        rectangles, is_causal = tuple(task.rectangles), has_diagonal(task)
        # There may be more rows than tokens: no position is made of those.
        sizes = (
            max((r.query_stop for r in rectangles), default=0),
            max((r.key_stop for r in rectangles), default=0),
        )
        key: tuple[object, ...] = (task.task, rectangles, is_causal, sizes, task.query.is_cuda)
        if self._tries:
            key = (*key, task.entries, task.first_head, task.query.shape[1])
        if key not in self._lists:
            pairs = geometry(task.task, rectangles, is_causal, *sizes)
            known = self.mask_mod if isinstance(self.mask_mod, BlockMask) else None
            full, mixed = listed_nodes(pairs, known)
            lanes = (1, 1)
            if self._tries and self.mask_mod is not None:
                full, mixed, lanes = tried_nodes(
                    self.mask_mod, pairs, full, mixed, task_indices(task, *sizes)
                )
            found = block_lists(pairs, full, mixed, lanes, pinned=task.query.is_cuda)
            return self._lists.put(key, found)
        return self._lists.get(key)


def _copied_bytes(call: CallShape, extent: Extent) -> int:
    """Query, key and value laid out anew (``_part``)."""
    by_query = extent.query_heads * call.head_dim
    by_key = extent.key_heads * (call.head_dim + call.value_dim)
    return extent.batch * extent.n_tokens * (by_query + by_key) * call.dtype.itemsize


def _everything_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> TaskTensors:
    """A monolithic call as a task."""
    n, m = query.shape[2], key.shape[2]
    return TaskTensors(
        Decomposition(max(n, m), ()).task(()), (Rectangle(0, n, 0, m, causal),),
        query, key, value, scale, causal, _no_bias, entries=tuple(range(query.shape[0])),
    )  # fmt: skip


def _no_bias(rectangle: Rectangle) -> None:
    return None


def _covers(made: Launch, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether no query and no key was left out."""
    whole = made.of_rows(query).shape == query.shape
    return whole and made.of_columns(key).shape == key.shape


class _Kept:
    """Lists used last, within a limit of bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes = limit, 0
        self._lists: OrderedDict[object, BlockLists | None] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._lists

    def get(self, key: object) -> BlockLists | None:
        self._lists.move_to_end(key)
        return self._lists[key]

    def put(self, key: object, lists: BlockLists | None) -> BlockLists | None:
        self._lists[key] = lists
        self._bytes += _host_bytes(lists)
        while self._bytes > self._limit:
            _, gone = self._lists.popitem(last=False)
            self._bytes -= _host_bytes(gone)
        return lists


def _host_bytes(lists: BlockLists | None) -> int:
    # What a key takes, too.
    return 4096 + (0 if lists is None else lists.nbytes)
