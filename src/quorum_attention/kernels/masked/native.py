"""The native kernel under a mask's geometry: a task is one launch, whatever the mask.

Its tables of runs (``kernels/native/runs.py``) say for each block of rows which keys it meets, with
a diagonal of any offset, and the bounds of a window. So a band and blocks need nothing of the
kernel that it has not: only other tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from quorum_attention.decomposition import EMPTY, FULL, Ranges, Rectangle, Rows, Task
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.native.kernel import Axis, HostTable, NativeKernel, host_table
from quorum_attention.kernels.native.options import UNLIMITED
from quorum_attention.kernels.native.runs import Piece, columns

# Bytes of the tables that are remembered, in host memory.
_TABLE_BYTES = 64 << 20


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
