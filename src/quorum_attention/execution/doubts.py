"""What a backward in fp16 notes of its gradients while it runs, to be looked at when it is done."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Doubts:
    """Which gradients of one backward may be wrong, though all that it was given is finite.

    They are then computed anew (execution/exact_rows.py).

    Attributes:
        outgrown: whether one is too large for fp16 once it is added up, or was not finite however
            far it was scaled down. It may be so rightly.
        rows: (*batch, heads, n_queries), boolean: rows whose exact delta fp16 could not carry
            (kernels/delta.py); None: there are none.
    """

    outgrown: bool = False
    rows: torch.Tensor | None = None
