"""``attention`` as a function of autograd's. The work is done in ``passes``.

Everything that the backward reads is saved as tensors: inputs, mask, results, and
tensors that the kernel captures. So torch itself reports one that has been written to
since, and hooks on saved tensors see all of them. Numbers that users' functions read
are recorded beside them (kernels/masked/read_values.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from quorum_attention.call.backward_inputs import BackwardInputs
from quorum_attention.call.request import Request
from quorum_attention.call.split_output import joined, rest_of
from quorum_attention.call.transformations import is_recorded
from quorum_attention.call.validation import Tensors, as_tensor
from quorum_attention.kernels.masked.read_values import (
    functions_of,
    record_values,
    warn_of_changed_values,
)
from quorum_attention.kernels.operator_call import OutLse
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.torch_private import (
    has_transforms,
    restores_grad_and_autocast,
    uncompiled,
)
from quorum_attention.passes.run import run_backward, run_forward

_REFUSED = (
    "{} derivatives of quorum_attention.attention are not supported; "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) has them where it fits in memory"
)

ResultHook = Callable[[Callable[[], Any]], Any]
"""A function that gets one that computes (out, lse), and may return stored ones
instead."""

# Set by a checkpoint that stores results of recorded calls; None: results are computed.
result_hook: ContextVar[ResultHook | None] = ContextVar("result_hook", default=None)


def run_with_hook(
    compute: Callable[[], tuple[torch.Tensor, ...]],
) -> tuple[torch.Tensor, ...]:
    """Return (out, lse, ...) by ``compute``, or as a checkpoint stored them."""
    hook = result_hook.get()
    results: tuple[torch.Tensor, ...] = compute() if hook is None else hook(compute)
    return results


@dataclass(slots=True, eq=False)
class AutogradPass:
    """One pass of a checked call, under autograd.

    Attributes:
        wanted_grads: whether a backward computes the gradients of mask and of sinks;
            None: the pass is a forward.
        recorded_values: those that users' functions could read as results were
            computed; empty without such functions.
    """

    request: Request
    wanted_grads: tuple[bool, bool] | None = None
    recorded_values: list[torch.Tensor] = field(default_factory=list)

    def compute(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """Compute the results of the pass.

        Args:
            inputs: the fields of ``Tensors``; for a backward then out, lse, grad_out
                and grad_lse, and the rest of an output that is split.

        Returns:
            (out, lse), and the rest of an output that is split; or the gradients of
            query, key and value, then those of mask and sinks where they are wanted.
        """
        tensors = Tensors(*inputs[:6])
        request = self.request
        if tensors.seed is not None and request.dropout is not None:
            dropout = replace(request.dropout, seed=int(tensors.seed))
            request = replace(request, dropout=dropout)
        if self.wanted_grads is None and request.splits_out:
            return self._split_results(tensors, request)
        if self.wanted_grads is None:
            out, lse = self._results(tensors, request)
            # ``out`` gets no graph, so it can be given again. What is returned and
            # saved is another tensor over the same memory, with the same version
            # counter.
            if request.out is not None:
                out = out.detach()
            return out, lse
        out, lse, grad_out, grad_lse, *rest = inputs[6:]
        if rest:
            request = reserving_out(request, out.device, "the unrounded output")
            out = joined(out, rest[0], request.options.available_bytes)
        grad_mask, grad_sinks = self.wanted_grads
        backward_inputs = BackwardInputs(
            grad_out,
            out,
            lse,
            grad_mask=grad_mask,
            grad_sinks=grad_sinks,
            grad_lse=grad_lse,
        )
        return run_backward(tensors, request, backward_inputs)

    def _results(self, tensors: Tensors, request: Request) -> OutLse:
        """Compute (out, lse), or take those that a checkpoint stored, with the values
        that users' functions read for them."""
        functions = functions_of(request.options.kernel)

        def compute() -> tuple[torch.Tensor, ...]:
            results = run_forward(tensors, request)
            return (*results, record_values(functions)) if functions else results

        out, lse, *self.recorded_values = run_with_hook(compute)
        return out, lse

    def _split_results(
        self, tensors: Tensors, request: Request
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute (out, lse) of a call, and the rest of the output."""
        device = tensors.query.device
        purpose = "the two parts of the output"
        request_with_parts = reserving_out(request, device, purpose)
        wide_request = replace(
            request_with_parts,
            out=None,
            out_dtype=torch.float32,
        )
        unrounded, lse = self._results(tensors, wide_request)
        if request.out is None:
            out = unrounded.to(request.out_dtype)
        else:
            out = request.out.detach().copy_(unrounded)
        # The pass had the rest of the budget, and has freed all but its results.
        most_bytes = request_with_parts.options.available_bytes
        if most_bytes is not None:
            most_bytes -= unrounded.nbytes + lse.nbytes
        return out, lse, rest_of(unrounded, out, most_bytes)


def reserving_out(request: Request, home: torch.device, purpose: str) -> Request:
    """Reserve the bytes of an output in fp32, or of its two parts, in the budget of a
    call that is computed where its tensors are."""
    if home != request.options.device:
        return request
    shape = request.shape
    n_rows = shape.lanes * shape.n_queries
    out_bytes = n_rows * shape.value_dim * torch.float32.itemsize
    return request.reserving(out_bytes, purpose)


class Attention(torch.autograd.Function):
    """An ``AutogradPass`` of tensors.

    The backward is such a pass too, so that ``torch.vmap`` can map it, and that a
    second derivative meets a clear error.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Do as torch's method, which first inspects the signature of ``forward``: 0.1
        ms."""
        if has_transforms():
            return _apply_transformed(cls, *args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]

    @staticmethod
    def forward(*args: Any) -> tuple[torch.Tensor, ...]:
        """Compute the results of the pass, which is the last argument."""
        *inputs, autograd_pass = args
        results: tuple[torch.Tensor, ...] = autograd_pass.compute(*inputs)
        return results

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]
    ) -> None:
        """Save what the backward reads."""
        *tensors, ctx.autograd_pass = inputs
        ctx.set_materialize_grads(False)
        if ctx.autograd_pass.wanted_grads is not None:
            return
        kernel = ctx.autograd_pass.request.options.kernel
        captured = [] if kernel == "auto" else get_kernel(kernel).captured()
        # Tensors of inference mode cannot be saved.
        savable = [tensor for tensor in captured if not tensor.is_inference()]
        recorded_values = ctx.autograd_pass.recorded_values
        ctx.save_for_backward(*tensors, *output, *savable, *recorded_values)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> Any:
        """Compute the gradients that are needed."""
        needed = ctx.needs_input_grad
        forward_pass = ctx.autograd_pass
        if forward_pass.wanted_grads is not None:
            refuse_second()
        grad_out, grad_lse, *_ = upstream
        if grad_out is None and grad_lse is None:
            return (None,) * len(needed)
        # To unpack saved tensors twice is an error under a checkpoint.
        saved_tensors = ctx.saved_tensors
        functions = functions_of(forward_pass.request.options.kernel)
        if functions:
            warn_of_changed_values(functions, saved_tensors[-1])
        saved = saved_tensors[:8]
        out = saved[6]
        inputs = (*saved, grad_or_zeros(out, grad_out), grad_lse)
        if forward_pass.request.splits_out:
            inputs = (*inputs, saved_tensors[8])
        backward_pass = AutogradPass(forward_pass.request, needed[3:5])
        if is_recorded(*inputs):
            grads = Attention.apply(*inputs, backward_pass)
        else:
            grads = backward_pass.compute(*inputs)
        return (*by_input(grads, *needed[3:5]), None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Refuse forward-mode."""
        refuse_forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        """Compute a call for each entry, as torch maps its own fused kernels."""
        if info.batch_size == 0:
            raise NotImplementedError("torch.vmap cannot map attention over no entries")
        entries_of_args = [
            [arg] * info.batch_size if dim is None else arg.unbind(dim)
            for arg, dim in zip(args, in_dims, strict=True)
        ]
        results = [
            Attention.apply(*entry) for entry in zip(*entries_of_args, strict=True)
        ]
        results_by_name = zip(*results, strict=True)
        stacked = tuple([torch.stack(entries) for entries in results_by_name])
        out_dims = (0,) * len(stacked)
        return stacked, out_dims


@restores_grad_and_autocast
def _apply_transformed(function: type[Attention], *args: Any) -> Any:
    """Apply a function under transformations of torch.func."""
    return super(Attention, function).apply(*args)  # type: ignore[no-untyped-call]


def grad_or_zeros(out: torch.Tensor, grad_out: torch.Tensor | None) -> torch.Tensor:
    """Return the gradient of the output, zeros where there is none."""
    if grad_out is not None:
        return grad_out
    return torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape)


