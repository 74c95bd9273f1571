"""The public functions: ``attention``, with its log-sum-exp, its backward, and by one
kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.overrides import handle_torch_function

from quorum_attention.call.backward_inputs import BackwardInputs, check_backward_inputs
from quorum_attention.call.options import Arguments, CallKeywords, call_options
from quorum_attention.call.validation import as_tensor
from quorum_attention.dispatch import attention_results, checked_request
from quorum_attention.kernels.native import NativeKernel
from quorum_attention.kernels.torch_private import (
    has_own_torch_function,
    refuse_traces,
    restores_grad_and_autocast,
    uncompiled,
)
from quorum_attention.keywords import helps_with_names
from quorum_attention.mask import Mask
from quorum_attention.passes.run import run_backward

if TYPE_CHECKING:
    from typing_extensions import Unpack


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    dropout_seed: int | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **options: Unpack[CallKeywords],
) -> torch.Tensor:
    """Scaled dot-product attention inside a memory budget, exact, with gradients.

    The arguments up to ``enable_gqa`` are those of torch's
    ``scaled_dot_product_attention``. A call that fits the budget is one kernel call. A
    larger call is cut into head groups. If that is not enough, cyclic quorum sets cut
    its tokens into independent tasks. The results of tasks merge exactly.

    Args:
        query: (..., heads, n_queries, head_dim); fp16, bf16, fp32 or fp64; on a CUDA
            device, in host memory, or memory-mapped. NumPy arrays and np.memmap work
            too. The dimension of heads may be missing: then it is missing in the result
            too.
        key: (..., kv_heads, n_keys, head_dim), dtype and device of the query.
        value: (..., kv_heads, n_keys, value_dim). Batch dimensions broadcast, and so
            does one head, as in torch. Under ``torch.autocast`` all three are cast to
            its dtype; gradients have the inputs' dtypes.
        attn_mask: boolean (True keeps) or additive, broadcastable to (..., heads,
            n_queries, n_keys), on any device. It is never expanded as a whole. An
            additive mask gets a gradient in its dtype and on its device
            (docs/gradients.md). Or give a ``quorum_attention.Mask`` for windows,
            documents, padding, soft caps, sinks and more, without a tensor of n_queries
            x n_keys (docs/masks.md).
        dropout_p: probability, from 0 to 1, that an attention weight is dropped; the
            others are divided by ``1 - dropout_p``. As in torch's function, a module's
            training mode does not matter. Only the seed and positions decide which
            weights are dropped. So the same pairs are dropped however the call is cut,
            and in the backward (docs/dropout.md).
        is_causal: query i sees keys j <= i (top-left, as in torch); may be combined
            with a mask.
        scale: factor of the scores; None is head_dim ** -0.5.
        enable_gqa: allow fewer key/value heads than query heads; they are never
            expanded.
        dropout_seed: from 0 to 2**63 - 1; the same seed drops the same pairs. None
            draws one from torch's CPU generator in each call with dropout; the report
            has it.
        out: preallocated result (..., heads, n_queries, value_dim) of any dtype, on the
            device, in host memory or mapped. It must not overlap itself, the inputs,
            or tensors that the mask or a function reads, and must be writable (this
            cannot be checked for ``torch.frombuffer`` of bytes). If gradients are
            recorded, the call returns another tensor over the same memory, which
            carries the graph. ``out`` can be given to another call after the backward.
            If it is given earlier, the backward raises torch's error about a changed
            tensor.
        out_dtype: dtype of the result; None is the query's. Merging is always in fp32
            (fp64 for fp64 inputs). With torch.float32 the merged result is not rounded
            again.

    Keyword Args:
        budget: device memory that the call may take beyond what is allocated when it
            begins: bytes, or text such as "2GiB". None is nine tenths of the free
            memory. On a CPU this is host memory. Forward and backward each have the
            whole budget. So has each of several devices; a list gives each device its
            own.
        plan: from ``quorum_attention.plan``. The forward runs this plan. The backward
            takes its kernel, and its levels unless rows stream by.
        depth: levels of cutting; 0 is the uncut call. If a depth is given, a call that
            runs out of memory raises, and is not recovered.
        kernel: name of a registered kernel (``quorum_attention.kernels()``) or an
            InnerKernel; "auto" takes the first that can run the call (docs/kernels.md).
        accumulator: where unfinished rows are kept between tasks: "device", "host" or
            "auto".
        devices: where to compute. None is the inputs' device, or for host inputs the
            current CUDA device if there is one. A list such as ["cuda:0", "cuda:1"]
            shares the call among these devices; "all" shares it among all CUDA devices
            of this machine. The first such call starts a worker process for each device
            (docs/devices.md). A ``quorum_attention.devices.Pool`` may be given too.
        progress: True for a progress bar (plain lines in files), or a callable
            (done, total, label).
        report: a ``Report``, to be filled with what the call did.
        exact_delta: True for 16-bit inputs whose attention is saturated. The backward
            then reads the output before it was rounded to 16 bits. Until the backward,
            that takes two more bytes for each number of the output (docs/gradients.md).
            None means True if ``out_dtype`` is torch.float32 and a kernel supports it.

    Returns:
        (..., heads, n_queries, value_dim), on the query's device. A row without a key
        is 0. (If the query of such a row has NaN or infinity, kernel "dense" gives NaN,
        as torch does.) In memory the result has the query's order of dimensions,
        without gaps. So if the query is ``x.view(batch, tokens, heads,
        head_dim).transpose(1, 2)``, then ``transpose(1, 2).view(batch, tokens, -1)`` of
        the result is no copy. (docs/limits.md has two exceptions.) Subclasses of
        tensors work as in torch's functions, by ``__torch_function__``.

    Raises:
        ValueError, TypeError: an argument is wrong. They are raised before anything is
            allocated.
        NotImplementedError: no kernel supports the call; or the call is made under
            torch.jit.trace, in forward mode or for a second derivative. The message
            says what works instead.
        BudgetError: the budget is too small; names the smallest that works.
        OutOfMemoryError: memory ran out, and no finer cut is possible.

    Examples:
        >>> q, k, v = (torch.randn(1, 8, 2048, 64, requires_grad=True) for _ in "qkv")
        >>> out = qa.attention(q, k, v, is_causal=True, budget="20MiB")
        >>> out.sum().backward()
        >>> sdpa = torch.nn.functional.scaled_dot_product_attention
        >>> torch.allclose(out, sdpa(q, k, v, is_causal=True), atol=1e-4)
        True
    """
    if has_own_torch_function(query, key, value):
        return handle_torch_function(
            attention,
            (query, key, value),
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            dropout_seed=dropout_seed,
            out=out,
            out_dtype=out_dtype,
            **options,
        )
    arguments = Arguments(
        attn_mask,
        dropout_p,
        dropout_seed,
        is_causal,
        scale,
        enable_gqa,
        out,
        out_dtype,
        call_options(attention, options),
    )
    result, _ = attention_results(query, key, value, arguments)
    return result


def attention_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    dropout_seed: int | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **options: Unpack[CallKeywords],
) -> tuple[torch.Tensor, torch.Tensor]:
    """``attention`` that also returns the log-sum-exp of every row's scores.

    Returns:
        (out, lse): lse (..., heads, n_queries), natural log, fp32 (fp64 for fp64
        inputs), -inf for rows without keys; on the query's device, or in host memory if
        the accumulators were there. Gradients flow through both.

    Examples:
        >>> q, k, v = (torch.randn(1, 2, 300, 16) for _ in range(3))
        >>> out, lse = qa.attention_with_lse(q, k, v)
        >>> lse.shape
        torch.Size([1, 2, 300])
    """
    if has_own_torch_function(query, key, value):
        return handle_torch_function(
            attention_with_lse,
            (query, key, value),
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            dropout_seed=dropout_seed,
            out=out,
            out_dtype=out_dtype,
            **options,
        )
    arguments = Arguments(
        attn_mask,
        dropout_p,
        dropout_seed,
        is_causal,
        scale,
        enable_gqa,
        out,
        out_dtype,
        call_options(attention_with_lse, options),
    )
    return attention_results(query, key, value, arguments)


@uncompiled
@restores_grad_and_autocast
def attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    attn_mask: torch.Tensor | Mask | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    grad_lse: torch.Tensor | None = None,
    grad_mask: torch.Tensor | bool = False,
    grad_sinks: bool = False,
    **options: Unpack[CallKeywords],
) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of ``attention``, without autograd.

    Args:
        grad_out: upstream gradient, shape of ``out``; fp16, bf16, fp32 or fp64.
        query, key, value, attn_mask, is_causal, scale, enable_gqa: as in the forward.
        out, lse: as ``attention_with_lse`` returned them.
        dropout_p, dropout_seed: those of the forward; with dropout the seed is
            required.
        grads: preallocated (grad_query, grad_key, grad_value), of one dtype, on the
            device, in host memory or mapped from files (for gradients larger than
            memory). They must not overlap each other or the inputs; see ``out`` of
            ``attention``.
        grad_lse: the upstream gradient of ``lse``, of its shape, or None.
        grad_mask: True also returns the gradient of the additive ``attn_mask``. If this
            is a tensor (of the mask's shape and any floating dtype), the gradient is
            written into it.
        grad_sinks: True also returns the gradient of a Mask's ``sinks``.

    Options and errors are those of ``attention``.

    Returns:
        (grad_query, grad_key, grad_value), or ``grads``; then grad_mask and grad_sinks,
        if asked for.

    Examples:
        >>> q, k, v, grad_out = (torch.randn(1, 2, 300, 16) for _ in range(4))
        >>> out, lse = qa.attention_with_lse(q, k, v, is_causal=True)
        >>> grads = qa.attention_backward(grad_out, q, k, v, out, lse, is_causal=True)
        >>> [tuple(grad.shape) for grad in grads]
        [(1, 2, 300, 16), (1, 2, 300, 16), (1, 2, 300, 16)]
    """
    arguments = Arguments(
        attn_mask,
        dropout_p,
        dropout_seed,
        is_causal,
        scale,
        enable_gqa,
        options=call_options(attention_backward, options),
    )
    originals = (
        as_tensor(query, "query"),
        as_tensor(key, "key"),
        as_tensor(value, "value"),
    )
    tensors, request = checked_request("attention_backward", *originals, arguments)
    backward_inputs = check_backward_inputs(
        tensors,
        request,
        BackwardInputs(
            grad_out,
            out,
            lse,
            grads,
            grad_mask,
            grad_sinks,
            grad_lse,
        ),
        originals,
    )
    results = run_backward(tensors, request, backward_inputs)
    if grads is not None:
        return results
    grads_of_originals = [
        grad.sum_to_size(original.shape).to(original.dtype)
        for grad, original in zip(results[:3], originals, strict=True)
    ]
    return (*grads_of_originals, *results[3:])


