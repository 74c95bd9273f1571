"""Which blocks of a task, 128 queries by 128 keys, a mask keeps: FULL, PARTIAL or
EMPTY.

A quadtree over the blocks is followed down as far as its nodes are partial, so its cost
is that of the border between full and empty blocks, and there is no grid of all blocks.
Blocks that only a user's function can tell are UNKNOWN until a ``BlockEvaluator`` has
called it for each of their pairs, on the device. The native kernel makes its runs of
the nodes, FlexAttention gets their lists.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from quorum_attention.decomposition import FULL, PARTIAL, Ranges, Rectangle, Task
from quorum_attention.kernels.masked.block_evaluator import BlockEvaluator, Codes
from quorum_attention.kernels.masked.block_nodes import (
    BLOCK,
    Ints,
    NodeColumns,
    Nodes,
    blocks_along,
    joined,
    quarters,
    single_blocks,
    without_empty,
)
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.masked.rules import FunctionRule
from quorum_attention.kernels.task_tensors import TaskTensors
from quorum_attention.kernels.torch_private import no_torch_modes

UNKNOWN = 3
"""The code of a block beside those of verdicts: a function has to be called for its
pairs."""
MOST_NODES = 1 << 14
"""More nodes of a level than this, and what is left is evaluated on the device."""


def classify(
    task: Task, region: Rectangle, rectangles: Sequence[Rectangle], geometry: Geometry
) -> dict[int, Nodes]:
    """The FULL, the PARTIAL and the UNKNOWN nodes; all other blocks are EMPTY.

    Where the functions of the geometry that say nothing of blocks decide, and where
    they might empty a block that is partial anyway, it is UNKNOWN.

    Args:
        region: queries and keys of the task, whose first ones nodes and rectangles
            count from.
        rectangles: disjoint; the geometry has their causal rule.
    """
    runs = [np.arange(start, stop) for start, stop, _ in task.runs]
    tokens = np.concatenate(runs)
    queries = tokens[region.query_start :]
    keys = tokens[region.key_start :]
    rules = [rule for rule in geometry.rules if not isinstance(rule, FunctionRule)]
    is_opaque = len(rules) < len(geometry.rules)
    geometry = replace(geometry, rules=tuple(rules))
    is_evaluated = is_opaque or bool(geometry.functions)
    by_code: dict[int, list[Nodes]] = {FULL: [], PARTIAL: [], UNKNOWN: []}
    nodes = _nodes_of(rectangles)
    while len(nodes):
        if is_evaluated and len(nodes) > MOST_NODES:
            by_code[UNKNOWN].append(nodes)
            break
        codes = _verdicts(geometry, nodes, queries, keys)
        is_single = (blocks_along(nodes) == 1).all(axis=1)
        is_partial = codes == PARTIAL
        is_cut = is_partial & ~is_single
        if is_evaluated:
            codes[is_partial & is_single] = UNKNOWN
        if is_opaque:
            codes[codes == FULL] = UNKNOWN
        for code, parts in by_code.items():
            has_code = (codes == code) & ~is_cut
            parts.append(nodes[has_code])
        nodes = quarters(nodes[is_cut])
    return {code: joined(parts) for code, parts in by_code.items()}


def _nodes_of(rectangles: Sequence[Rectangle]) -> Nodes:
    """Rectangles as nodes of the first lane."""
    lane = 0
    rows = [
        (lane, r.query_start, r.query_stop, r.key_start, r.key_stop) for r in rectangles
    ]
    nodes = np.array(rows, np.int64)
    return without_empty(nodes.reshape(-1, 5))


def _verdicts(geometry: Geometry, nodes: Nodes, queries: Ints, keys: Ints) -> Codes:
    """The verdict on each node. Between its first and its last position there may be
    tokens of others."""
    at = NodeColumns.of_nodes(nodes)
    bounds = (
        queries[at.query_start],
        queries[at.query_stop - 1] + 1,
        keys[at.key_start],
        keys[at.key_stop - 1] + 1,
    )
    verdicts = []
    for block_bounds in np.stack(bounds, axis=1).tolist():
        block = Ranges.from_bounds(*block_bounds)
        verdicts.append(geometry.verdict(block))
    return np.array(verdicts, np.int8)


@no_torch_modes()
def listed_blocks(
    geometry: Geometry,
    task: TaskTensors,
    region: Rectangle,
    rectangles: Sequence[Rectangle],
    nbytes: int,
    *,
    by_lane: bool = False,
) -> tuple[Nodes, Nodes, tuple[int, int]]:
    """(FULL nodes, PARTIAL nodes, lanes); see ``classify``.

    Args:
        nbytes: for evaluating functions.
        by_lane: whether entries and heads in which a function differs have blocks of
            their own (of a geometry that is no more than a function); otherwise these
            are PARTIAL for all.
    """
    by_code = classify(task.task, region, rectangles, geometry)
    unknown = single_blocks(by_code[UNKNOWN])
    if not len(unknown):
        return by_code[FULL], by_code[PARTIAL], (1, 1)
    evaluator = BlockEvaluator(geometry, task, region)
    at = NodeColumns.of_nodes(unknown)
    blocks = np.stack([at.query_start // BLOCK, at.key_start // BLOCK])
    codes = evaluator.codes(blocks, nbytes)
    codes = codes.reshape(len(unknown), -1)  # (blocks, lanes)
    lanes = evaluator.lanes
    if not by_lane:
        first_code = codes[:, :1]
        is_same = (codes == first_code).all(axis=1, keepdims=True)
        codes = np.where(is_same, first_code, PARTIAL)
        lanes = (1, 1)
    full = joined([by_code[FULL], _with_code(unknown, codes, FULL)])
    partial = joined([by_code[PARTIAL], _with_code(unknown, codes, PARTIAL)])
    return full, partial, lanes


def _with_code(blocks: Nodes, codes: Codes, code: int) -> Nodes:
    """The blocks that have a code, in each lane that has it.

    Args:
        codes: (blocks, lanes).
    """
    number, lane = np.nonzero(codes == code)
    return NodeColumns.of_nodes(blocks[number]).nodes(lane=lane)


def whole_region(task: TaskTensors) -> Rectangle:
    """All queries and keys of a task."""
    return Rectangle(
        0,
        task.query.shape[2],
        0,
        task.key.shape[2],
    )


def sides(region: Rectangle) -> tuple[tuple[int, int], tuple[int, int]]:
    """The bounds of its queries and of its keys."""
    queries = (region.query_start, region.query_stop)
    keys = (region.key_start, region.key_stop)
    return queries, keys


def blocks_key(
    geometry: Geometry, task: TaskTensors, rectangles: tuple[Rectangle, ...]
) -> tuple[Hashable, ...]:
    """All that the blocks of rectangles of a task depend on, as far as it can be
    seen."""
    device = task.query.device
    differs_by_entry, differs_by_head = geometry.depends(device)
    return (
        task.task,
        rectangles,
        device.type,
        geometry.seen,
        task.entries if differs_by_entry else (),
        (task.first_head, task.query.shape[1]) if differs_by_head else (),
    )
