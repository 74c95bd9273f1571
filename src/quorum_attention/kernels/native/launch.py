"""Launches the Triton kernels for a task's tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.native.config import Config, ScoreOptions, padded
from quorum_attention.kernels.native.runs import Runs

# In fp16, P is computed times 2**lift. A forward's largest P is 1: 2**8 P does not overflow, and P
# stays normal down to 2**-22.
_FORWARD_LIFT = 8
# A backward's P are of whole rows: its lift makes 2**lift P about 2**-8 if all keys weigh the same.
_TYPICAL = -8
_LARGEST_LIFT = 14
# The largest offset inside a tile, in elements, that fits 32 bits with room for a row's columns.
_LARGEST_OFFSET = 2**31 - 2**16
# The most columns of a tile whose ragged parts are pipelined.
_WIDEST_RAGGED = 128


@dataclass(frozen=True, slots=True)
class Operands:
    """query (b, h, n, d), key (b, hk, m, d), value (b, hk, m, dv), and the factor of the scores."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Extras:
    """Changes to the scores.

    Attributes:
        options: window, soft cap and slopes.
        slopes: (h,) fp32 on the device, or None.
        bias: additive mask, broadcastable to (b, h, rows, columns), or None.
        bias_row, bias_column: local positions of the mask's first row and column.
        query_bits, key_bits: (n,), (m,) int64 on the device, or None: a pair is kept where they
            have no bit in common; tested in the mixed runs of the table.
        words: (b or 1, h or 1, blocks, 128, 4) int32 on the device, or None: which pairs of tried
            blocks are kept (``scores_triton.tried``); the tables then have a column more, ``word``.
            Not together with group bits, a window, slopes or dropout.
        tf32: whether products of fp32 inputs use TF32 on tensor cores.
        drops: (8,) int32 on the device, from ``dropout_numbers``, or None: no dropout.
    """

    options: ScoreOptions
    slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    bias_row: int = 0
    bias_column: int = 0
    query_bits: torch.Tensor | None = None
    key_bits: torch.Tensor | None = None
    words: torch.Tensor | None = None
    tf32: bool = False
    drops: torch.Tensor | None = None


def dropout_numbers(dropout: Dropout, device: torch.device) -> torch.Tensor:
    """What a launch reads of a dropout (``load_dropout_params``), (8,) int32 on the device: halves
    of the seed, threshold, first head, first entry, after how many entries they repeat; and as
    fp32 1 / (1 - p) and 1 - p.

    A kernel writes them. A copy from the host would, in a CUDA graph, be made again at each replay,
    from memory that others may have by then.
    """
    from quorum_attention.kernels.native.dropout_triton import numbers_kernel

    words = (
        dropout.seed & 0xFFFFFFFF,
        dropout.seed >> 32,
        dropout.threshold,
        dropout.first_head,
        dropout.first_entry,
        dropout.repeat or 2**31 - 1,
    )
    numbers = torch.empty(8, dtype=torch.int32, device=device)
    with torch.cuda.device_of(numbers):
        # As signed numbers of 32 bits: larger ones would be of another type, and compile again.
        signed = (word - (word >> 31 << 32) for word in words)
        floats = numbers.view(torch.float32)
        numbers_kernel[(1,)](numbers, floats, *signed, dropout.rescale, 1.0 - dropout.p)
    return numbers


def backward_lift(n_keys: int, dtype: torch.dtype) -> int:
    """log2 of the factor of P in a backward of rows with about ``n_keys`` keys; 0 but for fp16."""
    if dtype != torch.float16:
        return 0
    return min(_LARGEST_LIFT, max(0, math.ceil(math.log2(max(1, n_keys))) + _TYPICAL))


