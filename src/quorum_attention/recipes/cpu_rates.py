"""How fast this machine's CPU reads weights and multiplies matrices, measured."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import NamedTuple

import torch

# The matrix that one token is multiplied with: more than most caches hold.
_READ_BYTES = 256 << 20
_READ_WIDTH = 4096
# The matrices that many tokens are multiplied with, and these tokens.
_PRODUCT_WIDTH = 2048
_PRODUCT_TOKENS = 512
# The first run warms up, the fastest of the others counts.
_N_RUNS = 4


class CpuRates(NamedTuple):
    """Rates of the threads that torch has.

    Attributes:
        weight_bytes: bytes of weights a second that one token is multiplied with.
        flops: FLOP/s of a product of many tokens.
    """

    weight_bytes: float
    flops: float


@lru_cache(maxsize=4)
def measure_cpu(dtype: torch.dtype) -> CpuRates:
    """Measure the rates of weights of a dtype, in a second and 256 MiB."""
    n_rows = _READ_BYTES // (_READ_WIDTH * dtype.itemsize)
    read_seconds = _product_seconds(1, _READ_WIDTH, n_rows, dtype)
    matrix_seconds = _product_seconds(
        _PRODUCT_TOKENS, _PRODUCT_WIDTH, _PRODUCT_WIDTH, dtype
    )
    operations = 2 * _PRODUCT_TOKENS * _PRODUCT_WIDTH * _PRODUCT_WIDTH
    return CpuRates(_READ_BYTES / read_seconds, operations / matrix_seconds)


def _product_seconds(
    n_tokens: int, n_inputs: int, n_outputs: int, dtype: torch.dtype
) -> float:
    """Seconds of a linear layer of ``n_tokens`` tokens."""
    weight = torch.ones(n_outputs, n_inputs, dtype=dtype)
    tokens = torch.ones(n_tokens, n_inputs, dtype=dtype)
    seconds = []
    for _ in range(_N_RUNS):
        start = time.perf_counter()
        torch.nn.functional.linear(tokens, weight)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
