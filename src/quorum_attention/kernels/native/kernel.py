"""The native kernel: a task in one launch, on fp32 statistics."""

from __future__ import annotations

import copy
import os
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch

from quorum_attention.argument_checks import switch
from quorum_attention.arithmetic import ceil_div
from quorum_attention.decomposition import Pairs, Rectangle
from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.masked.mask_fields import relative_band
from quorum_attention.kernels.masked.rules import GroupBits
from quorum_attention.kernels.native.columns import EntryColumn
from quorum_attention.kernels.native.config import KernelKind, Tiling, choose_config
from quorum_attention.kernels.native.launch import NativeLaunch
from quorum_attention.kernels.native.launch_tables import LaunchTables, TableMaker
from quorum_attention.kernels.native.pieces import (
    BLOCK_WINDOW,
    UNLIMITED,
    Ints,
    Window,
    pieces_of,
)
from quorum_attention.kernels.native.rule_blocks import EvaluationBudget, RuledTask
from quorum_attention.kernels.operator_call import (
    Call,
    OutLse,
    Saved,
    Three,
    empty_gradients,
    empty_results,
    uncut,
    whole_task,
)
from quorum_attention.kernels.operator_inputs import operator_refusal
from quorum_attention.kernels.operator_sizes import (
    SLACK_BYTES,
    UNSPLIT_BYTES,
    bias_bytes,
)
from quorum_attention.kernels.protocol import Kernel, Launches
from quorum_attention.kernels.task_tensors import Gradients, Statistics, TaskTensors
from quorum_attention.kernels.torch_private import has_tangent, no_torch_modes
from quorum_attention.kernels.triton_launch import triton_available
from quorum_attention.keywords import helps_with_names
from quorum_attention.mask import Mask

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST_FORWARD = 576
_LARGEST_BACKWARD = 256
# The workspace bound allows for this many runs for each block of this many rows (at
# depth 1 there are one or two).
_RUNS_OF_A_BLOCK = 4
_SMALLEST_BLOCK = 64
# Bytes of host memory in which a kernel's tables, and the pieces of rules, are cached.
_TABLE_BYTES = 64 << 20
_RULED_PIECES_BYTES = 256 << 20


