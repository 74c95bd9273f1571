"""What a call should return, in float64, and how far off finite arithmetic may leave
it.

The results are those of ``helpers.equations``, which shares nothing with the package.
The error bounds are first-order, element by element, from the data alone;
docs/random-call-bounds.md lists their formulae.
"""

from __future__ import annotations

from dataclasses import dataclass

import helpers.equations as equations
import torch

from random_calls.backward_bounds import BackwardBounds, last_rounding, without_inf
from random_calls.case import Case
from random_calls.forward_bounds import ForwardBounds
from random_calls.fp16_division import divisor, grad_s_limit, sum_divisor
from random_calls.head_groups import sum_of_group
from random_calls.rounding import rounding_of
from random_calls.tensors import DTYPES, CallInputs, slopes_of

# Pairs of queries and keys from which on a GPU is the quicker one: it takes 3 ms of any
# case on an H200, a core beside it 2 ms of 5,000 pairs, 7 of 60,000 and 20 of 145,000.
_PAIRS_FOR_A_GPU = 50_000
# Kernels made of users' functions round the gradient of each rectangle.
_RECTANGLES = 8


@dataclass
class BoundedResult:
    """One result.

    Attributes:
        exact: its value in float64.
        bound: how far off a result may be.
        loose_bound: how far off a result may be if torch's own is as far off.
    """

    exact: torch.Tensor
    bound: torch.Tensor
    loose_bound: torch.Tensor


def place(case: Case, compute: torch.device) -> torch.device:
    """Where a reference is computed.

    On the CPU if the case is small: each step takes some microseconds there, and a GPU
    that serves many processes has to be waited for at each question. Both agree to
    1e-14 of the largest element.
    """
    return compute if case.pairs >= _PAIRS_FOR_A_GPU else torch.device("cpu")


