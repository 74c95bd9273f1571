"""Tests whether a backward is the gradient of its forward, by steps in random directions.

It needs nothing but the kernel's two passes, so it works for any attention: the change of
``sum(grad_out * out)`` between two inputs is compared with the change by the gradients. Heads and
batch entries are independent, so one step tests all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quorum_attention.checking.trial import Trial

# By dtype: the step as a share of the inputs, and how much the two changes may differ: by the error
# of a central difference of fourth order, plus rounding divided by the step.
_STEPS = {torch.float64: 2e-3, torch.float32: 3e-2, torch.float16: 6e-2, torch.bfloat16: 0.12}
_LIMITS = {torch.float64: 1e-3, torch.float32: 5e-3, torch.float16: 0.1, torch.bfloat16: 0.4}
_DIRECTIONS = 3
# If two steps differ by more, the forward is too rough to tell.
_ROUGH = 0.2


@dataclass(frozen=True, slots=True)
class Slope:
    """The gradient of one input: the worst of all heads and directions, as shares of its size.

    Attributes:
        name: which input.
        error: difference between the forward's slope and the backward's.
        limit: how much of it steps and rounding account for; infinite if the forward is too rough.
    """

    name: str
    error: float
    limit: float

    @property
    def right(self) -> bool:
        """Whether the backward is the gradient, as far as can be told."""
        return self.error <= self.limit


def slopes(trial: Trial, seed: int = 0, roughness: float = 0.0) -> list[Slope]:
    """The backward of a task, as if it were the whole call, against differences of its forward.

    ``roughness``: the rounding errors of the gradients, as a share of their size.
    """
    grads = trial.backward(trial.forward())
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index, name in enumerate(("grad_query", "grad_key", "grad_value")):
        grad, here = grads[index], trial.tensors[index]
        if not bool(grad.isfinite().all()):
            found.append(Slope(name, torch.inf, 0.0))
            continue
        tried = []
        for _ in range(_DIRECTIONS):
            direction = torch.randn(
                here.shape, generator=generator, dtype=torch.float64, device="cpu"
            )
            error, limit = _compare(trial, index, grad, direction.to(here.device))
            tried.append(Slope(name, error, limit + roughness))
        found.append(max(tried, key=lambda slope: slope.error - slope.limit))
    return found


def _compare(
    trial: Trial, index: int, grad: torch.Tensor, direction: torch.Tensor
) -> tuple[float, float]:
    """(error, limit) of the gradient of one input in one direction."""
    here, dtype = trial.tensors[index], trial.tensors[3].dtype
    step = _STEPS[dtype] * (float(here.double().square().mean().sqrt()) or 1.0)
    first, change = _change(trial, index, direction * step)
    second, half = _change(trial, index, direction * (step / 2))
    wide = dtype in (torch.float64, torch.float32)
    # In this combination of the two steps the error of second order cancels.
    measured = (8 * second - first) / 6 if wide else second
    moved = (8 * half - change) / 6 if wide else half
    said = _by_head(trial, grad.double() * moved)
    # The expected size of such a sum: a gradient times random steps.
    count = _by_head(trial, torch.ones_like(moved))
    squares = _by_head(trial, grad.double().square()) * _by_head(trial, moved.square())
    scale = torch.maximum((squares / count).sqrt(), measured.abs())
    # Heads whose gradient is 0 have no size of their own.
    scale = scale.clamp_min(float(scale.max()) * 1e-4).clamp_min(1e-300)
    error = float(((measured - said).abs() / scale).nan_to_num(nan=torch.inf).max())
    rough = float(((2 * second - first).abs() / scale).nan_to_num(nan=torch.inf).max())
    if rough > _ROUGH and wide:
        return 0.0, torch.inf
    # A forward that has kinks or rounds has about the same error for both steps.
    return error, _LIMITS[dtype] + 4 * rough


def _change(trial: Trial, index: int, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(change of the result by key head, change of the input after rounding)."""
    here = trial.tensors[index]
    above, below = ((here.double() + sign * by).to(here.dtype) for sign in (1, -1))
    results = [trial.moved(index, t).forward().out.double() for t in (above, below)]
    grad_out = trial.tensors[3].double()
    return _by_head(trial, (results[0] - results[1]) * grad_out), above.double() - below.double()


def _by_head(trial: Trial, tensor: torch.Tensor) -> torch.Tensor:
    """Sums by batch entry and key head."""
    batch, heads = trial.tensors[1].shape[:2]
    return tensor.sum(dim=(2, 3)).reshape(batch, heads, -1).sum(dim=2)
