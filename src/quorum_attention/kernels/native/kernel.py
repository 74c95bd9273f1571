"""The native kernel: a task's forward in one launch, on fp32 statistics."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from quorum_attention.counts import switch
from quorum_attention.decomposition import Pairs, Rectangle, Task
from quorum_attention.decomposition.bands import window_verdict
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.launches import triton_available
from quorum_attention.kernels.native.config import Config, Half, ScoreOptions, config
from quorum_attention.kernels.native.launch import (
    Extras,
    Operands,
    dropout_numbers,
    launch_backward,
    launch_forward,
)
from quorum_attention.kernels.native.runs import (
    Piece,
    Runs,
    columns,
    is_aligned,
    pieces,
    table,
    within_window,
)
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
)
from quorum_attention.kernels.torch_private import outside
from quorum_attention.kernels.workspace import SLACK_BYTES, UNSPLIT_BYTES

Axis = Literal["query", "key"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST_FORWARD = 576
_LARGEST_BACKWARD = 256
# The workspace bound allows for this many runs for each block of this many rows (at depth 1 there
# are one or two).
_RUNS_OF_A_BLOCK = 6
_SMALLEST_BLOCK = 64


class HostTable(NamedTuple):
    """A table in host memory.

    Attributes:
        both: starts and entries in one tensor.
        n_starts: the number of starts.
        width: columns of the entries.
        aligned: as in ``Runs``.
    """

    both: torch.Tensor
    n_starts: int
    width: int
    aligned: bool


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
    plain_softmax = True
    wide_products = True
    dropout = True
    whole_tasks = True
    rates = (0.95, 0.78)  # H200, against cuDNN
    sparse = True
    whole_calls = True
    operator = True
    empty_rows = True

    def __init__(
        self,
        *,
        window: int | tuple[int, int] | None = None,
        softcap: float | None = None,
        alibi_slopes: torch.Tensor | None = None,
        allow_tf32: bool = False,
    ) -> None:
        self.options = ScoreOptions.of(window, softcap, alibi_slopes)
        self.allow_tf32 = switch(allow_tf32, "allow_tf32")
        sides = self.options.left, self.options.right
        self._verdict = window_verdict(*sides) if self.options.windowed else None
        self._slopes: dict[torch.device, torch.Tensor] = {}
        if not self.options.plain:
            self.plain_softmax, self.probed_as = False, _plain(self.allow_tf32)

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        if call.device_type != "cuda" and not interpreted():
            return f"it runs on NVIDIA GPUs, not on {call.device_type}"
        if call.dtype not in _DTYPES:
            return f"it takes float16, bfloat16 and float32, not {call.dtype}"
        if call.device_type != "cuda" and call.dtype == torch.bfloat16:
            return "Triton's interpreter has no bfloat16"
        largest = max(call.head_dim, call.value_dim)
        limit = _LARGEST_BACKWARD if call.needs_grad else _LARGEST_FORWARD
        if largest > limit or min(call.head_dim, call.value_dim) < 1:
            kind = "with gradients" if call.needs_grad else "without gradients"
            return f"it takes head dimensions from 1 to {limit} {kind}, not {largest}"
        slopes = self.options.slopes
        if slopes is not None and slopes.numel() != call.query_heads:
            return f"it has {slopes.numel()} alibi_slopes for {call.query_heads} query heads"
        return None if triton_available() else "it needs Triton, which is not installed"

    def keeps_pace(self, call: CallShape) -> bool:
        """Plain attention in 16 bits with 64 or 128 columns."""
        dims = {call.head_dim, call.value_dim}
        plain = self.options.plain and not self.allow_tf32 and call.mask is None
        plain = plain and not call.dropout
        return plain and call.dtype.itemsize == 2 and dims in ({64}, {128})

    def takes_whole(
        self, query_heads: int, key_heads: int, tokens: int, masked: bool, every: bool
    ) -> bool:
        """Whether a monolithic call can be run on the inputs as they are."""
        # Given only some heads, it cannot know which slopes are theirs.
        return every or self.options.slopes is None

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """The pairs of a call that are within the window."""
        return Pairs(n_queries, n_keys, is_causal, self._verdict)

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``forward`` allocates at any one time."""
        rows = extent.batch * extent.query_heads * extent.max_queries
        # The output may be asked for in fp32.
        results = rows * (call.value_dim * 4 + 4) + 2 * UNSPLIT_BYTES if extent.direct else 0
        return _table_bytes(call, extent) + results + _bias_bytes(call, extent)

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``backward`` allocates at any one time."""
        item = 4  # gradients may be asked for in fp32
        # The only other tensor, delta, may be a block that the allocator does not split.
        tables = 2 * _table_bytes(call, extent) + UNSPLIT_BYTES
        rows = extent.batch * extent.query_heads * extent.n_tokens
        results = 0
        if extent.direct:
            key_rows = extent.batch * extent.key_heads * extent.max_keys
            results = rows * call.head_dim * item + 3 * UNSPLIT_BYTES
            results += key_rows * (call.head_dim + call.value_dim) * item
        return tables + 4 * rows + results + _bias_bytes(call, extent)

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        config = _config("forward", task.query, task.value, dropout=task.dropout is not None)
        blocks: dict[Axis, int] = {"query": config.block_m}
        for rectangles, extras in self._launches(task, blocks):
            launch_forward(
                Operands(task.query, task.key, task.value, task.scale),
                state.out,
                state.lse,
                self._runs(rectangles, task, config.block_m, "query"),
                config,
                extras,
                resume=True,
            )
            del extras  # the next rectangle's mask is made when this one's has gone

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        drops = task.dropout is not None
        by_query = _config("query", task.query, task.value, dropout=drops)
        by_key = _config("key", task.query, task.value, dropout=drops)
        blocks: dict[Axis, int] = {"query": by_query.block_m, "key": by_key.block_n}
        for rectangles, extras in self._launches(task, blocks):
            launch_backward(
                Operands(task.query, task.key, task.value, task.scale),
                (grads.grad_out, grads.out, grads.lse),
                (grads.grad_query, grads.grad_key, grads.grad_value),
                self._runs(rectangles, task, by_query.block_m, "query"),
                self._runs(rectangles, task, by_key.block_n, "key"),
                by_query,
                by_key,
                extras,
                add=True,
                n_keys=task.task.spans[-1].stop if task.task.spans else 0,
            )
            del extras

    def whole_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernel``; ``out`` is in ``call.stored``, rounded once."""
        query = call.query
        shape = (*query.shape[:3], call.value.shape[-1])
        out = torch.empty(shape, dtype=call.stored or query.dtype, device=query.device)
        lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        config = _config("forward", query, call.value, dropout=call.dropout is not None)
        launch_forward(
            Operands(*call.inputs, call.scale),
            out,
            lse,
            self._whole_runs(call, config.block_m, "query"),
            config,
            self._whole_extras(call),
            resume=False,
        )
        return out, lse

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``Kernel``; gradients are in ``call.stored``, rounded once."""
        grads = tuple(
            torch.empty(t.shape, dtype=call.stored or t.dtype, device=t.device) for t in call.inputs
        )
        drops = call.dropout is not None
        by_query = _config("query", call.query, call.value, dropout=drops)
        by_key = _config("key", call.query, call.value, dropout=drops)
        launch_backward(
            Operands(*call.inputs, call.scale),
            (saved.grad_out, saved.out, saved.lse),
            grads,
            self._whole_runs(call, by_query.block_m, "query"),
            self._whole_runs(call, by_key.block_n, "key"),
            by_query,
            by_key,
            self._whole_extras(call),
            add=False,
        )
        return grads[0], grads[1], grads[2]

    def _whole_runs(self, call: Call, block: int, axis: Axis) -> Runs:
        whole = (Rectangle(0, call.query.shape[2], 0, call.key.shape[2], call.is_causal),)
        n_rows = (call.query if axis == "query" else call.key).shape[2]
        shifts = call.dropout is not None
        return runs_of(self, whole, None, n_rows, block, axis, call.query.device, shifts)

    def _whole_extras(self, call: Call) -> Extras:
        return self._extras(
            call.query.device, call.bias, Rectangle(0, 0, 0, 0), slice(None), call.dropout
        )

    # Rows without keys need no correction, so a rectangle is a whole call.
    rectangle_forward = whole_forward
    rectangle_backward = whole_backward

    def _launches(
        self, task: TaskTensors, blocks: dict[Axis, int]
    ) -> Iterator[tuple[tuple[Rectangle, ...], Extras]]:
        """The launches of a task: (rectangles, changes to the scores).

        All rectangles are one launch. With a mask, each rectangle is a launch; and if the table of
        all rectangles would exceed the workspace bound, they are launched in parts.
        """
        live = tuple(r for r in task.rectangles if r.n_queries > 0 and r.n_keys > 0)
        if not live or 0 in task.query.shape[:2]:
            return
        heads = slice(task.first_head, task.first_head + task.query.shape[1])
        if not task.has_mask(live[0]):
            extras = self._extras(task.query.device, None, live[0], heads, task.dropout)
            for part in self._portions(live, task, blocks):
                yield part, extras
            return
        if task.dropout is not None:
            # A rectangle may have many runs then: each part of it is a launch.
            alone = ((one,) for one in live)
            live = tuple(
                one for each in alone for part in self._portions(each, task, blocks) for one in part
            )
        for rectangle in live:
            # No name here keeps the mask alive.
            yield (
                (rectangle,),
                self._extras(
                    task.query.device, task.bias(rectangle), rectangle, heads, task.dropout
                ),
            )

    def _portions(
        self, rectangles: tuple[Rectangle, ...], task: TaskTensors, blocks: dict[Axis, int]
    ) -> Iterator[tuple[Rectangle, ...]]:
        entries = sum(
            self._host(rectangles, task, block, axis)[0].numel() for axis, block in blocks.items()
        )
        n_tokens = max(task.query.shape[2], task.key.shape[2])
        allowed = len(blocks) * _table_entries(n_tokens) * columns(task.dropout is not None)
        if entries <= allowed:
            yield rectangles
            return
        if len(rectangles) == 1:
            if task.dropout is not None:
                rectangles = _halves(rectangles[0], task.task)
            if len(rectangles) == 1:
                yield rectangles
                return
        half = len(rectangles) // 2
        yield from self._portions(rectangles[:half], task, blocks)
        yield from self._portions(rectangles[half:], task, blocks)

    def _host(
        self, rectangles: tuple[Rectangle, ...], task: TaskTensors, block: int, axis: Axis
    ) -> HostTable:
        shifts = task.dropout is not None
        of = task.task if self._is_placed or shifts else None
        n_rows = task.query.shape[2] if axis == "query" else task.key.shape[2]
        return self._table(rectangles, of, n_rows, block, axis, task.query.device, shifts)

    def _table(
        self,
        rectangles: tuple[Rectangle, ...],
        task: Task | None,
        n_rows: int,
        block: int,
        axis: Axis,
        device: torch.device,
        shifts: bool = False,
    ) -> HostTable:
        """See ``host_table``; ``task`` None: local positions are those of the call."""
        window = (self.options.left, self.options.right) if self.options.windowed else None
        pinned = device.type == "cuda"
        return _remembered_table(rectangles, task, window, n_rows, block, axis, pinned, shifts)

    @property
    def _is_placed(self) -> bool:
        """Whether global positions matter."""
        return self.options.positional

    def _extras(
        self,
        device: torch.device,
        bias: torch.Tensor | None,
        at: Rectangle,
        heads: slice,
        dropout: Dropout | None,
    ) -> Extras:
        slopes = self.options.slopes
        if slopes is not None:
            if device not in self._slopes:
                with outside():
                    self._slopes[device] = slopes.to(device)
            slopes = self._slopes[device][heads]
        return Extras(
            options=self.options,
            slopes=slopes,
            bias=bias,
            bias_row=at.query_start,
            bias_column=at.key_start,
            tf32=self.allow_tf32,
            drops=None if dropout is None else dropout_numbers(dropout, device),
        )

    def _runs(
        self, rectangles: tuple[Rectangle, ...], task: TaskTensors, block: int, axis: Axis
    ) -> Runs:
        return _sent(self._host(rectangles, task, block, axis), task.query.device)


def runs_of(
    kernel: NativeKernel,
    rectangles: tuple[Rectangle, ...],
    task: Task | None,
    n_rows: int,
    block: int,
    axis: Axis,
    device: torch.device,
    shifts: bool = False,
) -> Runs:
    """The table of a launch, on the device; ``task`` None: global positions are not needed, or are
    the local ones; ``shifts``: for dropout."""
    return _sent(kernel._table(rectangles, task, n_rows, block, axis, device, shifts), device)


def _sent(table: HostTable, device: torch.device) -> Runs:
    host, n_starts, width, aligned = table
    both = host if device.type == "cpu" else host.to(device, non_blocking=True)
    return Runs(both[:n_starts], both[n_starts:].view(-1, width), n_starts - 1, aligned)


def _halves(r: Rectangle, task: Task) -> tuple[Rectangle, ...]:
    """A plain rectangle in two, where its keys are no run of neighbours; else as it is."""
    runs = [] if r.causal else task.segments(r.key_start, r.key_stop)
    if len(runs) < 2:
        return (r,)
    middle = runs[len(runs) // 2].local
    return replace(r, key_stop=middle), replace(r, key_start=middle)


@lru_cache(maxsize=2)
def _plain(allow_tf32: bool) -> NativeKernel:
    """The kernel without options: one object, so that it is probed once."""
    return NativeKernel(allow_tf32=allow_tf32)


@lru_cache(maxsize=64)
def _remembered_table(
    rectangles: tuple[Rectangle, ...],
    task: Task | None,
    window: tuple[int, int] | None,
    n_rows: int,
    block: int,
    axis: Axis,
    pinned: bool,
    shifts: bool,
) -> HostTable:
    """The table of rectangles. The tasks of a level share theirs, so most of them share one."""
    found: Sequence[Piece] = pieces(rectangles, task)
    if window is not None:
        found = within_window(found, *window)
    made = host_table(found, n_rows, block, axis, pinned=pinned, shifts=shifts)
    # A window moves where runs begin.
    return made if window is None else made._replace(aligned=False)


def host_table(
    found: Sequence[Piece],
    n_rows: int,
    block: int,
    axis: Axis,
    *,
    pinned: bool,
    shifts: bool = False,
) -> HostTable:
    """A table in host memory; ``shifts``: for dropout."""
    starts, entries = table(found, n_rows, block, axis, shifts=shifts)
    with outside():  # because it is cached
        both = torch.empty(
            len(starts) + entries.size, dtype=torch.int32, pin_memory=pinned, device="cpu"
        )
        both[: len(starts)] = torch.from_numpy(starts)
        both[len(starts) :] = torch.from_numpy(entries.reshape(-1))
    aligned = shifts and is_aligned(entries)
    return HostTable(both, len(starts), columns(shifts), aligned)


def interpreted() -> bool:
    """Whether Triton's interpreter runs kernels in Python on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _config(half: Half, query: torch.Tensor, value: torch.Tensor, *, dropout: bool) -> Config:
    sizes = (query.shape[-1], value.shape[-1], query.element_size(), query.device)
    return config(half, *sizes, dropout=dropout)


def _table_entries(n_tokens: int) -> int:
    """Entries of a table that the workspace bound allows for; larger ones are launched in parts."""
    return (math.ceil(n_tokens / _SMALLEST_BLOCK) + 2) * _RUNS_OF_A_BLOCK


def _table_bytes(call: CallShape, extent: Extent) -> int:
    # A single rectangle cannot be launched in parts: it has one run for every block.
    blocks = math.ceil(extent.n_tokens / 16) + 2
    entries = max(_table_entries(extent.n_tokens), blocks)
    return 4 * (blocks + entries * columns(call.dropout)) + SLACK_BYTES


def _bias_bytes(call: CallShape, extent: Extent) -> int:
    """Bytes of the mask of one rectangle."""
    mask = call.mask
    if mask is None:
        return 0
    size = (extent.batch if mask.batch else 1) * (extent.query_heads if mask.heads else 1)
    size *= extent.max_queries if mask.rows else 1
    size *= extent.max_keys if mask.columns else 1
    return size * call.dtype.itemsize


__all__ = ["NativeKernel", "interpreted"]
