"""Brings the upstream gradient into the inputs' dtype.

Numbers of an fp32 gradient for fp16 inputs may be too large or too small for fp16. All results of a
backward are linear in the upstream gradient. So it is divided by a power of two for each key/value
head, and the finished gradients are multiplied by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quorum_attention.execution.rows import Axis
from quorum_attention.execution.workload import Group, Workload

# The largest element is below 2 to this power after the division: large where that is no danger, to
# keep the small numbers. Elsewhere it is below 1, so that no product overflows.
_WIDE_LARGEST, _PLAIN_LARGEST = 15, 0
# Largest magnitude of an exponent: fp32 holds these powers of two exactly, with room to spare.
_LARGEST_EXPONENT = 120


def outreaches(gradient: torch.dtype, inputs: torch.dtype) -> bool:
    """Whether dtype ``gradient`` has numbers that are too small or large for dtype ``inputs``."""
    return torch.finfo(gradient).tiny < torch.finfo(inputs).tiny


@dataclass(frozen=True, slots=True)
class Upstream:
    """An upstream gradient, divided if the inputs' dtype cannot hold it.

    Attributes:
        tensor: (*batch, heads, n_queries, value_dim), with any strides: as it was given, or divided
            and in the inputs' dtype.
        divisor: (*batch, kv_heads), the powers of two it was divided by, in the state's dtype on
            the device that computes; None if it was not divided.
    """

    tensor: torch.Tensor
    divisor: torch.Tensor | None = None

    def factor(self, group: Group, axis: Axis) -> torch.Tensor | None:
        """The factor of a group's finished gradients, (entries, heads, 1, 1); None is 1."""
        if self.divisor is None:
            return None
        found = torch.stack([self.divisor[entry][group.key_heads] for entry in group.entries])
        if axis == "query":
            found = found.repeat_interleave(group.queries_per_key_head, dim=-1)
        return found[:, :, None, None]


def upstream_of(
    grad_out: torch.Tensor, work: Workload, device: torch.device, *, wide: bool
) -> Upstream:
    """``grad_out`` (*batch, heads, n_queries, value_dim) for inputs of ``work``'s dtype.

    The host does not wait for the device.

    Args:
        device: the device that computes.
        wide: whether no product of the backward overflows, however large its elements are: see
            ``takes_wide`` (execution/scaling.py).
    """
    if not outreaches(grad_out.dtype, work.dtype):
        return Upstream(grad_out)
    # Rows that are not finite do not count.
    rows = torch.linalg.vector_norm(grad_out, ord=torch.inf, dim=-1)
    rows = rows.nan_to_num_(0.0, posinf=0.0)
    largest = rows.unflatten(-2, (work.kv_heads, -1)).amax(dim=(-2, -1))
    # 2**(exponent - 1) <= largest < 2**exponent
    exponent = torch.frexp(largest.to(torch.float64)).exponent
    exponent -= _WIDE_LARGEST if wide else _PLAIN_LARGEST
    exponent = exponent.clamp_(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    by_query = _power(-exponent).repeat_interleave(work.queries_per_key_head, dim=-1)
    tensor = torch.empty(grad_out.shape, dtype=work.dtype, device=grad_out.device)
    torch.mul(grad_out, by_query[..., None, None], out=tensor)
    return Upstream(tensor, _power(exponent).to(device=device, dtype=work.state_dtype))


def divided_bytes(gradient: torch.dtype, work: Workload, *, here: bool) -> int | None:
    """Bytes that ``upstream_of`` allocates on the device that computes, for a gradient of dtype
    ``gradient`` that is there (``here``) or elsewhere; None if it is not divided."""
    if not outreaches(gradient, work.dtype):
        return None
    # The divided copy, and two numbers for each row.
    per_row = work.value_dim * work.element_bytes + 2 * gradient.itemsize
    return work.batch * work.heads * work.n_queries * per_row if here else 0


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent in fp32, made from its bits: exact, as a device's pow may not be."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
