"""Tries a mask that is a plain function on every pair once, tile by tile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import isqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from quorum_attention.decomposition import FULL, PARTIAL
from quorum_attention.kernels.kit.block_masks import BLOCK, Geometry, Nodes, joined, piece
from quorum_attention.kernels.kit.masks import BlockMask, MaskMod
from quorum_attention.kernels.outside import outside
from quorum_attention.kernels.positions import positions
from quorum_attention.kernels.protocol import Indices, TaskTensors

# Pairs tried at a time, in all heads and batch entries for which the mask differs.
_PAIRS = 1 << 21


def trial_bytes(lanes: int) -> int:
    """Bound of the bytes that trying takes, for a mask that differs in ``lanes`` heads and entries.

    It counts the function's own temporaries: a few int64 tensors.
    """
    return 48 * max(_PAIRS, lanes * BLOCK * BLOCK)


def over_pairs(function: Callable[..., Any], scored: bool = False) -> Callable[..., torch.Tensor]:
    """``function`` of batch, head, query, key mapped over (b, h, q, k); ``scored``: of score, too.

    The function is written for single numbers, as in FlexAttention. Where its result does not
    depend on a dimension, the dimension is expanded (stride 0).

    Raises:
        TypeError: when it is called, for a mask that returns anything but booleans: numbers would
            be joined with others bit by bit.
    """
    found = indexing(function if scored else boolean(function))
    # From the innermost dimension outwards.
    for axis in (3, 2, 1, 0):
        dims = [0 if i == axis else None for i in range(4)]
        found = torch.vmap(found, in_dims=(*([0] if scored else []), *dims))
    return found


def indexing(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which may read a tensor at a number that torch.vmap maps over, as in
    ``slopes[h]``; torch 2.10 and before would ask for the number."""
    if _vmap_reads_tensors():
        return function

    def call(*at: torch.Tensor) -> Any:
        with _Indexing():
            return function(*at)

    return call


class _Indexing(TorchFunctionMode):
    """Tensors are read at tensors by ``aten::index``, which can be mapped."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # see TorchFunctionMode
        if func is torch.Tensor.__getitem__:
            at = args[1] if isinstance(args[1], tuple) else (args[1],)
            if at and all(isinstance(one, torch.Tensor) for one in at):
                return torch.ops.aten.index(args[0], at)
        return func(*args, **(kwargs or {}))


@functools.cache
@outside()
def _vmap_reads_tensors() -> bool:
    numbers = torch.arange(2, device="cpu")
    try:
        torch.vmap(lambda number: numbers[number])(numbers)
    except RuntimeError:
        return False
    return True


def boolean(mask_mod: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """``mask_mod``, whose result has to be a tensor of bool."""

    def checked(*at: torch.Tensor) -> torch.Tensor:
        kept = mask_mod(*at)
        if isinstance(kept, torch.Tensor) and kept.dtype == torch.bool:
            return kept
        got = kept.dtype if isinstance(kept, torch.Tensor) else type(kept).__name__
        raise TypeError(
            "a mask function (mask_mod, Mask.keeps) must return a tensor of torch.bool from the "
            f"tensors it gets, got {got}"
        )

    return checked


def task_indices(task: TaskTensors, n_queries: int, n_keys: int) -> Indices:
    """The indices of a task's first queries and keys."""
    device, heads = task.query.device, task.query.shape[1]
    return Indices(
        torch.tensor(task.entries, device=device),
        torch.arange(task.first_head, task.first_head + heads, device=device),
        positions(task.task, 0, n_queries, device),
        positions(task.task, 0, n_keys, device),
    )


@outside()
def told_apart(mask_mod: MaskMod, device: torch.device) -> tuple[bool, bool]:
    """Whether the mask differs between batch entries, and between heads."""
    # Each dimension has size 2: the stride of a dimension of size 1 tells nothing.
    twice, once = (torch.zeros(n, dtype=torch.int64, device=device) for n in (2, 1))
    found = over_pairs(_placed(mask_mod, device))(twice, twice, once, once)
    return found.stride(0) != 0, found.stride(1) != 0


def _placed(mask_mod: MaskMod, device: torch.device) -> MaskMod:
    return mask_mod.on(device) if isinstance(mask_mod, BlockMask) else mask_mod


@outside()
def scores_apart(score_mod: Callable[..., Any], device: torch.device) -> bool:
    """Whether a score modification differs between batch entries."""
    twice = torch.zeros(2, dtype=torch.int64, device=device)
    at, score = twice[0], torch.zeros((), dtype=torch.float32, device=device)
    # What does not depend on the entry is expanded.
    found = torch.vmap(lambda entry: indexing(score_mod)(score, entry, at, at, at))(twice)
    return bool(found.stride(0) != 0)


@outside()
def tried_nodes(
    mask_mod: MaskMod,
    pairs: Geometry,
    clear: Nodes,
    mixed: Nodes,
    at: Indices,
    apart: tuple[bool, bool],
) -> tuple[Nodes, Nodes, tuple[int, int]]:
    """The listed nodes in which ``mask_mod`` keeps pairs: (clear, mixed, (entries, heads)).

    Args:
        mask_mod: a plain function; its own errors, and those of torch.vmap, are passed on.
        pairs: the task's pairs.
        clear, mixed: the nodes that the task lists without the mask.
        at: the arguments for the mask.
        apart: whether the mask differs between batch entries, and between heads (``told_apart``).
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
        torch.from_numpy(piece(edges, np.arange(size))).to(device)
        for edges, size in (
            (pairs.query_edges, len(pairs.queries)), (pairs.key_edges, len(pairs.keys)),
        )
    )  # fmt: skip
    table = torch.from_numpy(pairs.table).to(device)
    found: dict[int, list[Nodes]] = {FULL: [], PARTIAL: []}
    for i, j in np.argwhere(_tiles(pairs.grid, side, joined([clear, mixed]))).tolist():
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
    return joined(found[FULL]), joined(found[PARTIAL]), (len(entries), len(heads))


def _tiles(grid: tuple[int, int], side: int, nodes: Nodes) -> NDArray[np.bool_]:
    """Which tiles of ``side`` by ``side`` blocks hold a listed block."""
    found = np.zeros((-(-grid[0] // side), -(-grid[1] // side)), dtype=np.bool_)
    parts = np.unique(nodes[:, 1:] // side + (nodes[:, 1:] % side > 0) * [0, 1, 0, 1], axis=0)
    for top, bottom, left, right in parts.tolist():
        found[top:bottom, left:right] = True
    return found


def _by_blocks(kept: torch.Tensor) -> NDArray[np.int8]:
    """The verdicts (b, h, block rows, block columns); pairs beyond the last token are masked."""
    b, h, q, k = kept.shape
    rows, columns = -(-q // BLOCK), -(-k // BLOCK)
    padded = torch.nn.functional.pad(kept, (0, columns * BLOCK - k, 0, rows * BLOCK - q))
    count = padded.view(b, h, rows, BLOCK, columns, BLOCK).sum(dim=(3, 5))
    codes = (count > 0).to(torch.int8) * PARTIAL
    codes[count == BLOCK * BLOCK] = FULL
    found: NDArray[np.int8] = codes.cpu().numpy()
    return found
