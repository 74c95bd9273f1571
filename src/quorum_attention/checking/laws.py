"""Tests that no comparison of cuts replaces: what holds for every attention, tried on
uncut calls.

Each law takes a kernel, the sizes of a call and a seed. It returns how the law is
broken, in words, or "" if it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from quorum_attention.checking.rounding import (
    exceeds,
    is_repetition,
    is_wide,
    rounding_limit,
)
from quorum_attention.checking.trial_call import (
    GRADIENTS,
    CheckSizes,
    TrialInputs,
    run_backward,
    run_call,
    run_forward,
)
from quorum_attention.kernels import InnerKernel
from quorum_attention.units import format_error

Law = Callable[[InnerKernel, CheckSizes, int], str]

# The least change of an output that counts as one.
_CLEAR_CHANGE = 1e-2
# The value of the elements around the views of a larger tensor.
_SURROUNDINGS = 7.0
_DIRECTIONS = 3
# Steps along an input, as shares of its size, and how much slopes may differ: by the
# error of a central difference of fourth order, and by rounding divided by the step.
_STEPS = {
    torch.float64: 2e-3,
    torch.float32: 3e-2,
    torch.float16: 6e-2,
    torch.bfloat16: 0.12,
}
_SLOPE_LIMITS = {
    torch.float64: 1e-3,
    torch.float32: 5e-3,
    torch.float16: 0.1,
    torch.bfloat16: 0.4,
}
# A forward is too rough for differences if those of two steps differ by more than this
# share.
_MOST_ROUGHNESS = 0.2


def calls_repeat(kernel: InnerKernel, sizes: CheckSizes, seed: int) -> str:
    """A call gives the same results again, depends on its inputs, and leaves earlier
    results alone."""
    inputs = sizes.inputs(seed)
    results = run_call(kernel, sizes, inputs)
    copies = {name: result.clone() for name, result in results.items()}
    other_inputs = TrialInputs(*(-2 * tensor for tensor in inputs))
    other_results = run_call(kernel, sizes, other_inputs)
    other_out = other_results["out"].clone()
    for name, copy in copies.items():
        earlier = copy.nan_to_num()
        now = results[name].nan_to_num()
        if not torch.equal(earlier, now):
            return f"{name} changes in a later call"
    if torch.equal(other_out, copies["out"]):
        return "two calls with other inputs have the same output"
    repeated = run_call(kernel, sizes, inputs)
    for name, copy in copies.items():
        if not is_repetition(copy, repeated[name], sizes.dtype):
            return f"two calls with the same inputs differ in {name}"
    return ""


def views_give_the_same(kernel: InnerKernel, sizes: CheckSizes, seed: int) -> str:
    """Views of larger tensors give the results of contiguous tensors."""
    inputs = sizes.inputs(seed)
    expected = run_call(kernel, sizes, inputs)
    results = run_call(kernel, sizes, TrialInputs(*map(_as_view, inputs)))
    limit = rounding_limit(sizes, inputs, expected)
    for name, result in results.items():
        if exceeds(result, expected[name], limit):
            return f"{name} of views of larger tensors in memory"
    return ""


def _as_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside a larger one, whose other elements are quite different."""
    batch, heads, tokens, width = tensor.shape
    larger_shape = (batch, heads + 1, tokens + 5, width + 8)
    larger = tensor.new_full(larger_shape, _SURROUNDINGS)
    stop = tokens + 2
    view = larger[:, :heads, 2:stop, :width]
    return view.copy_(tensor)


def scale_has_an_effect(kernel: InnerKernel, sizes: CheckSizes, seed: int) -> str:
    """Twice the scale changes the output where twice the query does."""
    inputs = sizes.inputs(seed)
    usual = run_forward(kernel, sizes, inputs)
    rescaled = run_forward(kernel, sizes, inputs, scale=2 * sizes.scale)
    if not torch.equal(usual["out"], rescaled["out"]):
        return ""
    larger_query = inputs._replace(query=2 * inputs.query)
    larger = run_forward(kernel, sizes, larger_query)
    if exceeds(larger["out"], usual["out"], _CLEAR_CHANGE):
        return "the scale is ignored"
    return ""


def last_causal_row_sees_all(kernel: InnerKernel, sizes: CheckSizes, seed: int) -> str:
    """The last row of a causal square is that of a plain one, if the kernel takes
    both."""
    plain_sizes = replace(sizes, is_causal=False)
    if not sizes.is_causal or kernel.refusal(plain_sizes) is not None:
        return ""
    inputs = sizes.inputs(seed)
    causal = run_forward(kernel, sizes, inputs)
    plain = run_forward(kernel, plain_sizes, inputs)
    limit = rounding_limit(sizes, inputs, plain)
    last_causal_row = causal["out"][:, :, -1]
    last_plain_row = plain["out"][:, :, -1]
    if exceeds(last_causal_row, last_plain_row, limit):
        return "the last row of a causal call does not see all keys"
    return ""


