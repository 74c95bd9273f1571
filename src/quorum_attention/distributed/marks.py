"""A number at the end of a message, by which its reader knows whether both mean the same call.

Gloo does not mind a message that is shorter than what was waited for: what is missing stays as the
memory was. One of the right length may still be of another call. So the last rank, whose message
comes last in memory everywhere, adds a mark to its first one.
"""

from __future__ import annotations

import torch

MARK_BYTES = 8


def write_marks(outbox: torch.Tensor, messages: int, mark: int) -> None:
    """Write a mark into the rows left for it, at the end of each message.

    Args:
        outbox: (messages * rows, ...), in one piece; of each message's last rows some are free.
        mark: in [0, 2**63).
    """
    place = outbox.view(torch.uint8).view(messages, -1)[:, -MARK_BYTES:]
    digits = list(mark.to_bytes(MARK_BYTES, "little"))
    place.copy_(torch.tensor(digits, dtype=torch.uint8, device="cpu"))


def read_mark(tail: torch.Tensor) -> int:
    """The mark at the end of what came."""
    last = tail.reshape(-1).view(torch.uint8)[-MARK_BYTES:]
    return int.from_bytes(bytes(last.tolist()), "little")


__all__ = ["MARK_BYTES", "read_mark", "write_marks"]
