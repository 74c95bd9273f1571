"""FlexAttention's score modifications and masks as an inner kernel, in global positions.

The modifications get the positions of a task's tokens in the whole sequence. By default on CUDA
compiled FlexAttention runs them, one call for a whole task; otherwise the reference, on any device.
Block lists (``block_table.py``) say which blocks of the task are run. A compiled backward runs the
task's forward again, because torch has no function that takes the whole rows' results.
"""

from __future__ import annotations

import copy
import math
import types
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from operator import itemgetter
from typing import Any, Literal

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from quorum_attention.arithmetic import ceil_div
from quorum_attention.counts import shown, switch
from quorum_attention.decomposition import Pairs, Rectangle
from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels import reference
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.kit.function import gradients_by_autograd, recordable
from quorum_attention.kernels.limits import GRID_BLOCKS, runs_within
from quorum_attention.kernels.masked.block_table import (
    BLOCK,
    block_lists,
    blocks_key,
    evaluated_bytes,
    listed_blocks,
    sides,
    whole_region,
)
from quorum_attention.kernels.masked.functions import MaskMod, ScoreMod, codes, over_pairs
from quorum_attention.kernels.masked.geometry import Geometry, geometry_of
from quorum_attention.kernels.masked.kernel import PartwiseKernel, UserModKernel, entries_of
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES
from quorum_attention.kernels.protocol import (
    Call,
    CallShape,
    Extent,
    Gradients,
    Saved,
    Statistics,
    TaskTensors,
    Three,
    whole_task,
)
from quorum_attention.kernels.rectangles import UNSPLIT_BYTES, CallsKernel, TaskCall
from quorum_attention.kernels.reference import TiledKernel
from quorum_attention.kernels.tensors import positions, to_device
from quorum_attention.kernels.torch_private import as_it_is, outside
from quorum_attention.keywords import helps_with_names

# Score matrices that a function may hold at a time, its result among them.
_MATRICES = 8
# Device bytes for evaluating a mask's blocks, unless there are more heads than fit them.
_EVALUATED_BYTES = 96 << 20


class ScoreModKernel(UserModKernel):
    """See ``from_score_mod``: by the reference, tile by tile.

    Attributes:
        score_mod, mask_mod: the score modification and the mask.
        geometry: what the mask keeps.
    """

    def __init__(self, score_mod: ScoreMod | None, mask_mod: MaskMod | None, name: str) -> None:
        self.score_mod, self.mask_mod, self.name = score_mod, mask_mod, name
        self.geometry = geometry_of(mask_mod)
        self.mask_mods = self.geometry.functions
        self._under = {False: self.geometry, True: Geometry(Band(None, 0)) & self.geometry}
        change = None if score_mod is None else partial(_changed, score_mod)
        scores = reference.ScoreTransform(change, tiles=reference.LARGE, matrices=_MATRICES)
        self._by_parts = {
            causal: PartwiseKernel(kept, TiledKernel(scores), scores)
            for causal, kept in self._under.items()
        }

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        if shape.bias is not None:
            return "it takes no attention mask: give it as mask_mod or score_mod"
        return None

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """The pairs of a call, as far as they are known without trying the mask."""
        unknown = self.geometry.keeps_all or self.geometry.functions
        return Pairs(n_queries, n_keys, is_causal, None if unknown else self.geometry.verdict)

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        return self._by_parts[True].forward_workspace_bytes(shape, extent)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        return self._by_parts[True].backward_workspace_bytes(shape, extent)

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        self._by_parts[task.is_causal].forward(task, state)

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        self._by_parts[task.is_causal].backward(task, grads)


