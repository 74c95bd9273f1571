"""What a backward in fp16 notes of its gradients while it runs, to be looked at when it is done."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Values of a norm of 16,000 beside gradients as large as fp16 holds are divided by 2 to this power.
_DEEP = 16


@dataclass(slots=True)
class Doubts:
    """Which gradients of one backward may be wrong, though all that it was given is finite.

    They are then computed anew (execution/exact_rows.py).

    Attributes:
        outgrown: whether one is too large for fp16 once it is added up, or was not finite however
            far it was scaled down. It may be so rightly.
        divided: log2 of the largest number that an upstream gradient was divided by, beyond what
            probabilities were multiplied by; as far as the host knows.
        rows: (*batch, heads, n_queries), boolean: rows whose exact delta fp16 could not carry
            (kernels/delta.py); None: there are none.
    """

    outgrown: bool = False
    divided: int = 0
    rows: torch.Tensor | None = None

    @property
    def sunk(self) -> bool:
        """Whether an upstream gradient was divided by so much that rows of less than its largest
        ones, and sums of few probabilities, have lost digits."""
        return self.divided >= _DEEP

    def __bool__(self) -> bool:
        """Whether there is any."""
        return self.outgrown or self.sunk or self.rows is not None
