"""Launches the Triton kernels for a task's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.native.config import Axis, padded
from quorum_attention.kernels.native.pieces import Window
from quorum_attention.kernels.native.runs import Runs
from quorum_attention.kernels.native.sums import launch_sums
from quorum_attention.kernels.operator_call import Call, Saved, Three, four_dims
from quorum_attention.kernels.scaling import usual_shift
from quorum_attention.kernels.tensors import broadcast_strides

# In fp16, P is computed times a power of two. A forward's largest P is 1: 2**8 P does
# not overflow, and P stays normal down to 2**-22.
_FORWARD_EXPONENT = 8
# The most elements from row to row: offsets inside a tile of 128 rows then fit 32 bits.
_LARGEST_STRIDE = 2**24 - 2**9
# The most columns of a tile whose ragged parts are pipelined.
_WIDEST_RAGGED = 128
# The tensors that a kernel walks, by the side whose rows stay: key and value, or query
# and grad_out.
_WALKED: dict[Axis, tuple[int, int]] = {"query": (1, 2), "key": (0, 3)}


class KernelConstants(NamedTuple):
    """The constants that a kernel is compiled for, ``K`` in Triton.

    Attributes:
        HEAD_DIM, VALUE_DIM: columns of queries and keys, and of values.
        PADDED: columns of a tile.
        BLOCK_M, BLOCK_N: queries and keys of a tile.
        PLAIN: scores are products times a factor above 0.
        SOFTCAP, ALIBI, BIAS, WINDOW, BITS: what there is of these; BITS are mask bits.
        DESCRIBED: rows are read by descriptors.
        PRECISION: of products of fp32 inputs.
        DROPOUT: 0: none; 2: runs begin at multiples of four keys (``dropped_pairs``);
            1: anywhere.
        RAGGED: pipeline stages of ragged parts.
        P_EXPONENT: a forward's P is computed times 2**P_EXPONENT.
        SCALE_DS: a backward's dS is computed times a power of two.
        ADD: results are merged into the targets, or gradients added, not written there.
    """

    HEAD_DIM: int
    VALUE_DIM: int
    PADDED: int
    BLOCK_M: int
    BLOCK_N: int
    PLAIN: bool
    SOFTCAP: bool
    ALIBI: bool
    BIAS: bool
    WINDOW: bool
    BITS: bool
    DESCRIBED: bool
    PRECISION: str
    DROPOUT: int
    RAGGED: int
    P_EXPONENT: int = 0
    SCALE_DS: bool = False
    ADD: bool = False


@dataclass(frozen=True, slots=True)
class NativeLaunch:
    """A launch for a task, or for a whole call.

    Attributes:
        call: the inputs of all, with what a launch reads of a call.
        tables: the runs, by blocks of queries; for a backward also by blocks of keys.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 is none.
        slopes: (h,) fp32 on the device, ALiBi: ``slope * |i - j|`` is subtracted; or
            None.
        window: a query at position i sees keys from ``i - window[0]`` to ``i +
            window[1]``, either may be below 0; None is no window.
        bias_at: local positions of the additive mask's first row and column.
        mask_bits: (b or 1, h or 1, blocks, 128, 4) int32 on the device, or None: which
            pairs of partial blocks are kept (``kept_by_bits``), where the table's last
            column says. Not together with a window, slopes or dropout.
        tf32: whether products of fp32 inputs use TF32 on tensor cores.
        n_keys: keys of a row in the whole call, which say how small its probabilities
            are.
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
        from quorum_attention.kernels.native.forward_triton import forward_kernel

        (runs,) = self.tables
        query, key, value = map(_as_kernel_readable, self.call.inputs)
        exponent = _FORWARD_EXPONENT if query.dtype == torch.float16 else 0
        with torch.cuda.device_of(query):
            self._launch(
                forward_kernel,
                runs,
                (query, key, value, out, lse),
                P_EXPONENT=exponent,
                ADD=resume,
            )

    def backward(self, saved: Saved, grads: Three, *, add: bool) -> None:
        """Add the gradients of the runs to ``grads``, or with ``add`` False write them
        there.

        Args:
            saved: with the global lse, natural log, -inf in rows without keys.
            grads: the gradients of query, key and value, any floating dtype.
        """
        from quorum_attention.kernels.native.backward_triton import (
            key_kernel,
            query_kernel,
        )

        query, key, value = map(_as_kernel_readable, self.call.inputs)
        grad_out = _as_kernel_readable(saved.grad_out)
        grad_query, *key_grads = grads
        by_query, by_key = self.tables
        launches = (
            (query_kernel, by_query, [grad_query]),
            (key_kernel, by_key, key_grads),
        )
        scales_ds = query.dtype == torch.float16
        exponent = usual_shift(self.n_keys or key.shape[2]) if scales_ds else 0
        with torch.cuda.device_of(query):
            out = _as_kernel_readable(saved.out)
            delta, norms = _delta_and_norms(value, grad_out, out, with_norms=scales_ds)
            for kernel, runs, targets in launches:
                self._launch(
                    kernel,
                    runs,
                    (query, key, value, grad_out, saved.lse, *targets),
                    delta,
                    norms,
                    key.shape[0] * key.shape[1],
                    # No compile-time constants: kernels would be compiled again for
                    # other lengths.
                    float(exponent),
                    2.0**-exponent,
                    SCALE_DS=scales_ds,
                    ADD=add,
                )

    def _launch(
        self,
        kernel: Any,
        runs: Runs,
        tensors: tuple[torch.Tensor, ...],
        *scalars: Any,
        **constants: Any,
    ) -> None:
        """Launch a Triton kernel for the blocks of a table.

        Args:
            tensors: the first arguments of the kernel, before the strides of them all.
            scalars: its next arguments.
            constants: ``KernelConstants`` that only this launch knows.
        """
        batch, heads, n_queries, _ = self.call.query.shape
        _, key_heads, n_keys, _ = self.call.key.shape
        programs_of_a_block = batch * (
            heads if runs.tiling.axis == "query" else key_heads
        )
        n_programs = runs.n_blocks * programs_of_a_block
        if n_programs == 0:
            return
        config = runs.tiling.config
        described = self._described(runs, tensors)
        kernel[(n_programs,)](
            *(described or tensors),
            *(tensor.stride()[:3] for tensor in tensors),
            *scalars,
            runs.starts,
            runs.entries,
            *self._optional_tensors,
            heads,
            heads // key_heads,
            n_queries,
            n_keys,
            runs.n_blocks,
            *self._score_arguments,
            K=self._constants(runs, DESCRIBED=described is not None, **constants),
            num_warps=config.warps,
            num_stages=config.stages,
        )

    @property
    def _tile_width(self) -> int:
        """Columns of a tile: the same for queries and values.

        With tiles of 64 and 32 columns the compiled forward read outside its memory on
        an H200 (docs/native.md).
        """
        head_dim = self.call.query.shape[-1]
        value_dim = self.call.value.shape[-1]
        return max(padded(head_dim), padded(value_dim))

    def _described(
        self, runs: Runs, tensors: tuple[torch.Tensor, ...]
    ) -> list[Any] | None:
        """The tensors of a launch, with descriptors of the two that its kernel walks;
        None where it reads them by pointers."""
        walked = _WALKED[runs.tiling.axis]
        has_descriptors = runs.tiling.config.descriptors
        if not has_descriptors or not all(_is_describable(tensors[i]) for i in walked):
            return None
        from triton.tools.tensor_descriptor import TensorDescriptor

        block = [1, 1, runs.tiling.step, self._tile_width]
        described: list[Any] = [*tensors]
        for index in walked:
            tensor = tensors[index]
            described[index] = TensorDescriptor(
                tensor, list(tensor.shape), list(tensor.stride()), block
            )
        return described

    def _constants(self, runs: Runs, **constants: Any) -> KernelConstants:
        """The constants that the kernel of a table is compiled for.

        Args:
            constants: those that only the launch knows.
        """
        call = self.call
        config = runs.tiling.config
        has_softcap = self.softcap > 0
        has_slopes = self.slopes is not None
        has_bias = call.bias is not None
        changes_scores = has_softcap or has_slopes or has_bias
        return KernelConstants(
            HEAD_DIM=call.query.shape[-1],
            VALUE_DIM=call.value.shape[-1],
            PADDED=self._tile_width,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            # Scaling after the maximum is cheaper, but right only for positive factors.
            PLAIN=not changes_scores and call.scale > 0,
            SOFTCAP=has_softcap,
            ALIBI=has_slopes,
            BIAS=has_bias,
            WINDOW=self.window is not None,
            BITS=self.mask_bits is not None,
            PRECISION="tf32" if self.tf32 else "ieee",
            DROPOUT=self._dropout_way(runs),
            RAGGED=self._ragged_stages(runs),
            **constants,
        )

    def _dropout_way(self, runs: Runs) -> int:
        """``KernelConstants.DROPOUT``."""
        if self.call.dropout is None:
            return 0
        return 2 if runs.aligned else 1

    def _ragged_stages(self, runs: Runs) -> int:
        """``KernelConstants.RAGGED``.

        Ragged parts are pipelined under a window, where they are much of all, and where
        it has been measured (docs/native.md).
        """
        if self.window is None or self._tile_width > _WIDEST_RAGGED:
            return 1
        if self.call.bias is not None or self.call.dropout is not None:
            return 1
        stages = runs.tiling.config.stages
        is_backward = len(self.tables) > 1
        return min(2, stages) if is_backward else stages

    @property
    def _optional_tensors(self) -> tuple[torch.Tensor, ...]:
        """Bias, slopes and mask bits; in the place of a missing one any tensor."""
        query = self.call.query
        return (
            query if self.call.bias is None else self.call.bias,
            query if self.slopes is None else self.slopes,
            query if self.mask_bits is None else self.mask_bits,
        )

    @property
    def _score_arguments(self) -> tuple[Any, ...]:
        """The arguments of a kernel from ``seed_low`` to ``window_right``.

        They are the dropout; the strides of the mask, 0 where it broadcasts, and its
        place; the factor of the scores and the soft cap; the bounds of the window, or
        the strides of the mask bits by batch entry and head.
        """
        call = self.call
        bias_strides: tuple[int, ...] = (0, 0, 0, 0)
        if call.bias is not None:
            bias_strides = broadcast_strides(four_dims(call.bias))
        bounds: tuple[int, ...] = self.window or (0, 0)
        if self.mask_bits is not None:
            bounds = broadcast_strides(self.mask_bits)[:2]
        return (
            *_dropout_words(call.dropout),
            bias_strides,
            *self.bias_at,
            call.scale,
            self.softcap,
            *bounds,
        )


