"""How much two results of one call may differ by rounding alone.

The limits follow from the dtype and the sizes of the numbers, not from the kernel's errors: a
kernel that is noisy or rounds too much must not widen its own limits.
"""

from __future__ import annotations

import torch

# How many units in the last place a score or an lse may be off. (The rounding of an lse changes the
# weight of a whole rectangle.) 16-bit inputs are summed in fp32, wider ones in their own dtype.
_ULPS, _ULPS_16_BITS = 6.0, 3.0


def limit(query: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, scale: float) -> float:
    """The largest error of a result that counts as rounding, as a share of its largest value.

    Rounding changes a score s by ``eps |s|``, and so the share of its key by this factor.
    """
    finite = lse[lse.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    norms = [float(t.double().norm(dim=-1).max()) if t.numel() else 0.0 for t in (query, key)]
    ulps = _ULPS if query.dtype.itemsize > 2 else _ULPS_16_BITS
    return ulps * torch.finfo(query.dtype).eps * (1.0 + max(largest, scale * norms[0] * norms[1]))


def apart(mine: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Absolute differences: 0 for equal infinities and for two NaN, infinite for a single NaN."""
    a, b = mine.double(), wanted.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)


def far(mine: torch.Tensor, wanted: torch.Tensor, share: float) -> bool:
    """Whether any element differs by more than ``share`` of the largest."""
    return mine.numel() > 0 and float(apart(mine, wanted).max()) > share * size(wanted)


def size(tensor: torch.Tensor) -> float:
    """The largest finite magnitude; 1 if that is 0."""
    finite = tensor[tensor.isfinite()]
    return (float(finite.abs().max()) if finite.numel() else 0.0) or 1.0


def repeated(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether two results of one call differ by no more than the order of sums in fp32 (or fp64).

    In 16 bits another order changes the last digit of a few elements.
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
