"""The scaled backward: its powers of two, and what to do if a gradient overflows (our
method).

For each key/value head of a unit, ``grad_out`` is divided by a power of two (in its
slot), and probabilities are multiplied by another, ``2**shift``. So everything that a
kernel rounds to fp16 uses the range of fp16. Let g be the largest row norm of
``grad_out`` after the division, and w that of ``value``. Then by construction

    2**shift P            <= 2**shift                        (P <= 1)
    2**shift |dS|         <= 2**shift * 2 g w  <= 2**15      (|dP - delta| <= 2 g w)

Sums over rows have no useful bound: dK and dV of a key that every query attends to (a
sink). They are checked as they are added up (kernels/merge.py). If a gradient is not
finite, the unit is run again from its stored state. In the heads at fault the products
then go down by a step, a power of
two: most of it is divided from ``grad_out``, a little is taken off the shift, so that
both stay normal numbers. This is repeated until no sum overflows.

Rows of inputs that are not finite make gradients that are not, however they are scaled.
A head with such rows is scaled down one step and no further, because each step costs
its other rows digits.

The device never waits here: norms and factors stay on it, and the host reads a unit's
flags while the next unit computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from quorum_attention.execution.device.lookup import backend_of, on_host
from quorum_attention.execution.head_groups import Group, group_part
from quorum_attention.execution.pass_spec import BACKWARD, TensorsByName
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.scaling import (
    Scaling,
    divide_gradient_,
    divisor_exponents,
    largest_norms,
    usual_shift,
)
from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.kernels.torch_private import capturing

# At least the bytes of each small tensor that a scaled backward makes for a head group.
SMALL_BYTES = 512
# One step down makes the products of a head smaller by so many powers of two,
_STEP = 8
# of which so many are taken off the shift, but never more in all than this: typical
# probabilities then stay normal numbers.
_OFF_THE_SHIFT = 4
_MOST_OFF_THE_SHIFT = 6
# The norm of the largest row of ``grad_out`` never goes below this, or the row would be
# lost.
_SMALLEST_ROW = 2.0**-18

# The inputs of a backward but for the log-sum-exp: of a unit (b, h, n, d) or (b, hk, m,
# d).
_WIDE_INPUTS = [item for item in BACKWARD.inputs if item.width != "one"]


def all_finite(parts: Sequence[torch.Tensor]) -> bool:
    """Whether 16-bit gradients are finite everywhere; the host waits once."""
    # On a CPU a sum in another dtype takes a copy, and five times as long. In 16 bits a
    # sum of finite numbers may be infinite.
    if on_host(parts[0].device) and _is_sum_finite(parts, None):
        return True
    return _is_sum_finite(parts, torch.float32)


def _is_sum_finite(parts: Sequence[torch.Tensor], dtype: torch.dtype | None) -> bool:
    """Whether the sum of all numbers is finite in ``dtype``; None is that of the
    numbers. Numbers that are not finite stay so in a sum."""
    sums = [part.sum(dtype=dtype) for part in parts]
    total = sums[0]
    for part_sum in sums[1:]:
        total = total + part_sum
    return math.isfinite(float(total))


def inputs_of_group(tensors: TensorsByName, group: Group) -> TensorsByName:
    """The inputs of a backward's head group of one batch entry, without the
    log-sum-exp."""
    inputs: NamedTensors = {}
    for item in _WIDE_INPUTS:
        tensor = tensors[item.name]
        inputs[item.name] = group_part(tensor, group, item.axis)
    return inputs


# A key/value head of a batch entry: the numbers of both.
_Head = tuple[int, int]


class BackwardScaling:
    """Scales a backward's units, in slots, and says which of them run again.

    Args:
        heads: (batch entries, key/value heads) of a unit, at most.
        by_unit: units run again one by one, each with steps of its own; if not, their
            head group does as a whole.
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
        self.by_unit = by_unit
        self._usual_shift = usual_shift(shape.n_keys)
        # The units of a head group share flags, unless each runs again by itself.
        n_flags = n_slots if by_unit else 1
        # By slot, one for each key/value head of each entry.
        self._unscale = [
            torch.empty(heads, dtype=torch.float32, device=device)
            for _ in range(n_slots)
        ]
        self._overflow = [
            torch.zeros(heads, dtype=torch.int32, device=device) for _ in range(n_flags)
        ]
        # The same in host memory, which is read when a unit has been computed.
        pins = backend_of(device).own_memory
        self._host_overflow = [
            torch.zeros(heads, dtype=torch.int32, device="cpu", pin_memory=pins)
            for _ in range(n_flags)
        ]
        # The last unit's value has rows of these norms at most.
        self._value_norm = torch.empty(heads, dtype=torch.float32, device=device)
        # How many steps each (entry, key/value head) has been taken down.
        self._steps = [dict[_Head, int]() for _ in range(n_flags)]

    def _flags_of(self, slot: int) -> int:
        """The number of the flags and steps of the unit in ``slot``."""
        return slot if self.by_unit else 0

    def begin(self, slot: int = 0) -> None:
        """Begin with a new unit in ``slot``, or with a new head group."""
        self._steps[self._flags_of(slot)].clear()

    def divide_(
        self,
        grad_out: torch.Tensor,
        value: torch.Tensor,
        slot: int = 0,
        *,
        is_same_value: bool = False,
    ) -> Scaling:
        """Divide a unit's ``grad_out`` (b, h, n, dv) in place; returns how a kernel
        undoes that.

        Args:
            is_same_value: whether ``value`` is that of the unit before.
        """
        n_entries, kv_heads = value.shape[:2]
        flags = self._flags_of(slot)
        unscale = self._unscale[slot]
        unscale = unscale[:n_entries, :kv_heads]
        overflow = self._overflow[flags]
        if self.by_unit:
            # All flags: the slot's last unit may have been of a larger head group.
            overflow.zero_()
        overflow = overflow[:n_entries, :kv_heads]
        if not is_same_value:
            self._value_norm = largest_norms(value, kv_heads)
        divide_gradient_(
            grad_out,
            self._value_norm,
            unscale,
            self._usual_shift,
        )
        steps = self._steps[flags]
        for (entry, kv_head), n_steps in steps.items():
            divisor = 2.0 ** _off_the_gradient(n_steps)
            head = _head_part(grad_out, value, entry, kv_head)
            head.div_(divisor)
            unscale[entry, kv_head].mul_(divisor)
        most_steps = max(steps.values(), default=0)
        shift = self._usual_shift - _off_the_shift(most_steps)
        return Scaling(shift, unscale, overflow)

    def computed(self, slot: int) -> None:
        """Copy a unit's flags to the host, in the stream of its kernel calls."""
        if self.by_unit:
            flags = self._overflow[slot]
            self._host_overflow[slot].copy_(flags, non_blocking=True)

    def overflowed(self, slot: int = 0) -> bool:
        """Whether a gradient is not finite: of the unit in ``slot``, which has been
        computed; or of the head group, for which the host waits."""
        if not self.by_unit:
            self._host_overflow[0].copy_(self._overflow[0])
        flags = self._host_overflow[self._flags_of(slot)]
        return bool(flags.any())

    def runs(
        self, read_inputs: Callable[[], TensorsByName], slot: int = 0
    ) -> Iterator[int]:
        """Yields a number for each time that the unit, or group, has to run: once, and
        again as long as it overflows and scaling the heads at fault down further may
        help.

        In a CUDA graph that is being captured the host cannot ask: it runs once.

        Args:
            read_inputs: gives its inputs, not divided.
        """
        n_repeats = 0
        yield n_repeats
        if capturing(self._overflow[0].device):
            return
        while self.overflowed(slot):
            if not self._step_down(read_inputs(), slot):
                return
            n_repeats += 1
            yield n_repeats

    def _step_down(self, inputs: TensorsByName, slot: int) -> bool:
        """Take the heads at fault down one step where their numbers allow it; returns
        whether any was."""
        flags = self._flags_of(slot)
        steps = self._steps[flags]
        lowered: list[_Head] = []
        for entry, kv_head in self._host_overflow[flags].nonzero().tolist():
            head = (entry, kv_head)
            if self._may_step_down(inputs, head, steps.get(head, 0)):
                lowered.append(head)
        for head in lowered:
            n_steps = steps.get(head, 0)
            steps[head] = n_steps + 1
        if not self.by_unit:
            self._overflow[flags].zero_()
        return bool(lowered)

    def _may_step_down(self, inputs: TensorsByName, head: _Head, n_steps: int) -> bool:
        """Whether a head that was taken down ``n_steps`` steps may be taken down one
        more."""
        entry, kv_head = head
        # The inputs of a unit in a slot come with its states, which overflowed.
        parts: NamedTensors = {}
        value = inputs["value"]
        for item in _WIDE_INPUTS:
            tensor = inputs[item.name]
            parts[item.name] = _head_part(tensor, value, entry, kv_head)
        if not all_finite(list(parts.values())):
            return n_steps == 0
        largest_row = largest_norms(parts["grad_out"], 1)
        value_norm = largest_norms(parts["value"], 1)
        divisor = divisor_exponents(largest_row, value_norm, self._usual_shift)
        exponent = int(divisor) + _off_the_gradient(n_steps + 1)
        return math.ldexp(float(largest_row), -exponent) >= _SMALLEST_ROW


def _off_the_shift(n_steps: int) -> int:
    """The powers of two that are taken off the shift."""
    return min(_MOST_OFF_THE_SHIFT, n_steps * _OFF_THE_SHIFT)


def _off_the_gradient(n_steps: int) -> int:
    """The powers of two that are divided from ``grad_out``."""
    # All heads of a unit have the shift of the head with the most steps, so that heads
    # with fewer steps are scaled down a little as well.
    return n_steps * _STEP - _off_the_shift(n_steps)


def _head_part(
    tensor: torch.Tensor, value: torch.Tensor, entry: int, kv_head: int
) -> torch.Tensor:
    """The part of (b, h, n, d) that belongs to a key/value head: (1, h / hk, n, d)."""
    n_heads = tensor.shape[1]
    kv_heads = value.shape[1]
    shared = n_heads // kv_heads
    first_head = kv_head * shared
    part = tensor[entry : entry + 1]
    return part[:, first_head : first_head + shared]
