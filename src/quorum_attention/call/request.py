"""A call, checked once. The planner, the executor and autograd get it as a
``Request``."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from quorum_attention.argument_checks import dropout_chance, real_number, switch
from quorum_attention.call.capture import check_capture, keep_for_replays
from quorum_attention.call.dropout_seed import draw_dropout
from quorum_attention.call.options import Arguments, check_options
from quorum_attention.call.transformations import (
    as_readable,
    is_recorded,
    needs_gradient,
    refuse_derivative,
    refuse_learned,
)
from quorum_attention.call.validation import (
    Tensors,
    check_no_overlap,
    check_plan,
    check_tensors,
    has_dense_memory,
)
from quorum_attention.execution.bias import bias_shape
from quorum_attention.execution.job import OnStored
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.report import Report
from quorum_attention.kernels.call_shape import BiasShape, CallShape, scale_is_exact
from quorum_attention.kernels.dropout import LARGEST_SEED, Dropout
from quorum_attention.kernels.masked.choose import kernel_for_mask
from quorum_attention.kernels.operator_call import OutLse
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.torch_private import has_transforms
from quorum_attention.mask import map_tensors
from quorum_attention.planner.options import PlannerOptions

if TYPE_CHECKING:
    from quorum_attention.call.backward_inputs import BackwardInputs

# Smaller factors are 0 to operators, which compute with them in fp32 (in float64 for
# such inputs).
_LEAST_SCALE = 2.0**-149


class Runner(Protocol):
    """Runs the passes of a call somewhere else than on one device of this process."""

    def forward(self, tensors: Tensors, request: Request) -> OutLse:
        """As ``run_forward``."""

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
        cast_bytes: bytes of autocast's copies of the inputs on the computing device.
            They are held as long as the call and its graph, and count against the
            budget.
        without_heads: the inputs were (tokens, head_dim), and so is the result.
        progress, report: as they were given.
        reports_with_totals: the reports to whose totals the passes of the call are
            added.
        dropout: which probabilities are dropped; None: none.
        runner: runs the passes on several devices; None: ``options.device`` does.
        lse: a tensor for the log-sum-exp, (*batch, heads, n_queries) in the state's
            dtype, in memory that the budget does not count; None: it is made.
        on_stored: called with head groups whose results are in the given tensors
            (``PassJob``); None: nobody asks.
        decisions: of a request that serves later calls too (``dispatch``), those of its
            passes that are one kernel call, None for one that had to be planned; None:
            it serves one call.
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
    reports_with_totals: tuple[Report, ...] = ()
    dropout: Dropout | None = None
    runner: Runner | None = None
    lse: torch.Tensor | None = None
    on_stored: OnStored | None = None
    decisions: dict[Hashable, Problem | None] | None = None

    @property
    def splits_out(self) -> bool:
        """Whether a recorded call saves its output as two numbers of 16 bits, because
        it returns one of them (call/split_output.py)."""
        returns_16_bits = self.out_dtype.itemsize == 2
        return self.records and self.shape.wide_out and returns_16_bits

    def reserving(self, n_bytes: int, purpose: str) -> Request:
        """Return the request with ``n_bytes`` of its budget reserved, for a purpose in
        words."""
        options = self.options.reserving(n_bytes, purpose)
        return self if options is self.options else replace(self, options=options)

    def add_heads(self, tensor: torch.Tensor, n_dims: int) -> torch.Tensor:
        """Return a view with a dimension of heads of a tensor that has ``n_dims``
        without it."""
        is_missing = self.without_heads and tensor.dim() == n_dims
        return tensor.unsqueeze(0) if is_missing else tensor

    def drop_heads(self, result: torch.Tensor) -> torch.Tensor:
        """Return a view of a result with the dimensions that its caller expects."""
        return result.squeeze(0) if self.without_heads else result


def request_of(
    function: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: Arguments,
    *,
    records: bool = False,
) -> tuple[Tensors, Request]:
    """Check a call, and return the tensors that it reads and its request.

    Args:
        function: name of the public function. "attention_backward" draws no seed, and
            takes kernels that have gradients.
        records: whether autograd sees the call in another place than this one.

    Raises:
        ValueError, TypeError, NotImplementedError: arguments that do not fit, by name.
            Nothing has been allocated by then but the casts of autocast.
    """
    is_backward = function == "attention_backward"
    dropout_p = dropout_chance(arguments.dropout_p)
    refuse_derivative(arguments.dropout_p, "dropout_p")
    refuse_derivative(arguments.scale, "scale")
    if arguments.out is not None and has_transforms():
        raise NotImplementedError(
            "out cannot be given under torch.func transformations"
        )
    checked = check_tensors(query, key, value, arguments)
    tensors = checked.tensors
    query, key, value, bias, sinks, _ = tensors
    options = check_options(arguments.options, query.device)
    device = options.device
    check_capture(device, query, bias, checked.mask)
    scale = _checked_scale(arguments.scale, checked.shape.head_dim, query.dtype)
    is_causal = switch(arguments.is_causal, "is_causal")
    shape = replace(
        checked.shape,
        device_type=device.type,
        bias=_bias_shape_of(tensors),
        sinks=sinks is not None,
        is_causal=is_causal,
        dropout=dropout_p > 0.0,
        positive_scale=scale > 0,
        exact_scale=scale_is_exact(scale, query.dtype),
    )
    kernel = options.kernel
    recorded = is_recorded(query, key, value, sinks)
    mask_grad = needs_gradient(bias)
    out = checked.out
    out_dtype = _out_dtype_of(arguments, out, query)
    records = mask_grad or recorded or records
    shape = replace(
        shape,
        wide_out=_needs_unrounded(arguments, shape, out_dtype, records=records),
    )
    mask = checked.mask
    if mask is not None:
        refuse_derivative(mask.softcap, "Mask.softcap")
        mask = map_tensors(mask, as_readable)
    shape, kernel = kernel_for_mask(
        mask, kernel, shape, device, needs_grad=is_backward or recorded
    )
    if kernel != "auto":
        kernel = _resolved_kernel(kernel, tensors, device)
        options = replace(options, kernel=kernel)
    if out is not None:
        check_no_overlap({"out": out}, tensors_by_name(tensors, kernel))
    if options.plan is not None:
        check_plan(options.plan, shape)
    seed = arguments.dropout_seed
    dropout = draw_dropout(dropout_p, seed, device, draws=not is_backward)
    if dropout is not None:
        tensors = _with_vmapped_seed(tensors, seed)
    request = Request(
        shape,
        scale,
        options,
        out,
        out_dtype=out_dtype,
        records=records,
        mask_grad=mask_grad,
        cast_bytes=checked.cast_bytes if query.device == device else 0,
        without_heads=checked.without_heads,
        progress=arguments.options.progress,
        report=arguments.options.report,
        reports_with_totals=arguments.options.reports_with_totals,
        dropout=dropout,
    )
    return tensors, request


def tensors_by_name(
    tensors: Tensors, kernel: str | InnerKernel
) -> dict[str, torch.Tensor | None]:
    """Return the tensors that a call reads, by name, with those that users' functions
    read."""
    query, key, value, bias, sinks, _ = tensors
    by_name = {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": bias,
        "Mask.sinks": sinks,
    }
    if kernel == "auto":
        return by_name
    kernel = get_kernel(kernel)
    for number, tensor in enumerate(kernel.captured(), start=1):
        if has_dense_memory(tensor):
            by_name[f"tensor {number} that kernel {kernel.name!r} reads"] = tensor
    return by_name


def _with_vmapped_seed(tensors: Tensors, seed: int | None) -> Tensors:
    """Return the tensors with a drawn seed, if the call under transformations of
    torch.func has none.

    The seed is drawn as torch draws: vmap says whether entries have one seed, or their
    own, or refuses.
    """
    if seed is not None or not has_transforms():
        return tensors
    drawn = torch.randint(
        LARGEST_SEED,
        (),
        dtype=torch.int64,
        device="cpu",
    )
    return tensors._replace(seed=drawn)


def _bias_shape_of(tensors: Tensors) -> BiasShape | None:
    """Return what is known of the bias of a call, or None without one."""
    if tensors.bias is None:
        return None
    n_batch_dims = tensors.query.dim() - 3
    return bias_shape(tensors.bias, n_batch_dims, tensors.query.dtype)


def _out_dtype_of(
    arguments: Arguments, out: torch.Tensor | None, query: torch.Tensor
) -> torch.dtype:
    """Return the dtype of a call's result."""
    if out is not None:
        return out.dtype
    return arguments.out_dtype or query.dtype


