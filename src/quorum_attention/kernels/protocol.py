"""What an inner kernel is: it computes one task's statistics, or one task's gradients.

A kernel sees one task in *local* positions (the task's tokens, gathered in ascending
order), and no plan, no device queue and no budget.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch

from quorum_attention.decomposition import Pairs
from quorum_attention.kernels.call_shape import CallShape, Extent, state_dtype
from quorum_attention.kernels.masked.captured_tensors import tensors
from quorum_attention.kernels.merge import empty_
from quorum_attention.kernels.operator_call import (
    Call,
    Four,
    OutLse,
    Saved,
    Three,
    empty_gradients,
    empty_results,
    map_three,
    whole_task,
)
from quorum_attention.kernels.speed import KernelSpeed
from quorum_attention.kernels.task_tensors import (
    Gradients,
    Indices,
    Statistics,
    TaskTensors,
)


class Launches(Enum):
    """How many launches a task is."""

    CALLS = "calls"
    """Several calls, one after the other."""
    CALLS_ON_STREAMS = "calls on streams"
    """Several calls, spread over ``TaskTensors.streams`` if there are any. Two calls in
    flight, or all tasks of a head group together, may be faster."""
    ONE = "one"
    """One launch, whatever the task's rectangles. So several calls in flight, or all
    tasks of a head group together, are not faster."""


# The attributes of a kernel that say how it computes.
_OF_COMPUTATION = (
    "launch_seconds",
    "rates",
    "speed",
    "scaled_backward",
    "fp32_products",
    "dropout",
    "wide_masks",
    "wide_out",
    "reads_wide_out",
    "accepts_inf_lse",
)


class Kernel(ABC):
    """Computes a task. Write a subclass; register it, or pass it as ``kernel=``.

    A subclass defines ``name``, ``refusal``, two bounds of memory, ``forward`` and
    ``backward``. The rest describes optional features, which are off by default.

    Attributes:
        name: short and unique; users write it as ``kernel=``.
        own_attention: the kernel is not plain attention of query, key, scale and mask.
            So it is not compared with the reference first, and gets no rows beyond the
            sequence's tokens.
        position_free: the kernel's own attention does not depend on positions, heads or
            batch entries. So parts of a call can be computed as separate calls.
        launches: how many launches a task takes.
        launch_seconds: host seconds to launch a forward, and a backward, if a task
            takes one launch.
        rates: speeds of the forward and the backward, divided by those of the device's
            fastest kernel.
        speed: what the planner knows of the kernel's calls beyond ``rates``; None: they
            are like cuDNN's.
        scaled_backward: dtypes for which a scaled backward is more exact. The kernel
            undoes the scaling (kernels/scaling.py). Other dtypes are not scaled, and
            calls with dropout are not.
        fp32_products: the backward takes fp16 upstream gradients of up to 2**15 without
            overflow, because the products are in fp32 or scaled by the kernel. An
            upstream gradient of a wider dtype then keeps more of its small numbers
            (execution/upstream.py).
        dropout: the kernel applies ``TaskTensors.dropout`` (kernels/dropout.py). Other
            kernels get no calls with dropout.
        wide_masks: the kernel takes additive masks in fp32 with 16-bit inputs. Other
            kernels get no calls with such masks.
        wide_out: the kernel rounds no output to the inputs' 16 bits, and its backward
            computes delta from such an output (``as_unrounded``).
        reads_wide_out: the backward computes delta from an output with a wider dtype
            than the inputs. Other kernels get a rounded output.
        plain_variant: if options of this kernel change the scores, the kernel that is
            compared with the reference in its place; None: this one is.
        priced_as: a kernel that has the same costs in uncut calls and lives longer than
            this one. What is measured in short calls is kept for that kernel. None: for
            this one.
        any_upstream: upstream gradient and output of ``backward`` may have any dtype
            and strides. If needed they are copied, for one operator call at a time.
        thread_per_head: on a CPU each thread computes whole heads of batch entries in
            the backward of an uncut call, and an equal part of all rows in its forward.
        accepts_inf_lse: the backward takes an lse of -inf, which rows without keys
            have.
        operator: ``whole_forward`` and ``whole_backward`` run a single rectangle.
        grouped: the operator takes fewer key/value heads than query heads.
        sparse: the kernel has a mask of its own, and ``kept_pairs`` says which pairs
            this mask keeps.
    """

    name: str
    own_attention: bool = False
    position_free: bool = False
    launches: Launches = Launches.CALLS
    launch_seconds: tuple[float, float] = (60e-6, 200e-6)  # the native kernel's
    rates: tuple[float, float] = (1.0, 1.0)
    speed: KernelSpeed | None = None
    scaled_backward: frozenset[torch.dtype] = frozenset()
    fp32_products: bool = False
    dropout: bool = False
    wide_masks: bool = False
    wide_out: bool = False
    reads_wide_out: bool = False
    plain_variant: Kernel | None = None
    priced_as: Kernel | None = None
    any_upstream: bool = False
    thread_per_head: bool = False
    accepts_inf_lse: bool = False
    operator: bool = False
    grouped: bool = False
    sparse: bool = False

    @abstractmethod
    def refusal(self, shape: CallShape) -> str | None:
        """Return why this kernel cannot run such a call, in words for the user, or
        None."""

    @abstractmethod
    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the device bytes ``forward`` allocates at any one
        time."""

    @abstractmethod
    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the device bytes ``backward`` allocates at any one
        time."""

    @abstractmethod
    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""

    @abstractmethod
    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""

    def compute_like(self, base: Kernel) -> None:
        """Copy the attributes that say how ``base`` computes, for a kernel whose calls
        ``base`` runs."""
        for name in _OF_COMPUTATION:
            setattr(self, name, getattr(base, name))

    @property
    def is_exact(self) -> bool:
        """Whether it computes plain attention of query, key, scale and mask."""
        return not self.own_attention and self.plain_variant is None

    def with_softcap(self, softcap: float) -> Kernel | None:
        """Return this kernel with a soft cap, and with its other options.

        Scores become ``softcap * tanh(score / softcap)``. None: the kernel has no soft
        cap.
        """
        return None

    def as_unrounded(self) -> Kernel | None:
        """Return a kernel that computes the same and does not round outputs to 16 bits:
        this one, or another; None if there is none."""
        return self if self.wide_out else None

    # --- Monolithic calls -------------------------------------------------------------

    def takes_whole(self, shape: CallShape, tokens: int, all_heads: bool) -> bool:
        """Whether it takes such a call by ``whole_forward`` and ``whole_backward``.

        Args:
            tokens: the larger of the numbers of queries and keys.
            all_heads: whether the kernel gets all heads and batch entries, in order;
                otherwise it gets some of them, and does not know which.
        """
        return False

    def whole_forward(self, call: Call) -> OutLse:
        """Return output (b, h, n, dv), rounded once, and lse (b, h, n).

        Rows without keys have output 0 and lse -inf. By default that is ``forward`` of
        a whole call as one task.
        """
        out, lse = empty_results(call, state_dtype(call.query.dtype))
        empty_(out, lse)
        self.forward(whole_task(call), Statistics(out, lse))
        return out.to(call.result_dtype), lse

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """Return the gradients of query, key and value, rounded once; lse is 0 in rows
        without keys.

        By default that is ``backward`` of a whole call as one task.
        """
        grads = empty_gradients(call, state_dtype(call.query.dtype))
        for grad in grads:
            grad.zero_()
        sums = Gradients(saved.grad_out, saved.out, saved.lse, *grads)
        self.backward(whole_task(call), sums)
        return map_three(lambda grad: grad.to(call.result_dtype), grads)

    def gives_bias_gradient(self, shape: CallShape) -> bool:
        """Whether ``whole_backward_with_bias`` takes such a call: the kernel's operator
        computes the gradient of a bias, within the digits of the bias's dtype.

        Other gradients of a bias are computed tile by tile
        (execution/mask_gradient.py).
        """
        return False

    def whole_backward_with_bias(self, call: Call, saved: Saved) -> Four:
        """Return the gradients of query, key and value, as ``whole_backward`` does, and
        of the bias before it is summed: (b, h, n, m)."""
        raise NotImplementedError(
            f"kernel {self.name!r} computes no gradient of a bias"
        )

    # --- What it reads, calls and keeps -----------------------------------------------

    def captured(self) -> Sequence[torch.Tensor]:
        """Return the tensors besides the inputs that results depend on (slopes, a
        function's closure).

        Autograd saves them with the inputs. So writing to one of them before the
        backward is an error, as for any saved tensor.
        """
        return tensors(self.called_back())

    def called_back(self) -> Sequence[Callable[..., Any]]:
        """Return the users' functions that the kernel calls in the forward and again in
        the backward."""
        return ()

    def results_of_functions(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, at: Indices
    ) -> Sequence[torch.Tensor]:
        """Return the functions' results for a few rows (b, h, q, d), (b, hk, k, d), (b,
        hk, k, dv)."""
        return ()

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """Return the pairs of a call. Tokens without a kept pair are not copied.

        Their ``verdict`` may call a block EMPTY only if no pair of it is kept, in any
        head of any batch entry. Its answers are cached by function as long as the
        kernel lives. So return the same function in every call: a method of the kernel,
        or a function that does not close over the kernel.
        """
        return Pairs(n_queries, n_keys, is_causal)

    def scores_of_pairs(self) -> Any:
        """Return how the kernel changes and masks each score
        (``score_tiles.ScoreTransform``).

        None: the kernel computes something else, so the gradient of a mask cannot be
        computed from its scores.
        """
        return None


InnerKernel = Kernel
"""The public name."""


def refusal(kernel: Kernel, shape: CallShape) -> str | None:
    """Return why a kernel cannot run such a call, or None.

    Dropout and wide masks are asked about here, so that a kernel that does not know of
    them never leaves out the one, nor misreads the other.
    """
    reason = kernel.refusal(shape)
    if reason is not None:
        return reason
    if shape.wide_out and kernel.as_unrounded() is None:
        return "it rounds outputs to 16 bits, and exact_delta needs them unrounded"
    if shape.dropout and not kernel.dropout:
        return "it has no dropout by the position of a pair"
    if shape.bias is not None and shape.bias.wide and not kernel.wide_masks:
        return (
            f"it adds attn_mask in the inputs' dtype {shape.dtype}, which would round "
            f"it: take kernel='auto', or give attn_mask.to({shape.dtype}) if that is "
            "meant"
        )
    return None


def workspace_bytes(
    kernel: Kernel, shape: CallShape, extent: Extent, *, backward: bool
) -> int:
    """Return an upper bound of the device bytes that a pass of ``kernel`` allocates at
    a time."""
    if backward:
        return kernel.backward_workspace_bytes(shape, extent)
    return kernel.forward_workspace_bytes(shape, extent)


def check_mask_gradient(kernel: Kernel) -> None:
    """Check that the gradient of a mask beside ``kernel`` is that of plain softmax.

    Raises:
        NotImplementedError: it computes another function of the scores.
    """
    if not kernel.is_exact and not kernel.scores_of_pairs():
        raise NotImplementedError(
            f"kernel {kernel.name!r} has no gradient of attn_mask: it computes more "
            "than the softmax of scores and mask; pass attn_mask.detach(), or take "
            "another kernel"
        )