def by_input(
    grads: Sequence[torch.Tensor], has_mask_grad: bool, has_sinks_grad: bool
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of query, key, value, mask and sinks; None for those not
    computed.

    Args:
        grads: of query, key and value, then of mask and sinks where there are such.
    """
    grad_query, grad_key, grad_value, *learned = grads
    grad_mask = learned.pop(0) if has_mask_grad else None
    grad_sinks = learned.pop(0) if has_sinks_grad else None
    return grad_query, grad_key, grad_value, grad_mask, grad_sinks


def refuse_second(*args: Any) -> Any:
    """Raise the error of second derivatives."""
    raise NotImplementedError(_REFUSED.format("second"))


def refuse_forward_mode() -> None:
    """Raise the error of forward-mode derivatives."""
    raise NotImplementedError(_REFUSED.format("forward-mode"))


def attend(tensors: Tensors, request: Request, out: torch.Tensor | None) -> OutLse:
    """Compute (out, lse) of a checked call, under autograd if it is recorded.

    Args:
        out: the tensor for the result as its caller gave it, which is returned if
            nothing is recorded.
    """
    # ``out`` is passed inside the request: as an argument, autograd would take it for
    # an input, and the result for a view of that input.
    if request.records:
        result, lse, *_ = Attention.apply(*tensors, AutogradPass(request))
        out = None
    else:
        result, lse = run_forward(tensors, request)
    lse = request.drop_heads(lse)
    if out is None:
        return request.drop_heads(result), lse
    return as_tensor(out, "out", for_writing=True), lse