@uncompiled
@helps_with_names
def native_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    query_bits: torch.Tensor | None = None,
    key_bits: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    allow_tf32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``attention_with_lse`` by one call of the native kernel, on the device of
    the inputs.

    Args:
        query, key, value, is_causal, scale, out_dtype: as of ``attention``; grouped
            heads too.
        query_bits, key_bits: (n,), (m,) int64 group bits, which are copied. A pair is
            kept if the two have no bit in common (paper, section 3.3). Give both or
            neither.
        allow_tf32: for fp32 inputs: products are faster and less exact.

    Raises:
        NotImplementedError: the kernel cannot run the call; says why.
        TypeError, ValueError: an argument that is wrong or does not fit the others, by
            name.
    """
    refuse_traces("native_attention", query, key, value)
    kernel = NativeKernel(allow_tf32=allow_tf32)
    if (query_bits is None) != (key_bits is None):
        raise ValueError("query_bits and key_bits go together: one is missing")
    if query_bits is not None and key_bits is not None:
        _check_bits(query_bits, "query_bits", query)
        _check_bits(key_bits, "key_bits", key)
        kernel = kernel.by_bits([query_bits, key_bits], is_causal)
    return attention_with_lse(
        query,
        key,
        value,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=True,
        out_dtype=out_dtype,
        kernel=kernel,
        devices=query.device,
        depth=0,
    )


def _check_bits(bits: torch.Tensor, name: str, tensor: torch.Tensor) -> None:
    """Check that there are 64 group bits for each row of ``tensor``, (..., n, d)."""
    shape = tensor.shape[-2:-1]
    if bits.shape != shape or bits.dtype != torch.int64:
        raise ValueError(f"{name} must be int64 of shape {tuple(shape)}")


__all__ = ["attention", "attention_backward", "attention_with_lse", "native_attention"]
