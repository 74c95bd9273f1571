"""The dtypes that inputs of a call may have, in words and as a check."""

from __future__ import annotations

from typing import Any

from quorum_attention.argument_checks import shown
from quorum_attention.kernels.call_shape import DTYPES

DTYPE_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)


def check_dtype(dtype: Any, name: str) -> None:
    """Raise TypeError if ``dtype`` is none of ``DTYPES``."""
    if dtype not in DTYPES:
        raise TypeError(f"{name} must be one of {DTYPE_NAMES}, got {shown(dtype)}")
