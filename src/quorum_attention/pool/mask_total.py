"""The gradient of a mask tensor, of which each part gives its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.workload import state_dtype
from quorum_attention.pool.masked import bias_at
from quorum_attention.pool.parts import Part, Sizes
from quorum_attention.pool.shared import Shared, made_for


class MaskTotal:
    """The gradient of a mask.

    Where no two parts contribute to an element, workers write to the result itself. Else each part
    has room of its own, and they are added up in fp32 (or fp64) and rounded once.

    Args:
        parts: of the call.
        flat: the mask with one batch dimension, (batch or 1, heads or 1, n_queries or 1, n_keys or
            1).
        result: the gradient, of the shape of the caller's mask.
        batch: batch dimensions of the call.
        target: ``result`` as workers get it, with the shape of ``flat``; None
            where there is no such view.
    """

    def __init__(
        self,
        sizes: Sizes,
        parts: Iterable[Part],
        flat: torch.Tensor,
        result: torch.Tensor,
        batch: tuple[int, ...],
        target: Shared | None,
    ) -> None:
        self._sizes, self._flat, self.result, self._batch = sizes, flat, result, batch
        apart = target is not None and all(self._is_alone(part) for part in parts)
        self.target = target if apart else None
        self._total: torch.Tensor | None = None
        if not apart:
            dtype = state_dtype(flat.dtype)
            self._total = torch.zeros(flat.shape, dtype=dtype, device=flat.device)

    def room(self, part: Part) -> torch.Tensor | None:
        """Where a worker puts a part's gradient; None: in the result."""
        if self._total is None:
            return None
        at = self._total[bias_at(self._flat.shape, self._sizes, part)]
        made = made_for(at.shape, at.dtype, at.device)
        # Its memory may have been a sum that is still being read; the worker would not wait for it.
        backend_of(made.device).synchronize(made.device)
        return made

    def add(self, part: Part, made: torch.Tensor | None) -> None:
        """Add the gradient of a part that is done."""
        if self._total is not None and made is not None:
            self._total[bias_at(self._flat.shape, self._sizes, part)] += made

    def store(self) -> None:
        """Put the sum where it belongs."""
        if self._total is None:
            return
        if self._flat.shape[0] == 1:
            self.result.copy_(self._total.reshape(self.result.shape))
        else:
            every = self._total.reshape(*self._batch, *self._total.shape[1:])
            self.result.copy_(every.sum_to_size(self.result.shape))

    def _is_alone(self, part: Part) -> bool:
        """Whether no other part contributes to the elements that a part does."""
        sizes = self._sizes
        every = (
            sizes.batch == 1, part.heads == (0, sizes.heads), part.rows == (0, sizes.n_queries)
        )  # fmt: skip
        return all(n != 1 or whole for n, whole in zip(self._flat.shape, every, strict=False))


__all__ = ["MaskTotal"]
