"""Inner kernels: what computes one task, behind one protocol, and the merge of
statistics.

The package can be called: ``quorum_attention.kernels`` is both it and the public
function of that name, whichever was asked for first.
"""

import sys
from types import ModuleType

from quorum_attention.kernels.call_shape import BiasShape, CallShape, Extent
from quorum_attention.kernels.cpu import CpuKernel
from quorum_attention.kernels.merge import add_, empty_, merge_
from quorum_attention.kernels.operator_call import Call, Saved
from quorum_attention.kernels.probing import probe
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.rectangles import RectangleKernel
from quorum_attention.kernels.reference import DenseKernel
from quorum_attention.kernels.registry import get_kernel, kernels, register_kernel
from quorum_attention.kernels.select import why_not
from quorum_attention.kernels.task_tensors import Gradients, Statistics, TaskTensors

__all__ = [
    "BiasShape",
    "Call",
    "CallShape",
    "CpuKernel",
    "DenseKernel",
    "Extent",
    "Gradients",
    "InnerKernel",
    "RectangleKernel",
    "Saved",
    "Statistics",
    "TaskTensors",
    "add_",
    "empty_",
    "get_kernel",
    "kernels",
    "merge_",
    "probe",
    "register_kernel",
    "why_not",
]


class _CallableModule(ModuleType):
    """A module that can be called: importing it hides the public function of the same
    name."""

    def __call__(self) -> dict[str, InnerKernel]:
        """Every registered kernel by name, the preferred ones first (a copy)."""
        return kernels()


sys.modules[__name__].__class__ = _CallableModule