def backward_is_the_gradient(kernel: InnerKernel, sizes: CheckSizes, seed: int) -> str:
    """The gradients are those of the forward.

    The change of ``sum(grad_out * out)`` between two inputs is compared with the change
    by the gradients, head by head. The test needs nothing but the two passes.

    Raises:
        RuntimeError: the forward is too rough to tell.
    """
    if not sizes.needs_grad:
        return ""
    inputs = sizes.inputs(seed)
    rows = run_forward(kernel, sizes, inputs)
    grads = run_backward(kernel, sizes, inputs, rows)
    generator = torch.Generator().manual_seed(seed)
    for index, name in enumerate(GRADIENTS):
        for _ in range(_DIRECTIONS):
            direction = torch.randn(
                inputs[index].shape,
                generator=generator,
                dtype=torch.float64,
                device="cpu",
            )
            direction = direction.to(sizes.device)
            slope = _Slope(kernel, sizes, inputs, index, direction)
            error, limit = slope.error_of(grads[name])
            if error > limit:
                return f"{name} is off by {format_error(error)} of its size"
    return ""


class _Slope:
    """The slope of the forward along one direction of one input.

    Args:
        index: of the input: 0 query, 1 key, 2 value.
        direction: like that input, float64.
    """

    def __init__(
        self,
        kernel: InnerKernel,
        sizes: CheckSizes,
        inputs: TrialInputs,
        index: int,
        direction: torch.Tensor,
    ) -> None:
        self._kernel = kernel
        self._sizes = sizes
        self._inputs = inputs
        self._index = index
        squares = inputs[index].double().square()
        size = float(squares.mean().sqrt()) or 1.0
        self._step = direction * _STEPS[sizes.dtype] * size

    def error_of(self, grad: torch.Tensor) -> tuple[float, float]:
        """The error of a gradient along the direction, and how much of it rounding
        explains.

        Raises:
            RuntimeError: the forward has kinks, or rounds too much.
        """
        is_wide_dtype = is_wide(self._sizes.dtype)
        result_change, input_change = self._change(self._step)
        half_result_change, half_input_change = self._change(self._step / 2)
        measured = half_result_change
        moved = half_input_change
        if is_wide_dtype:
            # In this combination of the two steps the error of second order cancels.
            measured = (8 * half_result_change - result_change) / 6
            moved = (8 * half_input_change - input_change) / 6
        grad = grad.double()
        expected = self._by_key_head(grad * moved)
        scale = self._expected_size(grad, moved, measured)
        error = _largest_share(measured - expected, scale)
        # A forward that has kinks or rounds has about the same error for both steps.
        roughness = _largest_share(2 * half_result_change - result_change, scale)
        if roughness > _MOST_ROUGHNESS and is_wide_dtype:
            name = GRADIENTS[self._index]
            raise RuntimeError(f"{name}: the forward is too rough for steps along it")
        return error, _SLOPE_LIMITS[self._sizes.dtype] + 4 * roughness

    def _change(self, step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The change of the result by key head, and of the input after rounding,
        between one step forward and one step back."""
        dtype = self._sizes.dtype
        tensor = self._inputs[self._index].double()
        above = (tensor + step).to(dtype)
        below = (tensor - step).to(dtype)
        output_change = self._output(above) - self._output(below)
        grad_out = self._inputs.grad_out.double()
        result_change = self._by_key_head(output_change * grad_out)
        input_change = above.double() - below.double()
        return result_change, input_change

    def _output(self, tensor: torch.Tensor) -> torch.Tensor:
        inputs = list(self._inputs)
        inputs[self._index] = tensor
        results = run_forward(self._kernel, self._sizes, inputs)
        return results["out"].double()

    def _expected_size(
        self, grad: torch.Tensor, moved: torch.Tensor, measured: torch.Tensor
    ) -> torch.Tensor:
        """The expected size of a sum by key head: a gradient times random steps."""
        ones = torch.ones_like(moved)
        counts = self._by_key_head(ones)
        grad_squares = self._by_key_head(grad.square())
        step_squares = self._by_key_head(moved.square())
        sizes = (grad_squares / counts * step_squares).sqrt()
        sizes = torch.maximum(sizes, measured.abs())
        # Heads whose gradient is 0 have no size of their own.
        smallest = float(sizes.max()) * 1e-4
        return sizes.clamp_min(smallest).clamp_min(1e-300)

    def _by_key_head(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums by batch entry and key head."""
        batch, heads = self._inputs.key.shape[:2]
        by_head = tensor.sum(dim=(2, 3))
        return by_head.reshape(batch, heads, -1).sum(dim=2)


def _largest_share(differences: torch.Tensor, sizes: torch.Tensor) -> float:
    shares = (differences.abs() / sizes).nan_to_num(nan=torch.inf)
    return float(shares.max())


# Buffers that are used again and sums in another order may be those of one dtype alone.
LAWS_IN_THE_DTYPE: tuple[Law, ...] = (calls_repeat,)
LAWS_IN_THE_WIDEST_DTYPE: tuple[Law, ...] = (
    views_give_the_same,
    scale_has_an_effect,
    last_causal_row_sees_all,
    backward_is_the_gradient,
)
