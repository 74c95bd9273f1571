"""How coarse the arithmetic of one call is: unit roundoffs, and the smallest numbers of
dtypes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from random_calls.case import Case
from random_calls.tensors import DTYPES

# The constant of accumulated roundings: sums of some hundred terms, a few merges.
SUMS = 4.0
# The relative error of an exponential meant for 16-bit results (torch's on a CPU: 3e-5
# seen).
SHORT_EXPONENTIAL = 2.0**-13


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def smallest(dtype: torch.dtype) -> float:
    """The most that a number loses because it is too small for a dtype.

    In fp16 half the smallest subnormal number. In other dtypes the smallest normal
    number, because exponentials and processors take smaller ones for zero.
    """
    info = torch.finfo(dtype)
    if dtype == torch.float16:
        return info.smallest_normal * info.eps / 2
    return info.smallest_normal


@dataclass(frozen=True)
class Rounding:
    """The arithmetic of one call; names as in docs/random-call-bounds.md.

    Attributes:
        u_in: unit roundoff of the inputs' dtype.
        u_acc: unit roundoff of the dtype that sums are accumulated in.
        a: SUMS times ``u_acc``.
        t_in: the smallest number of the inputs' dtype.
        e_exp: relative error of an exponential beyond its rounding, 0 but for 16-bit
            inputs.
        sum_keys, sum_rows: error of the reference's own sums over keys, and over the
            rows of a key head, in units of the sizes of their terms; 0 but for float64
            inputs.
        dropout_scale: 1 / (1 - dropout), the largest factor Z of a pair.
        n_shared: query heads that share a key head.
    """

    u_in: float
    u_acc: float
    a: float
    t_in: float
    e_exp: float
    sum_keys: float
    sum_rows: float
    dropout_scale: float
    n_shared: int

    def of_sum(self, n_terms: int) -> float:
        """The error of a sum in units of the sizes of its terms, all rounded alike."""
        return self.u_acc * n_terms


def rounding_of(case: Case) -> Rounding:
    dtype = DTYPES[case.dtype]
    is_fp64 = dtype == torch.float64
    u_acc = unit_roundoff(torch.float64 if is_fp64 else torch.float32)
    n_shared = case.heads // case.kv_heads if case.kv_heads else 1
    return Rounding(
        u_in=unit_roundoff(dtype),
        u_acc=u_acc,
        a=SUMS * u_acc,
        t_in=smallest(dtype),
        e_exp=SHORT_EXPONENTIAL if dtype.itemsize == 2 else 0.0,
        sum_keys=u_acc * case.n_keys if is_fp64 else 0.0,
        sum_rows=u_acc * case.n_queries * n_shared if is_fp64 else 0.0,
        dropout_scale=1 / (1 - case.dropout),
        n_shared=n_shared,
    )
