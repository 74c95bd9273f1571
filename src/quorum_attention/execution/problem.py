"""One pass of one call without its tensors: what plans are made for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quorum_attention.decomposition import Pairs
from quorum_attention.execution.device.backend import Backend
from quorum_attention.execution.device.lookup import BACKENDS
from quorum_attention.execution.pass_spec import PassSpec
from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.protocol import InnerKernel, workspace_bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a call's tensors are, as far as a plan depends on it.

    Attributes:
        resident: whether the inputs are on the device that computes.
        results_given: whether the caller passed the results, which the budget then does
            not count.
        result_dtype: of the output (forward) or of the gradients (backward).
        unreadable_inputs: the names of the inputs that operators cannot read without a
            copy (because they are expanded, or their rows have gaps or begin anywhere).
            Only one kernel call for each head group copies them; other routes than
            slots need all to be readable.
        n_unreadable: how many of upstream gradient and output operators cannot read
            (because they are expanded or of another dtype). Routes without slots copy
            them group by group.
        rescaled_grad_bytes: bytes of the divided copy of an upstream gradient that the
            input dtype cannot hold, which is made first (upstream.py). None: it is not
            divided.
        same_dtype: whether upstream gradient and output have the inputs' dtype.
        lse_here: whether the lse of a backward is on the device that computes; plans
            assume it.
        lse_given: whether the caller passed the lse of a forward too.
        flattenable: whether all inputs of the pass have views (b, heads, n, d), with
            one batch dimension.
    """

    resident: bool
    results_given: bool
    result_dtype: torch.dtype
    unreadable_inputs: tuple[str, ...] = ()
    n_unreadable: int = 0
    rescaled_grad_bytes: int | None = None
    same_dtype: bool = True
    lse_here: bool = True
    lse_given: bool = False
    flattenable: bool = True

    @property
    def in_place(self) -> bool:
        """Whether operators can read the inputs where they are, without a copy."""
        return self.resident and not self.unreadable_inputs

    @property
    def copies_query(self) -> bool:
        """Whether a kernel call of the whole pass gets a copy of the query, so that its
        output does not lie as the query does."""
        return not self.flattenable or "query" in self.unreadable_inputs


@dataclass(frozen=True, slots=True)
class Problem:
    """One pass of one call, without its tensors.

    Attributes:
        shape: the call's sizes.
        kernel: the inner kernel.
        spec: which pass.
        place: where its tensors are.
    """

    shape: CallShape
    kernel: InnerKernel
    spec: PassSpec
    place: Placement

    @property
    def backend(self) -> Backend:
        """The backend of the device that computes. If it is the CPU's, the budget
        counts host memory."""
        return BACKENDS[self.shape.device_type]

    @property
    def without_kernel(self) -> tuple[CallShape, PassSpec, Placement]:
        """All but the kernel, which caches must not hold."""
        return self.shape, self.spec, self.place

    @property
    def pairs(self) -> Pairs:
        """The pairs that the call keeps, by its lengths and the kernel's own mask."""
        return self.kernel.kept_pairs(*self.shape.lengths)

    @property
    def scaled(self) -> bool:
        """Whether the pass is a scaled backward (execution/scaling.py)."""
        return self.spec.backward and scales(self.kernel, self.shape)

    @property
    def kernel_shape(self) -> CallShape:
        """The sizes that kernels are asked about."""
        return replace(self.shape, needs_grad=self.spec.backward)

    def workspace(self, extent: Extent) -> int:
        """Most bytes that the kernel allocates at one time for work of ``extent``."""
        backward = self.spec.backward
        return workspace_bytes(
            self.kernel, self.kernel_shape, extent, backward=backward
        )


def scales(kernel: InnerKernel, shape: CallShape) -> bool:
    """Whether a backward by ``kernel`` is scaled; some kernels gain nothing, or cannot
    undo it."""
    # Kernels that have dropout compute it in fp32, or scale by themselves.
    if shape.dropout:
        return False
    return shape.dtype in kernel.scaled_backward