def _dropout_words(dropout: Dropout | None) -> tuple[int | float, ...]:
    """A dropout as kernels are given it, from ``seed_low`` to ``share``."""
    if dropout is None:
        return (0, 0, 0, 0, 0, 1.0, 1.0)
    return (
        _as_int32(dropout.seed & 0xFFFFFFFF),
        _as_int32(dropout.seed >> 32),
        _as_int32(dropout.threshold),
        _as_int32(dropout.first_head),
        _as_int32(dropout.first_entry),
        dropout.rescale,
        1.0 - dropout.p,
    )


def _as_int32(word: int) -> int:
    """A word of 32 bits as a signed number; a larger one is of another type, and
    compiles again."""
    return word - (word >> 31 << 32)


def _delta_and_norms(
    value: torch.Tensor, grad_out: torch.Tensor, out: torch.Tensor, *, with_norms: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the numbers that both backward kernels read, in fp32.

    Returns:
        delta: (b * h * n,), rowsum(grad_out * out).
        norms: (2 * b * hk,), the largest squared norm of a row of grad_out and of value
            for each key head; set only ``with_norms``.
    """
    batch, key_heads = value.shape[:2]
    heads, n_queries = out.shape[1:3]
    n_delta = batch * heads * n_queries
    key_lanes = batch * key_heads
    # One allocation for both.
    numbers = torch.empty(
        n_delta + 2 * key_lanes, dtype=torch.float32, device=value.device
    )
    delta = numbers[:n_delta]
    norms = numbers[n_delta:]
    if with_norms:
        norms.zero_()
        launch_sums(value, norms=norms[key_lanes:])
    launch_sums(
        grad_out,
        factors=out,
        products=delta,
        norms=norms if with_norms else None,
        group=heads // key_heads,
    )
    return delta, norms


def _is_describable(tensor: torch.Tensor) -> bool:
    """Whether nothing is empty or broadcast, and every row begins at a multiple of 16
    bytes."""
    strides = tensor.stride()[:3]
    if 0 in tensor.shape or 0 in strides:
        return False
    byte_strides = [stride * tensor.element_size() for stride in strides]
    return all(step % 16 == 0 for step in (tensor.data_ptr(), *byte_strides))


def _as_kernel_readable(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, copied unless its last dimension is contiguous and rows are not too
    far apart."""
    is_contiguous = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    if is_contiguous and tensor.stride(2) <= _LARGEST_STRIDE:
        return tensor
    return tensor.contiguous()
