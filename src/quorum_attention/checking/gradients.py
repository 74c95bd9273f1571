"""Is a backward the gradient of its own forward? By steps along random directions.

Nothing is asked of the kernel but its two passes, so it holds for attention of any kind: the change
of ``sum(grad_out * out)`` between two inputs is compared with what the gradients say it should be.
Heads and batch entries never meet, so one step tests each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quorum_attention.checking.subject import Subject, Tensors
from quorum_attention.decomposition import Task
from quorum_attention.kernels import Statistics

# Step as a share of the inputs, and how far the two may be apart, by dtype: a central difference
# of the fourth order, and rounding divided by the step.
_STEPS = {torch.float64: 2e-3, torch.float32: 3e-2, torch.float16: 6e-2, torch.bfloat16: 0.12}
_LIMITS = {torch.float64: 1e-3, torch.float32: 5e-3, torch.float16: 0.1, torch.bfloat16: 0.4}
_DIRECTIONS = 3
# Where two steps disagree by more, the forward is too rough to say.
_ROUGH = 0.2


@dataclass(frozen=True, slots=True)
class Slope:
    """Of one input, the worst of all heads and directions, as a share of the gradient's size.

    Attributes:
        name: which input.
        error: between the forward's slope and the backward's.
        limit: what steps and rounding account for; infinite where the forward is too rough.
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
    """The backward of a task, as if it were everything, against steps of its forward.

    ``roughness`` is a share of the gradients that their rounding accounts for.
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
            direction = torch.randn(tensors[index].shape, generator=generator, dtype=torch.float64)
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
        # Between the two the error of the second order cancels.
        measured = (8 * second - first) / 6 if wide else second
        moved = (8 * half - change) / 6 if wide else half
        said = self._by_head(grad.double() * moved)
        # What such a sum comes to where nothing is wrong: a gradient times random steps.
        count = self._by_head(torch.ones_like(moved))
        squares = self._by_head(grad.double().square()) * self._by_head(moved.square())
        scale = torch.maximum((squares / count).sqrt(), measured.abs())
        # A gradient that is 0 throughout has no size of its own.
        scale = scale.clamp_min(float(scale.max()) * 1e-4).clamp_min(1e-300)
        error = float(((measured - said).abs() / scale).nan_to_num(nan=torch.inf).max())
        rough = float(((2 * second - first).abs() / scale).nan_to_num(nan=torch.inf).max())
        if rough > _ROUGH and wide:
            return error, torch.inf
        # A forward with kinks, or one that rounds, is as far off for both steps.
        return error, _LIMITS[dtype] + 4 * rough

    def _change(self, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(by key head, how much the result changes; the change of the input, as it was rounded)"""
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
