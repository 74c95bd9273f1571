"""Zero columns that make a head dimension what an operator insists on.

Zero columns of query and key change no score, and those of value only add columns to the output
that are cut off again.
"""

from __future__ import annotations

import torch


def pad_last(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """``tensor`` with zero columns up to ``width``; as it is, uncopied, where it has as many."""
    missing = width - tensor.shape[-1]
    return tensor if missing <= 0 else torch.nn.functional.pad(tensor, (0, missing))
