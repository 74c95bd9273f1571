"""What a mask keeps of a task's rectangles, as calls of an operator that has no masks.

They are plain rectangles and triangles (``geometry.py``). A lower triangle is a causal call; an
upper one is a causal call with the orders of queries and keys turned round. Rectangles of one size
at equal distances are one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from quorum_attention.decomposition import Ranges, Rectangle, Task
from quorum_attention.decomposition.bands import Band, Kind
from quorum_attention.decomposition.rectangles import Batch
from quorum_attention.kernels.masked.geometry import Geometry

# The most rows to which an operator rounds up those of a batch entry.
_ROUND = 128
# Parts are joined to one call up to so many queries, and keys.
_JOINED = 8192


@dataclass(frozen=True, slots=True)
class PartCall:
    """One call of the operator, in local positions.

    Attributes:
        batch: the rectangle, or several of one size.
        kind: "lower" and "upper" triangles, "plain", "band", or "ragged": with a mask of its own.
        band: which pairs of a "band" are kept, counted from its first query and its first key.
    """

    batch: Batch
    kind: Kind
    band: Band | None = None

    @property
    def causal(self) -> bool | Band:
        """Whether it is causal; or its band (``RectangleKernel.rectangle_forward``)."""
        return self.kind in ("lower", "upper") if self.band is None else self.band


def calls_of(
    task: Task,
    rectangles: Sequence[Rectangle],
    geometry: Geometry,
    limits: tuple[int, int],
    *,
    single: bool,
    bands: bool = False,
) -> Iterator[PartCall]:
    """The operator calls of a task under a geometry.

    Args:
        limits: most queries and keys of a call together.
        single: no rectangles may be joined to one call.
        bands: the operator takes a band.
    """
    alike: dict[Kind, list[Rectangle]] = {"plain": [], "lower": [], "upper": []}
    for r in rectangles:
        for queries, keys, _ in task.contiguous(r):
            shifts = queries.start - queries.local, keys.start - keys.local
            block = Ranges.of(queries.start, queries.stop, keys.start, keys.stop)
            # The geometry has the call's own causal rule, so that of a rectangle adds nothing.
            for part in geometry.parts(block, bands=bands):
                made = Rectangle(
                    part.query_start - shifts[0], part.query_stop - shifts[0],
                    part.key_start - shifts[1], part.key_stop - shifts[1],
                    part.kind in ("lower", "upper"),
                )  # fmt: skip
                if part.kind == "band":
                    moved = geometry.band.moved(part.query_start - part.key_start)
                    yield PartCall(Batch(made), "band", moved)
                elif part.kind == "ragged":
                    yield PartCall(Batch(made), "ragged")
                else:
                    alike[part.kind].append(made)
    for kind, found in alike.items():
        if single:
            yield from (PartCall(Batch(r), kind) for r in found)
            continue
        for batch in _batches(found):
            for part_of_batch in _bounded(batch, limits):
                yield PartCall(part_of_batch, kind)


def limits_of(
    geometries: Sequence[Geometry], limits: tuple[int, int], *, bands: bool
) -> tuple[int, int]:
    """The most queries and keys of one call: of the largest part, or of parts joined."""
    largest = [geometry.most(*limits, bands=bands) for geometry in geometries]
    queries, keys = (max(n) for n in zip(*largest, strict=True))
    return max(queries, min(limits[0], _JOINED)), max(keys, min(limits[1], _JOINED))


def _batches(rectangles: list[Rectangle]) -> Iterator[Batch]:
    """Neighbours in the list of one size, at equal distances, as one call. In linear time, unlike
    ``rectangles.batches``: there may be tens of thousands."""
    batch: Batch | None = None
    for r in rectangles:
        joined = None if batch is None else _with(batch, r)
        if batch is not None and joined is None:
            yield batch
        batch = joined or Batch(r)
    if batch is not None:
        yield batch


def _with(batch: Batch, r: Rectangle) -> Batch | None:
    first = batch.first
    if (r.n_queries, r.n_keys) != (first.n_queries, first.n_keys):
        return None
    down, along = r.query_start - first.query_start, r.key_start - first.key_start
    if batch.count == 1:
        # No two may share a row, or a key.
        apart = down >= first.n_queries and along >= first.n_keys
        return Batch(first, 2, down, along) if apart else None
    count = batch.count
    if (down, along) != (count * batch.query_step, count * batch.key_step):
        return None
    return replace(batch, count=count + 1)


def _bounded(batch: Batch, limits: tuple[int, int]) -> Iterator[Batch]:
    """``batch`` in parts that together stay within the limits by which workspaces are sized."""
    first = batch.first
    # Operators round rows up to whole tiles of each batch entry.
    rows, columns = (-(-n // _ROUND) * _ROUND for n in (first.n_queries, first.n_keys))
    most = max(1, min(limits[0] // rows, limits[1] // columns))
    every = batch.rectangles()
    for start in range(0, batch.count, most):
        yield replace(batch, first=every[start], count=min(most, batch.count - start))


__all__ = ["PartCall", "calls_of", "limits_of"]
