"""Small calls on a CPU: torch's own operator, which torch's own autograd records."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quorum_attention.autograd import named_derivative
from quorum_attention.call.request import Request, Tensors
from quorum_attention.execution.call import MaskView
from quorum_attention.execution.memory import is_out_of_memory
from quorum_attention.kernels.protocol import Recorded
from quorum_attention.passes import recording_kernel
from quorum_attention.repeated.likeness import is_transformed


class Small(NamedTuple):
    """How a small call is run: the operator's kernel, and the factor of the scores."""

    kernel: Recorded
    is_causal: bool
    scale: float

    def output(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """The output; None if that is not the whole of it."""
        # Written out: a function that no cache holds any more costs as much as a short operator.
        try:
            bias = None if mask is None else MaskView(mask, 1).whole(query.dtype, query.device)
            found = self.kernel.recorded_forward(
                query, key, value, self.is_causal, self.scale, bias
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        return None if found is None else named_derivative(found)


def small(tensors: Tensors, request: Request) -> tuple[Small, torch.Tensor | None] | None:
    """How a small call is run, and its output, or None if that takes more than the operator; None
    if such calls are not the operator alone."""
    if request.records and is_transformed():
        return None
    kernel = recording_kernel(tensors, request)
    if kernel is None:
        return None
    query, key, value, mask, _ = tensors
    made = Small(kernel, request.work.is_causal, request.scale)
    return made, made.output(query, key, value, mask)
