"""The native kernel under a geometry with rules: empty blocks are left out, full ones are plain.

A table says of every block of 128 queries by 128 keys of a task whether it is empty, full or
partial. It is made once. In each call rules are evaluated on the partial blocks, as many at a time
as there is memory for: the kernel is given a bit for each of their pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.decomposition import EMPTY, FULL, PARTIAL, Ranges, Rectangle, Rows, Task
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
from quorum_attention.kernels.native.config import UNLIMITED, Config, Half, config
from quorum_attention.kernels.native.kernel import Axis, HostTable, NativeKernel, host_table
from quorum_attention.kernels.native.launch import (
    Extras,
    Operands,
    launch_backward,
    launch_forward,
)
from quorum_attention.kernels.native.runs import FIELDS, NO_DIAGONAL, Piece, Runs, columns
from quorum_attention.kernels.protocol import (
    CallShape,
    Extent,
    Gradients,
    Statistics,
    TaskTensors,
)
from quorum_attention.kernels.rectangles import SLACK_BYTES, UNSPLIT_BYTES
from quorum_attention.kernels.torch_private import outside

# The native kernel under a mask's geometry: a task is one launch, whatever the mask.
#
# Its tables of runs (``kernels/native/runs.py``) say for each block of rows which keys it meets,
# with a diagonal of any offset, and the bounds of a window. So a band and blocks need nothing of
# the kernel that it has not: only other tables.


class NativeUnderMask(NativeKernel):
    """See above; for batch entries of one geometry, which has no rules.

    Args:
        geometry: the kept pairs; it has the call's own causal rule.
        base: the native kernel with its other options.
    """

    def __init__(self, geometry: Geometry, base: NativeKernel) -> None:
        super().__init__(softcap=base.options.softcap or None, allow_tf32=base.allow_tf32)
        self._geometry = geometry
        band = geometry.band
        # A band without a lower bound is all diagonals.
        if band.low is not None:
            high = UNLIMITED if band.high is None else band.high
            self.options = replace(self.options, left=-band.low, right=high, signed=True)
        self._tables: Cache[HostTable] = Cache(_TABLE_BYTES, lambda made: int(made.both.nbytes))

    def table_bytes(self, *, dropout: bool) -> int:
        """Bytes that the blocks add to the tables of a launch."""
        blocks = self._geometry.blocks
        return 0 if blocks is None else 4 * 2 * 2 * columns(dropout) * len(blocks)

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
        def make() -> HostTable:
            found = list(self._pieces(rectangles, task))
            pinned = device.type == "cuda"
            made = host_table(found, n_rows, block, axis, pinned=pinned, shifts=shifts)
            # A window moves where runs begin.
            return made._replace(aligned=False) if self.options.windowed else made

        return self._tables.get((rectangles, task, n_rows, block, axis, device.type, shifts), make)

    def _pieces(self, rectangles: Sequence[Rectangle], task: Task | None) -> Iterator[Piece]:
        band = self._geometry.band
        for r in rectangles:
            if r.n_queries <= 0 or r.n_keys <= 0:
                continue
            for queries, keys in _contiguous(r, task):
                shift = queries.local - queries.start, keys.local - keys.start
                for a, b, c, d in self._blocks(Ranges.of(*queries[:2], *keys[:2])):
                    verdict = band.verdict(Ranges.of(a, b, c, d))
                    if verdict is EMPTY:
                        continue
                    part = Rectangle(a + shift[0], b + shift[0], c + shift[1], d + shift[1])
                    apart = shift[1] - shift[0]
                    diagonal = None
                    if verdict is not FULL and band.low is None and band.high is not None:
                        diagonal = band.high + apart
                    yield Piece(part, apart, diagonal, -shift[0])

    def _blocks(self, r: Ranges) -> Iterator[tuple[int, int, int, int]]:
        """The blocks of the geometry within ``r``."""
        (q0, q1), (k0, k1) = r
        if self._geometry.blocks is None:
            yield q0, q1, k0, k1
            return
        for a, b, c, d in self._geometry.near(r).tolist():
            yield max(a, q0), min(b, q1), max(c, k0), min(d, k1)

    @property
    def _is_placed(self) -> bool:
        return True


def _contiguous(r: Rectangle, task: Task | None) -> Iterator[tuple[Rows, Rows]]:
    """The parts of a rectangle whose tokens are consecutive in the whole sequence too."""
    if task is None:
        yield (
            Rows(r.query_start, r.query_stop, r.query_start),
            Rows(r.key_start, r.key_stop, r.key_start),
        )
        return
    for queries, keys, _ in task.contiguous(r):
        yield queries, keys


# Launches of the native kernel for a table of blocks, and the runs of each.
#
# A launch is a part of the table: some rows of blocks, or some columns of one row, so that there is
# memory for the words of its mixed blocks. Clear blocks of a row (for the keys' half of a backward,
# of a column) are one run; a mixed one is a run of its own, which says where its words begin.

# Columns of the tables: one more than the fields, where a block's words begin.
WIDTH = len(FIELDS) + 1
# Bytes of a block's words.
WORD_BYTES = BLOCK * BLOCK // 8
# The smallest blocks of rows of the native kernel.
_SMALLEST = 16


@dataclass(frozen=True, eq=False)
class Launch:
    """A part of a table of blocks.

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

    def mixed(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows and columns, in the whole table, of its mixed blocks, in the order of words."""
        rows, columns = np.nonzero(self.codes == PARTIAL)
        return rows + self.top, columns + self.left

    def runs(
        self, block: int, axis: Literal["query", "key"]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(starts, entries) as ``native.runs.table`` returns them, positions counted from the
        part's first; ``block``: rows of a block along ``axis``, which divide 128."""
        by_query = axis == "query"
        codes = self.codes if by_query else self.codes.T
        along, across = self.n_queries, self.n_keys
        if not by_query:
            along, across = across, along
        line, first, stop, word = _items(codes, self.codes, by_query=by_query)
        shares = BLOCK // block
        # Each item meets several blocks of rows.
        number = np.repeat(line * shares, shares) + np.tile(np.arange(shares), len(line))
        item = np.repeat(np.arange(len(line)), shares)
        live = number * block < along
        number, item = number[live], item[live]
        order = np.lexsort((first[item], number))
        number, item = number[order], item[order]
        entries = np.empty((len(item), WIDTH), dtype=np.int32)
        a, b = (0, 2) if by_query else (2, 0)
        entries[:, a] = number * block
        entries[:, a + 1] = np.minimum((number + 1) * block, along)
        entries[:, b] = first[item] * BLOCK
        entries[:, b + 1] = np.minimum(stop[item] * BLOCK, across)
        entries[:, 4], entries[:, 5] = NO_DIAGONAL, 0
        entries[:, 6] = word[item] >= 0
        entries[:, 7] = np.maximum(word[item], 0) * (WORD_BYTES // 4)
        starts = np.searchsorted(number, np.arange(-(-along // block) + 1))
        return starts.astype(np.int32), entries


def _items(
    codes: Codes, own: Codes, *, by_query: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(line, first, stop, word) of the runs of clear blocks, word -1, and of the mixed blocks."""
    edges = np.diff(np.pad(codes == FULL, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    line, first = np.nonzero(edges == 1)
    _, stop = np.nonzero(edges == -1)
    mixed, at = np.nonzero(codes == PARTIAL)
    word = np.arange(len(mixed))
    if not by_query:
        numbers = np.zeros(own.shape, dtype=np.int64)
        numbers[np.nonzero(own == PARTIAL)] = word
        word = numbers.T[mixed, at]
    clear = np.full(len(line), -1)
    return (
        np.concatenate((line, mixed)), np.concatenate((first, at)),
        np.concatenate((stop, at + 1)), np.concatenate((clear, word)),
    )  # fmt: skip


def most_runs(n_queries: int, n_keys: int, words: int) -> int:
    """The most runs of clear blocks of a launch, along either axis."""
    return max(4 * (n_queries + n_keys) // BLOCK + 64, words // 2)


def table_bytes(n_queries: int, n_keys: int, words: int) -> int:
    """Upper bound of the device bytes of both tables of a launch, and of its list of blocks."""
    runs = (most_runs(n_queries, n_keys, words) + words) * (BLOCK // _SMALLEST) * WIDTH * 4
    starts = 4 * ((n_queries + n_keys) // _SMALLEST + 4)
    return 2 * runs + starts + 2 * 8 * words


def launches(codes: Codes, n_queries: int, n_keys: int, words: int) -> Iterator[Launch]:
    """The parts of a table with no more than ``words`` mixed blocks each, by ascending rows; those
    with nothing to compute are left out."""
    most = most_runs(n_queries, n_keys, words)
    waiting = [(0, codes.shape[0], 0, codes.shape[1])]
    while waiting:
        top, bottom, left, right = waiting.pop()
        part = codes[top:bottom, left:right]
        if not part.any():
            continue
        if _fits(part, words, most):
            rows = min(bottom * BLOCK, n_queries) - top * BLOCK
            yield Launch(top, left, part, rows, min(right * BLOCK, n_keys) - left * BLOCK)
            continue
        if bottom - top > 1:
            middle = (top + bottom) // 2
            waiting += [(middle, bottom, left, right), (top, middle, left, right)]
        else:
            middle = (left + right) // 2
            waiting += [(top, bottom, middle, right), (top, bottom, left, middle)]


def _fits(part: Codes, words: int, most: int) -> bool:
    if np.count_nonzero(part == PARTIAL) > words:
        return False
    clear = part == FULL
    by_rows = np.count_nonzero(clear[:, 1:] & ~clear[:, :-1]) + np.count_nonzero(clear[:, 0])
    by_columns = np.count_nonzero(clear[1:] & ~clear[:-1]) + np.count_nonzero(clear[0])
    return bool(by_rows <= most and by_columns <= most)


# Bounds of the bytes for evaluating blocks, and again for words.
_LEAST, _MOST = 16 << 20, 256 << 20
# Bytes of host memory in which tables of blocks, and those of launches, are remembered.
_CODE_BYTES, _TABLE_BYTES = 256 << 20, 64 << 20
Function = Callable[..., torch.Tensor]


class Room(NamedTuple):
    """How much of a task is evaluated at a time.

    Attributes:
        nbytes: for evaluating, and again for words.
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
    def words(self) -> int:
        """Blocks whose words there are at a time."""
        return self._blocks(WORD_BYTES)

    def _blocks(self, block_bytes: int) -> int:
        """How many blocks there is room for, at most all of the task."""
        every = max(1, -(-self.n_queries // BLOCK) * -(-self.n_keys // BLOCK))
        return min(every, max(1, self.nbytes // (block_bytes * self.lanes)))

    @property
    def device_bytes(self) -> int:
        """Upper bound of the device bytes that evaluating takes, words among them."""
        evaluated = self.at_once * PAIR_BYTES * BLOCK * BLOCK * self.lanes
        words = self.words * WORD_BYTES * self.lanes
        # Positions and pieces of every token, made and padded; the blocks that are sent.
        tokens = 4 * 8 * (self.n_queries + self.n_keys + 2 * BLOCK)
        tokens += 3 * 8 * SENT * self.at_once
        unsplit = 4 * min(evaluated, UNSPLIT_BYTES) + min(words, UNSPLIT_BYTES)
        return evaluated + words + tokens + unsplit + 4 * min(tokens, UNSPLIT_BYTES) + SLACK_BYTES


class NativeTried:
    """See above; for batch entries of one geometry, and without dropout.

    Args:
        geometry: the kept pairs; it has the call's own causal rule.
        base: the native kernel with its other options.
        functions: the user's functions in the geometry.
    """

    def __init__(
        self, geometry: Geometry, base: NativeKernel, functions: Sequence[Function]
    ) -> None:
        self._geometry, self._base = geometry, base
        self._functions = tuple(functions)
        self._tables: Cache[_Table] = Cache(_CODE_BYTES, lambda table: table.nbytes)
        self._launched: Cache[_Tables] = Cache(_TABLE_BYTES, lambda made: made.nbytes)
        self._apart: Cache[tuple[bool, bool]] = Cache(16, lambda apart: 1)

    def forward_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        return self._bytes(call, extent) + self._base.forward_workspace_bytes(
            call, replace(extent, direct=False)
        )

    def backward_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        return self._bytes(call, extent) + self._base.backward_workspace_bytes(
            call, replace(extent, direct=False)
        )

    def _bytes(self, call: CallShape, extent: Extent) -> int:
        lanes = extent.batch * extent.query_heads
        n, width = extent.n_tokens, _row_bytes(call.head_dim, call.value_dim, call.dtype)
        differ = any(not isinstance(function, BlockMask) for function in self._functions)
        room = Room.of(lanes * n * width, lanes if differ else 1, n, n)
        # Functions that are the same in all lanes have more blocks in the same words.
        tables = table_bytes(n, n, room._replace(lanes=1).words)
        return room.device_bytes + tables + self._geometry.placed_bytes

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        found = _config("forward", task)
        for at, tables, extras in self._launches(task, (("query", found.block_m),)):
            rows, columns = at.rows, at.columns
            launch_forward(
                Operands(
                    task.query[:, :, rows], task.key[:, :, columns], task.value[:, :, columns],
                    task.scale,
                ),
                state.out[:, :, rows],
                state.lse[:, :, rows],
                tables[0],
                found,
                extras,
                resume=True,
            )  # fmt: skip
            del tables, extras  # what the next launch is given is made when this has gone

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        by_query, by_key = _config("query", task), _config("key", task)
        axes: tuple[_Axis, ...] = (("query", by_query.block_m), ("key", by_key.block_n))
        for at, tables, extras in self._launches(task, axes):
            rows, columns = at.rows, at.columns
            launch_backward(
                Operands(
                    task.query[:, :, rows], task.key[:, :, columns], task.value[:, :, columns],
                    task.scale,
                ),
                (grads.grad_out[:, :, rows], grads.out[:, :, rows], grads.lse[:, :, rows]),
                (
                    grads.grad_query[:, :, rows], grads.grad_key[:, :, columns],
                    grads.grad_value[:, :, columns],
                ),
                tables[0],
                tables[1],
                by_query,
                by_key,
                extras,
                add=True,
                n_keys=task.task.spans[-1].stop if task.task.spans else 0,
            )  # fmt: skip
            del tables, extras

    def _launches(
        self, task: TaskTensors, axes: Sequence[_Axis]
    ) -> Iterator[tuple[Launch, list[Runs], Extras]]:
        """The launches of a task: where, their tables, and what changes scores."""
        live = tuple(r for r in task.rectangles if r.n_queries > 0 and r.n_keys > 0)
        if not live or 0 in task.query.shape[:2]:
            return
        with torch.no_grad():
            # Each rectangle has a mask of its own, if any has.
            groups = [(r,) for r in live] if task.has_mask(live[0]) else [live]
            for rectangles in groups:
                yield from self._of(task, rectangles, axes)

    def _of(
        self, task: TaskTensors, rectangles: tuple[Rectangle, ...], axes: Sequence[_Axis]
    ) -> Iterator[tuple[Launch, list[Runs], Extras]]:
        device = task.query.device
        n_queries = max(r.query_stop for r in rectangles)
        n_keys = max(r.key_stop for r in rectangles)
        bias = task.bias(rectangles[0])
        apart = self._depends(device)
        room = _room(task, apart)
        key = self._key(task, rectangles, apart)
        sizes = (n_queries, n_keys)

        def table() -> _Table:
            pairs = TaskPairs.of(task.task, rectangles, False, n_queries, n_keys)
            codes = codes_of(self._geometry, task, pairs, apart, room)
            return _Table(codes, pairs.pieces, {})

        found = self._tables.get(key, table)
        if room.words not in found.launches:
            found.launches[room.words] = list(launches(found.codes, n_queries, n_keys, room.words))
        evaluator: BlockEvaluator | None = None
        for number, at in enumerate(found.launches[room.words]):
            made = self._made(key, (room.words, number, *axes), at, axes, device)
            tables = [_sent(one, device) for one in made.tables]
            words = None
            if made.blocks.numel():
                blocks = made.blocks.to(device, non_blocking=True)
                evaluator = evaluator or BlockEvaluator(
                    self._geometry.keeps, task, sizes, found.pieces, apart
                )
                words = words_of(evaluator, blocks, room.at_once)
            extras = Extras(
                self._base.options,
                bias=bias,
                bias_row=rectangles[0].query_start - at.rows.start,
                bias_column=rectangles[0].key_start - at.columns.start,
                words=words if words is not None else _no_words(device),
                tf32=self._base.allow_tf32,
            )
            yield at, tables, extras
            del tables, words, extras

    def _made(
        self, key: Hashable, number: Hashable, at: Launch, axes: Sequence[_Axis],
        device: torch.device,
    ) -> _Tables:  # fmt: skip
        """The tables of a launch; remembered as long as those of blocks are."""
        return self._launched.get((key, number), lambda: _tables(at, axes, device))

    def _depends(self, device: torch.device) -> tuple[bool, bool]:
        """Whether functions differ between batch entries, and between heads."""

        def make() -> tuple[bool, bool]:
            each = [depends_on_batch_head(f, device) for f in self._functions]
            return any(a for a, _ in each), any(b for _, b in each)

        return self._apart.get((device, versions(*self._functions)), make)

    def _key(
        self, task: TaskTensors, rectangles: tuple[Rectangle, ...], apart: tuple[bool, bool]
    ) -> Hashable:
        """All that a task's table depends on, as far as it can be seen."""
        seen = versions(*self._functions)
        heads = (task.first_head, task.query.shape[1]) if apart[1] else ()
        entries = task.entries if apart[0] else ()
        return task.task, rectangles, task.query.is_cuda, entries, heads, seen


def codes_of(
    geometry: Geometry,
    task: TaskTensors,
    pairs: TaskPairs,
    apart: tuple[bool, bool],
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
        sizes = (len(pairs.queries), len(pairs.keys))
        evaluator = BlockEvaluator(geometry.keeps, task, sizes, pairs.pieces, apart)
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


def words_of(evaluator: BlockEvaluator, blocks: torch.Tensor, at_once: int) -> torch.Tensor:
    """Which pairs of blocks are kept: (entries, heads, blocks, 128, 4) int32, a bit for a key.

    Args:
        blocks: (2, blocks) int64, their rows and columns, on the device.
        at_once: how many are evaluated at a time.
    """
    shape = (*evaluator.lanes, blocks.shape[1], BLOCK, BLOCK // 32)
    found = torch.empty(shape, dtype=torch.int32, device=blocks.device)
    bits = (1 << torch.arange(8, device=blocks.device)).to(torch.uint8)
    for start in range(0, blocks.shape[1], at_once):
        chosen = slice(start, start + at_once)
        kept = evaluator.kept(*blocks[:, chosen])
        eighths = kept.unflatten(-1, (-1, 8)).to(torch.uint8).mul_(bits)
        packed = eighths.sum(-1, dtype=torch.uint8).view(torch.int32)
        found[:, :, chosen] = packed.permute(1, 2, 0, 3, 4)
        del kept, eighths
    return found


_Axis = tuple[Literal["query", "key"], int]


class _Table(NamedTuple):
    """A table of blocks, and where its rectangles are; its launches, by how many words they may
    have."""

    codes: Codes
    pieces: Pieces | None
    launches: dict[int, list[Launch]]

    @property
    def nbytes(self) -> int:
        of_pieces = 0 if self.pieces is None else sum(part.nbytes for part in self.pieces)
        return int(self.codes.nbytes) + of_pieces + 1


class _Tables(NamedTuple):
    """Tables of a launch, in host memory.

    Attributes:
        tables: starts and entries in one tensor, and the number of starts, by axis.
        blocks: (2, partial) int64, rows and columns of the partial blocks.
    """

    tables: tuple[tuple[torch.Tensor, int], ...]
    blocks: torch.Tensor

    @property
    def nbytes(self) -> int:
        return sum(both.nbytes for both, _ in self.tables) + self.blocks.nbytes + 1


def _tables(at: Launch, axes: Sequence[_Axis], device: torch.device) -> _Tables:
    pinned = device.type == "cuda"
    found = []
    with outside():  # because they are cached
        for axis, block in axes:
            starts, entries = at.runs(block, axis)
            size = len(starts) + entries.size
            both = torch.empty(size, dtype=torch.int32, pin_memory=pinned, device="cpu")
            both[: len(starts)] = torch.from_numpy(starts)
            both[len(starts) :] = torch.from_numpy(entries.reshape(-1))
            found.append((both, len(starts)))
        mixed = np.stack(at.mixed())
        blocks = torch.empty(mixed.shape, dtype=torch.int64, pin_memory=pinned, device="cpu")
        blocks.copy_(torch.from_numpy(mixed))
    return _Tables(tuple(found), blocks)


def _sent(table: tuple[torch.Tensor, int], device: torch.device) -> Runs:
    host, n_starts = table
    both = host if device.type == "cpu" else host.to(device, non_blocking=True)
    return Runs(both[:n_starts], both[n_starts:].view(-1, WIDTH), n_starts - 1)


def _no_words(device: torch.device) -> torch.Tensor:
    """Words that are not read: the tables have a column for them."""
    return torch.empty((1, 1, 1, 1, 1), dtype=torch.int32, device=device)


def _room(task: TaskTensors, apart: tuple[bool, bool]) -> Room:
    batch, heads, n_queries, head_dim = task.query.shape
    n_keys, value_dim = task.value.shape[2:]
    lanes = (batch if apart[0] else 1) * (heads if apart[1] else 1)
    width = _row_bytes(head_dim, value_dim, task.query.dtype)
    nbytes = batch * heads * max(n_queries, n_keys) * width
    return Room.of(nbytes, lanes, n_queries, n_keys)


def _row_bytes(head_dim: int, value_dim: int, dtype: torch.dtype) -> int:
    return (head_dim + value_dim) * dtype.itemsize


def _config(half: Half, task: TaskTensors) -> Config:
    query, value = task.query, task.value
    return config(
        half, query.shape[-1], value.shape[-1], query.element_size(), query.device, dropout=False
    )