def _changed(
    score_mod: ScoreMod,
    scores: torch.Tensor,
    block: reference.QueryBlock,
    keys: slice,
    derivative: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A tile's modified scores, and their derivative by autograd if it is asked for."""
    with torch.inference_mode(False), torch.set_grad_enabled(derivative):
        # Autograd refuses tensors of inference mode.
        scores = scores.clone() if scores.is_inference() else scores
        leaf = scores.requires_grad_(derivative)
        at = block.indices(keys)
        mapped = over_pairs(score_mod, scored=True)
        changed = mapped(leaf, at.entries, at.heads, at.queries, at.keys).to(scores.dtype)
        slope = None
        if derivative:
            slope = torch.zeros_like(scores)
            if changed.requires_grad:
                (slope,) = torch.autograd.grad(changed, leaf, torch.ones_like(changed))
        return changed.detach().contiguous(), slope


# Tensors as compiled FlexAttention reads them fastest: in words of 16 bytes.
#
# It does so only if torch.compile can tell that every row begins at a whole word. It cannot tell
# that for a tensor that begins inside its storage (a field of a slot, a part of the rows), nor for
# a stride that does not follow from the sizes; either makes both passes 1.7 times as long (kit.md).
# So tensors are handed over with a storage that begins where they begin. A free stride is handed
# over together with a sixteenth of it: the compiler can use ``stride == 16 * sixteenth``
# (``assume_stride_multiple``).

Layout = Literal["rows", "tokens", "apart"]
"""Memory order of (b, h, n, d): contiguous; that of (b, n, h, d); or gaps between heads."""

_BYTES = 16
_ELEMENTS = 16


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` (b, h, n, d), detached, in a ``Layout``; copied where it is in none."""
    found = tensor.detach()
    if layout(found) is None:
        found = found.clone(memory_format=torch.contiguous_format)
    return from_dlpack(to_dlpack(found)) if found.storage_offset() else found


def layout(tensor: torch.Tensor) -> Layout | None:
    """The layout of a tensor; None if it has none of them or does not begin at a whole word."""
    if tensor.data_ptr() % _BYTES:
        return None
    if tensor.is_contiguous():
        return "rows"
    if tensor.transpose(1, 2).is_contiguous():
        return "tokens"
    batch, heads, _, width = tensor.shape
    entry, head, row, element = tensor.stride()
    rows = element == 1 and row == width and heads > 1 and head % _ELEMENTS == 0
    return "apart" if rows and (batch == 1 or entry == heads * head) else None


def sixteenth(tensor: torch.Tensor) -> int | None:
    """A sixteenth of the head stride if there are gaps between heads; None for other layouts."""
    return tensor.stride(1) // _ELEMENTS if layout(tensor) == "apart" else None


def assume_stride_multiple(tensor: torch.Tensor, sixteenth: int | None) -> None:
    """In compiled code: tell the compiler that the head stride is 16 times ``sixteenth``."""
    if sixteenth is not None:
        torch._check(tensor.stride(1) == _ELEMENTS * sixteenth)


@dataclass(frozen=True, slots=True)
class FlexCall:
    """One call for a task, or for a rectangle of it.

    Attributes:
        sent: the block lists on the device.
        mask_mod: the mask of partial blocks, by local indices; there are few kinds: each is
            compiled.
        score_mod: the score modification, by local indices.

    All its tensors are detached: torch.compile also looks at the base of a view, and would compile
    again for every kind of view.
    """

    inputs: Three
    sent: list[torch.Tensor]
    mask_mod: MaskMod
    score_mod: ScoreMod | None
    scale: float

    @property
    def in_blocks(self) -> bool:
        """Whether queries and keys are whole blocks, so that no row has to be tested."""
        return all(t.shape[2] % BLOCK == 0 for t in self.inputs)

    def kind(self, needs_grad: bool) -> Hashable:
        """All that needs code of its own, so that calls of one kind are compiled once. If the
        functions in a closure change later, torch notices and compiles again."""
        query, key, value = self.inputs
        return (
            query.device, query.dtype, query.shape[0] == 1, query.shape[1], key.shape[1],
            query.shape[3], value.shape[3], codes(self.mask_mod), codes(self.score_mod),
            self.in_blocks, tuple(layout(t) for t in self.inputs),
            tuple(size == 1 for t in (self.sent[0], self.sent[4]) for size in t.shape), needs_grad,
        )  # fmt: skip

    def block_mask(self) -> Any:
        """The call as a ``BlockMask`` of torch."""
        from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

        sizes = (self.inputs[0].shape[2], self.inputs[1].shape[2])
        # Not BlockMask.from_kv_blocks, which makes the lists by key from a matrix of all blocks.
        make: Any = FlexBlockMask
        return make(sizes, *self.sent[:8], BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=self.mask_mod)


def regions(task: TaskTensors) -> list[tuple[Rectangle, tuple[Rectangle, ...]]]:
    """What is one call each, with its rectangles, counted from its first query and key: the whole
    task, unless rectangles end within blocks."""
    every, whole = tuple(task.rectangles), whole_region(task)
    aligned = (
        at % BLOCK == 0 or at == n
        for r in every
        for side, (_, n) in zip(sides(r), sides(whole), strict=True)
        for at in side
    )
    if all(aligned):
        return [(whole, every)]
    return [(r, (Rectangle(0, r.n_queries, 0, r.n_keys),)) for r in every]


@lru_cache(maxsize=64)
def _numbers(which: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """``which`` on the device; cached, because every task of a head group needs it."""
    # A backward may use it, so it must not be a tensor of inference mode.
    with outside():
        return torch.tensor(which, dtype=torch.int32, device="cpu").to(device)


# FlexAttention compiled for one kind of call, at any length.

_NUMBERS = count()


def compiled_flex(*, in_blocks: bool) -> Callable[..., Any]:
    """``flex(query, key, value, block_mask, score_mod=, scale=) -> (out, lse)``, compiled anew.

    Args:
        in_blocks: queries and keys are whole blocks. For dynamic sizes FlexAttention cannot know
            that, and would test every row.

    torch.compile caches by code object, up to a limit for each. Beyond the limit FlexAttention
    would silently fall back to computing every score. So each compiled call has a code object of
    its own; beyond the limit it raises an error here, and is then given another code object.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit
    from torch.fx.experimental import _config
    from torch.nn.attention.flex_attention import flex_attention

    fx_config: Any = _config
    # Forced, because torch's kernel for few queries has other limits.
    options: Any = {"FORCE_USE_FLEX_ATTENTION": True, "IS_DIVISIBLE": in_blocks}

    def flex(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        block_mask: Any,
        score_mod: ScoreMod | None,
        scale: float,
        sixteenths: tuple[int | None, ...],
    ) -> Any:
        assume_stride_multiple(query, sixteenths[0])
        assume_stride_multiple(key, sixteenths[1])
        assume_stride_multiple(value, sixteenths[2])
        return flex_attention(
            query, key, value, score_mod=score_mod, block_mask=block_mask, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1], return_lse=True,
            kernel_options=options,
        )  # fmt: skip

    def anew() -> Callable[..., Any]:
        code = flex.__code__.replace(co_name=f"flex_{next(_NUMBERS)}")
        own = types.FunctionType(code, flex.__globals__, code.co_name, None, flex.__closure__)
        compiled: Callable[..., Any] = torch.compile(own, fullgraph=True, dynamic=True)
        return compiled

    current = anew()

    def call(*args: Any, **named: Any) -> Any:
        nonlocal current
        named["sixteenths"] = tuple(map(sixteenth, args[:3]))
        # Without this, torch assumes that sizes that are equal once always are (also a size and the
        # number of heads), and compiles again for tasks where they differ. It is set by hand,
        # because torch's context manager for it takes as long as all guards.
        before, fx_config.use_duck_shape = fx_config.use_duck_shape, False
        try:
            return current(*args, **named)
        except FailOnRecompileLimitHit:
            # Functions with one code may close over values for which torch compiles again (strings,
            # lists of other lengths).
            current = anew()
            return current(*args, **named)
        finally:
            fx_config.use_duck_shape = before

    return call


# The kernel.

# Host memory for cached lists, and the number of compiled calls that are cached.
_CACHE_BYTES = 256 << 20
_CACHED_CALLS = 128
# Compiled calls, by their kind and the code of the modifications: masks that are created again for
# every batch are compiled once.
_COMPILED: Cache[Callable[..., Any]] = Cache(_CACHED_CALLS)
# Whether the backward of a kind takes the rows' results (see below); empty: not known yet.
_TAKES_ROWS: Cache[list[bool]] = Cache(_CACHED_CALLS)


def _lists_bytes(lists: list[torch.Tensor]) -> int:
    return 4096 + sum(each.nbytes for each in lists)


class FlexKernel(CallsKernel, ScoreModKernel):
    """See ``from_score_mod``: compiled ``flex_attention``."""

    whole_tasks = True
    launch_seconds = (0.7e-3, 2.3e-3)  # most of it torch.compile's
    rates = (0.84, 0.69)  # H200, causal, D = 64
    entries_limit = GRID_BLOCKS
    _compiled, _takes_rows = _COMPILED, _TAKES_ROWS

    def __init__(self, score_mod: ScoreMod | None, mask_mod: MaskMod | None, name: str) -> None:
        super().__init__(score_mod, mask_mod, name)
        self._lists: Cache[list[torch.Tensor]] = Cache(_CACHE_BYTES, _lists_bytes)

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        if shape.bias is None and shape.dtype == torch.float64:
            return "compiled FlexAttention takes no float64: compiled=False"
        if shape.bias is None and shape.device_type == "cpu":
            return "compiled FlexAttention has no lse and no backward on the CPU: compiled=False"
        if shape.heads > GRID_BLOCKS:
            return f"compiled FlexAttention takes {GRID_BLOCKS} heads at most: compiled=False"
        return super().refusal(shape)

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        # The output, and lse in base 2 and base e.
        return self._bytes(shape, extent, shape.value_dim * shape.dtype.itemsize + 8, 0)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        item, d, dv = shape.dtype.itemsize, shape.head_dim, shape.value_dim
        # For each query: the task's own output, the gradient of it, a contiguous copy of that, and
        # grad_query; in fp32 forms of lse, its gradient, and delta.
        return self._bytes(shape, extent, item * (3 * dv + d) + 5 * 8, item * (d + dv))

    def _bytes(self, shape: CallShape, extent: Extent, by_query: int, by_key: int) -> int:
        """Of so many bytes for each query and key of a head; of copies of the inputs, positions,
        pieces and lists, of evaluating a mask, and of merging."""
        several = extent.batch == 1 or min(extent.query_heads, extent.key_heads) > 1
        in_words = shape.head_dim % _ELEMENTS == shape.value_dim % _ELEMENTS == 0
        if extent.direct or not several or not in_words:
            # Slots of usual widths are not copied, unless they hold one head of several entries.
            by_query += shape.head_dim * shape.dtype.itemsize
            by_key += (shape.head_dim + shape.value_dim) * shape.dtype.itemsize
        rows = extent.query_heads * by_query + extent.key_heads * by_key
        lanes = extent.batch * extent.query_heads if self.geometry.functions else 1
        blocks = ceil_div(extent.n_tokens, BLOCK) + 1
        # Two lists by query and two by key, in int32, each as long as possible; and their counts.
        lists = lanes * (16 * blocks * self._longest_list(blocks) + 32 * blocks)
        tokens = (extent.batch * rows + 16) * extent.n_tokens
        if self.geometry.functions:
            tokens += 32 * extent.n_tokens + evaluated_bytes(lanes, _EVALUATED_BYTES)
        # Of so many tensors each may be a block that the allocator does not split.
        return lists + tokens + MERGE_WORKSPACE_BYTES + 12 * UNSPLIT_BYTES

    def _longest_list(self, blocks: int) -> int:
        """The most listed blocks of a line; a task's gaps bring distant tokens closer together."""
        low, high = self.geometry.band.low, self.geometry.band.high
        if low is None or high is None:
            return blocks
        return min(blocks, (high - low) // BLOCK + 3)

    def task_calls(self, task: TaskTensors, *, backward: bool) -> Iterator[tuple[TaskCall]]:
        """See ``regions``; rows that keep nothing come back as out 0 and lse -inf. A call has no
        more batch entries than a grid has blocks."""
        for entries in runs_within(task.query.shape[0], self.entries_limit):
            part = entries_of(task, entries)
            for region, rectangles in regions(part):
                launch = self._launch(part, region, rectangles)
                if launch is None:
                    continue
                rows, keys = (
                    itemgetter((entries, slice(None), slice(*side))) for side in sides(region)
                )
                forward = partial(self._run_forward, launch)
                backward_of_part = partial(self._gradients, launch)
                yield (TaskCall(rows, keys, forward, backward_of_part),)

    def _run_forward(self, made: FlexCall) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            found: tuple[torch.Tensor, torch.Tensor] = self._attend(made, needs_grad=False)(
                *made.inputs, made.block_mask()
            )
        return found

    def takes_whole(self, shape: CallShape, tokens: int, every: bool) -> bool:
        """All heads and entries are needed, because the modifications are given their numbers."""
        return every and shape.bias is None and shape.batch <= self.entries_limit

    def whole_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernel``; ``out`` in the query's dtype."""
        calls = list(self.task_calls(whole_task(call), backward=False))
        if len(calls) == 1:
            return calls[0][0].forward()
        return super().whole_forward(call)

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``Kernel``; gradients in the query's dtype."""
        calls = list(self.task_calls(whole_task(call), backward=True))
        if len(calls) == 1:
            return calls[0][0].backward(saved)
        return super().whole_backward(call, saved)

    def _gradients(self, made: FlexCall, saved: Saved) -> Three:
        attend, block_mask = self._attend(made, needs_grad=True), made.block_mask()
        takes = self._takes_rows.get(made.kind(needs_grad=True), list)
        if takes == [True]:
            found = gradients_of_rows(attend, made.inputs, block_mask, saved)
            if found is not None:
                return found

        def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            # The caller's hooks see none of its tensors, which a checkpoint would count. Without
            # its graph: a saved output would hold the graph that has it, for good.
            with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, as_it_is):
                found: tuple[torch.Tensor, torch.Tensor] = attend(*inputs, block_mask)
            return found

        wanted = gradients_by_autograd(run, made.inputs, saved)
        if not takes:
            verdict = takes_rows(attend, made.inputs, block_mask, saved, wanted)
            takes += [] if verdict is None else [verdict]
        return wanted

    def _attend(self, made: FlexCall, *, needs_grad: bool) -> Callable[..., Any]:
        make = partial(compiled_flex, in_blocks=made.in_blocks)
        call = self._compiled.get(made.kind(needs_grad), make)
        return partial(call, score_mod=made.score_mod, scale=made.scale)

    def _launch(
        self, task: TaskTensors, region: Rectangle, rectangles: tuple[Rectangle, ...]
    ) -> FlexCall | None:
        """The call for a region of a task; None if it keeps no pair."""
        if not rectangles:
            return None
        geometry = self._under[task.is_causal]

        def make() -> list[torch.Tensor]:
            how = geometry, task, region, rectangles
            listed = listed_blocks(*how, _EVALUATED_BYTES, by_lane=True)
            return block_lists(region, *listed, pinned=task.query.is_cuda)

        key = task.is_causal, region, *blocks_key(geometry, task, rectangles)
        if not (lists := self._lists.get(key, make)):
            return None
        device, first, score_mod = task.query.device, task.first_head, self.score_mod
        entries = _numbers(task.entries, device)
        heads = _numbers(tuple(range(first, first + task.query.shape[1])), device)
        rows, columns = sides(region)
        queries, keys = (positions(task.task, *at, device, torch.int32) for at in (rows, columns))
        keeps = geometry.mask_mod(device)

        def masks(b: Any, h: Any, q: Any, k: Any) -> Any:
            return keeps(entries[b], heads[h], queries[q], keys[k])

        def change(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return score_mod(score, entries[b], heads[h], queries[q], keys[k])  # type: ignore[misc]

        given = (task.query, rows), (task.key, columns), (task.value, columns)
        query, key_rows, value = (laid_out(tensor[:, :, slice(*at)]) for tensor, at in given)
        sent = [to_device(each, device).detach() for each in lists]
        changes = None if score_mod is None else change
        return FlexCall((query, key_rows, value), sent, masks, changes, task.scale)


# FlexAttention's backward of a part, given the results of the whole rows, without its forward.
#
# torch has no function for that backward alone. So the forward runs on lists that name no block,
# which costs next to nothing. As the backward reads what torch saved, it gets the real counts of
# the lists and the rows' out and lse. What torch saves is its own affair: the first gradients of
# each kind of call are held against those of a forward that runs again.

_LOG2_E = math.log2(math.e)
# Of the norm: far above rounding, far below what a wrong exchange gives.
_APART = 0.03


@torch.inference_mode(False)
def gradients_of_rows(
    attend: Callable[..., Any], inputs: Three, block_mask: Any, saved: Saved
) -> Three | None:
    """Gradients of query, key and value; None if torch saved something else than expected.

    Args:
        attend: ``attend(query, key, value, block_mask) -> (out, lse)``, compiled.
        saved: of the whole rows.
    """
    counts: list[torch.Tensor] = [block_mask.kv_num_blocks, block_mask.full_kv_num_blocks]
    nothing = [torch.zeros_like(t) for t in counts]
    empty = copy.copy(block_mask)
    empty.kv_num_blocks, empty.full_kv_num_blocks = nothing
    read: Counter[str] = Counter()
    own_out: list[torch.Tensor] = []

    def exchange(tensor: torch.Tensor) -> torch.Tensor:
        for name, ours, real in zip(("counts", "full counts"), nothing, counts, strict=True):
            if tensor.data_ptr() == ours.data_ptr():
                read[name] = 1
                return real.view(tensor.shape)
        if own_out and tensor.data_ptr() == own_out[0].data_ptr():
            read["out"] += 1
            if (saved.out.stride(), saved.out.dtype) == (tensor.stride(), tensor.dtype):
                return saved.out
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            ).copy_(saved.out)
        if tensor.dtype == torch.float32 and tensor.shape == saved.lse.shape:
            read["lse"] += 1
            # In base 2, and a new tensor, which compiled code may overwrite. Rows without a key get
            # 0 in place of -inf, which would give NaN.
            lse = torch.mul(saved.lse, _LOG2_E)
            return lse.masked_fill_(lse == -torch.inf, 0.0)
        return tensor

    # The caller's hooks see none of its tensors. Without its graph: a saved output would hold the
    # graph that has it, for good.
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, exchange)
    with torch.enable_grad(), hooks:
        leaves = [recordable(t).detach().requires_grad_() for t in inputs]
        out, _ = attend(*leaves, empty)
        own_out.append(out.detach())
        query, key, value = torch.autograd.grad(out, leaves, recordable(saved.grad_out))
    # Both counts, out and lse, once each.
    return (query, key, value) if list(read.values()) == [1] * 4 else None


def takes_rows(
    attend: Callable[..., Any], inputs: Three, block_mask: Any, saved: Saved, wanted: Three
) -> bool | None:
    """Whether ``gradients_of_rows`` are those wanted; None where 0 says nothing."""
    sizes = [float(torch.linalg.vector_norm(t, dtype=torch.float32)) for t in wanted]
    if not all(sizes):
        return None
    try:
        found = gradients_of_rows(attend, inputs, block_mask, saved)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError, AttributeError, TypeError):
        found = None
    right = found is not None and all(
        float(torch.linalg.vector_norm(mine - theirs, dtype=torch.float32)) <= _APART * size
        for mine, theirs, size in zip(found, wanted, sizes, strict=True)
    )
    if not right:
        warnings.warn(
            "this torch's FlexAttention takes no results of another forward: its backward runs the "
            "forward again, which is as exact and slower",
            RuntimeWarning,
            stacklevel=2,
        )
    return right


@helps_with_names
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
            Any other mask is evaluated for every pair of a task. Neither function may change while
            the kernel lives (docs/kit.md): to change a value that they read, make another kernel,
            which compiles nothing again.
        name: for messages and reports.
        compiled: whether to use FlexAttention with torch.compile, one call for a task; default
            True if there is CUDA. Otherwise torch's operators compute it tile by tile, on any
            device and in float64 too.

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
