"""Error bounds of a backward. Each function is the formula of its name in
docs/random-call-bounds.md."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from helpers.equations import Forward, Gradients

from random_calls.forward_bounds import ForwardBounds
from random_calls.head_groups import first_of_group, sum_of_group
from random_calls.rounding import Rounding, smallest, unit_roundoff

# Beyond this error of log P the exponential is anybody's guess: the lse cannot tell.
_LOG_LIMIT = 0.5
# What dividing a gradient leaves of the smallest elements beside the largest of a head.
_DIVIDED_GRAD_OUT = 2.0**-38


class BackwardBounds:
    """The bounds of one backward; tensors as in ``helpers.equations``, heads expanded.

    Args:
        forward: bounds of the forward.
        gradients: the exact gradients.
        grad_out: dO in float64, (b, h, n, dv).
        out_dtype: of the output that delta is computed from.
        is_grad_out_wider: whether dO has more digits than the inputs.
        sum_divisor, divisor: of random_calls/fp16_division.py, (b, h, 1, 1).
        part_losses: how many parts of a gradient of one query head are each rounded to
            the smallest numbers.
    """

    def __init__(
        self,
        forward: ForwardBounds,
        gradients: Gradients,
        grad_out: torch.Tensor,
        *,
        out_dtype: torch.dtype,
        is_grad_out_wider: bool,
        sum_divisor: torch.Tensor,
        divisor: torch.Tensor,
        part_losses: int,
    ) -> None:
        self.forward = forward
        self.gradients = gradients
        self.grad_out = grad_out
        self.out_dtype = out_dtype
        self.is_grad_out_wider = is_grad_out_wider
        self.sum_divisor = sum_divisor
        self.divisor = divisor
        self.part_losses = part_losses

    @property
    def exact(self) -> Forward:
        return self.forward.exact

    @property
    def rounding(self) -> Rounding:
        return self.forward.rounding

    @property
    def grad_products(self) -> torch.Tensor:
        """dS', the gradient of the scaled products q k; (b, h, n, m)."""
        return self.gradients.scores * self.exact.slope

    @cached_property
    def probability_error(self) -> torch.Tensor:
        """(b, h, n, m), infinite where the error of log P is beyond ``_LOG_LIMIT``."""
        forward = self.forward
        rounding = self.rounding
        of_row = forward.lse_error + rounding.a * (1 + forward.lse_size)
        log_error = forward.score_error + of_row.unsqueeze(-1) + rounding.e_exp
        error = 1.5 * self.exact.p * log_error
        error = torch.where(log_error < _LOG_LIMIT, error, math.inf)
        return error.masked_fill(self.exact.p == 0, 0.0)

    def grad_s_error_of_probabilities(self) -> torch.Tensor:
        """(b, h, n, m). Probabilities that are off are so in the output too, and so in
        delta."""
        of_pair = without_inf(
            self.probability_error * self.gradients.centred_grad_p.abs()
        )
        return of_pair + self.exact.p * of_pair.sum(-1, keepdim=True)

    def grad_s_error_of_products(self) -> torch.Tensor:
        """(b, h, n, m)."""
        grad_p_sizes = self.grad_p_sizes(self.grad_out.abs())
        grad_p_sizes = grad_p_sizes + self.gradients.grad_lse.abs().unsqueeze(-1)
        delta_sizes = (self.grad_out * self.exact.out).abs().sum(-1, keepdim=True)
        error = self.rounding.a * self.exact.p * (grad_p_sizes + delta_sizes)
        if isinstance(self.exact.slope, torch.Tensor):
            of_slope = self.exact.p * self.gradients.centred_grad_p.abs()
            error = error + self.rounding.a * of_slope
        return error

    def grad_s_error_of_lost_probabilities(self) -> torch.Tensor:
        """(b, h, n, m)."""
        factor = 1.0 + without_inf(self.gradients.centred_grad_p.abs())
        return self.forward.lost_probability * factor

    @cached_property
    def grad_out_error(self) -> torch.Tensor:
        """(b, h, n, dv), 0 if dO has no more digits than the inputs."""
        sizes = self.grad_out.abs()
        if not self.is_grad_out_wider:
            return torch.zeros_like(sizes)
        lost = _DIVIDED_GRAD_OUT * self.sum_divisor
        if sizes.numel():
            of_lse = 2 * self.gradients.grad_lse.abs().unsqueeze(-1)
            lost = lost * torch.maximum(sizes, of_lse).amax((-2, -1), keepdim=True)
        return self.rounding.u_in * sizes + lost

    def grad_s_error_of_grad_out(self) -> torch.Tensor:
        """(b, h, n, m)."""
        return self.grad_s_error_by_upstream(
            self.grad_out_error, self.rounding.dropout_scale
        )

    def grad_s_error_of_returned_output(self) -> torch.Tensor:
        """(b, h, n, m), 0 unless the output that a caller hands back has fewer digits
        than the inputs."""
        unit = unit_roundoff(self.out_dtype)
        if unit <= self.rounding.u_in:
            return torch.zeros_like(self.exact.p)
        sizes = self.grad_out.abs()
        of_digits = unit * (sizes * self.exact.out.abs()).sum(-1, keepdim=True)
        of_lost = smallest(self.out_dtype) * sizes.sum(-1, keepdim=True)
        return self.exact.p * (of_digits + of_lost)

    def grad_s_error_of_reference(self) -> torch.Tensor:
        """(b, h, n, m), 0 but for float64 inputs."""
        factor = 4 * self.rounding.dropout_scale * self.rounding.sum_keys
        if not factor:
            return torch.zeros_like(self.exact.p)
        output_sizes = self.exact.p @ self.exact.value.abs()
        delta_sizes = (self.grad_out.abs() * output_sizes).sum(-1, keepdim=True)
        return factor * self.exact.p * delta_sizes

    @cached_property
    def grad_s_error(self) -> torch.Tensor:
        """(b, h, n, m), the sum of all parts above and one rounding."""
        error = self.rounding.u_in * self.grad_products.abs()
        error = error + self.grad_s_error_of_probabilities()
        error = error + self.grad_s_error_of_products()
        error = error + self.grad_s_error_of_lost_probabilities()
        error = error + self.grad_s_error_of_grad_out()
        error = error + self.grad_s_error_of_returned_output()
        return error + self.grad_s_error_of_reference()

    @cached_property
    def lost_grad_out(self) -> torch.Tensor:
        """(b, h, 1, 1). A row of dO far below the largest of its key head is divided
        along, and is among the smallest numbers then."""
        lost = self.rounding.t_in * self.divisor
        return torch.where(self.divisor > 1, lost, 0.0)

    @cached_property
    def grad_s_error_like_torch(self) -> torch.Tensor:
        """(b, h, n, m), allowed only as far as torch needs it: a rounded output in
        delta, and elements of dO that are lost where a head is divided."""
        exact = self.exact
        out_error = self.forward.output_error + self.rounding.u_in * exact.out.abs()
        out_error = out_error + self.rounding.t_in
        delta_error = (self.grad_out.abs() * out_error).sum(-1, keepdim=True)
        of_output = without_inf(exact.p * delta_error)
        lost = self.lost_grad_out * torch.ones_like(self.grad_out)
        return of_output + without_inf(self.grad_s_error_by_upstream(lost, 1.0))

    def grad_s_error_by_upstream(
        self, error: torch.Tensor, factor: float
    ) -> torch.Tensor:
        """(b, h, n, m): P (factor e |V|^T + rowsum(e |O|)) for an error e of dO, (b, h,
        n, dv)."""
        grad_p_error = factor * (error @ self.exact.value.abs().mT)
        delta_error = (error * self.exact.out.abs()).sum(-1, keepdim=True)
        return self.exact.p * (grad_p_error + delta_error)

    def grad_p_sizes(self, grad_out_sizes: torch.Tensor) -> torch.Tensor:
        """(b, h, n, m)."""
        return self.rounding.dropout_scale * (
            grad_out_sizes @ self.exact.value.abs().mT
        )

    def lost_parts(self) -> torch.Tensor:
        """(b, h, 1, 1)."""
        return self.part_losses * self.rounding.t_in * self.divisor

    def summed_grad_s_error(self) -> torch.Tensor:
        """(b, h, n, m): what dS is off by, and what its sums are off by for each
        term."""
        rounding = self.rounding
        reference = max(rounding.sum_keys, rounding.sum_rows)
        of_term = (rounding.u_in + rounding.a + reference) * self.grad_products.abs()
        return without_inf(self.grad_s_error + of_term)

    def times_key(self, grad_s_sizes: torch.Tensor) -> torch.Tensor:
        """(b, h, n, m) -> (b, h, n, d)."""
        return abs(self.exact.scale) * (grad_s_sizes @ self.exact.key.abs())

    def times_query(self, grad_s_sizes: torch.Tensor) -> torch.Tensor:
        """(b, h, n, m) -> (b, kv_heads, m, d)."""
        products = abs(self.exact.scale) * (grad_s_sizes.mT @ self.exact.query.abs())
        return sum_of_group(products, self.rounding.n_shared)

    def grad_query_bound(self, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(b, h, n, d)."""
        bound = self.times_key(self.summed_grad_s_error())
        return bound + last_rounding(exact, dtype) + self.lost_parts()

    def grad_key_bound(self, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(b, kv_heads, m, d)."""
        bound = self.times_query(self.summed_grad_s_error())
        lost = first_of_group(self.lost_parts(), self.rounding.n_shared)
        return bound + last_rounding(exact, dtype) + lost

    def grad_value_bound(self, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(b, kv_heads, m, dv)."""
        rounding = self.rounding
        p = self.exact.p
        of_term = rounding.u_in + rounding.a + rounding.sum_keys + rounding.sum_rows
        p_error = without_inf(self.probability_error) + of_term * p
        p_error = p_error + self.forward.lost_probability
        bound = p_error.mT @ self.grad_out.abs() + p.mT @ self.grad_out_error
        bound = rounding.dropout_scale * sum_of_group(bound, rounding.n_shared)
        lost = first_of_group(self.lost_parts(), rounding.n_shared)
        return bound + last_rounding(exact, dtype) + lost

    def grad_query_error_like_torch(self) -> torch.Tensor:
        """(b, h, n, d), allowed only as far as torch needs it."""
        return self.times_key(self.grad_s_error_like_torch + self._sum_error())

    def grad_key_error_like_torch(self) -> torch.Tensor:
        """(b, kv_heads, m, d), allowed only as far as torch needs it."""
        return self.times_query(self.grad_s_error_like_torch + self._sum_error())

    def _sum_error(self) -> torch.Tensor:
        n_terms = max(self.exact.p.shape[-2:]) * self.rounding.n_shared
        return self.rounding.of_sum(n_terms) * self.grad_products.abs()

    def grad_value_error_like_torch(self) -> torch.Tensor:
        """(b, kv_heads, m, dv), allowed only as far as torch needs it."""
        rounding = self.rounding
        n_terms = self.exact.p.shape[-2] * rounding.n_shared
        grad_out_error = (
            rounding.of_sum(n_terms) * self.grad_out.abs() + self.lost_grad_out
        )
        products = self.exact.p.mT @ grad_out_error
        return rounding.dropout_scale * sum_of_group(products, rounding.n_shared)

    def grad_sinks_bound(self) -> torch.Tensor:
        """(h,). Parts of an output are of the inputs' dtype, whatever the output's."""
        exact = self.exact
        rounding = self.rounding
        assert exact.p_sink is not None
        assert self.gradients.sinks is not None
        grad_lse = self.gradients.grad_lse
        delta = (self.grad_out * exact.out).sum(-1)
        sizes = (self.grad_out * exact.out).abs().sum(-1) + grad_lse.abs()
        log_error = self.forward.lse_error + rounding.a * (2 + self.forward.lse_size)
        log_error = log_error + rounding.e_exp

        units = unit_roundoff(self.out_dtype) + rounding.u_in
        out_error = self.forward.output_error + units * exact.out.abs()
        out_error = out_error + smallest(self.out_dtype) + rounding.t_in
        delta_error = (self.grad_out.abs() * out_error).sum(-1)

        of_row = (
            2 * log_error * (grad_lse - delta).abs() + rounding.a * sizes + delta_error
        )
        bound = (exact.p_sink * of_row).sum((0, 2))
        bound = bound + rounding.u_in * self.gradients.sinks.abs() + rounding.t_in
        if not rounding.sum_keys:
            return bound
        of_sum = rounding.of_sum(exact.p_sink.numel())
        return bound + of_sum * (exact.p_sink * sizes).sum((0, 2))


def last_rounding(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rounding of a result to its dtype."""
    return unit_roundoff(dtype) * exact.abs() + smallest(dtype)


def without_inf(bound: torch.Tensor) -> torch.Tensor:
    """Infinite bounds as very large ones, so that 0 times them is 0."""
    return bound.clamp(max=1e200)
