"""The pairs that a mask keeps of a task's rectangles, as a short list of parts for
kernels that know only plain and causal rectangles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

from quorum_attention.decomposition import Ranges, Rectangle, Rows
from quorum_attention.decomposition.bands import Band, BandPart, Kind
from quorum_attention.decomposition.rectangles import cut
from quorum_attention.kernels.masked.block_nodes import Nodes, joined_along_rows
from quorum_attention.kernels.masked.block_table import listed_blocks, whole_region
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.task_tensors import TaskTensors

LEAF = 256
"""Triangles up to this side are ragged, where they are no calls of their own."""
WIDEST = 4096
"""The most keys of a ragged part with partial blocks side by side."""
EVALUATED_BYTES = 8 << 20
"""Device bytes for evaluating users' functions block by block, unless there are many
heads."""

Rectangles = tuple[Rectangle, ...]


class Parts(NamedTuple):
    """The parts of a task, in local positions.

    Attributes:
        clear: plain and causal calls, and calls of a band.
        upper: upper triangles.
        ragged: those of which each pair has to be tested.
    """

    clear: Rectangles
    upper: Rectangles
    ragged: Rectangles


def parts_by_blocks(
    task: TaskTensors, rectangles: Rectangles, geometry: Geometry
) -> Parts:
    """The parts of a geometry with rules: full blocks, and partial ones side by side as
    ragged."""
    clear: list[Rectangle] = []
    ragged: list[Rectangle] = []
    region = whole_region(task)
    for rectangle in rectangles:
        full, partial, _ = listed_blocks(
            geometry, task, region, (rectangle,), EVALUATED_BYTES
        )
        clear += _rectangles_of(full)
        for row in _rectangles_of(joined_along_rows(partial)):
            ragged += cut([row], row.n_queries, WIDEST)
    return Parts(tuple(clear), (), tuple(ragged))


def _rectangles_of(nodes: Nodes) -> list[Rectangle]:
    return [Rectangle(*bounds) for _, *bounds in nodes.tolist()]


def parts_by_bands(
    task: TaskTensors,
    rectangles: Rectangles,
    geometry: Geometry,
    kinds: frozenset[Kind],
) -> Parts:
    """The parts of a geometry without rules.

    Args:
        kinds: those that parts may have; "plain" and "ragged" are among them.
    """
    clear: list[Rectangle] = []
    upper: list[Rectangle] = []
    ragged: list[Rectangle] = []
    for rectangle in rectangles:
        for queries, keys, _ in task.task.contiguous(rectangle):
            for part, band in _parts_of_block(queries, keys, geometry, kinds):
                local = _local(part, queries, keys, band)
                if part.kind == "upper":
                    upper.append(local)
                elif part.kind == "ragged":
                    ragged.append(local)
                else:
                    clear.append(local)
    return Parts(tuple(clear), tuple(upper), tuple(ragged))


def _parts_of_block(
    queries: Rows, keys: Rows, geometry: Geometry, kinds: frozenset[Kind]
) -> Iterator[tuple[BandPart, Band]]:
    """The parts of consecutive queries and keys, and the band of each."""
    block = Ranges.from_bounds(
        queries.start,
        queries.stop,
        keys.start,
        keys.stop,
    )
    for part, band in geometry.parts(block, bands="band" in kinds):
        if part.kind in kinds:
            yield part, band
            continue
        for piece in _cut_triangle(part):
            yield piece, band


def _cut_triangle(triangle: BandPart) -> Iterator[BandPart]:
    """A triangle as plain parts, and ragged squares along its edge."""
    side = triangle.n_queries
    first_query = triangle.query_start
    first_key = triangle.key_start
    for start in range(0, side, LEAF):
        stop = min(start + LEAF, side)
        rows = (first_query + start, first_query + stop)
        yield BandPart(
            *rows,
            first_key + start,
            first_key + stop,
            "ragged",
        )
        kept_keys = range(stop, side) if triangle.kind == "upper" else range(start)
        if kept_keys:
            yield BandPart(
                *rows, first_key + kept_keys.start, first_key + kept_keys.stop
            )


def _local(part: BandPart, queries: Rows, keys: Rows, band: Band) -> Rectangle:
    """A part in local positions; for an operator with bands, ``causal`` may be one."""
    query_shift = queries.local - queries.start
    key_shift = keys.local - keys.start
    causal: object = part.kind in ("lower", "upper")
    if part.kind == "band":
        causal = band.moved(part.query_start - part.key_start)
    return Rectangle(
        part.query_start + query_shift,
        part.query_stop + query_shift,
        part.key_start + key_shift,
        part.key_stop + key_shift,
        cast(bool, causal),
    )
