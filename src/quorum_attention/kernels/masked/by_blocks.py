"""The native kernel under a geometry with rules: empty blocks are left out, full ones are plain.

A table says of every block of 128 queries by 128 keys of a task whether it is empty, full or
partial. It is made once. In each call rules are evaluated on the partial blocks, as many at a time
as there is memory for: the kernel is given a bit for each of their pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.decomposition import EMPTY, FULL, PARTIAL, Ranges, Rectangle
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.kit.block_table import (
    BLOCK,
    MOST_NODES,
    PAIR_BYTES,
    SENT,
    UNKNOWN,
    BlockEvaluator,
    Codes,
    Pieces,
    TaskPairs,
    blocks_in,
    classify,
)
from quorum_attention.kernels.kit.functions import depends_on_batch_head, versions
from quorum_attention.kernels.kit.masks import BlockMask
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.native.kernel import Launch, NativeKernel, Tilings
from quorum_attention.kernels.native.runs import NO_DIAGONAL, WIDTH, Axis, HostTable, Ints, table
from quorum_attention.kernels.protocol import Call, CallShape, Extent, TaskTensors
from quorum_attention.kernels.rectangles import SLACK_BYTES, UNSPLIT_BYTES
from quorum_attention.kernels.torch_private import outside

# Bytes of a block's bits.
BIT_BYTES = BLOCK * BLOCK // 8
# The smallest blocks of rows of the native kernel.
_SMALLEST = 16
# Bounds of the bytes for evaluating blocks, and again for their bits.
_LEAST, _MOST = 16 << 20, 256 << 20
# Bytes of host memory in which tables of blocks, and those of launches, are remembered.
_CODE_BYTES, _TABLE_BYTES = 256 << 20, 64 << 20


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a table of blocks, which is one launch.

    Attributes:
        top, left: its first row and column of blocks.
        codes: its verdicts.
        n_queries, n_keys: tokens of it.
    """

    top: int
    left: int
    codes: Codes
    n_queries: int
    n_keys: int

    @property
    def rows(self) -> slice:
        """Its queries, local positions."""
        return slice(self.top * BLOCK, self.top * BLOCK + self.n_queries)

    @property
    def columns(self) -> slice:
        """Its keys, local positions."""
        return slice(self.left * BLOCK, self.left * BLOCK + self.n_keys)

    @property
    def partial(self) -> Ints:
        """(2, blocks): rows and columns, in the whole table, of its partial blocks, in the order of
        their bits."""
        rows, columns = np.nonzero(self.codes == PARTIAL)
        return np.stack((rows + self.top, columns + self.left))

    def pieces(self, axis: Axis) -> Ints:
        """Its full blocks, those of a row (of a column, for "key") together, and its partial ones,
        as ``native.runs.table`` takes them; positions are counted from the part's first."""
        number = (self.codes == PARTIAL).cumsum().reshape(self.codes.shape) - 1
        by_query = axis == "query"
        codes, number = (c if by_query else c.T for c in (self.codes, number))
        edges = np.diff(np.pad(codes == FULL, ((0, 0), (1, 1))).astype(np.int8), axis=1)
        line, first = np.nonzero(edges == 1)
        _, stop = np.nonzero(edges == -1)
        own, at = np.nonzero(codes == PARTIAL)
        found = np.zeros((len(line) + len(own), WIDTH + 1), dtype=np.int64)
        a, b = (0, 2) if by_query else (2, 0)
        found[:, a] = np.concatenate((line, own)) * BLOCK
        found[:, a + 1] = found[:, a] + BLOCK
        found[:, b] = np.concatenate((first, at)) * BLOCK
        found[:, b + 1] = np.concatenate((stop, at + 1)) * BLOCK
        found[:, [1, 3]] = np.minimum(found[:, [1, 3]], (self.n_queries, self.n_keys))
        found[:, 4] = NO_DIAGONAL
        found[len(line) :, 6] = 1
        found[len(line) :, 7] = number[own, at] * (BIT_BYTES // 4)
        return found


def most_runs(n_queries: int, n_keys: int, blocks: int) -> int:
    """The most runs of full blocks of a launch, along either axis."""
    return max(4 * (n_queries + n_keys) // BLOCK + 64, blocks // 2)


def parts(codes: Codes, n_queries: int, n_keys: int, blocks: int) -> Iterator[Part]:
    """The parts of a table with no more than so many partial ``blocks`` each, by ascending rows;
    those with nothing to compute are left out."""
    most = most_runs(n_queries, n_keys, blocks)
    waiting = [(0, codes.shape[0], 0, codes.shape[1])]
    while waiting:
        top, bottom, left, right = waiting.pop()
        part = codes[top:bottom, left:right]
        if not part.any():
            continue
        if _fits(part, blocks, most):
            rows = min(bottom * BLOCK, n_queries) - top * BLOCK
            yield Part(top, left, part, rows, min(right * BLOCK, n_keys) - left * BLOCK)
            continue
        if bottom - top > 1:
            middle = (top + bottom) // 2
            waiting += [(middle, bottom, left, right), (top, middle, left, right)]
        else:
            middle = (left + right) // 2
            waiting += [(top, bottom, middle, right), (top, bottom, left, middle)]


def _fits(part: Codes, blocks: int, most: int) -> bool:
    if np.count_nonzero(part == PARTIAL) > blocks:
        return False
    full = np.pad(part == FULL, ((1, 0), (1, 0)))
    by_rows = np.count_nonzero(full[1:, 1:] & ~full[1:, :-1])
    by_columns = np.count_nonzero(full[1:, 1:] & ~full[:-1, 1:])
    return bool(max(by_rows, by_columns) <= most)


class Room(NamedTuple):
    """How much of a task is evaluated at a time.

    Attributes:
        nbytes: for evaluating, and again for bits.
        lanes: batch entries times heads for which rules differ.
        n_queries, n_keys: tokens of the task.
    """

    nbytes: int
    lanes: int
    n_queries: int
    n_keys: int

    @classmethod
    def of(cls, rows_bytes: int, lanes: int, n_queries: int, n_keys: int) -> Room:
        """The room for a task whose rows of queries and values have so many bytes together."""
        return cls(min(max(rows_bytes // 2, _LEAST), _MOST), max(1, lanes), n_queries, n_keys)

    @property
    def at_once(self) -> int:
        """Blocks evaluated at a time."""
        return self._blocks(PAIR_BYTES * BLOCK * BLOCK)

    @property
    def partial(self) -> int:
        """Partial blocks whose bits there are at a time."""
        return self._blocks(BIT_BYTES)

    def _blocks(self, block_bytes: int) -> int:
        """How many blocks there is room for, at most all of the task."""
        every = max(1, -(-self.n_queries // BLOCK) * -(-self.n_keys // BLOCK))
        return min(every, max(1, self.nbytes // (block_bytes * self.lanes)))

    @property
    def device_bytes(self) -> int:
        """Upper bound of the device bytes that evaluating takes, bits among them."""
        evaluated = self.at_once * PAIR_BYTES * BLOCK * BLOCK * self.lanes
        bits = self.partial * BIT_BYTES * self.lanes
        # Positions and pieces of every token, made and padded; the blocks that are sent.
        tokens = 4 * 8 * (self.n_queries + self.n_keys + 2 * BLOCK)
        tokens += 3 * 8 * SENT * self.at_once
        unsplit = 4 * min(evaluated, UNSPLIT_BYTES) + min(bits, UNSPLIT_BYTES)
        return evaluated + bits + tokens + unsplit + 4 * min(tokens, UNSPLIT_BYTES) + SLACK_BYTES

    @property
    def table_bytes(self) -> int:
        """Upper bound of the device bytes of both tables of a launch, and of its list of blocks."""
        # Functions that are the same in all lanes have more blocks in the same bits.
        tokens, blocks = self.n_queries + self.n_keys, self._replace(lanes=1).partial
        runs = most_runs(self.n_queries, self.n_keys, blocks) + blocks
        runs_bytes = 4 * (WIDTH + 1) * (BLOCK // _SMALLEST) * runs
        return 2 * runs_bytes + 4 * (tokens // _SMALLEST + 4) + 2 * 8 * blocks


class _Blocks(NamedTuple):
    """A table of blocks, and where its rectangles are."""

    codes: Codes
    pieces: Pieces | None


class _Tables(NamedTuple):
    """A part, the tables of its launch, and its partial blocks, (2, blocks) on the host."""

    part: Part
    tables: tuple[HostTable, ...]
    blocks: torch.Tensor


class NativeByBlocks(NativeKernel):
    """See above; for batch entries of one geometry, and without dropout.

    Args:
        geometry: the kept pairs; it has the call's own causal rule.
        base: the native kernel with its other options.
        functions: the user's functions in the geometry.
    """

    def __init__(
        self,
        geometry: Geometry,
        base: NativeKernel,
        functions: Sequence[Callable[..., torch.Tensor]],
    ) -> None:
        super().__init__(softcap=base.softcap or None, allow_tf32=base.allow_tf32)
        self._ruled, self._functions = geometry, tuple(functions)
        self._blocks: Cache[_Blocks] = Cache(_CODE_BYTES, _blocks_bytes)
        self._made: Cache[list[_Tables]] = Cache(_TABLE_BYTES, _tables_bytes)
        self._depends: Cache[tuple[bool, bool]] = Cache(16, lambda depends: 1)

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        found = super().forward_workspace_bytes(call, replace(extent, direct=False))
        if extent.direct:
            # Statistics in fp32, and the output in its dtype, which may be that, too.
            rows = extent.batch * extent.query_heads * extent.n_tokens
            found += rows * (2 * call.value_dim + 1) * 4 + 3 * UNSPLIT_BYTES
        return found + self._room_bytes(call, extent)

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        found = super().backward_workspace_bytes(call, replace(extent, direct=False))
        if extent.direct:
            rows = extent.query_heads * call.head_dim
            rows += extent.key_heads * (call.head_dim + call.value_dim)
            found += 2 * extent.batch * extent.n_tokens * rows * 4 + 6 * UNSPLIT_BYTES
        return found + self._room_bytes(call, extent)

    def _room_bytes(self, call: CallShape, extent: Extent) -> int:
        lanes, n = extent.batch * extent.query_heads, extent.n_tokens
        row_bytes = (call.head_dim + call.value_dim) * call.dtype.itemsize
        differ = any(not isinstance(function, BlockMask) for function in self._functions)
        room = Room.of(lanes * n * row_bytes, lanes if differ else 1, n, n)
        return room.device_bytes + room.table_bytes + self._ruled.placed_bytes

    def _launches(self, task: TaskTensors, tilings: Tilings) -> Iterator[Launch]:
        live = tuple(r for r in task.rectangles if r.n_queries > 0 and r.n_keys > 0)
        if not live or 0 in task.query.shape[:2]:
            return
        with torch.no_grad():
            # Each rectangle has a mask of its own, if any has.
            for rectangles in [(r,) for r in live] if task.has_mask(live[0]) else [live]:
                yield from self._launches_of(rectangles, task, tilings)

    def _launches_of(
        self, rectangles: tuple[Rectangle, ...], task: TaskTensors, tilings: Tilings
    ) -> Iterator[Launch]:
        device, bias, r = task.query.device, task.bias(rectangles[0]), rectangles[0]
        seen = versions(*self._functions)
        depends = self._depends.get((device, seen), lambda: self._differences(device))
        room = _room(task, depends)
        heads = (task.first_head, task.query.shape[1]) if depends[1] else ()
        entries = task.entries if depends[0] else ()
        # All that a task's table depends on, as far as it can be seen.
        key: Hashable = (task.task, rectangles, task.query.is_cuda, entries, heads, seen)
        sizes = max(r.query_stop for r in rectangles), max(r.key_stop for r in rectangles)

        def blocks() -> _Blocks:
            pairs = TaskPairs.of(task.task, rectangles, False, *sizes)
            return _Blocks(codes_of(self._ruled, task, pairs, depends, room), pairs.pieces)

        known = self._blocks.get(key, blocks)

        def tables() -> list[_Tables]:
            return [
                _tables(part, tilings, task.query.is_cuda)
                for part in parts(known.codes, *sizes, room.partial)
            ]

        evaluator: BlockEvaluator | None = None
        for part, hosts, partial_blocks in self._made.get((key, room.partial, tilings), tables):
            bits = torch.empty((1, 1, 1, 1, 1), dtype=torch.int32, device=device)  # not read
            if partial_blocks.numel():
                evaluator = evaluator or BlockEvaluator(
                    self._ruled.keeps, task, sizes, known.pieces, depends
                )
                on_device = partial_blocks.to(device, non_blocking=True)
                bits = bits_of(evaluator, on_device, room.at_once)
            rows, columns = part.rows, part.columns
            extras = replace(
                self._extras(device, task), mask_bits=bits,
                bias_at=(r.query_start - rows.start, r.key_start - columns.start),
            )  # fmt: skip
            call = Call(
                task.query[:, :, rows], task.key[:, :, columns], task.value[:, :, columns],
                scale=task.scale, bias=bias,
            )  # fmt: skip
            runs = tuple(h.on(device, of) for h, (_, of) in zip(hosts, tilings, strict=True))
            yield Launch(call, runs, extras, rows, columns)
            del bits, extras, call, runs  # the next launch's are made when these have gone

    def _differences(self, device: torch.device) -> tuple[bool, bool]:
        """Whether functions differ between batch entries, and between heads."""
        each = [depends_on_batch_head(f, device) for f in self._functions]
        return any(a for a, _ in each), any(b for _, b in each)


def codes_of(
    geometry: Geometry,
    task: TaskTensors,
    pairs: TaskPairs,
    depends: tuple[bool, bool],
    room: Room,
) -> Codes:
    """FULL, PARTIAL or EMPTY in all lanes together, (block rows, block columns)."""
    opaque = bool(geometry.opaque)
    verdict = partial(_code, geometry) if opaque else geometry.verdict
    nodes = classify(pairs, verdict, opaque=opaque, most_nodes=MOST_NODES)
    codes = np.zeros(pairs.grid, dtype=np.int8)
    for code in (FULL, PARTIAL):
        for _, top, bottom, left, right in nodes[code].tolist():
            codes[top:bottom, left:right] = code
    unknown = blocks_in(nodes[UNKNOWN])
    if unknown.size:
        sizes = len(pairs.queries), len(pairs.keys)
        evaluator = BlockEvaluator(geometry.keeps, task, sizes, pairs.pieces, depends)
        lanes = evaluator.codes(unknown, room.at_once).reshape(unknown.shape[1], -1)
        same = (lanes == lanes[:, :1]).all(axis=1)
        codes[unknown[0], unknown[1]] = np.where(same, lanes[:, 0], PARTIAL)
    return codes


def _code(geometry: Geometry, block: Ranges) -> int:
    """The verdict on a block; UNKNOWN where it is for functions alone to decide."""
    most = geometry.verdict(block, FULL)
    if most is EMPTY:
        return EMPTY
    least = geometry.verdict(block, EMPTY)
    if least is FULL:
        return FULL
    return UNKNOWN if most is FULL and least is EMPTY else PARTIAL


def bits_of(evaluator: BlockEvaluator, blocks: torch.Tensor, at_once: int) -> torch.Tensor:
    """Which pairs of blocks are kept: (entries, heads, blocks, 128, 4) int32, a bit for a key.

    Args:
        blocks: (2, blocks) int64, their rows and columns, on the device.
        at_once: how many are evaluated at a time.
    """
    shape = (*evaluator.lanes, blocks.shape[1], BLOCK, BLOCK // 32)
    found = torch.empty(shape, dtype=torch.int32, device=blocks.device)
    powers = (1 << torch.arange(8, device=blocks.device)).to(torch.uint8)
    for start in range(0, blocks.shape[1], at_once):
        chosen = slice(start, start + at_once)
        kept = evaluator.kept(*blocks[:, chosen])
        eighths = kept.unflatten(-1, (-1, 8)).to(torch.uint8).mul_(powers)
        packed = eighths.sum(-1, dtype=torch.uint8).view(torch.int32)
        found[:, :, chosen] = packed.permute(1, 2, 0, 3, 4)
        del kept, eighths
    return found


def _tables(part: Part, tilings: Tilings, pinned: bool) -> _Tables:
    made = []
    for axis, tiled in tilings:
        n_rows = part.n_queries if axis == "query" else part.n_keys
        runs = table(part.pieces(axis), n_rows, tiled.rows(axis), axis, WIDTH + 1)
        made.append(HostTable.of(*runs, pinned=pinned))
    with outside():  # because it is cached
        blocks = torch.from_numpy(part.partial)
        return _Tables(part, tuple(made), blocks.pin_memory() if pinned else blocks)


def _blocks_bytes(known: _Blocks) -> int:
    arrays: tuple[NDArray[np.generic], ...] = (known.codes, *(known.pieces or ()))
    return 1 + sum(array.nbytes for array in arrays)


def _tables_bytes(made: list[_Tables]) -> int:
    tensors = [t for one in made for t in (one.blocks, *(host.both for host in one.tables))]
    return 1 + sum(tensor.nbytes for tensor in tensors)


def _room(task: TaskTensors, depends: tuple[bool, bool]) -> Room:
    batch, heads, n_queries, head_dim = task.query.shape
    n_keys, value_dim = task.value.shape[2:]
    lanes = (batch if depends[0] else 1) * (heads if depends[1] else 1)
    row_bytes = (head_dim + value_dim) * task.query.element_size()
    return Room.of(batch * heads * max(n_queries, n_keys) * row_bytes, lanes, n_queries, n_keys)
