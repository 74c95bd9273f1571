"""What a mask keeps that can only be called: every pair is tried once, a tile at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.decomposition import CLEAR, MIXED
from quorum_attention.kernels.kit.block_masks import BLOCK, Geometry, Nodes
from quorum_attention.kernels.kit.masks import MaskMod
from quorum_attention.kernels.kit.positions import positions
from quorum_attention.kernels.protocol import TaskTensors

# Pairs tried at a time, over all heads and batch entries that the mask tells apart.
_PAIRS = 1 << 21


def trial_bytes(lanes: int) -> int:
    """Bound of what trying takes, of a mask that tells so many heads and batch entries apart: a
    function's own temporaries, a handful of int64."""
    return 48 * max(_PAIRS, lanes * BLOCK * BLOCK)


def over_pairs(function: Callable[..., Any], scored: bool = False) -> Callable[..., torch.Tensor]:
    """``function`` of (score,) batch, head, query, key over (b, h, q, k).

    Functions are written for single numbers, as FlexAttention has them; what does not depend on a
    dimension comes back expanded over it (stride 0).
    """
    found = function
    # From the innermost dimension out.
    for axis in (3, 2, 1, 0):
        dims = [0 if i == axis else None for i in range(4)]
        found = torch.vmap(found, in_dims=(*([0] if scored else []), *dims))
    return found


@dataclass(frozen=True, slots=True)
class Indices:
    """What a mask is called with, int64 on its device: entries (b,), heads (h,), positions."""

    entries: torch.Tensor
    heads: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor


def task_indices(task: TaskTensors, n_queries: int, n_keys: int) -> Indices:
    """Those of a task's first queries and keys, global."""
    device, heads = task.query.device, task.query.shape[1]
    return Indices(
        torch.tensor(task.entries, device=device),
        torch.arange(task.first_head, task.first_head + heads, device=device),
        positions(task.task, 0, n_queries, device),
        positions(task.task, 0, n_keys, device),
    )


def told_apart(mask_mod: MaskMod, device: torch.device) -> tuple[bool, bool]:
    """Whether the mask tells batch entries apart, and heads."""
    # Twice the first of each: of a dimension of one it could not be seen.
    twice, once = (torch.zeros(n, dtype=torch.int64, device=device) for n in (2, 1))
    found = over_pairs(mask_mod)(twice, twice, once, once)
    return found.stride(0) != 0, found.stride(1) != 0


def tried_nodes(
    mask_mod: MaskMod,
    pairs: Geometry,
    clear: Nodes,
    mixed: Nodes,
    at: Indices,
    apart: tuple[bool, bool],
) -> tuple[Nodes, Nodes, tuple[int, int]]:
    """Listed nodes less what ``mask_mod`` empties: (clear, mixed, (entries, heads)).

    Args:
        clear, mixed: what the task lists without the mask.
        apart: whether batch entries, and heads, have to be tried one by one (``told_apart``).

    Raises:
        whatever ``mask_mod`` does, of a function that torch.vmap cannot map.
    """
    if not len(clear) + len(mixed):
        return clear, mixed, (1, 1)
    entries = at.entries if apart[0] else at.entries[:1]
    heads = at.heads if apart[1] else at.heads[:1]
    lanes = len(entries) * len(heads)
    keeps = over_pairs(mask_mod)
    side = max(1, isqrt(_PAIRS // max(1, lanes)) // BLOCK)
    device = at.queries.device
    rows, columns = (
        torch.from_numpy(np.searchsorted(edges, np.arange(size), side="right") - 1).to(device)
        for edges, size in (
            (pairs.query_edges, len(pairs.queries)), (pairs.key_edges, len(pairs.keys)),
        )
    )  # fmt: skip
    table = torch.from_numpy(pairs.table).to(device)
    found: dict[int, list[Nodes]] = {CLEAR: [], MIXED: []}
    for i, j in np.argwhere(_tiles(pairs.grid, side, np.concatenate([clear, mixed]))).tolist():
        r = slice(i * side * BLOCK, (i + 1) * side * BLOCK)
        c = slice(j * side * BLOCK, (j + 1) * side * BLOCK)
        queries, keys = at.queries[r], at.keys[c]
        kept = keeps(entries, heads, queries, keys) & table[rows[r][:, None], columns[c][None]]
        if pairs.is_causal:
            kept = kept & (queries[:, None] >= keys[None])
        verdicts = _by_blocks(kept)
        for code, nodes in found.items():
            e, h, row, column = np.nonzero(verdicts == code)
            row, column = row + i * side, column + j * side
            nodes.append(np.stack([e * len(heads) + h, row, row + 1, column, column + 1], axis=1))
    none = np.zeros((0, 5), dtype=np.int64)
    return (
        np.concatenate([none, *found[CLEAR]]), np.concatenate([none, *found[MIXED]]),
        (len(entries), len(heads)),
    )  # fmt: skip


def _tiles(grid: tuple[int, int], side: int, nodes: Nodes) -> NDArray[np.bool_]:
    """Which tiles of ``side`` by ``side`` blocks have a listed one."""
    found = np.zeros((-(-grid[0] // side), -(-grid[1] // side)), dtype=np.bool_)
    parts = np.unique(nodes[:, 1:] // side + (nodes[:, 1:] % side > 0) * [0, 1, 0, 1], axis=0)
    for top, bottom, left, right in parts.tolist():
        found[top:bottom, left:right] = True
    return found


def _by_blocks(kept: torch.Tensor) -> NDArray[np.int8]:
    """(b, h, rows, columns) of blocks: verdicts; beyond the last token is not kept."""
    b, h, q, k = kept.shape
    rows, columns = -(-q // BLOCK), -(-k // BLOCK)
    padded = torch.nn.functional.pad(kept, (0, columns * BLOCK - k, 0, rows * BLOCK - q))
    count = padded.view(b, h, rows, BLOCK, columns, BLOCK).sum(dim=(3, 5))
    codes = (count > 0).to(torch.int8) * MIXED
    codes[count == BLOCK * BLOCK] = CLEAR
    found: NDArray[np.int8] = codes.cpu().numpy()
    return found
