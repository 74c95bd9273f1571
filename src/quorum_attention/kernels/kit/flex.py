"""FlexAttention, compiled: one call for a whole task.

The score modification and the mask get global positions. Block lists (``block_table.py``) say which
blocks of the task are run. Both passes get only the range of queries and keys from the first to the
last listed block. The backward takes the whole row's results (``flex_launch.py``); where torch's
FlexAttention does not, it runs the call's forward again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from quorum_attention.counts import shown, switch
from quorum_attention.decomposition import Decomposition, Rectangle
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.kit.block_table import (
    BLOCK,
    BlockLists,
    TaskPairs,
    block_lists,
    evaluated_bytes,
    listed_blocks,
)
from quorum_attention.kernels.kit.flex_launch import (
    Launch,
    UnfitError,
    agree,
    always_in_words,
    compiled_flex,
    exchanged_gradients,
    has_diagonal,
    launch,
)
from quorum_attention.kernels.kit.function import gradients_by_autograd
from quorum_attention.kernels.kit.functions import codes
from quorum_attention.kernels.kit.masks import BlockMask, MaskMod
from quorum_attention.kernels.kit.over_pairs import ScoreMod
from quorum_attention.kernels.kit.score_mod import ScoreModKernel
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES, add_, merge_
from quorum_attention.kernels.protocol import (
    Call,
    CallShape,
    Extent,
    Gradients,
    Saved,
    Statistics,
    TaskTensors,
    Three,
)
from quorum_attention.kernels.tensors import dense
from quorum_attention.kernels.workspace import UNSPLIT_BYTES

# Host memory for cached lists, and the number of compiled calls and of spans that are cached.
_CACHE_BYTES = 256 << 20
_CACHED_CALLS = 128
_CACHED_SPANS = 1024
# Compiled calls, by their kind and the code of the modifications: masks that are created again for
# every batch are compiled once.
_COMPILED: Cache[Callable[..., Any]] = Cache(_CACHED_CALLS, lambda call: 1)
# By the same, whether it takes another forward's results in its backward.
_TAKES_OTHERS: dict[Hashable, bool] = {}
# Errors that the device reports; they say nothing about the exchange.
_ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)


def _host_bytes(lists: BlockLists | None) -> int:
    # 4096: about the size of a cache key.
    return 4096 + (0 if lists is None else lists.nbytes)


class FlexKernel(ScoreModKernel):
    """See ``from_score_mod``: compiled ``flex_attention``, except for float64."""

    whole_tasks = True
    launch_seconds = (0.7e-3, 2.3e-3)  # most of it torch.compile's
    rates = (0.84, 0.69)  # H200, causal, D = 64
    whole_calls = True
    task_calls = True

    def __init__(self, score_mod: ScoreMod | None, mask_mod: MaskMod | None, name: str) -> None:
        super().__init__(score_mod, mask_mod, name)
        self._lists: Cache[BlockLists | None] = Cache(_CACHE_BYTES, _host_bytes)
        self._spans: Cache[tuple[slice, slice] | None] = Cache(_CACHED_SPANS, lambda span: 1)
        self._compiled, self._takes_others = _COMPILED, _TAKES_OTHERS
        # If the functions in a closure change later, torch notices and compiles again.
        self._codes = codes(score_mod), codes(mask_mod)

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        if call.mask is None and call.device_type == "cpu" and call.dtype != torch.float64:
            return "compiled FlexAttention has no lse and no backward on the CPU: compiled=False"
        return super().refusal(call)

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        rows = extent.batch * extent.query_heads * extent.n_tokens
        if call.dtype == torch.float64:
            results = rows * (call.value_dim + 1) * 8 if extent.direct else 0
            return results + super().forward_workspace_bytes(call, extent)
        # The output, and lse in base 2 and base e.
        own = rows * (call.value_dim * call.dtype.itemsize + 8)
        if extent.direct and self.mask_mod is not None:
            own *= 2  # results of all rows, into which those of the listed rows are copied
        return own + _copied_bytes(call, extent) + self._common_bytes(extent)

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        if call.dtype == torch.float64:
            results = _copied_bytes(call, extent) if extent.direct else 0
            return results + super().backward_workspace_bytes(call, extent)
        item, d, dv = call.dtype.itemsize, call.head_dim, call.value_dim
        # For each query: the part's own output, the gradient of it, a contiguous copy of that, and
        # grad_query; in fp32 forms of lse, its gradient, and delta.
        by_query = item * (3 * dv + d) + 4 * 8
        by_key = item * (d + dv)
        lanes = extent.batch * extent.query_heads
        rows = lanes * by_query + extent.batch * extent.key_heads * by_key
        # The first gradients of a kind are found both ways, and compared.
        both = (lanes + 2 * extent.batch * extent.key_heads) * 2 * max(d, dv) * (item + 4)
        own = (rows + both) * extent.n_tokens + _copied_bytes(call, extent)
        if extent.direct and self.mask_mod is not None:
            own += _copied_bytes(call, extent)  # gradients of all rows, as in the forward
        return own + self._common_bytes(extent)

    def _common_bytes(self, extent: Extent) -> int:
        """Bytes of positions, pieces and lists, of evaluating a mask, and of merging."""
        lanes = extent.batch * extent.query_heads if self._opaque else 1
        blocks = -(-extent.n_tokens // BLOCK) + 1
        # Two lists by query and two by key, in int32, each as long as possible; and their counts.
        lists = lanes * (16 * blocks * self._longest_list(blocks) + 32 * blocks)
        tokens = 16 * extent.n_tokens
        if self._opaque:
            tokens += 32 * extent.n_tokens
        tried = evaluated_bytes(lanes) if self._opaque else 0
        # Eight tensors may each be a block that the allocator does not split.
        return lists + tokens + tried + MERGE_WORKSPACE_BYTES + 8 * UNSPLIT_BYTES

    def _longest_list(self, blocks: int) -> int:
        """The most listed blocks of a line; a task's gaps bring distant tokens closer together."""
        if not isinstance(self.mask_mod, BlockMask) or sum(self.mask_mod.reach) >= BLOCK * blocks:
            return blocks
        return min(blocks, int(sum(self.mask_mod.reach)) // BLOCK + 3)

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        if task.query.dtype == torch.float64:
            super().forward(task, state)
            return
        made = self._launch(task)
        if made is None:
            return
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
            super().backward(task, grads)
            return
        made = self._launch(task)
        if made is None:
            return
        saved = Saved(grads.grad_out, grads.out, grads.lse)
        found = self._gradients(made, saved.mapped(made.of_rows))
        targets = (
            made.of_rows(grads.grad_query),
            made.of_columns(grads.grad_key),
            made.of_columns(grads.grad_value),
        )
        with task.timed("merge"):
            for target, part in zip(targets, found, strict=True):
                add_(target, part)

    def takes_tasks(self, dtype: torch.dtype) -> bool:
        """See ``Kernel``: all dtypes that are compiled."""
        return dtype != torch.float64

    def task_span(self, task: TaskTensors) -> tuple[slice, slice] | None:
        """See ``Kernel``; a span begins and ends at whole blocks, or at the task's end."""

        def make() -> tuple[slice, slice] | None:
            lists = self._listed(task)
            return None if lists is None else (lists.rows, lists.columns)

        # Cached apart from the lists, which may be too large to stay in their cache.
        span = self._spans.get(self._list_key(task), make) if _has_rows(task) else None
        if span is None:
            self.pruned += _count(task)
        return span

    def task_forward(self, task: TaskTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernel``; ``out`` in the query's dtype."""
        return self._run_forward(_known(self._launch(task)))

    def task_backward(self, task: TaskTensors, saved: Saved) -> Three:
        """See ``Kernel``; gradients in the query's dtype."""
        made = _known(self._launch(task))
        # If heads are far apart in memory, a part of the backward is ten times as slow as copies.
        query, key, value = map(dense, made.inputs)
        given = saved.mapped(lambda tensor: dense(made.of_rows(tensor)))
        return self._gradients(replace(made, inputs=(query, key, value)), given)

    def takes_whole(
        self, query_heads: int, key_heads: int, tokens: int, masked: bool, every: bool
    ) -> bool:
        """All heads and entries are needed, because the modifications are given their numbers."""
        return every and not masked

    def whole_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernel``; ``out`` in the query's dtype."""
        query, value, task = call.query, call.value, _everything_of(call)
        exact = query.dtype == torch.float64
        made = None if exact else self._launch(task)
        if made is not None and made.of_rows(query).shape == query.shape:
            return self._run_forward(made)
        # Some rows keep nothing and are not run.
        found = _no_statistics(query, value)
        if exact:
            super().forward(task, found)
        elif made is not None:
            part, part_lse = self._run_forward(made)
            made.of_rows(found.out).copy_(part)
            made.of_rows(found.lse).copy_(part_lse)
        return found.out, found.lse

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``Kernel``; gradients in the query's dtype."""
        (query, key, value), task = call.inputs, _everything_of(call)
        if query.dtype == torch.float64:
            sums = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
            super().backward(task, Gradients(saved.grad_out, saved.out, saved.lse, *sums))
            return sums
        made = self._launch(task)
        if made is None:
            return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        found = self._gradients(made, saved.mapped(made.of_rows))
        return (
            _in_place(found[0], made.of_rows, query),
            _in_place(found[1], made.of_columns, key),
            _in_place(found[2], made.of_columns, value),
        )

    def _gradients(self, made: Launch, saved: Saved) -> Three:
        attend, block_mask = self._attend(made, needs_grad=True), made.block_mask()
        kind, rows = self._kind(made, needs_grad=True), (saved.grad_out, saved.out, saved.lse)
        if self._takes_others.get(kind, False):
            return exchanged_gradients(attend, made.inputs, block_mask, *rows)

        def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            # The caller's hooks see none of its tensors, which a checkpoint would count. Without
            # its graph: a saved output would hold the graph that has it, for good.
            with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved):
                found: tuple[torch.Tensor, torch.Tensor] = attend(*inputs, block_mask)
            return found

        wanted = gradients_by_autograd(run, made.inputs, *rows)
        if kind not in self._takes_others:
            verdict = self._tried(attend, made.inputs, block_mask, rows, wanted)
            if verdict is not None:
                self._takes_others[kind] = verdict
        return wanted

    @staticmethod
    def _tried(
        attend: Callable[..., Any], inputs: Three, block_mask: Any, rows: Three, wanted: Three
    ) -> bool | None:
        """Whether FlexAttention takes another forward's results; None: it cannot be told here."""
        try:
            verdict = agree(exchanged_gradients(attend, inputs, block_mask, *rows), wanted)
            reason = "gradients are apart"
        except (torch.OutOfMemoryError, _ACCELERATOR_ERROR):
            raise
        except (UnfitError, RuntimeError, AssertionError, AttributeError, TypeError) as error:
            verdict, reason = False, f"{type(error).__name__}: {error}".splitlines()[0]
        if verdict is False:
            warnings.warn(
                f"this torch's FlexAttention does not take another forward's results ({reason}): "
                "its backward recomputes the forward, which is as exact and slower",
                RuntimeWarning,
                stacklevel=3,
            )
        return verdict

    def _kind(self, made: Launch, *, needs_grad: bool) -> Hashable:
        return made.kind(needs_grad), self._codes

    def _attend(self, made: Launch, *, needs_grad: bool) -> Callable[..., Any]:
        kind = self._kind(made, needs_grad=needs_grad)
        call = self._compiled.get(kind, lambda: compiled_flex(in_blocks=made.in_blocks))
        return partial(call, score_mod=made.indexed.score(self.score_mod), scale=made.scale)

    def _launch(self, task: TaskTensors) -> Launch | None:
        if not _has_rows(task):
            return None
        lists = self._listed(task)
        self.run += 0 if lists is None else lists.run
        self.pruned += _count(task) if lists is None else lists.pruned
        if lists is None:
            return None
        return launch(task, lists, self.mask_mod)

    def _listed(self, task: TaskTensors) -> BlockLists | None:
        return self._lists.get(self._list_key(task), lambda: self._make_lists(task))

    def _list_key(self, task: TaskTensors) -> Hashable:
        """All that a task's lists depend on."""
        key: tuple[Hashable, ...] = (
            task.task, tuple(task.rectangles), has_diagonal(task), task.query.is_cuda, self._seen,
        )  # fmt: skip
        # Most masks are the same for all heads and all batch entries.
        entries, heads = self._depends(task.query.device)
        key += (task.entries if entries else (),)
        return (*key, (task.first_head, task.query.shape[1]) if heads else ())

    def _make_lists(self, task: TaskTensors) -> BlockLists | None:
        rectangles = tuple(task.rectangles)
        # The tensors may have more rows than there are tokens; those have no positions.
        n_queries = max((r.query_stop for r in rectangles), default=0)
        n_keys = max((r.key_stop for r in rectangles), default=0)
        pairs = TaskPairs.of(task.task, rectangles, has_diagonal(task), n_queries, n_keys)
        listed = listed_blocks(self.mask_mod, task, pairs, self._depends(task.query.device))
        return block_lists(pairs, *listed, pinned=task.query.is_cuda)


def _has_rows(task: TaskTensors) -> bool:
    return 0 not in task.query.shape[:3] and 0 not in task.key.shape[1:3]


def _known(made: Launch | None) -> Launch:
    """``made``, which is not None: tasks without a span are not run."""
    assert made is not None
    return made


def _count(task: TaskTensors) -> int:
    return sum(1 for r in task.rectangles if r.n_queries and r.n_keys)


def _copied_bytes(call: CallShape, extent: Extent) -> int:
    """Bytes of copies of query, key and value (``laid_out``).

    Slots of usual widths are not copied, unless they hold one head of several entries.
    """
    several = extent.batch == 1 or min(extent.query_heads, extent.key_heads) > 1
    if not extent.direct and several and always_in_words(call.head_dim, call.value_dim):
        return 0
    by_query = extent.query_heads * call.head_dim
    by_key = extent.key_heads * (call.head_dim + call.value_dim)
    return extent.batch * extent.n_tokens * (by_query + by_key) * call.dtype.itemsize


def _everything_of(call: Call) -> TaskTensors:
    """A monolithic call as a task."""
    (n, m), causal = (call.query.shape[2], call.key.shape[2]), call.is_causal
    return TaskTensors(
        Decomposition(max(n, m), ()).task(()), (Rectangle(0, n, 0, m, causal),),
        *call.inputs, call.scale, causal, _no_bias, entries=tuple(range(call.query.shape[0])),
    )  # fmt: skip


def _no_statistics(query: torch.Tensor, value: torch.Tensor) -> Statistics:
    """Statistics of rows without keys, the output in the query's dtype."""
    shape = (*query.shape[:3], value.shape[-1])
    wide = torch.promote_types(query.dtype, torch.float32)
    return Statistics(
        torch.zeros(shape, dtype=query.dtype, device=query.device),
        torch.full(shape[:3], -torch.inf, dtype=wide, device=query.device),
    )


def _no_bias(rectangle: Rectangle) -> None:
    return None


def _in_place(
    part: torch.Tensor, take: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor
) -> torch.Tensor:
    """Zeros like ``like`` with ``part`` at ``take`` of them; ``part`` itself if that is all."""
    if part.shape == like.shape:
        return part
    found = torch.zeros_like(like)
    take(found).copy_(part)
    return found


def from_score_mod(
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    *,
    name: str = "flex",
    compiled: bool | None = None,
) -> ScoreModKernel:
    """An inner kernel from FlexAttention's score modification and mask.

    Args:
        score_mod: ``score_mod(score, batch, head, query, key)`` -> score, positions global.
        mask_mod: ``mask_mod(batch, head, query, key)`` -> which pairs are kept, positions global.
            A mask from ``quorum_attention.kernels.kit.masks`` (``sliding_window``, ``document``,
            ``prefix_lm``, ``causal``, combined with ``&`` and ``|``) knows which blocks it keeps.
            Any other mask is called once for every pair of a task. Both functions must stay what
            they are as long as the kernel lives (docs/kit.md says how that is checked): make
            another kernel to change what they read, which costs next to nothing.
        name: for messages and reports.
        compiled: whether to use FlexAttention with torch.compile, one call for a task; default
            True if there is CUDA. Otherwise, and always for float64, rectangles are run with
            materialised scores, on any device.

    A call's own ``is_causal`` applies in addition.

    Raises:
        TypeError: a modification that cannot be called.

    Examples:
        >>> def nearer(score, batch, head, query, key):
        ...     return score - 0.1 * (query - key).abs()
        >>> kernel = qa.from_score_mod(nearer, compiled=False)
        >>> q = torch.randn(1, 2, 300, 16)
        >>> out = qa.attention(q, q, q, kernel=kernel, depth=1)
    """
    for what, given in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if given is not None and not callable(given):
            raise TypeError(f"{what} must be callable or None, got {type(given).__name__}")
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a str of at least a letter, got {shown(name)}")
    if compiled is None:
        compiled = torch.cuda.is_available()
    if not switch(compiled, "compiled"):
        return ScoreModKernel(score_mod, mask_mod, name)
    return FlexKernel(score_mod, mask_mod, name)
