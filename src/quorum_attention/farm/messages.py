"""What a farm tells its workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from quorum_attention.devices.buffers import InFile
from quorum_attention.farm.data import Source
from quorum_attention.farm.units import Cut
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.mask import Mask


@dataclass(frozen=True, slots=True)
class Begin:
    """A pass begins.

    Attributes:
        number: of the pass, in this farm.
        backward: which of the two it is.
        sizes: of the call, and how it is cut.
        inputs: by name: query, key, value, mask; grad_out, out, lse.
        results: by name, where rows are written: out, lse; grad_query, grad_key, grad_value. Empty:
            they are sent back.
        folder: where partial states are; None: they are sent back.
        state: dtype of partial states and of the log-sum-exp.
        dtype: of the forward's output.
        options: keyword arguments of each call.
        mask: what is masked beside the input of that name.
        sinks: (heads,); None: the mask has none.
        dropout: which probabilities are dropped; heads are whole then.
    """

    number: int
    backward: bool
    sizes: Cut
    inputs: dict[str, Source]
    results: dict[str, InFile]
    folder: str | None
    state: torch.dtype
    dtype: torch.dtype
    options: dict[str, Any] = field(default_factory=dict)
    mask: Mask | None = None
    sinks: torch.Tensor | None = None
    dropout: Dropout | None = None


__all__ = ["Begin"]
