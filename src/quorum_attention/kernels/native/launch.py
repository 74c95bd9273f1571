"""Launches the Triton kernels for a task's tensors."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch

from quorum_attention.arithmetic import ceil_div
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.native.config import padded
from quorum_attention.kernels.native.runs import FIELDS, Runs, Window
from quorum_attention.kernels.protocol import Call, Saved, Three
from quorum_attention.kernels.scaling import usual_shift
from quorum_attention.kernels.triton_launch import launch_norms

# In fp16, P is computed times a power of two. A forward's largest P is 1: 2**8 P does not overflow,
# and P stays normal down to 2**-22.
_FORWARD_EXPONENT = 8
# The most elements from row to row: offsets inside a tile of 128 rows then fit 32 bits.
_LARGEST_STRIDE = 2**24 - 2**9
# The most columns of a tile whose ragged parts are pipelined.
_WIDEST_RAGGED = 128


# What a kernel is compiled for, ``K`` in Triton. PADDED: columns of a tile. PLAIN: scores are
# products times a factor above 0. BITS: there are mask bits. FIELDS: columns of the table.
# DESCRIBED: rows are read by descriptors. DROPOUT 2: runs begin at multiples of four keys
# (``dropped``). RAGGED: pipeline stages of ragged parts. P_EXPONENT: of the forward.
Constants = namedtuple(
    "Constants",
    "HEAD_DIM VALUE_DIM PADDED BLOCK_M BLOCK_N PLAIN SOFTCAP ALIBI BIAS WINDOW BITS FIELDS "
    "DESCRIBED PRECISION DROPOUT RAGGED P_EXPONENT SCALE_DS ADD",
    defaults=(0, False, False),
)


@dataclass(frozen=True, slots=True)
class NativeLaunch:
    """A launch for a task, or for a whole call.

    Attributes:
        call: the inputs of all, with what a launch reads of a call.
        tables: the runs, by blocks of queries; for a backward also by blocks of keys.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 is none.
        slopes: (h,) fp32 on the device, ALiBi: ``slope * |i - j|`` is subtracted; or None.
        window: a query at position i sees keys from ``i - window[0]`` to ``i + window[1]``, either
            may be below 0; None is no window.
        bias_at: local positions of the additive mask's first row and column.
        mask_bits: (b or 1, h or 1, blocks, 128, 4) int32 on the device, or None: which pairs of
            partial blocks are kept (``bits_kept``), where the table's last column says. Not
            together with a window, slopes or dropout.
        tf32: whether products of fp32 inputs use TF32 on tensor cores.
        n_keys: keys of a row in the whole call, which say how small its probabilities are.
    """

    call: Call
    tables: tuple[Runs, ...]
    softcap: float = 0.0
    slopes: torch.Tensor | None = None
    window: Window | None = None
    bias_at: tuple[int, int] = (0, 0)
    mask_bits: torch.Tensor | None = None
    tf32: bool = False
    n_keys: int = 0

    def forward(self, out: torch.Tensor, lse: torch.Tensor, *, resume: bool) -> None:
        """Merge the runs into (out, lse), or with ``resume`` False write them there.

        Args:
            out: (b, h, n, dv), any floating dtype.
            lse: (b, h, n) fp32, natural log.
        """
        from quorum_attention.kernels.native.kernels_triton import forward_kernel

        (runs,) = self.tables
        query, key, value = map(_rows, self.call.inputs)
        batch, heads, n_queries, _ = query.shape
        if runs.n_blocks * batch * heads == 0:
            return
        exponent = _FORWARD_EXPONENT if query.dtype == torch.float16 else 0
        with torch.cuda.device_of(query):
            read, compiled = self._compiled(runs, key, value, P_EXPONENT=exponent)
            forward_kernel[(runs.n_blocks * batch * heads,)](
                query, *read, out, lse, runs.starts, runs.entries, *self._pointers,
                heads, heads // key.shape[1], n_queries, runs.n_blocks,
                *_strides(query, key, value, out, lse), *self._scores, RESUME=resume, **compiled,
            )  # fmt: skip

    def backward(self, saved: Saved, grads: Three, *, add: bool) -> None:
        """Add the gradients of the runs to ``grads``, or with ``add`` False write them there.

        Args:
            saved: with the global lse, natural log, -inf in rows without keys.
            grads: the gradients of query, key and value, any floating dtype.
        """
        from quorum_attention.kernels.native.kernels_triton import key_kernel, query_kernel

        query, key, value = map(_rows, self.call.inputs)
        grad_out, lse = _rows(saved.grad_out), saved.lse
        batch, heads, n_queries, _ = query.shape
        key_heads, m = key.shape[1:3]
        if batch * heads == 0:
            return
        by_query, by_key = self.tables
        group, key_lanes = heads // key_heads, batch * key_heads
        scales_ds = query.dtype == torch.float16
        exponent = usual_shift(self.n_keys or m) if scales_ds else 0
        more = {"SCALE_DS": scales_ds, "ADD": add}
        with torch.cuda.device_of(query):
            delta, norms = _delta_and_norms(value, grad_out, _rows(saved.out), with_norms=scales_ds)
            pointers, strides = self._pointers, _strides(query, key, value, grad_out, lse)
            # The exponent is no compile-time constant: it would compile again for other lengths.
            scores = *self._scores, float(exponent), 2.0**-exponent
            if by_query.n_blocks:
                read, compiled = self._compiled(by_query, key, value, **more)
                query_kernel[(by_query.n_blocks * batch * heads,)](
                    query, *read, grad_out, lse, delta, norms, grads[0], by_query.starts,
                    by_query.entries, *pointers, heads, group, n_queries, by_query.n_blocks,
                    key_lanes, *strides, *_strides(grads[0]), *scores, **compiled,
                )  # fmt: skip
            if by_key.n_blocks:
                read, compiled = self._compiled(by_key, query, grad_out, **more)
                key_kernel[(by_key.n_blocks * key_lanes,)](
                    read[0], key, value, read[1], lse, delta, norms, *grads[1:], by_key.starts,
                    by_key.entries, *pointers, key_heads, group, n_queries, m, by_key.n_blocks,
                    key_lanes, *strides, *_strides(*grads[1:]), *scores, **compiled,
                )  # fmt: skip

    def _compiled(
        self, runs: Runs, *walked: torch.Tensor, **more: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The tensors that a kernel walks, as it reads them; and what it is compiled for."""
        call, config, dropout = self.call, runs.config, self.call.dropout is not None
        head_dim, value_dim = call.query.shape[-1], call.value.shape[-1]
        # Both have one width: with tiles of 64 and 32 columns the compiled forward read outside its
        # memory on an H200 (docs/native.md).
        width = max(padded(head_dim), padded(value_dim))
        biased, windowed = call.bias is not None, self.window is not None
        modified = biased or self.softcap > 0 or self.slopes is not None
        backward = len(self.tables) > 1
        block = config.block_m if backward and runs is self.tables[1] else config.block_n
        made = _descriptors([1, 1, block, width], *walked) if config.descriptors else None
        # Ragged parts are pipelined under a window, where they are much of all, and where it has
        # been measured (docs/native.md).
        pipelined = windowed and width <= _WIDEST_RAGGED
        pipelined = pipelined and not (biased or dropout)
        constants = Constants(
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            PADDED=width,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            # Scaling after the maximum is cheaper, but right only for positive factors.
            PLAIN=not modified and call.scale > 0,
            SOFTCAP=self.softcap > 0,
            ALIBI=self.slopes is not None,
            BIAS=biased,
            WINDOW=windowed,
            BITS=self.mask_bits is not None,
            FIELDS=FIELDS,
            DESCRIBED=made is not None,
            PRECISION="tf32" if self.tf32 else "ieee",
            DROPOUT=(1 + runs.aligned) * dropout,
            RAGGED=(min(2, config.stages) if backward else config.stages) if pipelined else 1,
            **more,
        )
        return made or walked, {
            "K": constants,
            "num_warps": config.warps,
            "num_stages": config.stages,
        }

    @property
    def _pointers(self) -> tuple[torch.Tensor, ...]:
        """Bias, slopes and mask bits; or a spare."""
        every = (self.call.bias, self.slopes, self.mask_bits)
        return tuple(self.call.query if tensor is None else tensor for tensor in every)

    @property
    def _scores(self) -> tuple[Any, ...]:
        """Dropout; strides of the mask, 0 where it broadcasts, and its place; the factor of the
        scores and the soft cap; the bounds of the window, or the strides of the mask bits by entry
        and head."""
        bias, bits = self.call.bias, self.mask_bits
        strides = (0, 0, 0, 0) if bias is None else _broadcast(bias[(None,) * (4 - bias.ndim)])
        bounds = (self.window or (0, 0)) if bits is None else _broadcast(bits)[:2]
        drops = _words(self.call.dropout)
        return *drops, strides, *self.bias_at, self.call.scale, self.softcap, *bounds


