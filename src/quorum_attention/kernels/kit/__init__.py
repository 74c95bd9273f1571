"""Inner kernels made from a user's function, score modification or mask
(docs/kit.md)."""

from quorum_attention.kernels.kit.flex import from_score_mod
from quorum_attention.kernels.kit.function import FunctionKernel, from_lse_function
from quorum_attention.kernels.kit.longnet import DilatedSetting, LongNetKernel
from quorum_attention.kernels.kit.masks import (
    causal,
    document,
    prefix_lm,
    sliding_window,
)

__all__ = [
    "DilatedSetting",
    "FunctionKernel",
    "LongNetKernel",
    "causal",
    "document",
    "from_lse_function",
    "from_score_mod",
    "prefix_lm",
    "sliding_window",
]
