"""Attention of a few queries over segments on a GPU, by the kernels of
``decode_triton``.

A launch for each segment writes statistics of its splits into one workspace; one more
launch merges them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from quorum_attention.arithmetic import ceil_div, power_of_two_from, round_up
from quorum_attention.kernels.operator_call import OutLse
from quorum_attention.kernels.triton_launch import triton_available
from quorum_attention.long_prompts.key_mask import KeyMask
from quorum_attention.long_prompts.row_groups import RowLayout
from quorum_attention.long_prompts.scores import ScoreScaling
from quorum_attention.plain_types import Keywords

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_HEAD_DIM = 256
# More rows than this for each key head are better off in kernels made for many queries.
MAX_ROWS = 4096
_MIN_SPLIT_KEYS = 256
# Programs for each multiprocessor: enough loads in flight for the memory's full rate.
_PROGRAMS_PER_PROCESSOR = 2
_LOG2_E = math.log2(math.e)


class KeysAt(NamedTuple):
    """Keys and values that lie together.

    Attributes:
        start: the position of the first key.
        key, value: (rows, h_kv, n, d) and (rows, h_kv, n, d_v), last dimension
            contiguous.
    """

    start: int
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class _BlockSizes:
    """The sizes of a program's blocks."""

    rows: int
    keys: int
    dim: int
    value_dim: int
    warps: int
    stages: int


@cache
def _kernels() -> Any:
    # To import Triton takes 0.4 s.
    from quorum_attention.long_prompts import decode_triton

    return decode_triton


def can_decode(query: torch.Tensor, value_dim: int, n_rows: int) -> bool:
    """Whether the kernels take such a call.

    Args:
        query: (b, h_q, n_q, d).
        value_dim: d_v.
        n_rows: rows of queries for each key head.
    """
    dims = (query.shape[3], value_dim)
    dims_fit = min(dims) >= 1 and max(dims) <= _MAX_HEAD_DIM
    if not query.is_cuda or query.dtype not in _DTYPES:
        return False
    return dims_fit and n_rows <= MAX_ROWS and triton_available()


def decode(
    query: torch.Tensor, parts: Sequence[KeysAt], mask: KeyMask, scaling: ScoreScaling
) -> OutLse:
    """Attend over keys on the query's device.

    Args:
        query: (entries, h_q, n_q, d).
        parts: at least one, all with the same number of rows; entries / rows
            neighbouring entries read each row.
        mask: which keys are kept; a padding (entries, n_keys) on the query's device.
        scaling: of the scores.

    Returns:
        out (entries, h_q, n_q, d_v) and lse (entries, h_q, n_q), fp32.
    """
    layout = RowLayout.from_tensors(query, parts[0].key)
    rows = layout.to_rows(query).contiguous()  # (rows, h_kv, r, d)
    value_dim = parts[0].value.shape[3]
    tile = _tile_of(layout.rows_per_head, query.shape[3], value_dim, query.dtype)
    split_keys = _split_keys(parts, layout, tile, query.device)
    n_splits = [ceil_div(part.key.shape[2], split_keys) for part in parts]
    shape = (sum(n_splits), *rows.shape[:3])
    out = query.new_empty((*shape, value_dim), dtype=torch.float32)
    lse = query.new_empty(shape, dtype=torch.float32)
    first_split = 0
    for part, splits in zip(parts, n_splits, strict=True):
        launch = _Launch(layout, tile, mask, scaling, first_split, split_keys, splits)
        launch.run(rows, part, out, lse)
        first_split += splits
    merged_out, merged_lse = _merge_splits(out, lse)
    return layout.from_rows(merged_out), layout.from_rows(merged_lse)


def _tile_of(n_rows: int, dim: int, value_dim: int, dtype: torch.dtype) -> _BlockSizes:
    block_rows = min(64, max(16, power_of_two_from(n_rows)))
    block_dim = max(16, power_of_two_from(dim))
    block_value_dim = max(16, power_of_two_from(value_dim))
    row_bytes = (block_dim + block_value_dim) * dtype.itemsize
    # Three blocks of keys and values are in flight within a multiprocessor's shared
    # memory.
    block_keys = 128 if row_bytes <= 256 else 64 if row_bytes <= 1024 else 32
    stages = 3 if row_bytes <= 1024 else 2
    return _BlockSizes(block_rows, block_keys, block_dim, block_value_dim, 4, stages)


