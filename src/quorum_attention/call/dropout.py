"""The dropout of a call: its chance and its seed, checked; a seed is drawn where none is given."""

from __future__ import annotations

from typing import Any

import torch

from quorum_attention.call.transforms import refuse_randomness
from quorum_attention.counts import chance, whole_number
from quorum_attention.kernels.dropout import LARGEST_SEED, MOST_POSITIONS, Dropout
from quorum_attention.kernels.torch_private import capturing, outside


def checked_dropout(dropout_p: Any, dropout_seed: Any, *, draws: bool) -> tuple[float, int | None]:
    """The chance and the seed of a call as numbers.

    Args:
        draws: whether a seed is drawn where none is given; if not, there has to be one.

    Raises:
        TypeError, ValueError: one of them makes no sense, by name.
    """
    if dropout_seed is None and type(dropout_p) is float and dropout_p == 0.0:
        return 0.0, None
    seed = None
    if dropout_seed is not None:
        seed = whole_number(dropout_seed, "dropout_seed", 0, LARGEST_SEED)
    p = chance(dropout_p, "dropout_p")
    if p > 0.0 and seed is None and not draws:
        raise ValueError(
            "dropout_seed must be given with dropout_p: the seed of the forward, which its report "
            "has, or which it was given"
        )
    return p, seed


def dropout_of(
    p: float,
    seed: int | None,
    counts: tuple[int, ...],
    device: torch.device,
    *inputs: torch.Tensor | None,
) -> Dropout:
    """The dropout of a call; draws the seed where it is None.

    Args:
        p, seed: from ``checked_dropout``.
        counts: queries, keys, heads and batch entries.
        device: what computes.
        inputs: the call's, as they were given.

    Raises:
        NotImplementedError: more of something than is counted; or a CUDA graph is captured, in
            which a drawn seed would be the same at every replay.
        RuntimeError: ``torch.vmap`` of randomness="error".
    """
    if max(counts) > MOST_POSITIONS:
        raise NotImplementedError(
            f"dropout_p needs at most {MOST_POSITIONS} queries, keys, heads and batch entries, got "
            f"{max(counts)}"
        )
    if seed is None:
        if capturing(device):
            raise NotImplementedError(
                "dropout_p in a CUDA graph needs dropout_seed: a seed drawn while the graph is "
                "captured would be used again at every replay"
            )
        refuse_randomness(*inputs)
        seed = _drawn()
    return Dropout(p, seed)


def _drawn() -> int:
    """A seed from torch's generator of the CPU, whatever device computes: nobody waits for it, and
    checkpointing, which restores that generator, draws it again."""
    with outside():
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_())