class NativeKernel(Kernel):
    """Triton attention of whole tasks, for many shapes and masks that other kernels
    refuse.

    It reads and writes fp32 statistics, so partial results are not rounded. Gradients
    repeat bit for bit. It takes all head dimensions up to 256 (up to 576 without
    gradients); fp16, bf16 and fp32 (IEEE, not TF32); grouped heads; additive and
    boolean masks.

    Args:
        window: sliding window: tokens to each side, or (left, right); -1 is no limit.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        alibi_slopes: (query heads,): ``slope * |i - j|`` is subtracted from the score.
            The tensor is copied, and gets no gradient.
        allow_tf32: for fp32 inputs: products are faster and less exact.

    Raises:
        TypeError, ValueError: an argument that makes no sense, by name.
        NotImplementedError: ``alibi_slopes`` requires a gradient.

    Examples:
        >>> kernel = qa.NativeKernel(window=(4095, 0), softcap=50.0)
        >>> kernel.name
        'native'
    """

    name = "native"
    grouped = True
    fp32_products = True
    dropout = True
    wide_masks = True
    wide_out = True
    reads_wide_out = True
    launches = Launches.ONE
    rates = (0.95, 0.78)  # H200, against cuDNN
    sparse = True
    operator = True
    accepts_inf_lse = True

    @helps_with_names
    def __init__(
        self,
        *,
        window: int | tuple[int, int] | None = None,
        softcap: float | None = None,
        alibi_slopes: torch.Tensor | None = None,
        allow_tf32: bool = False,
    ) -> None:
        checked = Mask(window=window, softcap=softcap)
        band = relative_band(checked)
        self.geometry = Geometry(band)
        self.softcap = float(softcap or 0.0)
        self.slopes = None if alibi_slopes is None else _checked_slopes(alibi_slopes)
        self.allow_tf32 = switch(allow_tf32, "allow_tf32")
        self._verdict = None if band.keeps_all else band.verdict
        self._slopes_by_device: dict[torch.device, torch.Tensor] = {}
        self._make_caches()
        if not self._is_plain:
            self.plain_variant = _plain_kernel(self.allow_tf32)

    def _make_caches(self) -> None:
        self._tables: Cache[tuple[LaunchTables, ...]] = Cache(
            _TABLE_BYTES, _tables_bytes
        )
        self._ruled_pieces: Cache[Ints] = Cache(_RULED_PIECES_BYTES, _pieces_bytes)

    def under(self, geometry: Geometry) -> NativeKernel:
        """The kernel for pairs of a geometry; one with rules is for tasks without
        dropout."""
        kernel = copy.copy(self)
        kernel.geometry = geometry
        kernel._make_caches()
        return kernel

    def with_softcap(self, softcap: float) -> NativeKernel:
        """See ``Kernel``."""
        capped = self.under(self.geometry)
        capped.softcap = float(softcap)
        capped.plain_variant = self.plain_variant or self
        return capped

    def by_bits(self, bits: Sequence[torch.Tensor], is_causal: bool) -> NativeKernel:
        """The kernel for pairs without a group bit in common, of queries and of keys;
        copied."""
        with no_torch_modes():
            rule = GroupBits(*(side.detach().cpu().numpy().copy() for side in bits))
        band = Band(None, 0 if is_causal else None)
        kernel = self.under(Geometry(band, rules=(rule,)))
        kernel.plain_variant = _plain_kernel(self.allow_tf32)
        return kernel

    @property
    def _is_plain(self) -> bool:
        """Whether scores are unchanged and all pairs kept."""
        return self.geometry.keeps_all and not self.softcap and self.slopes is None

    @property
    def _window(self) -> Window | None:
        """How far before and after a query its keys are, if the kernel has to test
        both.

        Beside rules the mask bits say it.
        """
        band = self.geometry.band
        if self.geometry.rules:
            return None
        if self.geometry.has_block_windows:
            return BLOCK_WINDOW
        if band.low is None:
            return None
        right = UNLIMITED if band.high is None else band.high
        return -band.low, right

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it
        can."""
        device = shape.device_type if interpreted() else "cuda"
        if (reason := operator_refusal(shape, device, _DTYPES)) is not None:
            return reason
        if shape.device_type != "cuda" and shape.dtype == torch.bfloat16:
            return "Triton's interpreter has no bfloat16"
        limit = _LARGEST_BACKWARD if shape.needs_grad else _LARGEST_FORWARD
        if shape.width > limit:
            kind = "with gradients" if shape.needs_grad else "without gradients"
            return (
                f"it takes head dimensions from 1 to {limit} {kind}, not {shape.width}"
            )
        if self.slopes is not None and self.slopes.numel() != shape.heads:
            return (
                f"it has {self.slopes.numel()} alibi_slopes for {shape.heads} query "
                "heads"
            )
        return None if triton_available() else "it needs Triton, which is not installed"

    def takes_whole(self, shape: CallShape, tokens: int, all_heads: bool) -> bool:
        """Whether a monolithic call can be run on the inputs as they are."""
        # Given only some heads, it cannot know which slopes are theirs.
        return all_heads or self.slopes is None

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """The pairs of a call that are within the window."""
        return Pairs(n_queries, n_keys, is_causal, self._verdict)

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``forward`` allocates at any one time."""
        total = self._table_bytes(extent) + self._rule_bytes(shape, extent)
        total += bias_bytes(shape, extent)
        if not extent.direct:
            return total
        # The output may be asked for in fp32.
        out_bytes = extent.rows * shape.value_dim * 4 * self._result_copies
        lse_bytes = extent.rows * 4
        return total + out_bytes + lse_bytes + 3 * UNSPLIT_BYTES

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``backward`` allocates at any one time."""
        # Delta may be a block that the allocator does not split.
        delta_bytes = 4 * extent.token_rows + UNSPLIT_BYTES
        total = delta_bytes + 2 * self._table_bytes(extent)
        total += self._rule_bytes(shape, extent)
        total += bias_bytes(shape, extent)
        if not extent.direct:
            return total
        elements = extent.token_rows * shape.head_dim
        elements += extent.key_rows * (shape.head_dim + shape.value_dim)
        # Gradients may be asked for in fp32.
        result_bytes = 4 * elements + 3 * UNSPLIT_BYTES
        return total + result_bytes * self._result_copies

    @property
    def _result_copies(self) -> int:
        """How often results of a whole call exist: with rules there are some in fp32
        beside."""
        return 2 if self.geometry.rules else 1

    def _rule_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Bytes for evaluating rules."""
        geometry = self.geometry
        if not geometry.rules:
            return 0
        row_bytes = (shape.head_dim + shape.value_dim) * shape.dtype.itemsize
        budget = EvaluationBudget.for_rows(
            extent.token_rows * row_bytes,
            extent.lanes if geometry.functions else 1,
            extent.n_tokens,
            extent.n_tokens,
        )
        return budget.device_bytes + geometry.placed_bytes

    def _table_bytes(self, extent: Extent) -> int:
        # A single rectangle cannot be launched in parts: it has one run for every
        # block.
        n_blocks = ceil_div(extent.n_tokens, 16) + 2
        n_entries = max(self._max_entries(extent.n_tokens), n_blocks)
        return 4 * (n_blocks + n_entries * len(EntryColumn)) + SLACK_BYTES

    def _max_entries(self, n_tokens: int) -> int:
        """Entries of a table that the bound allows for; larger ones are launched in
        parts."""
        n_row_blocks = ceil_div(n_tokens, _SMALLEST_BLOCK) + 2
        n_mask_blocks = 0 if self.geometry.blocks is None else len(self.geometry.blocks)
        return n_row_blocks * _RUNS_OF_A_BLOCK + 5 * n_mask_blocks // 2

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        for launch in self.task_launches(task, "forward"):
            launch.forward(state.out, state.lse, resume=True)
            del launch  # the next rectangle's mask is made when this one's has gone

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        saved = Saved(grads.grad_out, grads.out, grads.lse)
        targets = grads.grad_query, grads.grad_key, grads.grad_value
        for launch in self.task_launches(task, "query", "key"):
            launch.backward(saved, targets, add=True)
            del launch

    def whole_forward(self, call: Call) -> OutLse:
        """See ``Kernel``; ``out`` is in ``call.stored``, rounded once."""
        if self.geometry.rules:
            return super().whole_forward(call)
        out, lse = empty_results(call, call.result_dtype)
        (launch,) = self.task_launches(whole_task(call), "forward", is_whole_call=True)
        launch.forward(out, lse, resume=False)
        return out, lse

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``Kernel``; gradients are in ``call.stored``, rounded once."""
        if self.geometry.rules:
            return super().whole_backward(call, saved)
        grads = empty_gradients(call, call.result_dtype)
        (launch,) = self.task_launches(
            whole_task(call), "query", "key", is_whole_call=True
        )
        launch.backward(saved, grads, add=False)
        return grads

    def task_launches(
        self, task: TaskTensors, *kinds: KernelKind, is_whole_call: bool = False
    ) -> Iterator[NativeLaunch]:
        """Yield the launches of a task, or the one of a whole call.

        All rectangles are one launch, and each is one where they have masks. There are
        more where a table or the bits of rules would exceed the workspace bound.

        Args:
            kinds: "forward"; or "query" and "key", a backward.
        """
        rectangles = tuple(task.rectangles)
        if not rectangles and is_whole_call:
            # Results of a whole call without pairs are written, too.
            rectangles = (Rectangle(0, 0, 0, 0),)
        if not rectangles:
            return
        tilings = tilings_of(kinds, task)
        if not task.has_mask(rectangles[0]):
            yield from self._launches_of(task, rectangles, tilings, is_whole_call)
            return
        for rectangle in rectangles:
            yield from self._launches_of(task, (rectangle,), tilings, is_whole_call)

    def _launches_of(
        self,
        task: TaskTensors,
        rectangles: tuple[Rectangle, ...],
        tilings: tuple[Tiling, ...],
        is_whole_call: bool,
    ) -> Iterator[NativeLaunch]:
        """Yield the launches of rectangles that have one mask, or none."""
        device = task.query.device
        spans = task.task.spans
        first = rectangles[0]
        call = Call(
            task.query,
            task.key,
            task.value,
            scale=task.scale,
            bias=task.bias(first),
            dropout=task.dropout,
        )
        slopes = self._slopes_on(device)
        ruled = (
            RuledTask(self.geometry, task, rectangles) if self.geometry.rules else None
        )
        launches = self.launch_tables(
            task, rectangles, tilings, ruled, is_whole_call=is_whole_call
        )
        for tables, blocks in launches:
            # No name here keeps the bits alive: the next launch has others.
            yield NativeLaunch(
                call,
                tuple(runs.on(device) for runs in tables),
                softcap=self.softcap,
                slopes=None if slopes is None else slopes[task.first_head :],
                window=self._window,
                bias_at=(first.query_start, first.key_start),
                mask_bits=None if ruled is None else ruled.bits(blocks),
                tf32=self.allow_tf32,
                n_keys=0 if is_whole_call or not spans else spans[-1].stop,
            )

    def _slopes_on(self, device: torch.device) -> torch.Tensor | None:
        if self.slopes is not None and device not in self._slopes_by_device:
            with no_torch_modes():
                self._slopes_by_device[device] = self.slopes.to(device)
        return self._slopes_by_device.get(device)

    def launch_tables(
        self,
        task: TaskTensors,
        rectangles: tuple[Rectangle, ...],
        tilings: tuple[Tiling, ...],
        ruled: RuledTask | None = None,
        *,
        is_whole_call: bool = False,
    ) -> tuple[LaunchTables, ...]:
        """Return the tables of the launches for rectangles of a task; cached."""
        n_queries = task.query.shape[2]
        n_keys = task.key.shape[2]
        maker = TableMaker(n_queries, n_keys, tilings, self._window, task.query.is_cuda)
        pieces_key: Hashable
        if ruled is not None:
            pieces_key = ruled.key
            make_pieces = partial(self._ruled_pieces.get, ruled.key, ruled.pieces)
            maker = replace(
                maker,
                has_rules=True,
                max_entries=ruled.budget.max_runs * len(tilings),
                max_partial_blocks=ruled.budget.n_partial,
            )
        else:
            positions = task.task
            if self._ignores_positions(task):
                # The tasks of a level have the same rectangles, so most of them share
                # one table.
                positions = uncut(max(n_queries, n_keys))
            pieces_key = (positions, rectangles)
            make_pieces = partial(pieces_of, rectangles, positions, self.geometry)
            if not is_whole_call:
                max_entries = self._max_entries(max(n_queries, n_keys)) * len(tilings)
                maker = replace(maker, max_entries=max_entries)

        def make() -> tuple[LaunchTables, ...]:
            pieces = make_pieces()
            if not len(pieces) and not is_whole_call:
                return ()
            return tuple(maker.launches(pieces))

        return self._tables.get((pieces_key, maker), make)

    def _ignores_positions(self, task: TaskTensors) -> bool:
        """Whether the global positions of a task's tokens do not matter."""
        return task.dropout is None and self.slopes is None and self.geometry.keeps_all


