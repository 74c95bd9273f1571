"""Error bounds of a forward. Each function is the formula of its name in
docs/random-call-bounds.md."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from helpers.equations import Forward

from random_calls.rounding import Rounding, smallest, unit_roundoff


class ForwardBounds:
    """The bounds of one forward; tensors as in ``helpers.equations.Forward``.

    Args:
        exact: the forward in float64.
        rounding: the arithmetic of the call.
        softcap: of the scores, or None.
        slopes: ALiBi's, (h,), or None.
    """

    def __init__(
        self,
        exact: Forward,
        rounding: Rounding,
        softcap: float | None,
        slopes: torch.Tensor | None,
    ) -> None:
        self.exact = exact
        self.rounding = rounding
        self.softcap = softcap
        self.slopes = slopes

    @cached_property
    def score_sizes(self) -> torch.Tensor:
        """(b, h, n, m)."""
        exact = self.exact
        products_of_sizes = exact.query.abs() @ exact.key.abs().mT
        sizes = abs(exact.scale) * products_of_sizes + exact.products.abs()
        if self.softcap is not None:
            sizes = sizes + self.softcap
        if self.slopes is not None:
            n_queries, n_keys = sizes.shape[-2:]
            query_at = torch.arange(n_queries, device=sizes.device)
            key_at = torch.arange(n_keys, device=sizes.device)
            distance = (query_at[:, None] - key_at).abs()
            sizes = sizes + self.slopes.to(sizes)[:, None, None] * distance
        if exact.bias is not None:
            sizes = sizes + exact.bias.abs()
        return sizes

    @cached_property
    def score_error(self) -> torch.Tensor:
        """(b, h, n, m)."""
        return self.rounding.a * self.score_sizes.masked_fill(~self.exact.kept, 0.0)

    @cached_property
    def lse_error(self) -> torch.Tensor:
        """(b, h, n)."""
        return (self.exact.p * self.score_error).sum(-1)

    @cached_property
    def lse_size(self) -> torch.Tensor:
        """|lse|, 0 in rows without keys; (b, h, n)."""
        is_empty = self.exact.lse == -math.inf
        return self.exact.lse.masked_fill(is_empty, 0.0).abs()

    def lse_bound(self) -> torch.Tensor:
        """(b, h, n)."""
        rounding = self.rounding
        own_roundings = rounding.a * (2 + self.lse_size)
        return self.lse_error + own_roundings + rounding.sum_keys + rounding.e_exp

    @cached_property
    def lost_probability(self) -> torch.Tensor:
        """(b, h, n, m)."""
        return self.rounding.t_in * (self.exact.p > 0)

    @cached_property
    def output_error(self) -> torch.Tensor:
        """(b, h, n, dv)."""
        rounding = self.rounding
        p = self.exact.p
        of_row = (self.lse_error + 2 * rounding.a).unsqueeze(-1)
        of_scores = p * (self.score_error + of_row)
        of_roundings = (rounding.u_in + rounding.a + 2 * rounding.sum_keys) * p
        probability_errors = of_scores + of_roundings + self.lost_probability
        return rounding.dropout_scale * (probability_errors @ self.exact.value.abs())

    def output_bound(self, dtype: torch.dtype) -> torch.Tensor:
        """(b, h, n, dv), for an output of ``dtype``; a task's output is of the inputs'
        dtype."""
        last_rounding = unit_roundoff(dtype) * self.exact.out.abs()
        return (
            self.output_error + last_rounding + max(smallest(dtype), self.rounding.t_in)
        )

    def output_sum_error(self) -> torch.Tensor:
        """(b, h, n, dv), allowed only as far as torch needs it."""
        rounding = self.rounding
        of_sum = rounding.dropout_scale * rounding.of_sum(self.exact.p.shape[-1])
        return of_sum * (self.exact.p @ self.exact.value.abs())