def _split_keys(
    parts: Sequence[KeysAt], layout: RowLayout, tile: _BlockSizes, device: torch.device
) -> int:
    """The keys of a split: so many splits that together they keep the device busy."""
    n_keys = sum(part.key.shape[2] for part in parts)
    n_row_blocks = ceil_div(layout.rows_per_head, tile.rows)
    programs_per_split = max(1, layout.rows * layout.heads * n_row_blocks)
    n_programs = _PROGRAMS_PER_PROCESSOR * _n_processors(device)
    n_splits = ceil_div(n_programs, programs_per_split)
    n_split_keys = max(_MIN_SPLIT_KEYS, ceil_div(n_keys, n_splits))
    return round_up(n_split_keys, tile.keys)


@cache
def _n_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True, slots=True)
class _Launch:
    """The launch of the kernel over one part."""

    layout: RowLayout
    tile: _BlockSizes
    mask: KeyMask
    scaling: ScoreScaling
    first_split: int
    split_keys: int
    n_splits: int

    def run(
        self, rows: torch.Tensor, part: KeysAt, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        layout = self.layout
        n_row_blocks = ceil_div(layout.rows_per_head, self.tile.rows)
        grid = (self.n_splits, layout.rows * layout.heads, n_row_blocks)
        padding = self.mask.key_padding
        padding_or_rows = rows if padding is None else padding.view(torch.uint8)
        softcap = self.scaling.softcap
        with torch.cuda.device_of(rows):
            _kernels().attend_splits_kernel[grid](
                rows,
                part.key,
                part.value,
                padding_or_rows,
                out,
                lse,
                self.scaling.softmax_scale * _LOG2_E,
                1.0 if softcap is None else softcap,
                part.key.shape[2],
                part.start,
                self.mask.first_position,
                self.mask.window or 0,
                self.first_split,
                self.split_keys,
                layout.rows_per_head,
                layout.n_queries,
                layout.group * layout.n_queries,
                layout.heads,
                layout.share,
                *part.key.stride()[:3],
                *part.value.stride()[:3],
                0 if padding is None else padding.stride(0),
                **self._constants(rows, part),
            )

    def _constants(self, rows: torch.Tensor, part: KeysAt) -> Keywords:
        mask = self.mask
        last_key = part.start + part.key.shape[2] - 1
        last_hidden = (
            mask.n_keys - 1 - (mask.n_keys if mask.window is None else mask.window)
        )
        return {
            "DIM": rows.shape[3],
            "VALUE_DIM": part.value.shape[3],
            "BLOCK_DIM": self.tile.dim,
            "BLOCK_VALUE_DIM": self.tile.value_dim,
            "BLOCK_ROWS": self.tile.rows,
            "BLOCK_KEYS": self.tile.keys,
            "IS_CAUSAL": mask.is_causal and last_key > mask.first_position,
            "HAS_WINDOW": part.start <= last_hidden,
            "HAS_PADDING": mask.key_padding is not None,
            "HAS_SOFTCAP": self.scaling.softcap is not None,
            "PRECISION": "ieee" if rows.dtype == torch.float32 else "tf32",
            "num_warps": self.tile.warps,
            "num_stages": self.tile.stages,
        }


def _merge_splits(out: torch.Tensor, lse: torch.Tensor) -> OutLse:
    """Merge (splits, rows, h, r, d_v) and (splits, rows, h, r) over the splits."""
    if out.shape[0] == 1:
        return out[0], lse[0]
    merged_out = torch.empty_like(out[0])
    merged_lse = torch.empty_like(lse[0])
    value_dim = out.shape[-1]
    n_rows = merged_lse.numel()
    block_value_dim = power_of_two_from(value_dim)
    # One size for all numbers of splits: each size is a kernel to compile.
    block_splits = max(1, 4096 // block_value_dim)
    with torch.cuda.device_of(out):
        _kernels().merge_splits_kernel[(n_rows,)](
            out,
            lse,
            merged_out,
            merged_lse,
            out.shape[0],
            n_rows,
            VALUE_DIM=value_dim,
            BLOCK_VALUE_DIM=block_value_dim,
            BLOCK_SPLITS=block_splits,
        )
    return merged_out, merged_lse
