"""The scaled backward: which powers of two, and what to do when they were too large.

For each key/value head of a unit, ``grad_out`` is divided by a power of two (in its slot) and
probabilities are multiplied by another, ``2**shift``, so that everything a kernel rounds to fp16
uses fp16's range: with g the largest row norm of ``grad_out`` after the division and w that of
``value``,

    2**shift P            <= 2**shift                        (P <= 1)
    2**shift |dS|         <= 2**shift * 2 g w  <= 2**15      (|dP - delta| <= 2 g w)

holds by construction (design, section 2). What has no useful bound are the sums over rows, dK and
dV of a key that everything attends to. They are checked as they are added up (kernels/merge.py);
a unit with a gradient that is not finite is run again from its stored state, the calls at fault
with a smaller shift, down to far below zero, where not even the sum of a sink overflows.

Nothing here makes the device wait: norms and factors stay on it, and the host reads a unit's flags
while the next one computes.
"""

from __future__ import annotations

import math

import torch

from quorum_attention.execution.engine import Unit
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels.blocks import row_blocks
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.rectangles import RectangleKernel
from quorum_attention.kernels.scaling import Scaling, divide_gradient_

# 2**shift P of a row that attends evenly should come out about here ...
_LOG2_TYPICAL = -8
# ... with a shift of at most this.
_LARGEST_SHIFT = 14
# A call that overflowed is tried again with so much less, down to the last.
_STEP = 8
_SMALLEST_SHIFT = -48


def usual_shift(n_keys: int) -> int:
    """The shift for rows of up to ``n_keys`` keys: 0 where probabilities are no problem."""
    return min(_LARGEST_SHIFT, max(0, math.ceil(math.log2(max(1, n_keys))) + _LOG2_TYPICAL))


def scales(kernel: InnerKernel, work: Workload) -> bool:
    """Whether a backward by ``kernel`` is scaled: only rectangle kernels know how to undo it."""
    return isinstance(kernel, RectangleKernel) and kernel.scales_backward(work.dtype)


class BackwardScaling:
    """Scales the units of one backward pass; one object for an arena of ``n_slots`` slots.

    Attributes:
        repeated: how often a unit had to be run again.
    """

    def __init__(self, n_keys: int, device: torch.device) -> None:
        self.shift = usual_shift(n_keys)
        self.repeated = 0
        self._device = device
        self._scalings: dict[int, tuple[Unit, Scaling, torch.Tensor]] = {}

    def prepare(self, unit: Unit) -> None:
        """Divide the unit's ``grad_out`` in its slot, and note by what."""
        fields = unit.fields
        unscale = fields["unscale"]
        divide_gradient_(
            fields["grad_out"], fields["value"], unscale.view(unscale.shape[:2]), self.shift
        )

    def scaling(self, unit: Unit) -> Scaling:
        """What the kernel is told of a prepared unit."""
        entries, key_heads = unit.fields["unscale"].shape[:2]
        overflow = unit.fields["overflow"].view(-1)
        overflow.zero_()
        _, known, flags = self._scalings.get(unit.slot, (None, None, None))
        if flags is None:
            flags = torch.zeros(
                overflow.numel(), dtype=overflow.dtype, pin_memory=self._device.type == "cuda"
            )
        lowered = known.lowered if known is not None and self._is_same(unit) else {}
        scaling = Scaling(
            self.shift, unit.fields["unscale"].view(entries, key_heads), overflow, lowered
        )
        self._scalings[unit.slot] = (unit, scaling, flags)
        return scaling

    def computed(self, unit: Unit) -> None:
        """After the unit's kernel calls, in their stream: send the flags to the host."""
        _, scaling, flags = self._scalings[unit.slot]
        assert scaling.overflow is not None
        flags[: scaling.overflow.numel()].copy_(scaling.overflow, non_blocking=True)

    def spoiled(self, unit: Unit) -> bool:
        """Whether the unit, now computed, has to be run again; the shifts at fault are lowered."""
        _, scaling, flags = self._scalings[unit.slot]
        assert scaling.overflow is not None
        names = ("query", "key", "value", "out", "grad_out")
        inputs = tuple(unit.fields[name] for name in names)
        again = lower_shifts(scaling, flags[: scaling.overflow.numel()], inputs)
        self.repeated += again
        return again

    def _is_same(self, unit: Unit) -> bool:
        held, _, _ = self._scalings[unit.slot]
        return held.visit.task == unit.visit.task and held.group == unit.group


def lower_shifts(
    scaling: Scaling, overflow: torch.Tensor | None, inputs: tuple[torch.Tensor, ...]
) -> bool:
    """Lower the shifts of the calls that ``overflow`` flags; False where nothing is to be done.

    Nothing is where no flag is set, where no smaller shift is left, and where an input is not
    finite: no shift cures that, and the result is what the kernel makes of it.
    """
    calls = [] if overflow is None else overflow.nonzero().flatten().tolist()
    if not calls or not all(_is_finite(tensor) for tensor in inputs):
        return False
    lower = {call: scaling.shift_of(call) - _STEP for call in calls}
    if min(lower.values()) < _SMALLEST_SHIFT:
        return False
    scaling.lowered.update(lower)
    return True


def _is_finite(tensor: torch.Tensor) -> bool:
    return all(bool(torch.isfinite(tensor[block]).all()) for block in _blocks(tensor))


def _blocks(tensor: torch.Tensor) -> list[tuple[slice, slice, slice]]:
    batch, heads, rows, width = tensor.shape
    return list(row_blocks(batch, heads, rows, max(1, width)))