def tilings_of(kinds: Sequence[KernelKind], task: TaskTensors) -> tuple[Tiling, ...]:
    """The tilings of the Triton kernels of a pass."""
    wide_mask = bool(task.rectangles) and task.has_wide_mask(task.rectangles[0])
    has_dropout = task.dropout is not None
    return tuple(
        Tiling(
            "key" if kind == "key" else "query",
            choose_config(
                kind, task.query, task.value, has_dropout, wide_mask=wide_mask
            ),
        )
        for kind in kinds
    )


def _pieces_bytes(pieces: Ints) -> int:
    return 4096 + pieces.nbytes


def _tables_bytes(launches: tuple[LaunchTables, ...]) -> int:
    return 4096 + sum(launch.nbytes for launch in launches)


@lru_cache(maxsize=2)
def _plain_kernel(allow_tf32: bool) -> NativeKernel:
    """The kernel without options: one object, so that it is probed once."""
    return NativeKernel(allow_tf32=allow_tf32)


def _checked_slopes(slopes: torch.Tensor) -> torch.Tensor:
    """ALiBi's slopes, copied: a kernel stays what it is.

    Raises:
        TypeError, ValueError: they are none.
        NotImplementedError: they would get a gradient.
    """
    if not isinstance(slopes, torch.Tensor):
        raise TypeError(
            f"alibi_slopes must be a tensor or None, got {type(slopes).__name__}"
        )
    if slopes.ndim != 1 or not slopes.is_floating_point():
        raise ValueError(
            "alibi_slopes must be floating-point, one for each query head, got "
            f"{slopes.dtype} of shape {tuple(slopes.shape)}"
        )
    is_learned = slopes.requires_grad and torch.is_grad_enabled()
    if is_learned or has_tangent(slopes):
        raise NotImplementedError(
            "alibi_slopes are copied and get no gradient: give slopes.detach(), or "
            "make what they add to the scores an attn_mask"
        )
    with no_torch_modes():
        return slopes.detach().to(torch.float32, copy=True)


def interpreted() -> bool:
    """Whether Triton's interpreter runs kernels in Python on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