def launch_forward(
    given: Operands,
    out: torch.Tensor,
    lse: torch.Tensor,
    runs: Runs,
    config: Config,
    extras: Extras,
    *,
    resume: bool,
) -> None:
    """Merge the runs into (out, lse), or with ``resume`` False write them there.

    Args:
        out: (b, h, n, dv), any floating dtype.
        lse: (b, h, n) fp32, natural log.
        runs: by blocks of ``config.block_m`` queries.
    """
    from quorum_attention.kernels.native.forward_triton import forward_kernel

    query, key, value = (_rows(t) for t in (given.query, given.key, given.value))
    batch, heads, n_queries, head_dim = query.shape
    total = runs.n_blocks * batch * heads
    if total == 0:
        return
    width = max(padded(head_dim), padded(value.shape[-1]))
    lift = _FORWARD_LIFT if query.dtype == torch.float16 else 0
    with torch.cuda.device_of(query):
        way, read = _as_read(config, config.block_n, width, key, value)
        forward_kernel[(total,)](
            query, *read, out, lse, runs.starts, runs.entries,
            *_pointers(extras, query),
            heads, heads // key.shape[1], n_queries, key.shape[2], runs.n_blocks,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
            *lse.stride(), *_bias_strides(extras.bias, batch, heads),
            extras.bias_row, extras.bias_column,
            given.scale, extras.options.softcap, *_bounds(extras),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, LIFT=lift, LIFTED=2.0**lift,
            RESUME=resume, READ=way, DROPOUT=_dropout(extras, runs),
            RAGGED=_ragged(config.stages, extras, width),
            **_shared(given, extras, head_dim, value.shape[-1]),
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip


def launch_backward(
    given: Operands,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grads: tuple[torch.Tensor, ...],
    by_query_runs: Runs,
    by_key_runs: Runs,
    by_query: Config,
    by_key: Config,
    extras: Extras,
    *,
    add: bool,
    n_keys: int = 0,
    grad_lse: torch.Tensor | None = None,
    grad_bias: torch.Tensor | None = None,
) -> None:
    """Add the gradients of the runs to ``grads``, or with ``add`` False write them there.

    Args:
        rows: grad_out, out (b, h, n, dv) and the global lse (b, h, n), natural log, -inf in rows
            without keys.
        grads: the gradients of query, key and value, any floating dtype.
        by_query_runs, by_key_runs: tables by blocks of ``by_query.block_m`` queries and of
            ``by_key.block_n`` keys.
        n_keys: keys of a row in the whole call, for the lift in fp16; 0: those of ``key``.
        grad_lse: (b, h, n) fp32, the gradient of a returned lse, or None.
        grad_bias: (b, h, m) fp32, receives the sum over rows of the gradient of the scores.
    """
    from quorum_attention.kernels.native.backward_triton import key_kernel, query_kernel

    query, key, value = (_rows(t) for t in (given.query, given.key, given.value))
    grad_out, out = (_rows(t) for t in rows[:2])
    lse = rows[2]
    batch, heads, n_queries, head_dim = query.shape
    key_heads, m, value_dim = key.shape[1], key.shape[2], value.shape[-1]
    if batch * heads == 0:
        return
    group, key_lanes = heads // key_heads, batch * key_heads
    width = max(padded(head_dim), padded(value_dim))
    eased = query.dtype == torch.float16
    lift = backward_lift(n_keys or m, query.dtype)
    softened = _shared(given, extras, head_dim, value_dim)
    lengths = {"EASED": eased, "ADD": add}
    with torch.cuda.device_of(query):
        delta, norms = _delta_and_norms(value, grad_out, out, grad_lse, heads, eased=eased)
        strides = (
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad_out.stride()[:3],
            *lse.stride(),
        )  # fmt: skip
        masks = (*_bias_strides(extras.bias, batch, heads), extras.bias_row, extras.bias_column)
        # The lift is no compile-time constant: it would compile again for other lengths.
        window = _bounds(extras)
        scores = (given.scale, extras.options.softcap, *window, float(lift), 2.0**-lift)
        if by_query_runs.n_blocks:
            way, read = _as_read(by_query, by_query.block_n, width, key, value)
            query_kernel[(by_query_runs.n_blocks * batch * heads,)](
                query, *read, grad_out, lse, delta, norms, grads[0], by_query_runs.starts,
                by_query_runs.entries, *_pointers(extras, query),
                heads, group, n_queries, m, by_query_runs.n_blocks, key_lanes,
                *strides, *grads[0].stride()[:3], *masks, *scores,
                BLOCK_M=by_query.block_m, BLOCK_N=by_query.block_n, **lengths,
                READ=way, DROPOUT=_dropout(extras, by_query_runs),
                RAGGED=_ragged(min(2, by_query.stages), extras, width), **softened,
                num_warps=by_query.warps, num_stages=by_query.stages,
            )  # fmt: skip
        if by_key_runs.n_blocks:
            way, read = _as_read(by_key, by_key.block_m, width, query, grad_out)
            bias_strides = (0, 0) if grad_bias is None else grad_bias.stride()[:2]
            key_kernel[(by_key_runs.n_blocks * key_lanes,)](
                read[0], key, value, read[1], lse, delta, norms, grads[1], grads[2],
                delta if grad_bias is None else grad_bias, by_key_runs.starts,
                by_key_runs.entries, *_pointers(extras, query),
                key_heads, group, n_queries, m, by_key_runs.n_blocks, key_lanes,
                *strides, *grads[1].stride()[:3], *grads[2].stride()[:3], *masks, *bias_strides,
                *scores, BLOCK_M=by_key.block_m, BLOCK_N=by_key.block_n, **lengths,
                GRAD_BIAS=grad_bias is not None, READ=way,
                DROPOUT=_dropout(extras, by_key_runs),
                RAGGED=_ragged(min(2, by_key.stages), extras, width), **softened,
                num_warps=by_key.warps, num_stages=by_key.stages,
            )  # fmt: skip


def _delta_and_norms(
    value: torch.Tensor,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    heads: int,
    *,
    eased: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What both backward kernels read: delta (b * h * n,), rowsum(grad_out * out) - grad_lse; and
    norms (2 * b * hk,), the largest squared norm of a row of grad_out and of value for each key
    head, which are set only where ``eased``. All fp32."""
    from quorum_attention.kernels.native.backward_triton import delta_kernel, norm_kernel

    batch, key_heads, m, value_dim = value.shape
    n_queries, key_lanes = out.shape[2], batch * key_heads
    n_delta = batch * heads * n_queries
    # One allocation for both.
    work = torch.empty(n_delta + 2 * key_lanes, dtype=torch.float32, device=value.device)
    delta, norms = work[:n_delta], work[n_delta:]
    block_dv = padded(value_dim)
    block = max(16, 4096 // block_dv)
    if eased:
        norms.zero_()
        norm_kernel[(-(-m // block) * key_lanes,)](
            value, norms[key_lanes:], key_heads, m, *value.stride()[:3],
            VALUE_DIM=value_dim, BLOCK_DV=block_dv, BLOCK=block,
        )  # fmt: skip
    if n_delta:
        grad_lse_strides = (0, 0, 0) if grad_lse is None else grad_lse.stride()
        delta_kernel[(-(-n_queries // block) * batch * heads,)](
            grad_out, out, delta if grad_lse is None else grad_lse, delta, norms, heads,
            heads // key_heads, n_queries, *grad_out.stride()[:3], *out.stride()[:3],
            *grad_lse_strides, VALUE_DIM=value_dim, BLOCK_DV=block_dv, BLOCK=block, NORMS=eased,
            GRAD_LSE=grad_lse is not None,
        )  # fmt: skip
    return delta, norms


def _shared(given: Operands, extras: Extras, head_dim: int, value_dim: int) -> dict[str, Any]:
    """The compile-time constants that all kernels share."""
    options, biased = extras.options, extras.bias is not None
    # Both have one width: with tiles of 64 and 32 columns the compiled forward read outside its
    # memory on an H200 (docs/native.md).
    width = max(padded(head_dim), padded(value_dim))
    modified = biased or options.softcap > 0 or extras.slopes is not None
    return {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": width,
        "BLOCK_DV": width,
        # Scaling after the maximum is cheaper, but right only for positive factors.
        "PLAIN": not modified and given.scale > 0,
        "SOFTCAP": options.softcap > 0,
        "ALIBI": extras.slopes is not None,
        "BIAS": biased,
        "WINDOW": options.windowed,
        "BITS": 2 if extras.words is not None else int(extras.query_bits is not None),
        "PRECISION": "tf32" if extras.tf32 else "ieee",
    }


def _dropout(extras: Extras, runs: Runs) -> int:
    """Whether pairs are dropped, and how (``dropout_triton.dropped``)."""
    return 0 if extras.drops is None else 1 + runs.aligned


def _ragged(stages: int, extras: Extras, width: int) -> int:
    """Pipeline stages of the ragged parts of runs: more than one under a window, where these are
    much of all, and where it has been measured (docs/native.md)."""
    other = extras.bias is not None or extras.drops is not None or extras.query_bits is not None
    return stages if extras.options.windowed and width <= _WIDEST_RAGGED and not other else 1


def _as_read(
    config: Config, block_rows: int, width: int, *tensors: torch.Tensor
) -> tuple[str, tuple[Any, ...]]:
    """How a kernel reads blocks of ``block_rows`` rows of ``tensors`` (loads_triton.py), and what
    it is given for that: the tensors, or their descriptors."""
    if _described(config, *tensors):
        return "descriptors", tuple(_describe(t, block_rows, width) for t in tensors)
    # Offsets inside a tile must fit 32 bits.
    furthest = max(config.block_m, config.block_n) * max(t.stride(2) for t in tensors)
    return ("wide" if furthest > _LARGEST_OFFSET else "pointers"), tensors


def _described(config: Config, *tensors: torch.Tensor) -> bool:
    """Whether the tensors can be read by descriptors, as the copy engine requires."""
    if not config.descriptors:
        return False
    return all(
        t.data_ptr() % 16 == 0
        and 0 not in t.shape
        and all(s > 0 and s * t.element_size() % 16 == 0 for s in t.stride()[:3])
        for t in tensors
    )


def _describe(tensor: torch.Tensor, block_rows: int, width: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    block = [1, 1, block_rows, width]
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def _pointers(extras: Extras, spare: torch.Tensor) -> tuple[torch.Tensor, ...]:
    bits = extras.query_bits if extras.words is None else extras.words
    every = (extras.bias, extras.slopes, bits, extras.key_bits, extras.drops)
    return tuple(spare if tensor is None else tensor for tensor in every)


def _bounds(extras: Extras) -> tuple[int, int]:
    """The bounds of the window, or the strides of words by entry and head."""
    words = extras.words
    if words is None:
        return extras.options.bounds
    by_entry, by_head = words.stride()[:2]
    return by_entry if words.shape[0] > 1 else 0, by_head if words.shape[1] > 1 else 0


def _bias_strides(bias: torch.Tensor | None, batch: int, heads: int) -> tuple[int, ...]:
    """Strides by batch entry, head, row and column; 0 where the mask broadcasts."""
    if bias is None:
        return (0, 0, 0, 0)
    while bias.ndim < 4:
        bias = bias.unsqueeze(0)
    pairs = zip(bias.stride(), bias.shape, strict=True)
    return tuple(0 if size == 1 else stride for stride, size in pairs)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with its last dimension contiguous; copied if needed."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
