"""The scaled backward: its powers of two, and what to do if a gradient overflows (our method).

For each key/value head of a unit, ``grad_out`` is divided by a power of two (in its slot), and
probabilities are multiplied by another, ``2**shift``. So everything that a kernel rounds to fp16
uses the range of fp16. Let g be the largest row norm of ``grad_out`` after the division, and w that
of ``value``. Then by construction

    2**shift P            <= 2**shift                        (P <= 1)
    2**shift |dS|         <= 2**shift * 2 g w  <= 2**15      (|dP - delta| <= 2 g w)

Sums over rows have no useful bound: dK and dV of a key that every query attends to (a sink). They
are checked as they are added up (kernels/merge.py). If a gradient is not finite, the unit is run
again from its stored state. In the heads at fault the products then go down by a step, a power of
two: most of it is divided from ``grad_out``, a little is taken off the shift, so that both stay
normal numbers. This is repeated until no sum overflows.

Rows of inputs that are not finite make gradients that are not, however they are scaled. A head with
such rows is scaled down one step and no further, because each step costs its other rows digits.

The device never waits here: norms and factors stay on it, and the host reads a unit's flags while
the next unit computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.head_groups import Group, group_part
from quorum_attention.execution.pass_spec import BACKWARD, TensorsByName
from quorum_attention.kernels.protocol import CallShape
from quorum_attention.kernels.scaling import (
    Scaling,
    divide_gradient_,
    divisor_exponents,
    largest_norms,
    usual_shift,
)
from quorum_attention.kernels.torch_private import capturing

# At least the bytes of each small tensor that a scaled backward makes for a head group.
SMALL_BYTES = 512
# One step down makes the products of a head smaller by so many powers of two,
_STEP = 8
# of which so many are taken off the shift, but never more in all than this: typical probabilities
# then stay normal numbers.
_OFF_THE_SHIFT = 4
_MOST_OFF_THE_SHIFT = 6
# The norm of the largest row of ``grad_out`` never goes below this, or the row would be lost.
_SMALLEST_ROW = 2.0**-18


def all_finite(parts: Sequence[torch.Tensor]) -> bool:
    """Whether 16-bit gradients are finite everywhere; the host waits once, nothing is allocated."""
    first, *others = (part.sum(dtype=torch.float32) for part in parts)
    return math.isfinite(float(sum(others, first)))


# What a backward reads beside the log-sum-exp. Of a unit: (b, h, n, d) or (b, hk, m, d).
_READ = [item for item in BACKWARD.inputs if item.width != "one"]


def inputs_of_group(tensors: TensorsByName, group: Group) -> TensorsByName:
    """The inputs of a backward's head group of one batch entry."""
    return {item.name: group_part(tensors[item.name], group, item.axis) for item in _READ}


