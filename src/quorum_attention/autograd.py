"""``attention`` as a function of autograd's. The work is done in ``passes``.

All that the backward reads is saved as tensors: inputs, mask, results, and those that the kernel
captures. So torch itself reports one that has been written to since, and hooks on saved tensors see
all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from quorum_attention.call.backward_inputs import BackwardInputs
from quorum_attention.call.request import Request
from quorum_attention.call.transformations import is_recorded
from quorum_attention.call.validation import Tensors, as_tensor
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.torch_private import (
    has_transforms,
    restores_grad_and_autocast,
    uncompiled,
    unwrap_if_dead,
)
from quorum_attention.passes.run import run_backward, run_forward

_REFUSED = (
    "{} derivatives of quorum_attention.attention are not supported; "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) has them where it fits in memory"
)

# Who is asked for (out, lse) of a recorded call, with what computes them: a checkpoint that keeps
# them, or None.
result_hook: ContextVar[Callable[[Callable[[], Any]], Any] | None] = ContextVar(
    "RESULTS", default=None
)


def run_with_hook(compute: Callable[[], Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by ``compute``, or as a checkpoint kept them."""
    results = result_hook.get()
    out, lse = compute() if results is None else results(compute)
    return out, lse


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One pass of a checked call, under autograd.

    Attributes:
        learned: of a backward, whether the gradients of mask and sinks are wanted; None: it is a
            forward.
    """

    request: Request
    learned: tuple[bool, bool] | None = None

    def compute(self, *read: Any) -> tuple[torch.Tensor, ...]:
        """(out, lse) of ``Tensors``; or the gradients of query, key and value, and those that are
        wanted of mask and sinks, of ``Tensors``, out, lse, grad_out and grad_lse."""
        tensors, request = Tensors(*read[:6]), self.request
        if tensors.seed is not None and request.dropout is not None:
            dropout = replace(request.dropout, seed=int(tensors.seed))
            request = replace(request, dropout=dropout)
        if self.learned is None:
            result, lse = run_with_hook(partial(run_forward, tensors, request))
            # ``out`` gets no graph, so it can be given again. What is returned and saved is another
            # tensor over the same memory, with the same version counter.
            return result if request.out is None else result.detach(), lse
        out, lse, grad_out, grad_lse = read[6:]
        backward_inputs = BackwardInputs(grad_out, out, lse, None, *self.learned, grad_lse)
        return run_backward(tensors, request, backward_inputs)


class Attention(torch.autograd.Function):
    """A ``Pass`` of tensors. The backward is one too, so that ``torch.vmap`` can map it and that a
    second derivative meets a clear error."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As torch's, which first inspects the signature of ``forward``: 0.1 ms."""
        if has_transforms():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        # As torch's does: wrappers of a transformation that is over are replaced by their tensors.
        alive = [unwrap_if_dead(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        return super(torch.autograd.Function, cls).apply(*alive)  # type: ignore[misc]

    @staticmethod
    def forward(*args: Any) -> tuple[torch.Tensor, ...]:
        """The results of the pass."""
        *read, one = args
        made: tuple[torch.Tensor, ...] = one.compute(*read)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Save what the backward reads."""
        *read, ctx.one = inputs
        ctx.set_materialize_grads(False)
        if ctx.one.learned is None:
            kernel = ctx.one.request.options.kernel
            captured = [] if kernel == "auto" else get_kernel(kernel).captured()
            # Those of inference mode cannot be saved.
            ctx.save_for_backward(*read, *output, *(t for t in captured if not t.is_inference()))

    @staticmethod
    @uncompiled
    @restores_grad_and_autocast
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> Any:
        """The gradients that are needed."""
        needed = ctx.needs_input_grad
        if ctx.one.learned is not None:
            refuse_second()
        grad_out, grad_lse = upstream
        if grad_out is None and grad_lse is None:
            return (None,) * len(needed)
        read = ctx.saved_tensors[:8]
        read += grad_or_zeros(read[6], grad_out), grad_lse
        one = Pass(ctx.one.request, needed[3:5])
        grads = Attention.apply(*read, one) if is_recorded(*read) else one.compute(*read)
        return (*by_input(grads, *needed[3:5]), None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Forward-mode: an error."""
        refuse_forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        """A call for each entry: as torch maps its own fused kernels."""
        if info.batch_size == 0:
            raise NotImplementedError("torch.vmap cannot map attention over no entries")
        mapped = [
            [arg] * info.batch_size if dim is None else arg.unbind(dim)
            for arg, dim in zip(args, in_dims, strict=True)
        ]
        results = [Attention.apply(*entry) for entry in zip(*mapped, strict=True)]
        stacked = tuple([torch.stack(one) for one in zip(*results, strict=True)])
        return stacked, (0,) * len(stacked)


def grad_or_zeros(out: torch.Tensor, grad_out: torch.Tensor | None) -> torch.Tensor:
    """The gradient of the output, zeros where there is none."""
    if grad_out is not None:
        return grad_out
    return torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape)


def by_input(
    grads: Sequence[torch.Tensor], of_mask: bool, of_sinks: bool
) -> tuple[torch.Tensor | None, ...]:
    """Those of query, key, value, mask and sinks.

    Args:
        grads: of query, key and value, then of mask and sinks where those are wanted.
    """
    learned = [*grads[3:], None, None]
    return (*grads[:3], learned.pop(0) if of_mask else None, learned[0] if of_sinks else None)


def refuse_second(*args: Any) -> Any:
    """The derivative of the gradients: an error."""
    raise NotImplementedError(_REFUSED.format("second"))


def refuse_forward_mode() -> None:
    """Raise the error of forward-mode derivatives."""
    raise NotImplementedError(_REFUSED.format("forward-mode"))


@uncompiled
@restores_grad_and_autocast
def attend(
    tensors: Tensors, request: Request, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a call that has been checked; ``out`` as its caller gave it."""
    # ``out`` is passed inside the request: as an argument, autograd would take it for an input, and
    # the result for a view of that input.
    recorded = request.records
    made = Attention.apply(*tensors, Pass(request)) if recorded else run_forward(tensors, request)
    given = None if recorded or out is None else as_tensor(out, "out", for_writing=True)
    return request.drop_heads(made[0]) if given is None else given, request.drop_heads(made[1])
