"""The native kernel: a task in one launch, on fp32 statistics."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from quorum_attention.argument_checks import switch
from quorum_attention.decomposition import Pairs, Rectangle
from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.masked.block_table import BLOCK
from quorum_attention.kernels.masked.geometry import Geometry, GroupBits
from quorum_attention.kernels.native.config import Config, Half, config
from quorum_attention.kernels.native.launch import NativeLaunch
from quorum_attention.kernels.native.runs import (
    BIT_BYTES,
    BLOCK_WINDOW,
    FIELDS,
    UNLIMITED,
    Axis,
    Ints,
    Room,
    RuledTask,
    Runs,
    Window,
    pieces,
)
from quorum_attention.kernels.operator_inputs import operator_refusal
from quorum_attention.kernels.operator_sizes import SLACK_BYTES, UNSPLIT_BYTES, bias_bytes
from quorum_attention.kernels.protocol import (
    Call,
    CallShape,
    Extent,
    Gradients,
    Kernel,
    Saved,
    Statistics,
    TaskTensors,
    Three,
    uncut,
    whole_task,
)
from quorum_attention.kernels.result_layout import empty_like_input
from quorum_attention.kernels.torch_private import outside
from quorum_attention.kernels.triton_launch import triton_available
from quorum_attention.keywords import helps_with_names
from quorum_attention.mask import Mask

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST_FORWARD = 576
_LARGEST_BACKWARD = 256
# The workspace bound allows for this many runs for each block of this many rows (at depth 1 there
# are one or two).
_RUNS_OF_A_BLOCK = 4
_SMALLEST_BLOCK = 64
# Bytes of host memory in which a kernel's tables, and the blocks of rules, are remembered.
_TABLE_BYTES = 64 << 20

_CODE_BYTES = 256 << 20

Tilings = tuple[tuple[Axis, Config], ...]
"""The tables that a pass reads, by axis, with the config of the Triton kernel that reads each."""


class _LaunchTables(NamedTuple):
    """A launch on the host: its tables, in the order of the tilings, and the rows and columns of
    the partial blocks of rules, (2, blocks)."""

    tables: tuple[Runs, ...]
    blocks: torch.Tensor | None = None


class NativeKernel(Kernel):
    """Triton attention of whole tasks, for many shapes and masks that other kernels refuse.

    It reads and writes fp32 statistics, so partial results are not rounded in between; gradients
    are deterministic. It takes head dimensions up to 256 (forward alone: 576), not only powers of
    two; fp16, bf16 and fp32 (IEEE, not TF32); grouped heads; additive and boolean masks.

    Args:
        window: sliding window: tokens to each side, or (left, right); -1 is no limit.
        softcap: bound of the scores, ``softcap * tanh(score / softcap)``.
        alibi_slopes: (query heads,): ``slope * |i - j|`` is subtracted from the score. Copied.
        allow_tf32: for fp32 inputs, faster and less exact products.

    Raises:
        TypeError, ValueError: an argument that makes no sense, by name.

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
    whole_tasks = True
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
        left, right = Mask(window=window, softcap=softcap).sides  # which checks both
        band = Band(-left if left >= 0 else None, right if right >= 0 else None)
        self.geometry, self.softcap = Geometry(band), float(softcap or 0.0)
        self.slopes = None if alibi_slopes is None else _checked_slopes(alibi_slopes)
        self.allow_tf32 = switch(allow_tf32, "allow_tf32")
        self._verdict = None if band.keeps_all else band.verdict
        self._slopes: dict[torch.device, torch.Tensor] = {}
        self._known()
        if not self._is_plain:
            self.plain_variant = _plain(self.allow_tf32)

    def _known(self) -> None:
        self._parts: Cache[tuple[_LaunchTables, ...]] = Cache(_TABLE_BYTES, _parts_bytes)
        self._blocks: Cache[Ints] = Cache(_CODE_BYTES, _blocks_bytes)

    def under(self, geometry: Geometry) -> NativeKernel:
        """The kernel for pairs of a geometry; one with rules is for tasks without dropout."""
        found = copy.copy(self)
        found.geometry = geometry
        found._known()
        return found

    def with_softcap(self, softcap: float) -> NativeKernel:
        """See ``Kernel``."""
        capped = self.under(self.geometry)
        capped.softcap = float(softcap)
        capped.plain_variant = self.plain_variant or self
        return capped

    def by_bits(self, bits: Sequence[torch.Tensor], is_causal: bool) -> NativeKernel:
        """The kernel for pairs without a group bit in common, of queries and of keys; copied."""
        with outside():
            rule = GroupBits(*(side.detach().cpu().numpy().copy() for side in bits))
        found = self.under(Geometry(Band(None, 0 if is_causal else None), rules=(rule,)))
        found.plain_variant = _plain(self.allow_tf32)
        return found

    @property
    def _is_plain(self) -> bool:
        """Whether scores are unchanged and all pairs kept."""
        return self.geometry.keeps_all and not self.softcap and self.slopes is None

    @property
    def _window(self) -> Window | None:
        """How far before and after a query its keys are, if the kernel has to test both; beside
        rules the bits say it."""
        band = self.geometry.band
        if self.geometry.rules:
            return None
        if self.geometry.has_block_windows:
            return BLOCK_WINDOW
        if band.low is None:
            return None
        return -band.low, UNLIMITED if band.high is None else band.high

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        device = shape.device_type if interpreted() else "cuda"
        if (reason := operator_refusal(shape, device, _DTYPES)) is not None:
            return reason
        if shape.device_type != "cuda" and shape.dtype == torch.bfloat16:
            return "Triton's interpreter has no bfloat16"
        largest = max(shape.head_dim, shape.value_dim)
        limit = _LARGEST_BACKWARD if shape.needs_grad else _LARGEST_FORWARD
        if largest > limit:
            kind = "with gradients" if shape.needs_grad else "without gradients"
            return f"it takes head dimensions from 1 to {limit} {kind}, not {largest}"
        if self.slopes is not None and self.slopes.numel() != shape.heads:
            return f"it has {self.slopes.numel()} alibi_slopes for {shape.heads} query heads"
        return None if triton_available() else "it needs Triton, which is not installed"

    def takes_whole(self, shape: CallShape, tokens: int, every: bool) -> bool:
        """Whether a monolithic call can be run on the inputs as they are."""
        # Given only some heads, it cannot know which slopes are theirs.
        return every or self.slopes is None

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """The pairs of a call that are within the window."""
        return Pairs(n_queries, n_keys, is_causal, self._verdict)

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``forward`` allocates at any one time."""
        rows = extent.batch * extent.query_heads * extent.max_queries
        # The output may be asked for in fp32; with rules there is one in fp32 beside it.
        results = rows * (shape.value_dim * 4 * self._copies + 4) + 3 * UNSPLIT_BYTES
        tables = self._table_bytes(shape, extent) + self._room_bytes(shape, extent)
        return tables + results * extent.direct + bias_bytes(shape, extent)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``backward`` allocates at any one time."""
        item = 4 * self._copies  # gradients may be asked for in fp32
        # The only other tensor, delta, may be a block that the allocator does not split.
        tables = 2 * self._table_bytes(shape, extent) + UNSPLIT_BYTES
        rows = extent.batch * extent.query_heads * extent.n_tokens
        results = 0
        if extent.direct:
            key_rows = extent.batch * extent.key_heads * extent.max_keys
            results = rows * shape.head_dim * item + 3 * UNSPLIT_BYTES * self._copies
            results += key_rows * (shape.head_dim + shape.value_dim) * item
        tables += self._room_bytes(shape, extent)
        return tables + 4 * rows + results + bias_bytes(shape, extent)

    @property
    def _copies(self) -> int:
        return 2 if self.geometry.rules else 1

    def _room_bytes(self, shape: CallShape, extent: Extent) -> int:
        """For evaluating rules."""
        geometry, lanes, n = self.geometry, extent.batch * extent.query_heads, extent.n_tokens
        if not geometry.rules:
            return 0
        row_bytes = (shape.head_dim + shape.value_dim) * shape.dtype.itemsize
        room = Room.of(lanes * n * row_bytes, lanes if geometry.functions else 1, n, n)
        return room.device_bytes + geometry.placed_bytes

    def _table_bytes(self, shape: CallShape, extent: Extent) -> int:
        # A single rectangle cannot be launched in parts: it has one run for every block.
        blocks = math.ceil(extent.n_tokens / 16) + 2
        entries = max(self._most_entries(extent.n_tokens), blocks)
        return 4 * (blocks + entries * FIELDS) + SLACK_BYTES

    def _most_entries(self, n_tokens: int) -> int:
        """Entries of a table that the bound allows for; larger ones are launched in parts."""
        blocks = 0 if self.geometry.blocks is None else len(self.geometry.blocks)
        return (math.ceil(n_tokens / _SMALLEST_BLOCK) + 2) * _RUNS_OF_A_BLOCK + 5 * blocks // 2

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        for launch in self.launches(task, "forward"):
            launch.forward(state.out, state.lse, resume=True)
            del launch  # the next rectangle's mask is made when this one's has gone

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        saved = Saved(grads.grad_out, grads.out, grads.lse)
        targets = grads.grad_query, grads.grad_key, grads.grad_value
        for launch in self.launches(task, "query", "key"):
            launch.backward(saved, targets, add=True)
            del launch

    def whole_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernel``; ``out`` is in ``call.stored``, rounded once."""
        if self.geometry.rules:
            return super().whole_forward(call)
        query = call.query
        shape = (*query.shape[:3], call.value.shape[-1])
        out = empty_like_input(query, shape, call.stored or query.dtype)
        lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        (launch,) = self.launches(whole_task(call), "forward", whole=True)
        launch.forward(out, lse, resume=False)
        return out, lse

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``Kernel``; gradients are in ``call.stored``, rounded once."""
        if self.geometry.rules:
            return super().whole_backward(call, saved)
        query, key, value = (
            empty_like_input(t, t.shape, call.stored or t.dtype) for t in call.inputs
        )
        (launch,) = self.launches(whole_task(call), "query", "key", whole=True)
        launch.backward(saved, (query, key, value), add=False)
        return query, key, value

    def launches(
        self, task: TaskTensors, *halves: Half, whole: bool = False
    ) -> Iterator[NativeLaunch]:
        """The launches of a task, or one of a ``whole`` call, for a forward or a backward.

        All rectangles are one launch, and each is one where they have masks. There are more where
        a table or the bits of rules would exceed the workspace bound.
        """
        # Results of a whole call without pairs are written, too.
        every = tuple(task.rectangles) or (Rectangle(0, 0, 0, 0),) * whole
        if not every:
            return
        device, spans = task.query.device, task.task.spans
        slopes, heads = self._slopes_on(device), slice(task.first_head, None)
        for rectangles in [(r,) for r in every] if task.has_mask(every[0]) else [every]:
            r = rectangles[0]
            call = Call(
                task.query, task.key, task.value, scale=task.scale, bias=task.bias(r),
                dropout=task.dropout,
            )  # fmt: skip
            ruled = RuledTask(self.geometry, task, rectangles) if self.geometry.rules else None
            for part in self.parts(task, rectangles, tilings(halves, task), ruled, whole=whole):
                # No name here keeps the bits alive: the next launch has others.
                yield NativeLaunch(
                    call, tuple(table.on(device) for table in part.tables), softcap=self.softcap,
                    slopes=None if slopes is None else slopes[heads], window=self._window,
                    bias_at=(r.query_start, r.key_start),
                    mask_bits=None if ruled is None else ruled.bits(part.blocks),
                    tf32=self.allow_tf32, n_keys=0 if whole or not spans else spans[-1].stop,
                )  # fmt: skip
            del call

    def _slopes_on(self, device: torch.device) -> torch.Tensor | None:
        if self.slopes is not None and device not in self._slopes:
            with outside():
                self._slopes[device] = self.slopes.to(device)
        return self._slopes.get(device)

    def parts(
        self,
        task: TaskTensors,
        rectangles: tuple[Rectangle, ...],
        tilings: Tilings,
        ruled: RuledTask | None = None,
        *,
        whole: bool = False,
    ) -> tuple[_LaunchTables, ...]:
        """The launches for rectangles of a task; remembered."""
        n, m, device_type = task.query.shape[2], task.key.shape[2], task.query.device.type
        drops, limits = task.dropout is not None, (math.inf, math.inf)
        if not whole:
            limits = self._most_entries(max(n, m)) * len(tilings), 0
        # The tasks of a level have the same rectangles, so most of them share one table, where
        # global positions do not matter.
        anywhere = not drops and self.slopes is None and self.geometry.keeps_all
        positions = uncut(max(n, m)) if anywhere else task.task
        key: Hashable = positions, rectangles
        if ruled is not None:
            key, limits = ruled.key, (ruled.room.runs * len(tilings), ruled.room.partial)
            blocks = self._blocks.get(key, ruled.pieces)
        sizes = {"query": n, "key": m}

        def part(found: Ints) -> _LaunchTables:
            mixed, on_host = found[:, 6] == 1, None
            if ruled is not None:
                found = found.copy()
                found[mixed, 7] = np.arange(mixed.sum()) * (BIT_BYTES // 4)
                on_host = _on_host(found[mixed][:, :4:2].T // BLOCK, device_type)
            tables = (
                Runs.of(found, sizes[tiling[0]], tiling, self._window, pinned=device_type == "cuda")
                for tiling in tilings
            )
            return _LaunchTables(tuple(tables), on_host)

        def make() -> tuple[_LaunchTables, ...]:
            found = pieces(rectangles, positions, self.geometry) if ruled is None else blocks
            if not whole and not len(found):
                return ()
            return tuple(_portions(found, part, limits))

        return self._parts.get((key, n, m, device_type, drops, limits, tilings), make)


def _portions(
    found: Ints, part: Callable[[Ints], _LaunchTables], limits: tuple[float, float]
) -> Iterator[_LaunchTables]:
    """Launches of pieces, each with no more than so many entries and partial blocks."""
    half = len(found) // 2
    if not half or (found[:, 6] == 1).sum() <= limits[1]:
        made = part(found)
        if not half or sum(len(table.entries) for table in made.tables) <= limits[0]:
            yield made
            return
    yield from _portions(found[:half], part, limits)
    yield from _portions(found[half:], part, limits)


def tilings(halves: Sequence[Half], task: TaskTensors) -> Tilings:
    """The tables of a forward, or of both halves of a backward."""
    given = task.query, task.value, task.dropout is not None
    wide_mask = bool(task.rectangles) and task.has_wide_mask(task.rectangles[0])
    return tuple(
        ("key" if half == "key" else "query", config(half, *given, wide_mask=wide_mask))
        for half in halves
    )


@outside()  # because it is cached
def _on_host(blocks: Ints, device_type: str) -> torch.Tensor:
    found = torch.from_numpy(np.ascontiguousarray(blocks))
    return found.pin_memory() if device_type == "cuda" else found


def _blocks_bytes(blocks: Ints) -> int:
    return 4096 + blocks.nbytes


def _parts_bytes(parts: tuple[_LaunchTables, ...]) -> int:
    tensors = [t for part in parts for t in (part.blocks, *(table.both for table in part.tables))]
    return 4096 + sum(tensor.nbytes for tensor in tensors if tensor is not None)


@lru_cache(maxsize=2)
def _plain(allow_tf32: bool) -> NativeKernel:
    """The kernel without options: one object, so that it is probed once."""
    return NativeKernel(allow_tf32=allow_tf32)


def _checked_slopes(slopes: torch.Tensor) -> torch.Tensor:
    """ALiBi's slopes, copied: a kernel stays what it is.

    Raises:
        TypeError, ValueError: they are none.
    """
    if not isinstance(slopes, torch.Tensor):
        raise TypeError(f"alibi_slopes must be a tensor or None, got {type(slopes).__name__}")
    if slopes.ndim != 1 or not slopes.is_floating_point():
        raise ValueError(
            "alibi_slopes must be floating-point, one for each query head, got "
            f"{slopes.dtype} of shape {tuple(slopes.shape)}"
        )
    with outside():
        return slopes.detach().to(torch.float32, copy=True)


def interpreted() -> bool:
    """Whether Triton's interpreter runs kernels in Python on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
