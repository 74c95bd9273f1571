"""What operators can take, and inputs in the form in which they take them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.operator_call import Call

HALF_DTYPES = (torch.float16, torch.bfloat16)


def operator_refusal(
    shape: CallShape,
    device: str,
    dtypes: Sequence[torch.dtype],
    widest: int | None = None,
) -> str | None:
    """Return why an operator for a kind of device and some dtypes cannot run a call, or
    None.

    Args:
        widest: the largest head and value dimension, which then are multiples of 8.
    """
    if shape.device_type != device:
        where = "the CPU" if device == "cpu" else "NVIDIA GPUs"
        return f"it runs on {where}, not on {shape.device_type}"
    if shape.dtype not in dtypes:
        *names, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"it takes {', '.join(names)} and {last}, not {shape.dtype}"
    return _width_refusal("head", shape.head_dim, widest) or _width_refusal(
        "value", shape.value_dim, widest
    )


def _width_refusal(name: str, width: int, widest: int | None) -> str | None:
    """Return why an operator cannot run a call with this head or value dimension, or
    None."""
    if width == 0:
        return f"it takes no {name} dimension of 0"
    if widest is None:
        return None
    if width % 8 or width > widest:
        return (
            f"it takes {name} dimensions that are multiples of 8 up to {widest}, not "
            f"{width}"
        )
    return None


def small_scale_refusal(shape: CallShape) -> str | None:
    """Return why an operator cannot run a call if it multiplies gradients of scores by
    the scale before it rounds them to fp16: nothing would be left of them."""
    if shape.needs_grad and shape.dtype == torch.float16 and not shape.exact_scale:
        return "its float16 gradients lose their digits where scale is below 2**-9"
    return None


def as_operator_readable(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of an upstream gradient or an output as operators can read them.

    Args:
        rows: (b, h, n, d).

    Returns:
        ``rows`` if it is of ``dtype``, in dense rows, and not expanded; else a copy of
        it, token after token.
    """
    is_dense = rows.stride(-1) == 1 or rows.shape[-1] <= 1
    is_expanded = 0 in rows.stride()
    if rows.dtype == dtype and is_dense and not is_expanded:
        return rows
    batch, heads, n, width = rows.shape
    by_token = torch.empty(
        (batch, n, heads, width),
        dtype=dtype,
        device=rows.device,
    )
    copy = by_token.transpose(1, 2)
    return copy.copy_(rows)


def with_positive_scale(
    call: Call, splits_fp32_scale: bool = False
) -> tuple[Call, float]:
    """Return a call with a scale above 0 that has the same scores.

    Operators mask a row with -inf and take its maximum before they multiply by the
    scale. With a scale of 0 or below they return NaN or wrong weights. So the queries
    are multiplied by the sign of the scale (-1 or 0), which is exact. In float64, and
    in fp32 for torch's CPU operator, they are multiplied by all of the scale but a
    power of two: that operator rounds a score times the scale otherwise in its backward
    than in its forward, which costs a digit or two of exp(score - lse) where scores are
    large (docs/gradients.md).

    Args:
        splits_fp32_scale: see ``RectangleKernel``.

    Returns:
        The call, and the factor by which its queries were multiplied. The gradient of
        its queries is to be multiplied by that factor, too; if the factor is 1, the
        queries are the same.
    """
    dtype = call.query.dtype
    to_power_of_two = dtype == torch.float64
    if dtype == torch.float32:
        to_power_of_two = splits_fp32_scale
    query_factor, scale = _split_scale(call.scale, to_power_of_two)
    if query_factor == 1.0 and scale == call.scale:
        return call, 1.0
    # 0 times NaN or infinity is NaN, as in the scores.
    query = call.query if query_factor == 1.0 else call.query * query_factor
    return replace(call, query=query, scale=scale), query_factor


@lru_cache(maxsize=256)
def _split_scale(scale: float, to_power_of_two: bool) -> tuple[float, float]:
    """Return a factor of the queries and a scale above 0 whose product is ``scale``."""
    if scale == 0:
        return 0.0, 1.0
    sign = -1.0 if scale < 0 else 1.0
    size = abs(scale)
    mantissa, exponent = math.frexp(size)
    if to_power_of_two and mantissa != 0.5:
        return sign * mantissa, math.ldexp(1.0, exponent)
    return sign, size


def shifted_lse(lse: torch.Tensor, shift: int) -> torch.Tensor:
    """Return ``lse - shift ln 2``, with 0 for rows without keys: exp(-inf - 0) = 0,
    where exp(-inf - -inf) would be NaN."""
    shifted = lse - shift * math.log(2.0)
    return shifted.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=0.0)
