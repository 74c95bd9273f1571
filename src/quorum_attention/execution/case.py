"""What a route is asked about: can it run this pass, and what memory and time does that take."""

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
        kernel: the inner kernel.
        spec: which pass.
        place: where its tensors are.
    """

    work: Workload
    kernel: InnerKernel
    spec: PassSpec
    place: Placement

    @property
    def scaled(self) -> bool:
        """Whether the pass is a scaled backward (execution/scaling.py)."""
        return self.spec.divided is not None and scales(self.kernel, self.work)

    def workspace(self, extent: Extent) -> int:
        """Most bytes that the kernel allocates at one time for work of ``extent``."""
        call = self.work.call_shape(self.place.device_type, self.spec.backward)
        return self.spec.workspace(self.kernel, call, extent)
