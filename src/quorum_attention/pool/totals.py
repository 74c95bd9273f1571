"""Gradients of key/value heads that several parts read, added up by the coordinator."""

from __future__ import annotations

import torch

from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.workload import state_dtype
from quorum_attention.pool.parts import Part, Sizes
from quorum_attention.pool.shared import made_for


class Totals:
    """Sums in fp32 (or fp64), rounded once at the end.

    Args:
        key, value: (batch, kv_heads, n_keys, width); the gradients are like them.
    """

    def __init__(self, sizes: Sizes, key: torch.Tensor, value: torch.Tensor) -> None:
        self._sizes, self._like = sizes, (key, value)
        self._dtype = state_dtype(key.dtype)
        self._sums: dict[tuple[int, int], list[torch.Tensor]] = {}

    def room(self, part: Part) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Where a worker puts a part's gradients; None: in the results themselves."""
        if part.whole:
            return None
        kv, keys = part.kv(self._sizes), part.n_keys(self._sizes)
        first, second = (
            made_for((1, kv.length, keys, t.shape[3]), self._dtype, t.device) for t in self._like
        )
        # Its memory may have been a sum that is still being read; the worker would not wait for it.
        backend_of(first.device).synchronize(first.device)
        return first, second

    def add(self, part: Part, sums: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Add the gradients of a part that is done."""
        if sums is None:
            return
        for number, head in enumerate(range(*part.kv(self._sizes))):
            totals = self._sums.get((part.entry, head))
            if totals is None:
                totals = self._sums[part.entry, head] = [
                    torch.zeros(t.shape[2:], dtype=self._dtype, device=t.device) for t in self._like
                ]
            for total, made in zip(totals, sums, strict=True):
                rows = made[0, number]
                total[: rows.shape[0]] += rows

    def store(self, grad_key: torch.Tensor, grad_value: torch.Tensor) -> None:
        """Put the sums where they belong."""
        for (entry, head), (first, second) in self._sums.items():
            grad_key[entry, head] = first
            grad_value[entry, head] = second


__all__ = ["Totals"]
