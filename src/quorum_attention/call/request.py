"""A call, checked once. The planner, the executor and autograd get it as a ``Request``."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from quorum_attention.argument_checks import chance, real_number, switch, whole_number
from quorum_attention.call.capture import check_capture, keep_for_replays
from quorum_attention.call.options import Arguments, options_of
from quorum_attention.call.validation import Tensors, check_kind, check_plan, check_tensors
from quorum_attention.execution.bias import bias_shape
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.report import Report
from quorum_attention.kernels.dropout import LARGEST_SEED, Dropout
from quorum_attention.kernels.masked.kernel import kernel_for_mask
from quorum_attention.kernels.protocol import CallShape, Indices, InnerKernel, scale_is_exact
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.torch_private import (
    capturing,
    has_tangent,
    has_transforms,
    outside,
)
from quorum_attention.mask import map_tensors
from quorum_attention.planner.options import PlannerOptions

if TYPE_CHECKING:
    from quorum_attention.call.backward_inputs import BackwardInputs

# Smaller factors are 0 to operators, which compute with them in fp32 (in float64 for such inputs).
_LEAST_SCALE = 2.0**-149


class Runner(Protocol):
    """Runs the passes of a call somewhere else than on one device of this process."""

    def forward(self, tensors: Tensors, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse), as ``run_forward``."""

    def backward(
        self, tensors: Tensors, request: Request, backward_inputs: BackwardInputs
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of query, key and value, as ``run_backward``."""


@dataclass(frozen=True, slots=True)
class Request:
    """A checked call without the tensors that it reads (autograd keeps those).

    Attributes:
        shape: sizes, dtype and mask shape.
        scale: factor of the scores.
        options: where and how the call may be run.
        out: the caller's tensor for the result, with a dimension of heads.
        out_dtype: of the result.
        records: whether autograd sees the call, and may ask for gradients.
        mask_grad: whether autograd will ask for the mask's gradient.
        cast_bytes: bytes of autocast's copies of the inputs on the computing device. They are held
            as long as the call and its graph, and count against the budget.
        without_heads: the inputs were (tokens, head_dim), and so is the result.
        progress, report: as they were given.
        sums: the reports to whose totals the passes of the call are added.
        dropout: which probabilities are dropped; None: none.
        runner: runs the passes on several devices; None: ``options.device`` does.
        lse: a tensor for the log-sum-exp, (*batch, heads, n_queries) in the state's dtype, in
            memory that the budget does not count; None: it is made.
        decisions: of a request that serves later calls too (``dispatch``), those of its passes that
            are one kernel call; None: it serves one call.
    """

    shape: CallShape
    scale: float
    options: PlannerOptions
    out: torch.Tensor | None
    out_dtype: torch.dtype
    records: bool
    mask_grad: bool
    cast_bytes: int
    without_heads: bool
    progress: Any
    report: Report | None
    sums: tuple[Report, ...] = ()
    dropout: Dropout | None = None
    runner: Runner | None = None
    lse: torch.Tensor | None = None
    decisions: dict[Hashable, Problem] | None = None

    def reserving(self, n_bytes: int, purpose: str) -> Request:
        """Return the request with ``n_bytes`` of its budget reserved, for a purpose in words."""
        options = self.options.reserving(n_bytes, purpose)
        return self if options is self.options else replace(self, options=options)

    def add_heads(self, given: torch.Tensor, dims: int) -> torch.Tensor:
        """A caller's tensor that has ``dims`` dimensions without heads: a view with heads."""
        return given.unsqueeze(0) if self.without_heads and given.dim() == dims else given

    def drop_heads(self, result: torch.Tensor) -> torch.Tensor:
        """A result with the dimensions that its caller expects, a view."""
        return result.squeeze(0) if self.without_heads else result


def request_of(
    function: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: Arguments,
) -> tuple[Tensors, Request]:
    """The tensors that a call reads, and its request.

    Args:
        function: name of the public function. "attention_backward" draws no seed, and takes
            kernels that have gradients.

    Raises:
        ValueError, TypeError, NotImplementedError: arguments that do not fit, by name. Nothing has
            been allocated by then but the casts of autocast.
    """
    backward, options, scale = function == "attention_backward", arguments.options, arguments.scale
    p = chance(arguments.dropout_p, "dropout_p")
    if arguments.out is not None and has_transforms():
        raise NotImplementedError("out cannot be given under torch.func transformations")
    tensors, out, described, sizes, without_heads, cast_bytes = check_tensors(
        query, key, value, arguments
    )
    query, key, value, mask, sinks, _ = tensors
    planner_options = options_of(options, query.device)
    check_capture(planner_options.device, query, mask, described)
    factor = sizes.head_dim**-0.5 if scale is None else _checked_scale(scale)
    if query.dtype != torch.float64 and abs(factor) < _LEAST_SCALE:
        factor = 0.0
    shape = None if mask is None else bias_shape(mask, len(sizes.batch_shape), query.dtype)
    work = replace(
        sizes,
        device_type=planner_options.device.type,
        is_causal=switch(arguments.is_causal, "is_causal"),
        bias=shape,
        dropout=p > 0.0,
        positive_scale=factor > 0,
        sinks=sinks is not None,
        exact_scale=scale_is_exact(factor, query.dtype),
    )
    kernel, recorded = planner_options.kernel, is_recorded(query, key, value, sinks)
    if described is not None:
        described = map_tensors(described, _as_readable)
        work, kernel = kernel_for_mask(
            described, kernel, work, planner_options.device, needs_grad=backward or recorded
        )
    if kernel != "auto":
        # The object: by the backward another kernel may have been registered under its name.
        kernel = get_kernel(kernel)
        keep_for_replays(kernel, planner_options.device)
        if torch.is_grad_enabled() or is_recorded():
            refuse_learned(kernel, query, key, value, planner_options.device)
    planner_options = replace(planner_options, kernel=kernel)
    if planner_options.plan is not None:
        check_plan(planner_options.plan, work)
    dropout = _dropout_of(p, arguments.dropout_seed, planner_options.device, draws=not backward)
    if dropout is not None and arguments.dropout_seed is None and has_transforms():
        # As torch draws: vmap says whether entries have one seed, or their own, or refuses.
        seed = torch.randint(LARGEST_SEED, (), dtype=torch.int64, device="cpu")
        tensors = tensors._replace(seed=seed)
    learned = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    request = Request(
        work, factor, planner_options, out,
        out_dtype=out.dtype if out is not None else (arguments.out_dtype or query.dtype),
        records=learned or recorded,
        mask_grad=learned,
        cast_bytes=cast_bytes if query.device == planner_options.device else 0,
        without_heads=without_heads,
        progress=options.progress, report=options.report, sums=options.sums,
        dropout=dropout,
    )  # fmt: skip
    return tensors, request


def _checked_scale(scale: Any) -> float:
    """The argument ``scale``.

    Raises:
        TypeError, ValueError: it is no finite number, or would get a gradient.
    """
    if isinstance(scale, torch.Tensor) and scale.requires_grad:
        raise TypeError(
            "scale must be a real number, which gets no gradient, got a tensor that requires one: "
            "give query * scale with scale=1.0, or scale.item() where it is not learned"
        )
    return real_number(scale, "scale")


# --- Dropout --------------------------------------------------------------------------------------


def _dropout_of(p: float, seed: Any, device: torch.device, *, draws: bool) -> Dropout | None:
    """The dropout of a call.

    Args:
        seed: as its caller gave it.
        device: what computes.
        draws: whether a seed is drawn where none is given; if not, there has to be one.

    Raises:
        TypeError, ValueError: the seed makes no sense, or is missing.
        NotImplementedError: a CUDA graph is captured, in which a drawn seed would be the same at
            every replay.
    """
    if seed is not None:
        seed = whole_number(seed, "dropout_seed", 0, LARGEST_SEED)
    if p == 0.0:
        return None
    if seed is None:
        if not draws:
            raise ValueError(
                "dropout_seed must be given with dropout_p: the seed of the forward, which its "
                "report has, or which it was given"
            )
        if capturing(device):
            raise NotImplementedError(
                "dropout_p in a CUDA graph needs dropout_seed: a seed drawn while the graph is "
                "captured would be used again at every replay"
            )
        # By torch's generator of the CPU, whatever device computes: nobody waits for it, and
        # checkpointing, which restores that generator, draws it again.
        with outside():
            seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    return Dropout(p, seed)


# --- Under autograd, torch.func and forward-mode --------------------------------------------------


def is_recorded(*inputs: torch.Tensor | None) -> bool:
    """Whether the call has to be a function of autograd's: for gradients, or under a transformation
    or forward-mode (where that function works or raises its error)."""
    return (
        (torch.is_grad_enabled() and True in [t.requires_grad for t in inputs if t is not None])
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def _as_readable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor of a mask, whose numbers are read now and which gets no gradient, without the
    wrappers of torch.func's derivatives.

    Raises:
        NotImplementedError: it has no dense memory of its own, or torch.vmap maps over it, by name.
    """
    check_kind(tensor, f"Mask.{name}")
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    if functorch.is_batchedtensor(tensor):
        raise NotImplementedError(
            f"torch.vmap cannot map over Mask.{name}: only over query, key, value, attn_mask, "
            "Mask.bias and Mask.sinks; make the dimension that is mapped one of the batch"
        )
    return tensor


def refuse_learned(
    kernel: InnerKernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    device: torch.device,
) -> None:
    """Refuse functions of the user's whose results have a gradient that would be lost.

    No walk over a function's code finds all tensors that it reads. So it is called for a few pairs,
    as it will be, and its result says whether autograd, forward-mode or torch.func follow it.

    Raises:
        NotImplementedError: a function of ``kernel`` reads a tensor that requires a gradient or has
            a tangent, or one of a transformation that is under way.
    """
    three = query, key, value
    # In a CUDA graph no copy from the host can be captured.
    if not (kernel.called_back() and all(t.numel() for t in three)) or capturing(device):
        return
    with outside():
        rows = [
            torch.zeros(
                1, t.shape[-3], min(2, t.shape[-2]), t.shape[-1], dtype=t.dtype, device=device
            )
            for t in three
        ]
        ends = [sorted({0, t.shape[-2] - 1}) for t in (query, key)]
        numbers = [0], list(range(query.shape[-3])), *ends
        at = Indices(*(torch.tensor(each, device=device) for each in numbers))
    functorch = torch._C._functorch
    made = kernel.results_of_functions(rows[0], rows[1], rows[2], at)
    if any(map(functorch.is_functorch_wrapped_tensor, kernel.captured())) or any(
        result.requires_grad or functorch.is_batchedtensor(result) or has_tangent(result)
        for result in made
        if isinstance(result, torch.Tensor)
    ):
        raise NotImplementedError(
            f"a function of kernel {kernel.name!r} (Mask.keeps, mask_mod, score_mod, ...) reads a "
            "tensor that would get no gradient, or one of a torch.func transformation: give it "
            "tensor.detach() from outside of the transformation, or make what it adds to the "
            "scores an attn_mask"
        )


def refuse_transforms(*inputs: torch.Tensor | None) -> None:
    """Refuse transformations of ``attention_backward``: it is no function of autograd's, so their
    derivatives and dimensions would be lost without an error.

    Raises:
        NotImplementedError: under torch.func, or for dual tensors.
    """
    if has_transforms() or has_tangent(inputs):
        raise NotImplementedError(
            "attention_backward takes no part in torch.func transformations, nor in forward-mode "
            "derivatives: take the gradients of attention instead"
        )
