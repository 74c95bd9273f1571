"""Tells rounding from errors.

The limit follows from the dtype and from the size of the scores, not from the kernel's
errors: a kernel that is noisy or rounds too much must not widen its own limit.
"""

from __future__ import annotations

import torch

from quorum_attention.checking.trial_call import CheckSizes, Results, TrialInputs

# How many units in the last place a score or an lse may be off. (The rounding of an lse
# changes the weight of a whole rectangle.) 16-bit inputs are summed in fp32, wider ones
# in their own dtype.
_ULPS = 6.0
_ULPS_16_BITS = 3.0
# A dtype with a smaller unit in the last place has at least 32 bits.
_EPS_OF_WIDE_DTYPES = 1e-6


def is_wide(dtype: torch.dtype) -> bool:
    """Whether a dtype has more than 16 bits."""
    return torch.finfo(dtype).eps < _EPS_OF_WIDE_DTYPES


def rounding_limit(sizes: CheckSizes, inputs: TrialInputs, results: Results) -> float:
    """The largest error of a result that counts as rounding, as a share of its largest
    value.

    Rounding changes a score s by ``eps |s|``, and the weight of its key by the same
    factor.
    """
    largest_lse = _largest_finite(results["lse"])
    query_norm = _largest_norm(inputs.query)
    key_norm = _largest_norm(inputs.key)
    largest_score = sizes.scale * query_norm * key_norm
    largest = max(largest_lse, largest_score)
    eps = torch.finfo(sizes.dtype).eps
    ulps = _ULPS if is_wide(sizes.dtype) else _ULPS_16_BITS
    return ulps * eps * (1.0 + largest)


def _largest_norm(tensor: torch.Tensor) -> float:
    if not tensor.numel():
        return 0.0
    return float(tensor.double().norm(dim=-1).max())


def distance(result: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The absolute differences, float64.

    Equal infinities and pairs of NaN have distance 0. A single NaN has distance
    infinity.
    """
    result = result.double()
    expected = expected.double()
    is_same = (result == expected) | (result.isnan() & expected.isnan())
    differences = torch.where(is_same, 0.0, (result - expected).abs())
    return differences.nan_to_num(nan=torch.inf)


def exceeds(result: torch.Tensor, expected: torch.Tensor, share: float) -> bool:
    """Whether any element differs by more than ``share`` of the largest expected
    value."""
    if not result.numel():
        return False
    return float(distance(result, expected).max()) > share * largest_magnitude(expected)


def largest_magnitude(tensor: torch.Tensor) -> float:
    """The largest finite magnitude; 1 if that is 0."""
    return _largest_finite(tensor) or 1.0


def _largest_finite(tensor: torch.Tensor) -> float:
    """The largest finite magnitude; 0 without one."""
    finite = tensor[tensor.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def is_repetition(
    result: torch.Tensor, repeated: torch.Tensor, dtype: torch.dtype
) -> bool:
    """Whether two results of one call differ by no more than the order of sums in fp32
    or fp64.

    In 16 bits another order changes the last digit of a few elements.
    """
    differences = distance(result, repeated)
    if not differences.numel() or float(differences.max()) == 0.0:
        return True
    eps = torch.finfo(dtype).eps
    allowed_largest = 2 * eps
    allowed_typical = eps / 16
    if is_wide(dtype):
        allowed_largest = 64 * eps
        allowed_typical = 16 * eps
    if float(differences.max()) > allowed_largest * largest_magnitude(repeated):
        return False
    finite = repeated[repeated.isfinite()]
    typical_size = _root_mean_square(finite) if finite.numel() else 1.0
    return _root_mean_square(differences) <= allowed_typical * max(typical_size, 1e-30)


def _root_mean_square(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())