class BackwardScaling:
    """Scales a backward's units, in slots, and says which of them run again.

    Args:
        heads: (batch entries, key/value heads) of a unit, at most.
        by_unit: units run again one by one, each with steps of its own; if not, their head group
            does as a whole.
    """

    def __init__(
        self,
        shape: CallShape,
        device: torch.device,
        heads: tuple[int, int],
        n_slots: int = 1,
        *,
        by_unit: bool = False,
    ) -> None:
        self.by_unit, self._n_keys = by_unit, shape.n_keys
        own = n_slots if by_unit else 1
        pins = backend_of(device).own_memory
        # By slot, one for each key/value head of each entry; a head group's units share flags.
        self._unscale = [
            torch.empty(heads, dtype=torch.float32, device=device) for _ in range(n_slots)
        ]
        self._overflow = [torch.zeros(heads, dtype=torch.int32, device=device) for _ in range(own)]
        # The same in host memory, which is read when a unit has been computed.
        self._flags = [
            torch.zeros(heads, dtype=torch.int32, device="cpu", pin_memory=pins) for _ in range(own)
        ]
        # How many steps each (entry, key/value head) has been taken down.
        self._steps = [dict[tuple[int, int], int]() for _ in range(own)]

    def begin(self, slot: int = 0) -> None:
        """Begin with a new unit in ``slot``, or with a new head group."""
        self._steps[self._own(slot)].clear()

    def divide_(self, grad_out: torch.Tensor, value: torch.Tensor, slot: int = 0) -> Scaling:
        """Divide a unit's ``grad_out`` (b, h, n, dv) in place; returns how a kernel undoes that."""
        own, (entries, kv_heads) = self._own(slot), value.shape[:2]
        unscale = self._unscale[slot][:entries, :kv_heads]
        overflow, steps = self._overflow[own][:entries, :kv_heads], self._steps[own]
        usual = usual_shift(self._n_keys)
        divide_gradient_(grad_out, value, unscale, usual)
        for (entry, head), taken in steps.items():
            further = 2.0 ** _off_the_gradient(taken)
            _head(grad_out, value, entry, head).div_(further)
            unscale[entry, head].mul_(further)
        if self.by_unit:
            overflow.zero_()
        shift = usual - _off_the_shift(max(steps.values(), default=0))
        return Scaling(shift, unscale, overflow)

    def computed(self, slot: int) -> None:
        """Copy a unit's flags to the host, in the stream of its kernel calls."""
        if self.by_unit:
            self._flags[slot].copy_(self._overflow[slot], non_blocking=True)

    def overflowed(self, slot: int = 0) -> bool:
        """Whether a gradient is not finite: of the unit in ``slot``, which has been computed; or of
        the head group, for which the host waits."""
        if not self.by_unit:
            self._flags[0].copy_(self._overflow[0])
        return bool(self._flags[self._own(slot)].any())

    def runs(self, read: Callable[[], TensorsByName], slot: int = 0) -> Iterator[int]:
        """Yields a number for each time that the unit, or group, has to run: once, and again as
        long as it overflows and scaling the heads at fault down further may help.

        In a CUDA graph that is being captured the host cannot ask: it runs once.

        Args:
            read: gives its inputs, not divided.
        """
        times = 0
        yield times
        if capturing(self._overflow[0].device):
            return
        while self.overflowed(slot) and self._lower(read(), slot):
            times += 1
            yield times

    def _lower(self, read: TensorsByName, slot: int) -> bool:
        """Take the heads at fault down one step where their numbers allow it; whether any was."""
        own = self._own(slot)
        flagged: list[tuple[int, int]] = [(e, h) for e, h in self._flags[own].nonzero().tolist()]
        lower = [one for one in flagged if self._may_lower(read, own, *one)]
        for one in lower:
            self._steps[own][one] = self._steps[own].get(one, 0) + 1
        if not self.by_unit:
            self._overflow[own].zero_()
        return bool(lower)

    def _may_lower(self, read: TensorsByName, own: int, entry: int, head: int) -> bool:
        taken = self._steps[own].get((entry, head), 0)
        # Of a unit in a slot, states are there as well: those that overflowed.
        one = {i.name: _head(read[i.name], read["value"], entry, head) for i in _READ}
        if not all_finite(list(one.values())):
            return taken == 0
        grad_out, value, usual = one["grad_out"], one["value"], usual_shift(self._n_keys)
        exponent = int(divisor_exponents(grad_out, value, usual)) + _off_the_gradient(taken + 1)
        return math.ldexp(float(largest_norms(grad_out, 1)), -exponent) >= _SMALLEST_ROW

    def _own(self, slot: int) -> int:
        return slot if self.by_unit else 0


def _off_the_shift(steps: int) -> int:
    return min(_MOST_OFF_THE_SHIFT, steps * _OFF_THE_SHIFT)


def _off_the_gradient(steps: int) -> int:
    # All heads of a unit have the shift of the head with the most steps, so that heads with fewer
    # steps are scaled down a little as well.
    return steps * _STEP - _off_the_shift(steps)


def _head(tensor: torch.Tensor, value: torch.Tensor, entry: int, head: int) -> torch.Tensor:
    """The part of (b, h, n, d) that belongs to a key/value head: (1, h / hk, n, d)."""
    shared = tensor.shape[1] // value.shape[1]
    return tensor[entry : entry + 1, head * shared : (head + 1) * shared]
