"""Tests whether a backward is the gradient of its forward, by steps in random directions.

It needs nothing but the kernel's two passes, so it works for any attention: the change of
``sum(grad_out * out)`` between two inputs is compared with the change by the gradients. Heads and
batch entries are independent, so one step tests all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quorum_attention.checking.subject import Subject, Tensors
from quorum_attention.decomposition import Task
from quorum_attention.kernels import Statistics

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


def slopes(
    subject: Subject,
    tensors: Tensors,
    grad_out: torch.Tensor,
    task: Task,
    is_causal: bool,
    seed: int = 0,
    roughness: float = 0.0,
) -> list[Slope]:
    """The backward of a task, as if it were the whole call, against differences of its forward.

    ``roughness``: the rounding errors of the gradients, as a share of their size.
    """
    rows = subject.forward(tensors, task, is_causal)
    grads = subject.backward(tensors, grad_out.clone(), rows, task, is_causal)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index, name in enumerate(("grad_query", "grad_key", "grad_value")):
        if not bool(grads[index].isfinite().all()):
            found.append(Slope(name, torch.inf, 0.0))
            continue
        worst = Slope(name, 0.0, torch.inf)
        for _ in range(_DIRECTIONS):
            direction = torch.randn(
                tensors[index].shape, generator=generator, dtype=torch.float64, device="cpu"
            )
            step = _Step(subject, tensors, grad_out, task, is_causal, index)
            slope = step.compare(grads[index], direction.to(grad_out.device))
            found_here = Slope(name, slope[0], slope[1] + roughness)
            if found_here.error - found_here.limit > worst.error - worst.limit:
                worst = found_here
        found.append(worst)
    return found


@dataclass(frozen=True, slots=True)
class _Step:
    subject: Subject
    tensors: Tensors
    grad_out: torch.Tensor
    task: Task
    is_causal: bool
    index: int

    def compare(self, grad: torch.Tensor, direction: torch.Tensor) -> tuple[float, float]:
        """(error, limit) for one direction."""
        dtype = self.grad_out.dtype
        size = float(self.tensors[self.index].double().square().mean().sqrt()) or 1.0
        step = _STEPS[dtype] * size
        first, change = self._change(direction * step)
        second, half = self._change(direction * (step / 2))
        wide = dtype in (torch.float64, torch.float32)
        # In this combination of the two steps the error of second order cancels.
        measured = (8 * second - first) / 6 if wide else second
        moved = (8 * half - change) / 6 if wide else half
        said = self._by_head(grad.double() * moved)
        # The expected size of such a sum: a gradient times random steps.
        count = self._by_head(torch.ones_like(moved))
        squares = self._by_head(grad.double().square()) * self._by_head(moved.square())
        scale = torch.maximum((squares / count).sqrt(), measured.abs())
        # Heads whose gradient is 0 have no size of their own.
        scale = scale.clamp_min(float(scale.max()) * 1e-4).clamp_min(1e-300)
        error = float(((measured - said).abs() / scale).nan_to_num(nan=torch.inf).max())
        rough = float(((2 * second - first).abs() / scale).nan_to_num(nan=torch.inf).max())
        if rough > _ROUGH and wide:
            return error, torch.inf
        # A forward that has kinks or rounds has about the same error for both steps.
        return error, _LIMITS[dtype] + 4 * rough

    def _change(self, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(change of the result by key head, change of the input after rounding)."""
        here = self.tensors[self.index]
        above, below = ((here.double() + sign * by).to(here.dtype) for sign in (1, -1))
        return self._value(above) - self._value(below), above.double() - below.double()

    def _value(self, moved: torch.Tensor) -> torch.Tensor:
        query, key, value = self.tensors
        given = [query, key, value]
        given[self.index] = moved
        found: Statistics = self.subject.forward(
            (given[0], given[1], given[2]), self.task, self.is_causal
        )
        return self._by_head(found.out.double() * self.grad_out.double())

    def _by_head(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums by batch entry and key head."""
        batch, heads = self.tensors[1].shape[:2]
        return tensor.sum(dim=(2, 3)).reshape(batch, heads, -1).sum(dim=2)