class Reference:
    """The textbook of one case, heads expanded, all batch dimensions flattened.

    Attributes:
        case: the call.
        inputs: its tensors, on the device where the reference is computed.
        dtype: of the inputs.
        rounding: the arithmetic of the call.
        exact: the forward in float64.
        bounds: of the forward.
        grad_out: dO in float64, (b, h, n, dv).
    """

    def __init__(
        self, case: Case, inputs: CallInputs, where: torch.device | None = None
    ) -> None:
        """Compute the forward; on the device of the inputs unless ``where`` is
        another."""
        self.case = case
        self.inputs = inputs if where is None else inputs.on(where)
        self.dtype = DTYPES[case.dtype]
        self.rounding = rounding_of(case)
        slopes = slopes_of(case.heads) if case.scores.alibi else None
        # The raw arguments of the call: no mask is rounded, and nothing left out.
        self.exact = equations.forward(
            self.inputs.query,
            self.inputs.key,
            self.inputs.value,
            self.inputs.attn_mask(self.inputs.mask),
            is_causal=case.is_causal,
            scale=case.scale,
            dropout_p=case.dropout,
            dropout_seed=case.seed,
            window=case.scores.window,
            softcap=case.scores.softcap,
            alibi_slopes=slopes,
        )
        softcap = case.scores.softcap if case.rules is None else case.rules.softcap
        self.bounds = ForwardBounds(self.exact, self.rounding, softcap, slopes)
        self.grad_out = (
            self.inputs.grad_out.detach().double().reshape(self.exact.out.shape)
        )

    def _in_call_shape(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(*self.case.batch, *tensor.shape[1:])

    def _bounded(
        self, exact: torch.Tensor, bound: torch.Tensor, like_torch: torch.Tensor | float
    ) -> BoundedResult:
        """A result (b, ...) with the call's batch dimensions; ``like_torch``: what the
        loose bound has on top."""
        return BoundedResult(
            self._in_call_shape(exact),
            self._in_call_shape(bound),
            self._in_call_shape(bound + like_torch),
        )

    def forward(self, out_dtype: torch.dtype) -> dict[str, BoundedResult]:
        """out and lse, both in float64."""
        bounds = self.bounds
        out_bound = bounds.output_bound(out_dtype)
        return {
            "out": self._bounded(self.exact.out, out_bound, bounds.output_sum_error()),
            "lse": self._bounded(self.exact.lse, bounds.lse_bound(), 0.0),
        }

    def _gradients(
        self, out: torch.Tensor | None = None
    ) -> tuple[equations.Gradients, dict[str, torch.Tensor]]:
        """All gradients where delta = rowsum(dO * ``out``); those of query, key and
        value once more, by key head."""
        inputs = self.inputs
        gradients = equations.backward(
            self.exact, inputs.grad_out, inputs.grad_lse, out
        )
        by_key_head = {
            "grad_query": gradients.query,
            "grad_key": sum_of_group(gradients.key, self.rounding.n_shared),
            "grad_value": sum_of_group(gradients.value, self.rounding.n_shared),
        }
        return gradients, by_key_head

    def gradients_with_delta_of(self, out: torch.Tensor) -> dict[str, torch.Tensor]:
        """The gradients in float64 where delta is formed of ``out``, which may be
        rounded."""
        _, by_key_head = self._gradients(out)
        return {
            name: self._in_call_shape(tensor) for name, tensor in by_key_head.items()
        }

    def _grad_s_limit(self, gradients: equations.Gradients) -> torch.Tensor:
        """The bound of |dS| that fp16 gradients are divided by; 0 in other dtypes."""
        if self.dtype != torch.float16:
            return self.grad_out.new_zeros((*self.grad_out.shape[:2], 1, 1))
        grad_lse = None if self.inputs.grad_lse is None else gradients.grad_lse
        n_shared = self.rounding.n_shared
        return grad_s_limit(self.grad_out, self.exact.value, grad_lse, n_shared)

    def backward(
        self, dtype: torch.dtype, out_dtype: torch.dtype
    ) -> dict[str, BoundedResult]:
        """The gradients of query, key and value, of ``dtype``, and those of mask and
        sinks.

        Args:
            dtype: of the gradients.
            out_dtype: of the output that delta is computed from.
        """
        gradients, by_key_head = self._gradients()
        limit = self._grad_s_limit(gradients)
        of_sums = sum_divisor(limit, list(by_key_head.values()), self.rounding.n_shared)
        is_users_function = self.case.kernel.startswith(("function", "scores"))
        n_rectangles = _RECTANGLES if is_users_function else 1
        bounds = BackwardBounds(
            self.bounds,
            gradients,
            self.grad_out,
            out_dtype=out_dtype,
            is_grad_out_wider=self.inputs.grad_out.dtype.itemsize > self.dtype.itemsize,
            sum_divisor=of_sums,
            divisor=divisor(limit, of_sums),
            part_losses=n_rectangles * self.rounding.n_shared,
        )
        grad_query = by_key_head["grad_query"]
        grad_key = by_key_head["grad_key"]
        grad_value = by_key_head["grad_value"]
        results = {
            "grad_query": self._bounded(
                grad_query,
                bounds.grad_query_bound(grad_query, dtype),
                bounds.grad_query_error_like_torch(),
            ),
            "grad_key": self._bounded(
                grad_key,
                bounds.grad_key_bound(grad_key, dtype),
                bounds.grad_key_error_like_torch(),
            ),
            "grad_value": self._bounded(
                grad_value,
                bounds.grad_value_bound(grad_value, dtype),
                bounds.grad_value_error_like_torch(),
            ),
        }
        if self.case.mask_grad:
            results["grad_mask"] = self._grad_mask(bounds)
        if gradients.sinks is not None:
            bound = bounds.grad_sinks_bound()
            results["grad_sinks"] = BoundedResult(gradients.sinks, bound, bound)
        return results

    def _grad_mask(self, bounds: BackwardBounds) -> BoundedResult:
        """The gradient of the scores, summed over what the mask broadcasts over."""
        mask = self.inputs.mask
        assert mask is not None
        grad_s = bounds.gradients.scores
        exact = self._sum_to_mask(grad_s)
        sizes = self._sum_to_mask(grad_s.abs())
        bound = (
            self._sum_to_mask(without_inf(bounds.grad_s_error))
            + 3 * self.rounding.a * sizes
        )
        bound = bound + last_rounding(exact, mask.dtype)
        if self.rounding.sum_keys:
            n_terms = grad_s.numel() // max(1, exact.numel())
            bound = bound + self.rounding.of_sum(n_terms) * sizes
        like_torch = self._sum_to_mask(bounds.grad_s_error_like_torch)
        return BoundedResult(exact, bound, bound + like_torch)

    def _sum_to_mask(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._in_call_shape(tensor).sum_to_size(self.inputs.mask.shape)
