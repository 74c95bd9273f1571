"""The upstream gradient in the inputs' dtype, whatever dtype it comes in.

A gradient of fp32 for inputs of fp16 may lie outside what fp16 can hold, on either side. All
gradients are linear in it: it is divided by a power of two for every key/value head, which the
finished gradients are multiplied by.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quorum_attention.execution.rows import Axis
from quorum_attention.execution.workload import Group, Workload

# The largest element comes out below 2**15 where the backward is scaled again, by units: as much
# as possible of the small ones is left. Elsewhere below 1, so that no product overflows.
_SCALED_LARGEST, _PLAIN_LARGEST = 15, 0
# Powers of two of either sign that fp32 holds exactly, with room.
_LARGEST_EXPONENT = 120


def outreaches(gradient: torch.dtype, inputs: torch.dtype) -> bool:
    """Whether gradients of that dtype may be beyond what the inputs' dtype can hold."""
    return torch.finfo(gradient).tiny < torch.finfo(inputs).tiny


@dataclass(frozen=True, slots=True)
class Upstream:
    """An upstream gradient as kernels take it.

    Attributes:
        tensor: (*batch, heads, n_queries, value_dim), however it lies; as it came, or divided and
            in the inputs' dtype.
        divisor: (*batch, kv_heads), powers of two that it was divided by, in the state's dtype
            where it is computed; None is 1.
    """

    tensor: torch.Tensor
    divisor: torch.Tensor | None = None

    def factor(self, group: Group, axis: Axis) -> torch.Tensor | None:
        """What a group's gradients are multiplied by, (entries, heads, 1, 1)."""
        if self.divisor is None:
            return None
        found = torch.stack([self.divisor[entry][group.key_heads] for entry in group.entries])
        if axis == "query":
            found = found.repeat_interleave(group.queries_per_key_head, dim=-1)
        return found[:, :, None, None]


def upstream_of(
    grad_out: torch.Tensor, work: Workload, device: torch.device, *, scaled: bool
) -> Upstream:
    """``grad_out`` (*batch, heads, n_queries, value_dim) for inputs of ``work``'s dtype.

    Nothing is read back: on a device the host does not wait.

    Args:
        device: where the gradients are computed.
        scaled: the backward is scaled by units besides (execution/scaling.py).
    """
    if not outreaches(grad_out.dtype, work.dtype):
        return Upstream(grad_out)
    # Rows that are not finite have no say in how the others are scaled.
    rows = torch.linalg.vector_norm(grad_out, ord=torch.inf, dim=-1)
    rows = rows.nan_to_num_(0.0, posinf=0.0)
    largest = rows.unflatten(-2, (work.kv_heads, -1)).amax(dim=(-2, -1))
    # 2**(exponent - 1) <= largest < 2**exponent
    exponent = torch.frexp(largest.to(torch.float64)).exponent
    exponent -= _SCALED_LARGEST if scaled else _PLAIN_LARGEST
    exponent = exponent.clamp_(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    by_query = _power(-exponent).repeat_interleave(work.queries_per_key_head, dim=-1)
    tensor = torch.empty(grad_out.shape, dtype=work.dtype, device=grad_out.device)
    torch.mul(grad_out, by_query[..., None, None], out=tensor)
    return Upstream(tensor, _power(exponent).to(device=device, dtype=work.state_dtype))


def divided_bytes(gradient: torch.dtype, work: Workload, *, here: bool) -> int | None:
    """Bytes that ``upstream_of`` takes where the pass is computed, of a gradient of that dtype that
    lies ``here`` or elsewhere; None where it is not divided."""
    if not outreaches(gradient, work.dtype):
        return None
    # The copy, and two numbers for a row.
    per_row = work.value_dim * work.element_bytes + 2 * gradient.itemsize
    return work.batch * work.heads * work.n_queries * per_row if here else 0


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent by its bits, fp32: exact whatever a device's pow does."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
