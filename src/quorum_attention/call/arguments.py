"""What a call says beside its query, key and value, as its caller wrote it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quorum_attention.call.options import CallOptions
from quorum_attention.mask import Mask


class Arguments(NamedTuple):
    """The arguments of a call that follow query, key and value, unchecked, in the order in which
    ``request_of`` takes them; ``api.attention`` says what they mean."""

    attn_mask: torch.Tensor | Mask | None = None
    dropout_p: float = 0.0
    dropout_seed: int | None = None
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    out: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    written: CallOptions = CallOptions()


__all__ = ["Arguments"]
