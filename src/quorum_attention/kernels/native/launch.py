"""Launches the Triton kernels for a task's tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.native.config import Config, padded
from quorum_attention.kernels.native.runs import Runs
from quorum_attention.kernels.protocol import Call, Saved, Three

# In fp16, P is computed times a power of two. A forward's largest P is 1: 2**8 P does not overflow,
# and P stays normal down to 2**-22.
_FORWARD_EXPONENT = 8
# A backward's P are of whole rows: times its power of two they are about 2**-8 if all keys weigh
# the same.
_TYPICAL = -8
_LARGEST_EXPONENT = 14
# The largest offset inside a tile, in elements, that fits 32 bits with room for a row's columns.
_LARGEST_OFFSET = 2**31 - 2**16
# The most columns of a tile whose ragged parts are pipelined.
_WIDEST_RAGGED = 128


@dataclass(frozen=True, slots=True)
class Extras:
    """Changes to the scores of a launch, beside those of its ``Call``.

    Attributes:
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 is none.
        slopes: (h,) fp32 on the device, ALiBi: ``slope * |i - j|`` is subtracted; or None.
        window: a query at position i sees keys from ``i - window[0]`` to ``i + window[1]``, either
            may be below 0; None is no window.
        bias_at: local positions of the additive mask's first row and column.
        bits: (n,), (m,) int64 on the device, or None: a pair is kept where they have no bit in
            common; tested in the mixed runs of the table.
        mask_bits: (b or 1, h or 1, blocks, 128, 4) int32 on the device, or None: which pairs of
            partial blocks are kept (``mask_bits_kept``), where the table's last column says. Not
            together with group bits, a window, slopes or dropout.
        tf32: whether products of fp32 inputs use TF32 on tensor cores.
        n_keys: keys of a row in the whole call, which say how small its probabilities are.
    """

    softcap: float = 0.0
    slopes: torch.Tensor | None = None
    window: tuple[int, int] | None = None
    bias_at: tuple[int, int] = (0, 0)
    bits: tuple[torch.Tensor, torch.Tensor] | None = None
    mask_bits: torch.Tensor | None = None
    tf32: bool = False
    n_keys: int = 0


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


def p_exponent_of(n_keys: int, dtype: torch.dtype) -> int:
    """log2 of the factor of P in a backward of rows with about ``n_keys`` keys; 0 but for fp16."""
    if dtype != torch.float16:
        return 0
    return min(_LARGEST_EXPONENT, max(0, math.ceil(math.log2(max(1, n_keys))) + _TYPICAL))


def launch_forward(
    call: Call, out: torch.Tensor, lse: torch.Tensor, runs: Runs, extras: Extras, *, resume: bool
) -> None:
    """Merge the runs into (out, lse), or with ``resume`` False write them there.

    Args:
        out: (b, h, n, dv), any floating dtype.
        lse: (b, h, n) fp32, natural log.
        runs: by blocks of queries.
    """
    from quorum_attention.kernels.native.forward_triton import forward_kernel

    query, key, value = map(_rows, call.inputs)
    batch, heads, n_queries, head_dim = query.shape
    total, config = runs.n_blocks * batch * heads, runs.config
    if total == 0:
        return
    width = max(padded(head_dim), padded(value.shape[-1]))
    exponent = _FORWARD_EXPONENT if query.dtype == torch.float16 else 0
    with torch.cuda.device_of(query):
        way, read = _as_read(config, config.block_n, width, key, value)
        forward_kernel[(total,)](
            query, *read, out, lse, runs.starts, runs.entries, *_pointers(call, extras),
            heads, heads // key.shape[1], n_queries, key.shape[2], runs.n_blocks,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
            *lse.stride(), *_bias_strides(call.bias), *extras.bias_at,
            call.scale, extras.softcap, *_bounds(extras),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, P_EXPONENT=exponent,
            P_FACTOR=2.0**exponent, RESUME=resume, READ=way, DROPOUT=_dropout(call, runs),
            RAGGED=_ragged(config.stages, call, extras, width), **_shared(call, extras),
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip


def launch_backward(
    call: Call, saved: Saved, grads: Three, tables: tuple[Runs, ...], extras: Extras, *, add: bool
) -> None:
    """Add the gradients of the runs to ``grads``, or with ``add`` False write them there.

    Args:
        saved: with the global lse, natural log, -inf in rows without keys.
        grads: the gradients of query, key and value, any floating dtype.
        tables: by blocks of queries, and by blocks of keys.
    """
    from quorum_attention.kernels.native.backward_triton import key_kernel, query_kernel

    query, key, value = map(_rows, call.inputs)
    grad_out, lse = _rows(saved.grad_out), saved.lse
    batch, heads, n_queries, head_dim = query.shape
    key_heads, m, value_dim = key.shape[1], key.shape[2], value.shape[-1]
    if batch * heads == 0:
        return
    (by_query, by_key), (c, d) = tables, (tables[0].config, tables[1].config)
    group, key_lanes = heads // key_heads, batch * key_heads
    width = max(padded(head_dim), padded(value_dim))
    scales_ds = query.dtype == torch.float16
    exponent = p_exponent_of(extras.n_keys or m, query.dtype)
    shared = {**_shared(call, extras), "SCALE_DS": scales_ds, "ADD": add}
    with torch.cuda.device_of(query):
        delta, norms = _delta_and_norms(value, grad_out, _rows(saved.out), with_norms=scales_ds)
        pointers = _pointers(call, extras)
        strides = (
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad_out.stride()[:3],
            *lse.stride(),
        )  # fmt: skip
        # The exponent is no compile-time constant: it would compile again for other lengths.
        scores = (
            *_bias_strides(call.bias), *extras.bias_at, call.scale, extras.softcap,
            *_bounds(extras), float(exponent), 2.0**-exponent,
        )  # fmt: skip
        if by_query.n_blocks:
            way, read = _as_read(c, c.block_n, width, key, value)
            query_kernel[(by_query.n_blocks * batch * heads,)](
                query, *read, grad_out, lse, delta, norms, grads[0], by_query.starts,
                by_query.entries, *pointers, heads, group, n_queries, m, by_query.n_blocks,
                key_lanes, *strides, *grads[0].stride()[:3], *scores,
                BLOCK_M=c.block_m, BLOCK_N=c.block_n, READ=way, DROPOUT=_dropout(call, by_query),
                RAGGED=_ragged(min(2, c.stages), call, extras, width), **shared,
                num_warps=c.warps, num_stages=c.stages,
            )  # fmt: skip
        if by_key.n_blocks:
            way, read = _as_read(d, d.block_m, width, query, grad_out)
            key_kernel[(by_key.n_blocks * key_lanes,)](
                read[0], key, value, read[1], lse, delta, norms, grads[1], grads[2],
                by_key.starts, by_key.entries, *pointers, key_heads, group, n_queries, m,
                by_key.n_blocks, key_lanes, *strides, *grads[1].stride()[:3],
                *grads[2].stride()[:3], *scores,
                BLOCK_M=d.block_m, BLOCK_N=d.block_n, READ=way, DROPOUT=_dropout(call, by_key),
                RAGGED=_ragged(min(2, d.stages), call, extras, width), **shared,
                num_warps=d.warps, num_stages=d.stages,
            )  # fmt: skip


def _delta_and_norms(
    value: torch.Tensor, grad_out: torch.Tensor, out: torch.Tensor, *, with_norms: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What both backward kernels read: delta (b * h * n,), rowsum(grad_out * out); and norms
    (2 * b * hk,), the largest squared norm of a row of grad_out and of value for each key head,
    which are set only ``with_norms``. All fp32."""
    from quorum_attention.kernels.native.backward_triton import delta_kernel, norm_kernel

    batch, key_heads, m, value_dim = value.shape
    heads, n_queries = out.shape[1:3]
    n_delta, key_lanes = batch * heads * n_queries, batch * key_heads
    # One allocation for both.
    work = torch.empty(n_delta + 2 * key_lanes, dtype=torch.float32, device=value.device)
    delta, norms = work[:n_delta], work[n_delta:]
    block_dv = padded(value_dim)
    block = max(16, 4096 // block_dv)
    if with_norms:
        norms.zero_()
        norm_kernel[(-(-m // block) * key_lanes,)](
            value, norms[key_lanes:], key_heads, m, *value.stride()[:3],
            VALUE_DIM=value_dim, BLOCK_DV=block_dv, BLOCK=block,
        )  # fmt: skip
    if n_delta:
        delta_kernel[(-(-n_queries // block) * batch * heads,)](
            grad_out, out, delta, norms, heads, heads // key_heads, n_queries,
            *grad_out.stride()[:3], *out.stride()[:3],
            VALUE_DIM=value_dim, BLOCK_DV=block_dv, BLOCK=block, NORMS=with_norms,
        )  # fmt: skip
    return delta, norms


def _shared(call: Call, extras: Extras) -> dict[str, Any]:
    """The compile-time constants that all kernels share."""
    head_dim, value_dim, biased = call.query.shape[-1], call.value.shape[-1], call.bias is not None
    # Both have one width: with tiles of 64 and 32 columns the compiled forward read outside its
    # memory on an H200 (docs/native.md).
    width = max(padded(head_dim), padded(value_dim))
    modified = biased or extras.softcap > 0 or extras.slopes is not None
    return {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": width,
        "BLOCK_DV": width,
        # Scaling after the maximum is cheaper, but right only for positive factors.
        "PLAIN": not modified and call.scale > 0,
        "SOFTCAP": extras.softcap > 0,
        "ALIBI": extras.slopes is not None,
        "BIAS": biased,
        "WINDOW": extras.window is not None,
        "BITS": 2 if extras.mask_bits is not None else int(extras.bits is not None),
        "PRECISION": "tf32" if extras.tf32 else "ieee",
    }


def _dropout(call: Call, runs: Runs) -> int:
    """Whether pairs are dropped, and how (``dropout_triton.dropped``)."""
    return 0 if call.dropout is None else 1 + runs.aligned


def _ragged(stages: int, call: Call, extras: Extras, width: int) -> int:
    """Pipeline stages of the ragged parts of runs: more than one under a window, where these are
    much of all, and where it has been measured (docs/native.md)."""
    other = call.bias is not None or call.dropout is not None or extras.bits is not None
    return stages if extras.window is not None and width <= _WIDEST_RAGGED and not other else 1


def _as_read(
    config: Config, block_rows: int, width: int, *tensors: torch.Tensor
) -> tuple[str, tuple[Any, ...]]:
    """How a kernel reads blocks of ``block_rows`` rows of ``tensors`` (tile_triton.py), and what
    it is given for that: the tensors, or their descriptors."""
    if _described(config, *tensors):
        from triton.tools.tensor_descriptor import TensorDescriptor

        block = [1, 1, block_rows, width]
        made = (TensorDescriptor(t, list(t.shape), list(t.stride()), block) for t in tensors)
        return "descriptors", tuple(made)
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


def _pointers(call: Call, extras: Extras) -> tuple[torch.Tensor, ...]:
    """Bias, slopes, bits of queries (or mask bits) and of keys, dropout's numbers; or a spare."""
    own, other = extras.bits or (extras.mask_bits, None)
    drops = None if call.dropout is None else dropout_numbers(call.dropout, call.query.device)
    every = (call.bias, extras.slopes, own, other, drops)
    return tuple(call.query if tensor is None else tensor for tensor in every)


def _bounds(extras: Extras) -> tuple[int, int]:
    """The bounds of the window, or the strides of the mask bits by entry and head."""
    bits = extras.mask_bits
    if bits is None:
        return extras.window or (0, 0)
    by_entry, by_head = bits.stride()[:2]
    return by_entry if bits.shape[0] > 1 else 0, by_head if bits.shape[1] > 1 else 0


def _bias_strides(bias: torch.Tensor | None) -> tuple[int, ...]:
    """Strides by batch entry, head, row and column; 0 where the mask broadcasts."""
    if bias is None:
        return (0, 0, 0, 0)
    bias = bias[(None,) * (4 - bias.ndim)]
    pairs = zip(bias.stride(), bias.shape, strict=True)
    return tuple(0 if size == 1 else stride for stride, size in pairs)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with its last dimension contiguous; copied if needed."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
