"""The dropout of a call: its probability and its seed, drawn if none was given."""

from __future__ import annotations

from typing import Any

import torch

from quorum_attention.argument_checks import whole_number
from quorum_attention.kernels.dropout import LARGEST_SEED, Dropout
from quorum_attention.kernels.torch_private import capturing, no_torch_modes


def draw_dropout(
    p: float, seed: Any, device: torch.device, *, draws: bool
) -> Dropout | None:
    """Return the dropout of a call; None if nothing is dropped.

    Args:
        p: the probability that a weight is dropped.
        seed: the seed as the caller gave it, or None.
        device: the device that computes.
        draws: whether a seed is drawn where none is given; if not, a missing one is an
            error.

    Raises:
        TypeError, ValueError: the seed makes no sense, or is missing.
        NotImplementedError: a CUDA graph is captured, in which a drawn seed would be
            the same at every replay.
    """
    if seed is not None:
        seed = whole_number(seed, "dropout_seed", 0, LARGEST_SEED)
    if p == 0.0:
        return None
    if seed is not None:
        return Dropout(p, seed)
    if not draws:
        raise ValueError(
            "dropout_seed must be given with dropout_p: the seed of the forward, "
            "which its report has, or which it was given"
        )
    if capturing(device):
        raise NotImplementedError(
            "dropout_p in a CUDA graph needs dropout_seed: a seed drawn while the "
            "graph is captured would be used again at every replay"
        )
    # Torch's generator of the CPU draws it, whatever device computes: nobody waits for
    # it, and checkpointing, which restores that generator, draws the same seed again.
    with no_torch_modes():
        drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    return Dropout(p, drawn)
