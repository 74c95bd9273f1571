"""Gradients that several parts contribute to, added up by the coordinator."""

from __future__ import annotations

import torch

from quorum_attention.execution.device.lookup import backend_of, on_host
from quorum_attention.execution.workload import state_dtype
from quorum_attention.pool.mask_total import MaskTotal
from quorum_attention.pool.parts import Part, Sizes
from quorum_attention.pool.shared import made_for


class Totals:
    """Sums in fp32 (or fp64), rounded once at the end.

    Args:
        key, value: (batch, kv_heads, n_keys, width); the gradients are like them.
        mask: the gradient of the mask, if it is wanted.
    """

    def __init__(
        self,
        sizes: Sizes,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: MaskTotal | None = None,
    ) -> None:
        self._sizes, self._like, self._mask = sizes, (key, value), mask
        self._dtype = state_dtype(key.dtype)
        self._sums: dict[tuple[int, int], list[torch.Tensor]] = {}

    @property
    def in_host_memory(self) -> bool:
        """Whether sums are there."""
        return on_host(self._like[0].device)

    @property
    def may_cut(self) -> bool:
        """Whether parts may be cut after the pass has begun."""
        return self._mask is None

    def room(self, part: Part) -> dict[str, torch.Tensor] | None:
        """Where a worker puts those of a part's gradients that are added up, by name; None: all are
        results themselves."""
        found = self._of_keys(part)
        of_mask = None if self._mask is None else self._mask.room(part)
        if of_mask is not None:
            found["grad_mask"] = of_mask
        return found or None

    def _of_keys(self, part: Part) -> dict[str, torch.Tensor]:
        if part.whole:
            return {}
        kv, keys = part.kv(self._sizes), part.n_keys(self._sizes)
        first, second = (
            made_for((1, kv.length, keys, t.shape[3]), self._dtype, t.device) for t in self._like
        )
        # Its memory may have been a sum that is still being read; the worker would not wait for it.
        backend_of(first.device).synchronize(first.device)
        return {"grad_key": first, "grad_value": second}

    def add(self, part: Part, sums: dict[str, torch.Tensor] | None) -> None:
        """Add the gradients of a part that is done."""
        if sums is None:
            return
        if self._mask is not None:
            self._mask.add(part, sums.get("grad_mask"))
        if "grad_key" not in sums:
            return
        both = sums["grad_key"], sums["grad_value"]
        for number, head in enumerate(range(*part.kv(self._sizes))):
            totals = self._sums.get((part.entry, head))
            if totals is None:
                totals = self._sums[part.entry, head] = [
                    torch.zeros(t.shape[2:], dtype=self._dtype, device=t.device) for t in self._like
                ]
            for total, made in zip(totals, both, strict=True):
                rows = made[0, number]
                total[: rows.shape[0]] += rows

    def store(self, grad_key: torch.Tensor, grad_value: torch.Tensor) -> None:
        """Put the sums where they belong."""
        for (entry, head), (first, second) in self._sums.items():
            grad_key[entry, head] = first
            grad_value[entry, head] = second
        if self._mask is not None:
            self._mask.store()


__all__ = ["Totals"]
