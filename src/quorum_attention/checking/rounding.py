"""How far two results of one call may be apart when nothing but rounding differs.

From the dtype and the sizes of the numbers alone, never from what a kernel makes of them: one that
is noisy, or rounds where it should not, must not widen its own limits.
"""

from __future__ import annotations

import torch

# Units in the last place of a score or an lse that a kernel may have lost: an lse that is rounded
# to its dtype weighs a whole rectangle by as much. In 16 bits sums are made in fp32, in the wider
# dtypes in themselves.
_ULPS, _ULPS_16_BITS = 6.0, 3.0


def limit(query: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, scale: float) -> float:
    """What a result may be off by, as a share of its largest value.

    A score s, rounded, is off by ``eps |s|``, and the share of its key by as much of itself.
    """
    finite = lse[lse.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    norms = [float(t.double().norm(dim=-1).max()) if t.numel() else 0.0 for t in (query, key)]
    ulps = _ULPS if query.dtype.itemsize > 2 else _ULPS_16_BITS
    return ulps * torch.finfo(query.dtype).eps * (1.0 + max(largest, scale * norms[0] * norms[1]))


def apart(mine: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Differences; equal infinities do not differ, and what is no number is infinitely off."""
    a, b = mine.double(), wanted.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)


def far(mine: torch.Tensor, wanted: torch.Tensor, share: float) -> bool:
    """Whether any element differs by more than that share of the largest."""
    return mine.numel() > 0 and float(apart(mine, wanted).max()) > share * size(wanted)


def size(tensor: torch.Tensor) -> float:
    """The largest finite magnitude, 1 where there is none but 0."""
    finite = tensor[tensor.isfinite()]
    return (float(finite.abs().max()) if finite.numel() else 0.0) or 1.0


def repeated(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether two results of one call are the same but for the order of sums in fp32 (or fp64).

    In 16 bits such an order turns a last digit here and there, and no more.
    """
    off = apart(one, other)
    if not off.numel() or float(off.max()) == 0.0:
        return True
    eps = torch.finfo(dtype).eps
    largest, typical = (64 * eps, 16 * eps) if eps < 1e-6 else (2 * eps, eps / 16)
    finite = other[other.isfinite()].double()
    middle = float(finite.square().mean().sqrt()) if finite.numel() else 1.0
    return float(off.max()) <= largest * size(other) and float(
        off.square().mean().sqrt()
    ) <= typical * max(middle, 1e-30)
