"""Attention over keys in host memory by the processor's cores, where the keys lie.

torch's operator for CPUs gives each (batch entry, head, run of queries) to one thread.
A few queries over many keys would keep a few cores busy. So the keys of a head are cut
into blocks, which become heads of the operator's call, and the blocks' results are
merged by log-sum-exp. Query heads that share a key head are rows of one head, so keys
are read once. Of many keys a few rows go to a C function (compiled_rows.py).
"""

from __future__ import annotations

import torch

from quorum_attention.arithmetic import ceil_div
from quorum_attention.kernels.cpu import CpuKernel
from quorum_attention.kernels.merge import merge_
from quorum_attention.kernels.operator_call import Call, OutLse
from quorum_attention.long_prompts.compiled_rows import compiled_statistics
from quorum_attention.long_prompts.key_mask import KeyMask
from quorum_attention.long_prompts.row_groups import RowGroup, RowLayout, row_groups
from quorum_attention.long_prompts.running_statistics import RunningStatistics
from quorum_attention.long_prompts.scores import ScoreScaling, attend_by_equations
from quorum_attention.long_prompts.segments import Segment

_KERNEL = CpuKernel()
# Blocks for each thread: their times differ, and the last ones must not be waited for
# long.
_BLOCKS_PER_THREAD = 4
_MIN_BLOCK_KEYS = 512


def attend_on_cores(
    query: torch.Tensor,
    segment: Segment,
    start: int,
    mask: KeyMask,
    scaling: ScoreScaling,
) -> OutLse:
    """Attend over one segment in host memory.

    Args:
        query: (b, h_q, n_q, d), in host memory.
        segment: tokens in host memory.
        start: the position of its first token.
        mask: which keys are kept; a padding in host memory.
        scaling: of the scores.

    Returns:
        out (b, h_q, n_q, d_v) and lse (b, h_q, n_q), fp32, or fp64 for fp64 inputs.
    """
    # Entries with paddings of their own see other keys, so they are cut differently.
    groups = list(row_groups(segment, is_shared=mask.key_padding is None))
    if groups[0].entries is None:
        return _attend_group(query, groups[0], start, mask, scaling)
    out, lse = RunningStatistics(query, segment.value.shape[3]).empty_results()
    for group in groups:
        group_out, group_lse = _attend_group(
            group.take(query), group, start, group.take_mask(mask), scaling
        )
        group.put(out, group_out)
        group.put(lse, group_lse)
    return out, lse


def _attend_group(
    query: torch.Tensor,
    group: RowGroup,
    start: int,
    mask: KeyMask,
    scaling: ScoreScaling,
) -> OutLse:
    layout = RowLayout.from_tensors(query, group.key)
    rows = layout.to_rows(query)  # (rows, h_kv, r, d)
    state = RunningStatistics(rows, group.value.shape[3])
    for keys in mask.ranges(start, start + group.key.shape[2]):
        first = keys.start - start
        n_keys = keys.stop - keys.start
        key = group.key.narrow(2, first, n_keys)
        value = group.value.narrow(2, first, n_keys)
        is_kept = None
        if keys.is_mixed:
            pairs = mask.kept_pairs(keys.start, keys.stop, query.device)
            if not pairs.any():
                continue
            is_kept = layout.mask_of_rows(pairs)
        state.merge(*_attend_range(rows, key, value, scaling, is_kept))
    out, lse = state.results()
    return layout.from_rows(out), layout.from_rows(lse)


def _attend_range(
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: ScoreScaling,
    is_kept: torch.Tensor | None,
) -> OutLse:
    """Attention of rows (b, h, r, d) over keys (b, h, n, d), all or those that
    ``is_kept`` keeps."""
    has_equal_dims = key.shape[3] == value.shape[3]
    changes_scores = is_kept is not None or scaling.softcap is not None
    if has_equal_dims and not changes_scores:
        return _attend_in_blocks(rows, key, value, scaling.softmax_scale)
    return attend_by_equations(rows, key, value, scaling, is_kept)


def _attend_in_blocks(
    rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softmax_scale: float
) -> OutLse:
    """Attention of rows (b, h, r, d) over all keys (b, h, n, d), cut into blocks of
    keys."""
    statistics = compiled_statistics(rows, key, value, softmax_scale)
    if statistics is not None:
        return statistics
    n_keys = key.shape[2]
    n_blocks = _n_blocks(rows.shape[0] * rows.shape[1], n_keys)
    if n_blocks == 1:
        return _cpu_statistics(rows, key, value, softmax_scale)
    block = n_keys // n_blocks
    results = [
        _attend_entry_in_blocks(
            rows[entry], key[entry], value[entry], block, n_blocks, softmax_scale
        )
        for entry in range(rows.shape[0])
    ]
    outs, lses = zip(*results, strict=True)
    out = torch.stack(outs)
    lse = torch.stack(lses)
    n_cut = block * n_blocks
    if n_cut < n_keys:
        rest = _cpu_statistics(
            rows, key[:, :, n_cut:], value[:, :, n_cut:], softmax_scale
        )
        merge_(out, lse, *rest)
    return out, lse


def _attend_entry_in_blocks(
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block: int,
    n_blocks: int,
    softmax_scale: float,
) -> OutLse:
    """Attention of rows (h, r, d) over the first ``block * n_blocks`` keys (h, n,
    d)."""
    n_cut = block * n_blocks
    sizes = (n_blocks, block)
    key_blocks = key[:, :n_cut].unflatten(1, sizes)  # (h, blocks, block, d)
    value_blocks = value[:, :n_cut].unflatten(1, sizes)
    repeated_rows = rows.unsqueeze(1)  # (h, 1, r, d)
    repeated_rows = repeated_rows.expand(-1, n_blocks, -1, -1)
    outs, lses = _cpu_statistics(repeated_rows, key_blocks, value_blocks, softmax_scale)
    return _merge_blocks(outs, lses)


def _merge_blocks(out: torch.Tensor, lse: torch.Tensor) -> OutLse:
    """Merge the statistics of blocks of keys.

    Args:
        out: (..., blocks, rows, d_v), any floating dtype.
        lse: (..., blocks, rows), fp32 or fp64.

    Returns:
        out (..., rows, d_v), in the dtype of lse, and lse (..., rows).
    """
    merged_lse = lse.logsumexp(dim=-2)
    # Rows without keys have -inf everywhere, whose difference is NaN.
    differences = lse - merged_lse.unsqueeze(-2)
    weights = differences.exp().nan_to_num(nan=0.0)
    weighted = out.to(lse.dtype) * weights.unsqueeze(-1)
    return weighted.sum(dim=-3), merged_lse


def _cpu_statistics(
    rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softmax_scale: float
) -> OutLse:
    # The operator alone returns numbers where scores are NaN or infinite.
    call = Call(rows, key, value, scale=softmax_scale)
    out, lse = _KERNEL.whole_forward(call)
    return out.to(lse.dtype), lse


def _n_blocks(n_heads: int, n_keys: int) -> int:
    """The number of blocks that the keys of each head are cut into."""
    n_threads = torch.get_num_threads()
    if n_heads % n_threads == 0:
        # All threads are busy to the end without a cut.
        return 1
    wanted_blocks = ceil_div(_BLOCKS_PER_THREAD * n_threads, max(1, n_heads))
    return max(1, min(wanted_blocks, n_keys // _MIN_BLOCK_KEYS))