def _words(dropout: Dropout | None) -> tuple[int | float, ...]:
    """A dropout as kernels are given it (``kernels_triton.dropout_params``)."""
    if dropout is None:
        return 0, 0, 0, 0, 0, 0.0, 0.0
    words = (
        dropout.seed & 0xFFFFFFFF, dropout.seed >> 32, dropout.threshold,
        dropout.first_head, dropout.first_entry,
    )  # fmt: skip
    # As signed numbers of 32 bits: larger ones would be of another type, and compile again.
    signed = (word - (word >> 31 << 32) for word in words)
    return *signed, dropout.rescale, 1.0 - dropout.p


def _delta_and_norms(
    value: torch.Tensor, grad_out: torch.Tensor, out: torch.Tensor, *, with_norms: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What both backward kernels read: delta (b * h * n,), rowsum(grad_out * out); and norms
    (2 * b * hk,), the largest squared norm of a row of grad_out and of value for each key head,
    which are set only ``with_norms``. All fp32."""
    from quorum_attention.kernels.native.kernels_triton import delta_kernel

    batch, key_heads, _, value_dim = value.shape
    heads, n_queries = out.shape[1:3]
    n_delta, key_lanes = batch * heads * n_queries, batch * key_heads
    # One allocation for both.
    work = torch.empty(n_delta + 2 * key_lanes, dtype=torch.float32, device=value.device)
    delta, norms = work[:n_delta], work[n_delta:]
    block_dv = padded(value_dim)
    block = max(16, 4096 // block_dv)
    if with_norms:
        norms.zero_()
        launch_norms(value, norms[key_lanes:], key_heads)
    if n_delta:
        delta_kernel[(ceil_div(n_queries, block) * batch * heads,)](
            grad_out, out, delta, norms, heads, heads // key_heads, n_queries,
            *_strides(grad_out, out), value_dim, block_dv, block, with_norms,
        )  # fmt: skip
    return delta, norms


def _descriptors(block: list[int], *tensors: torch.Tensor) -> tuple[Any, ...] | None:
    """Descriptors of tensors, by blocks; None if the copy engine cannot read one of them."""
    for t in tensors:
        steps = [t.data_ptr(), *(s * t.element_size() for s in t.stride()[:3])]
        if 0 in (*t.shape, *t.stride()[:3]) or any(step % 16 for step in steps):
            return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return tuple(TensorDescriptor(t, list(t.shape), list(t.stride()), block) for t in tensors)


def _broadcast(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its strides, 0 in dimensions of size 1."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return tuple(0 if size == 1 else stride for stride, size in pairs)


def _strides(*tensors: torch.Tensor) -> list[tuple[int, ...]]:
    """By batch entry, head and row, of each."""
    return [tensor.stride()[:3] for tensor in tensors]


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as kernels can read it: its last dimension contiguous, rows not too far apart;
    copied if needed."""
    contiguous = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    return tensor if contiguous and tensor.stride(2) <= _LARGEST_STRIDE else tensor.contiguous()
