"""The output and the log-sum-exp of rows over the keys so far."""

from __future__ import annotations

import torch

from quorum_attention.kernels.call_shape import state_dtype
from quorum_attention.kernels.merge import empty_, merge_
from quorum_attention.kernels.operator_call import OutLse


class RunningStatistics:
    """The statistics over the keys so far: out (b, h, r, d_v) and lse (b, h, r).

    Args:
        query: (b, h, r, d).
        value_dim: d_v.
    """

    def __init__(self, query: torch.Tensor, value_dim: int) -> None:
        self._query = query
        self._value_dim = value_dim
        self._results: OutLse | None = None

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge the statistics over more keys, from any device. They may be written to
        later."""
        out = out.to(self._query.device)
        lse = lse.to(self._query.device)
        if self._results is None:
            self._results = (out, lse)
        else:
            merge_(*self._results, out, lse)

    def results(self) -> OutLse:
        """Return out and lse; without any keys, 0 and -inf."""
        if self._results is None:
            out, lse = self.empty_results()
            empty_(out, lse)
            self._results = (out, lse)
        return self._results

    def empty_results(self) -> OutLse:
        """Return uninitialised out and lse."""
        query = self._query
        rows = query.shape[:3]  # (b, h, r)
        dtype = state_dtype(query.dtype)
        out = query.new_empty((*rows, self._value_dim), dtype=dtype)
        lse = query.new_empty(rows, dtype=dtype)
        return out, lse
