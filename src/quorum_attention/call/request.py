"""A call, checked once. The planner, the executor and autograd get it as a ``Request``."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from quorum_attention.call.options import Arguments, options_of
from quorum_attention.call.transforms import (
    records,
    refuse_learned,
    unwrapped,
)
from quorum_attention.call.validation import Tensors, check_kind, check_plan, check_tensors
from quorum_attention.counts import chance, real_number, switch, whole_number
from quorum_attention.execution.call import mask_shape
from quorum_attention.execution.problem import Workload, scale_is_exact
from quorum_attention.execution.report import Report
from quorum_attention.kernels.dropout import LARGEST_SEED, MOST_POSITIONS, Dropout
from quorum_attention.kernels.masked.kernel import kernel_for_mask
from quorum_attention.kernels.masked.resolve import Sizes as MaskSizes
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.torch_private import capturing, has_transforms, outside
from quorum_attention.mask import Mask, map_tensors
from quorum_attention.planner.plan import Options

if TYPE_CHECKING:
    from quorum_attention.call.gradients import BackwardInputs
    from quorum_attention.planner.decide import Decision

# What arguments may be; ``as_tensor`` says which of them.
Array = torch.Tensor | np.ndarray


# Smaller factors are 0 to operators, which compute with them in fp32 (in float64 for such inputs).
_LEAST_SCALE = 2.0**-149


class Runner(Protocol):
    """Runs the passes of a call somewhere else than on one device of this process."""

    def forward(self, tensors: Tensors, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse), as ``passes.run_forward``."""

    def backward(
        self, tensors: Tensors, request: Request, given: BackwardInputs
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of query, key and value, as ``passes.run_backward``."""


@dataclass(frozen=True, slots=True)
class Request:
    """A checked call without the tensors that it reads (autograd keeps those).

    Attributes:
        work: sizes, dtype and mask shape.
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
        decisions: of a request that serves later calls too (``direct``), what was decided for its
            passes; None: it serves one call.
    """

    work: Workload
    scale: float
    options: Options
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
    decisions: dict[Hashable, Decision] | None = None

    def with_heads(self, given: torch.Tensor, dims: int) -> torch.Tensor:
        """A caller's tensor that has ``dims`` dimensions without heads: a view with heads."""
        return given.unsqueeze(0) if self.without_heads and given.dim() == dims else given

    def back(self, result: torch.Tensor) -> torch.Tensor:
        """A result with the dimensions that its caller expects, a view."""
        return result.squeeze(0) if self.without_heads else result

    def seeded(self, seed: torch.Tensor | None) -> Request:
        """The same request with a drawn seed, if there is one."""
        if seed is None or self.dropout is None:
            return self
        return replace(self, dropout=replace(self.dropout, seed=int(seed)))


def request_of(
    function: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Arguments,
) -> tuple[Tensors, Request]:
    """The tensors that a call reads, and its request.

    Args:
        function: name of the public function. "attention_backward" draws no seed, and takes
            kernels that have gradients.

    Raises:
        ValueError, TypeError, NotImplementedError: arguments that do not fit, by name. Nothing has
            been allocated by then but the casts of autocast.
    """
    backward, written, scale = function == "attention_backward", call.written, call.scale
    p = chance(call.dropout_p, "dropout_p")
    if call.out is not None and has_transforms():
        raise NotImplementedError("out cannot be given under torch.func transformations")
    tensors, out, described, sizes, without_heads, cast_bytes = check_tensors(
        query, key, value, call
    )
    query, key, value, mask, sinks, _ = tensors
    options = options_of(written, query.device)
    factor = sizes.head_dim**-0.5 if scale is None else real_number(scale, "scale")
    if query.dtype != torch.float64 and abs(factor) < _LEAST_SCALE:
        factor = 0.0
    shape = None if mask is None else mask_shape(mask, len(sizes.batch_shape))
    causal = switch(call.is_causal, "is_causal")
    exact_scale, recorded = scale_is_exact(factor, query.dtype), records(query, key, value, sinks)
    if described is not None:
        work = replace(sizes, is_causal=causal, mask=shape, dropout=p > 0.0)
        causal, kernel = _under_mask(described, work, options, needs_grad=backward or recorded)
        options = options if kernel is options.kernel else replace(options, kernel=kernel)
    if options.kernel != "auto":
        # The object: by the backward another kernel may have been registered under its name.
        kernel = get_kernel(options.kernel)
        options = options if kernel is options.kernel else replace(options, kernel=kernel)
        if torch.is_grad_enabled() or records():
            refuse_learned(kernel, query, key, value, options.device)
    work = replace(
        sizes, is_causal=causal, mask=shape, dropout=p > 0.0, positive_scale=factor > 0,
        sinks=sinks is not None, exact_scale=exact_scale,
    )  # fmt: skip
    if options.plan is not None:
        check_plan(options.plan, work)
    dropout = _dropout_of(p, call.dropout_seed, work, options.device, draws=not backward)
    if dropout is not None and call.dropout_seed is None and has_transforms():
        # As torch draws: vmap says whether entries have one seed, or their own, or refuses.
        seed = torch.randint(LARGEST_SEED, (), dtype=torch.int64, device="cpu")
        tensors = tensors._replace(seed=seed)
    learned = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    request = Request(
        work, factor, options, out,
        out_dtype=out.dtype if out is not None else (call.out_dtype or query.dtype),
        records=learned or recorded,
        mask_grad=learned,
        cast_bytes=cast_bytes if query.device == options.device else 0,
        without_heads=without_heads,
        progress=written.progress, report=written.report, sums=written.sums,
        dropout=dropout,
    )  # fmt: skip
    return tensors, request


# --- Dropout --------------------------------------------------------------------------------------


def _dropout_of(
    p: float, seed: Any, work: Workload, device: torch.device, *, draws: bool
) -> Dropout | None:
    """The dropout of a call.

    Args:
        seed: as its caller gave it.
        device: what computes.
        draws: whether a seed is drawn where none is given; if not, there has to be one.

    Raises:
        TypeError, ValueError: the seed makes no sense, or is missing.
        NotImplementedError: more of something than is counted; or a CUDA graph is captured, in
            which a drawn seed would be the same at every replay.
    """
    if seed is not None:
        seed = whole_number(seed, "dropout_seed", 0, LARGEST_SEED)
    if p == 0.0:
        return None
    largest = max(work.n_tokens, work.heads, work.batch)
    if largest > MOST_POSITIONS:
        each = "queries, keys, heads and batch entries"
        raise NotImplementedError(f"dropout_p needs at most {MOST_POSITIONS} {each}, got {largest}")
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
        seed = _drawn()
    return Dropout(p, seed)


def _drawn() -> int:
    """A seed from torch's generator of the CPU, whatever device computes: nobody waits for it, and
    checkpointing, which restores that generator, draws it again."""
    with outside():
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


# --- A Mask ---------------------------------------------------------------------------------------


def _under_mask(
    mask: Mask, work: Workload, options: Options, *, needs_grad: bool
) -> tuple[bool, str | InnerKernel]:
    """Whether a call under ``mask`` is causal, and the kernel that knows the mask (bias and sinks
    left aside).

    Raises:
        ValueError, TypeError, NotImplementedError: a part of the mask does not fit, by name.
    """
    mask = map_tensors(mask, _readable)
    sizes = MaskSizes(work.batch, work.heads, work.n_queries, work.n_keys)
    call = work.call_shape(options.device.type, needs_grad)
    return kernel_for_mask(mask, sizes, options.kernel, call, options.device)


def _readable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor of a mask as one that can be read, also under a transformation of torch.func's.

    Raises:
        NotImplementedError: it has no dense memory of its own, or torch.vmap maps over it, by name.
    """
    check_kind(tensor, f"Mask.{name}")
    return unwrapped(tensor, f"Mask.{name}")