def _needs_unrounded(
    arguments: Arguments, shape: CallShape, out_dtype: torch.dtype, *, records: bool
) -> bool:
    """Tell whether the kernel of a call must not round its output to 16 bits.

    Without the option ``exact_delta`` that is so for a recorded call with a wider
    output on a CPU, where the kernel can. (On a GPU ``unrounded_kernel`` chooses such a
    kernel where it can.)
    """
    if shape.dtype.itemsize != 2:
        return False
    is_wanted = arguments.options.exact_delta
    if is_wanted is not None:
        return is_wanted
    if not records or out_dtype.itemsize == 2 or shape.device_type != "cpu":
        return False
    kernel = arguments.options.kernel
    return kernel == "auto" or get_kernel(kernel).as_unrounded() is not None


def _checked_scale(scale: Any, head_dim: int, dtype: torch.dtype) -> float:
    """Return the factor of the scores: the argument ``scale``, or the usual one.

    Raises:
        TypeError, ValueError: it is no finite number, or would get a gradient.
    """
    if isinstance(scale, torch.Tensor) and scale.requires_grad:
        raise TypeError(
            "scale must be a real number, which gets no gradient, got a tensor that "
            "requires one: give query * scale with scale=1.0, or scale.item() where "
            "it is not learned"
        )
    factor = head_dim**-0.5 if scale is None else real_number(scale, "scale")
    if dtype != torch.float64 and abs(factor) < _LEAST_SCALE:
        return 0.0
    return factor


def _resolved_kernel(
    kernel: str | InnerKernel, tensors: Tensors, device: torch.device
) -> InnerKernel:
    """Return a kernel that was asked for, as an object.

    By the time of the backward another kernel may have been registered under its name.
    """
    kernel = get_kernel(kernel)
    keep_for_replays(kernel, device)
    if torch.is_grad_enabled() or is_recorded():
        refuse_learned(
            kernel,
            tensors.query,
            tensors.key,
            tensors.value,
            device,
        )
    return kernel
