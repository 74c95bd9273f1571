"""A pass as a route sees it before it runs: what is asked of whether it can, and what it takes."""

from __future__ import annotations

from dataclasses import dataclass

from quorum_attention.execution.pass_spec import PassSpec
from quorum_attention.execution.placement import Placement
from quorum_attention.execution.scaling import scales
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels.protocol import Extent, InnerKernel


@dataclass(frozen=True, slots=True)
class Case:
    """One pass of one call, without its tensors.

    Attributes:
        work: the call's sizes.
        kernel: what computes.
        spec: which pass.
        place: where its tensors lie.
    """

    work: Workload
    kernel: InnerKernel
    spec: PassSpec
    place: Placement

    @property
    def scaled(self) -> bool:
        """Whether units are scaled (execution/scaling.py)."""
        return self.spec.divided is not None and scales(self.kernel, self.work)

    def workspace(self, extent: Extent) -> int:
        """Upper bound of the bytes that the kernel allocates at any one time."""
        call = self.work.call_shape(self.place.device_type, self.spec.backward)
        return self.spec.workspace(self.kernel, call, extent)
