"""``attention()``: scaled dot-product attention inside a memory budget, and its backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quorum_attention.call.gradients import BackwardInputs, check_backward_inputs
from quorum_attention.call.options import Arguments, CallOptions, RunOptions
from quorum_attention.call.validation import as_tensor
from quorum_attention.direct import checked_request
from quorum_attention.kernels.torch_private import refuse_traces, uncompiled
from quorum_attention.mask import Mask
from quorum_attention.operator import attention_results
from quorum_attention.passes import run_backward

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
    **options: Unpack[RunOptions],
) -> torch.Tensor:
    """Scaled dot-product attention inside a memory budget, exact, with gradients.

    The arguments up to ``enable_gqa`` are those of torch's ``scaled_dot_product_attention``. A call
    that fits the budget runs as one kernel call; one that does not is cut into head groups and, by
    cyclic quorum sets, into independent subsequence tasks whose statistics are merged exactly.

    Args:
        query: (..., heads, n_queries, head_dim); fp16, bf16, fp32 or fp64; on a CUDA device, in
            host memory, or memory-mapped. A NumPy array (np.memmap too) works as well. It may have
            no heads, (n_queries, head_dim): then the result has none either.
        key: (..., kv_heads, n_keys, head_dim), dtype and device of the query.
        value: (..., kv_heads, n_keys, value_dim). Batch dimensions broadcast, and so does one
            head, as in torch. Under ``torch.autocast`` all three are cast to its dtype (of their
            own device), and kernels compute in that; gradients have the inputs' dtypes.
        attn_mask: boolean (True keeps) or additive, broadcastable to (..., heads, n_queries,
            n_keys), on any device; never expanded beyond one rectangle of the decomposition. An
            additive one gets its gradient, where it lies and in its dtype, summed over what it
            broadcasts over (docs/gradients.md). Or a ``quorum_attention.Mask``: causal with an
            offset, window, chunks, documents, padding, soft cap, sinks and more, of which nothing
            of n_queries x n_keys is made (docs/masks.md).
        dropout_p: chance of each probability to be dropped, after the softmax, from 0 to 1; the
            others are divided by ``1 - dropout_p``. As in torch's function, whether a module trains
            makes no difference. Which are dropped follows from the seed and from the positions of
            query and key alone: however the call is cut, wherever it runs, in the backward too
            (docs/dropout.md). "auto" takes a kernel that has it.
        is_causal: query i sees keys j <= i (top-left, as in torch); may be combined with a mask.
        scale: of the scores; None is head_dim ** -0.5.
        enable_gqa: allow fewer key/value heads than query heads; they are never expanded.
        dropout_seed: from 0 to 2**63 - 1; the same seed drops the same pairs. None: drawn from
            torch's generator of the CPU in each call that has dropout; the report says it.
        out: preallocated result (..., heads, n_queries, value_dim) of any dtype and residency. It
            may be one of several interleaved views of a tensor, but must share no memory with the
            inputs nor overlap itself. A read-only array or memory map is refused; a tensor over an
            object that must not change (``torch.frombuffer`` of bytes) cannot be recognised. Where
            gradients are recorded, the call returns another tensor over the same memory. That one
            carries the graph; ``out`` does not, and can be given again once the backward is done
            (earlier, the backward raises torch's error about a changed tensor).
        out_dtype: of the result, None for the query's. Merging is in fp32 (fp64 for fp64 inputs)
            in any case; torch.float32 leaves out the last rounding.

    Options:
        budget: device bytes the call may take beyond what is allocated when it begins, as a
            number or "2GiB"; None: what is free now, less a tenth. On the CPU this is host
            memory. Holds for the forward and, separately, for the backward. Where several devices
            compute it holds for each; a list has one for each.
        plan: from ``quorum_attention.plan``; pins the forward, and kernel and levels after it.
        depth: levels of decomposition; 0 is the monolithic call. A number pins the depth: an
            out-of-memory failure is then reported, not recovered from.
        kernel: name of a registered inner kernel (``quorum_attention.kernels()``) or an
            InnerKernel; "auto" takes the fastest that can run the call, in this budget.
        accumulator: where unfinished rows are kept between tasks: "device", "host" or "auto".
        devices: where to compute; None: the inputs' device, or for host inputs the current CUDA
            device if there is one. Several, ["cuda:0", "cuda:1"], or "all" CUDA devices of this
            machine, share the call: a worker process for each, started by the first such call and
            ended with the program (docs/devices.md). Or a ``pool.Pool`` of one's own.
        progress: True for a progress bar (plain lines where none can be drawn), or a callable
            (done, total, label).
        report: a ``Report`` to fill with what happened.

    Returns:
        (..., heads, n_queries, value_dim), on the query's device; 0 in rows with no key to see
        (with NaN or infinity in the query, kernel "dense" gives NaN there, as torch does).

    Raises:
        ValueError, TypeError: arguments that do not fit; before anything is allocated.
        NotImplementedError: no kernel here supports the call; the message says what would. Also
            under torch.jit.trace, and for forward-mode and second derivatives. torch.vmap and
            torch.func.grad work. torch.compile, torch.export, make_fx and fake tensors see one
            operator (docs/programs.md); with ``out``, arrays or objects torch.compile breaks its
            graph.
        BudgetError: the budget is too small; names the smallest that would do.
        OutOfMemoryError: memory ran out and nothing finer was left to try.

    Examples:
        >>> q, k, v = (torch.randn(1, 8, 2048, 64, requires_grad=True) for _ in range(3))
        >>> out = qa.attention(q, k, v, is_causal=True, budget="20MiB")
        >>> out.sum().backward()
        >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torch.allclose(out, expected, atol=1e-4)
        True
    """
    call = Arguments(
        attn_mask, dropout_p, dropout_seed, is_causal, scale, enable_gqa, out, out_dtype,
        CallOptions(**options),
    )  # fmt: skip
    return attention_results(query, key, value, call)[0]


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
    **options: Unpack[RunOptions],
) -> tuple[torch.Tensor, torch.Tensor]:
    """``attention`` that also returns the log-sum-exp of every row's scores.

    Returns:
        (out, lse): lse (..., heads, n_queries), natural log, fp32 (fp64 for fp64 inputs), -inf
        for rows without keys; on the query's device, or in host memory where the accumulators
        were there. Gradients flow through both.

    Examples:
        >>> q, k, v = (torch.randn(1, 2, 300, 16) for _ in range(3))
        >>> out, lse = qa.attention_with_lse(q, k, v)
        >>> lse.shape
        torch.Size([1, 2, 300])
    """
    call = Arguments(
        attn_mask, dropout_p, dropout_seed, is_causal, scale, enable_gqa, out, out_dtype,
        CallOptions(**options),
    )  # fmt: skip
    return attention_results(query, key, value, call)


@uncompiled
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
    **options: Unpack[RunOptions],
) -> tuple[torch.Tensor, ...]:
    """The gradients of ``attention``, without autograd, into preallocated tensors if wished.

    Args:
        grad_out: upstream gradient, shape of ``out``; fp16, bf16, fp32 or fp64.
        query, key, value, attn_mask, is_causal, scale, enable_gqa: as in the forward.
        out, lse: as ``attention_with_lse`` returned them.
        dropout_p, dropout_seed: those of the forward; with dropout the seed has to be given.
        grads: (grad_query, grad_key, grad_value) to fill, one dtype, any residency (so that
            gradients larger than memory can go to memory-mapped files). They share no memory with
            each other, nor with what is read; see ``out`` of ``attention``.
        grad_lse: the upstream gradient of ``lse``, of its shape, or None.
        grad_mask: True: return the gradient of the additive ``attn_mask`` too. A tensor of its
            shape, of any floating dtype, is filled with it (and shares no memory with others).
        grad_sinks: True: return the gradient of a Mask's ``sinks`` too.

    Options, and errors, as of ``attention``.

    Returns:
        (grad_query, grad_key, grad_value), or ``grads``; then grad_mask and grad_sinks, where asked
        for.

    Examples:
        >>> q, k, v, grad_out = (torch.randn(1, 2, 300, 16) for _ in range(4))
        >>> out, lse = qa.attention_with_lse(q, k, v, is_causal=True)
        >>> grads = qa.attention_backward(grad_out, q, k, v, out, lse, is_causal=True)
        >>> [tuple(grad.shape) for grad in grads]
        [(1, 2, 300, 16), (1, 2, 300, 16), (1, 2, 300, 16)]
    """
    refuse_traces("attention_backward", query, key, value)
    call = Arguments(
        attn_mask, dropout_p, dropout_seed, is_causal, scale, enable_gqa,
        written=CallOptions(**options),
    )  # fmt: skip
    originals = as_tensor(query, "query"), as_tensor(key, "key"), as_tensor(value, "value")
    tensors, request = checked_request("attention_backward", *originals, call)
    given = BackwardInputs(grad_out, out, lse, grads, grad_mask, grad_sinks, grad_lse)
    given = check_backward_inputs(tensors, request, given, originals)
    made = run_backward(tensors, request, given)
    if grads is not None:
        return made
    three = (g.sum_to_size(o.shape).to(o.dtype) for g, o in zip(made, originals, strict=False))
    return (*three, *made[3:])


__all__ = ["attention", "attention_backward", "attention_with_lse"]
