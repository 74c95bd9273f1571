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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from quorum_attention.execution.control.controller import Path, RecoveryController
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.problem import Axis, Group, GroupSize, Workload, group_part
from quorum_attention.kernels.scaling import (
    Scaling,
    divide_gradient_,
    divisor_exponent,
    largest_norm,
    value_norms,
)

if TYPE_CHECKING:
    from quorum_attention.execution.engine import Unit

# log2 of the scaled probabilities, 2**shift P, of a row that attends to all keys evenly.
_LOG2_TYPICAL = -8
_LARGEST_SHIFT = 14
# One step down makes the products of a head smaller by so many powers of two,
_STEP = 8
# of which so many are taken off the shift, but never more in all than this: typical probabilities
# then stay normal numbers.
_OFF_THE_SHIFT = 4
_MOST_OFF_THE_SHIFT = 6
# The norm of the largest row of ``grad_out`` never goes below this, or the row would be lost.
_SMALLEST_ROW = 2.0**-18


def usual_shift(n_keys: int) -> int:
    """The shift for rows of up to ``n_keys`` keys: 0 if they are few enough to need none."""
    return min(_LARGEST_SHIFT, max(0, math.ceil(math.log2(max(1, n_keys))) + _LOG2_TYPICAL))


def all_finite(parts: Sequence[torch.Tensor]) -> bool:
    """Whether 16-bit gradients are finite everywhere; the host waits once, nothing is allocated."""
    first, *others = (part.sum(dtype=torch.float32) for part in parts)
    return math.isfinite(float(sum(others, first)))


# What a backward reads beside the log-sum-exp, with the rows that each has. Of a unit:
# (b, h, n, d) or (b, hk, m, d).
_READ: dict[str, Axis] = {
    "query": "query", "out": "query", "grad_out": "query", "key": "key", "value": "key",
}  # fmt: skip
Read = Mapping[str, torch.Tensor]


def what_is_read(tensors: Read, group: Group) -> Read:
    """The inputs of a backward's head group of one batch entry."""
    return {name: group_part(tensors[name], group, axis) for name, axis in _READ.items()}


@dataclass(slots=True)
class Steps:
    """How far one unit is scaled down: the steps ``taken`` by each (entry, key/value head)."""

    n_keys: int
    taken: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def shift(self) -> int:
        """The shift of the probabilities of all its heads."""
        return usual_shift(self.n_keys) - _off_the_shift(max(self.taken.values(), default=0))

    def divide_(
        self,
        grad_out: torch.Tensor,
        value: torch.Tensor,
        unscale: torch.Tensor,
        norms: torch.Tensor | None = None,
    ) -> None:
        """Divide ``grad_out`` (b, h, n, dv) in place; ``unscale`` (b, hk) gets the divisors;
        ``norms`` as in ``divide_gradient_``."""
        divide_gradient_(grad_out, value, unscale, usual_shift(self.n_keys), norms)
        for (entry, head), steps in self.taken.items():
            further = 2.0 ** _off_the_gradient(steps)
            _head(grad_out, value, entry, head).div_(further)
            unscale[entry, head].mul_(further)

    def lower(self, overflow: torch.Tensor, read: Read, ask: Ask) -> bool:
        """Take the heads that ``overflow`` (b, hk) flags as overflowed down by as many steps as
        ``ask`` says; returns whether any head was taken down.

        Args:
            read: the unit's inputs, not divided.
        """
        flagged: list[list[int]] = overflow.nonzero().tolist()
        steps = ask({(e, h): self._most(read, e, h) for e, h in flagged})
        self.taken.update(steps)
        return bool(steps)

    def _most(self, read: Read, entry: int, head: int) -> int:
        """Most steps that the numbers of a head allow: those taken already, or one more."""
        taken = self.taken.get((entry, head), 0)
        one = {name: _head(part, read["value"], entry, head) for name, part in read.items()}
        if not all_finite(list(one.values())):
            return max(taken, 1)
        largest = largest_norm(one["grad_out"])
        exponent = divisor_exponent(largest, largest_norm(one["value"]), usual_shift(self.n_keys))
        after = math.ldexp(largest, -exponent - _off_the_gradient(taken + 1))
        return taken + (after >= _SMALLEST_ROW)


# Maps the most steps that each flagged head allows to the steps of those heads to run again.
Ask = Callable[[dict[tuple[int, int], int]], Mapping[tuple[int, int], int]]


def asking(
    controller: RecoveryController, group: Group, path: Path = (), part: Group | None = None
) -> Ask:
    """A function that asks the controller of a pass about a unit, or about ``part`` of its heads if
    only those were computed."""
    entry, head = 0, 0
    if part is not None:
        entry, head = group.entries.index(part.entries[0]), part.kv_start - group.kv_start

    def ask(most: dict[tuple[int, int], int]) -> Mapping[tuple[int, int], int]:
        named = {(e + entry, h + head): steps for (e, h), steps in most.items()}
        steps = controller.overflow(group, path, named)
        return {(e - entry, h - head): steps[e, h] for e, h in named if (e, h) in steps}

    return ask


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


class GroupScaling:
    """Scales a head group that runs again as a whole.

    Args:
        heads: (batch entries, key/value heads), at most.
        n_units: units of the group that may be in flight at once.
    """

    def __init__(
        self, work: Workload, device: torch.device, heads: tuple[int, int], n_units: int = 1
    ) -> None:
        self._work, self._heads = work, heads
        self._unscale = [
            torch.empty(heads, dtype=torch.float32, device=device) for _ in range(n_units)
        ]
        self._overflow = torch.zeros(heads, dtype=torch.int32, device=device)
        self._norms: torch.Tensor | None = None
        self.begin(heads[1])

    def begin(self, kv_heads: int) -> None:
        """Begin a group of so many key/value heads."""
        self._steps, self._kv_heads = Steps(self._work.n_keys), kv_heads

    def divide_(
        self,
        grad_out: torch.Tensor,
        value: torch.Tensor,
        slot: int = 0,
        norms: torch.Tensor | None = None,
    ) -> Scaling:
        """Divide ``grad_out`` in place; returns how a kernel has to undo that."""
        unscale = self._unscale[slot][:, : self._kv_heads]
        self._steps.divide_(grad_out, value, unscale, norms)
        return Scaling(self._steps.shift, unscale, self._overflow[:, : self._kv_heads])

    def overflowed(self) -> bool:
        """Whether a gradient of the group is not finite; the host waits."""
        return bool(self._overflow.any())

    def repeats(self, read: Read, ask: Ask) -> bool:
        """Scale the heads at fault down further, if that may help; returns whether it does."""
        flags = self._overflow[:, : self._kv_heads].to("cpu", copy=True)
        self._overflow.zero_()
        return self._steps.lower(flags, read, ask)

    def prepare(self, unit: Unit) -> Scaling:
        """Divide the upstream gradient of a unit that streams by."""
        beside = unit.beside
        assert beside is not None
        value = beside.unit.fields["value"]
        if beside.opens:
            self._norms = value_norms(value)
        return self.divide_(unit.fields["grad_out"], value, unit.slot, self._norms)


class UnitScaling:
    """Scales units that run again one by one, in the slots of one arena.

    Args:
        group: the largest head group.

    Attributes:
        repeated: how often a unit was run again.
    """

    def __init__(
        self,
        work: Workload,
        device: torch.device,
        group: GroupSize,
        n_slots: int,
        controller: RecoveryController,
    ) -> None:
        self.repeated = 0
        self._work, self._controller = work, controller

        def numbers(dtype: torch.dtype, **where: Any) -> list[torch.Tensor]:
            """By slot: one for each key/value head of each entry."""
            heads = group.batch, group.kv_heads
            return [torch.zeros(heads, dtype=dtype, **where) for _ in range(n_slots)]

        self._unscale = numbers(torch.float32, device=device)
        self._overflow = numbers(torch.int32, device=device)
        # The same in host memory, which is read when the unit has been computed.
        pins = backend_of(device).own_memory
        self._flags = numbers(torch.int32, device="cpu", pin_memory=pins)
        # By slot: the unit in it, and how far that is scaled.
        self._units: dict[int, tuple[Unit, Steps]] = {}

    def prepare(self, unit: Unit) -> Scaling:
        """Divide the unit's ``grad_out`` in its slot; returns how a kernel has to undo that."""
        before, steps = self._units.get(unit.slot, (None, None))
        same = before is not None and before.visit.task == unit.visit.task
        if steps is None or before is None or not same or before.group != unit.group:
            steps = Steps(self._work.n_keys)
            self._units[unit.slot] = unit, steps
        unscale = _of_unit(self._unscale, unit)
        steps.divide_(unit.fields["grad_out"], unit.fields["value"], unscale)
        return Scaling(steps.shift, unscale, _of_unit(self._overflow, unit).zero_())

    def computed(self, unit: Unit) -> None:
        """Copy the unit's flags to the host, in the stream of its kernel calls."""
        flags = _of_unit(self._flags, unit)
        flags.copy_(_of_unit(self._overflow, unit), non_blocking=True)

    def overflowed(self, unit: Unit) -> bool:
        """Whether a gradient of the computed unit is not finite."""
        return bool(_of_unit(self._flags, unit).any())

    def repeats(self, unit: Unit) -> bool:
        """Scale a unit that overflowed down further, if that may help; returns whether it is.

        The slot holds the unit's inputs, not divided.
        """
        (_, steps), task, work = self._units[unit.slot], unit.visit.task, self._work
        # Rows beyond the end of the sequence were never written.
        rows = {"query": task.count_below(work.n_queries), "key": task.count_below(work.n_keys)}
        read = {name: unit.fields[name][:, :, : rows[axis]] for name, axis in _READ.items()}
        ask = asking(self._controller, unit.group, task.path)
        again = steps.lower(_of_unit(self._flags, unit), read, ask)
        self.repeated += again
        return again


def _of_unit(numbers: list[torch.Tensor], unit: Unit) -> torch.Tensor:
    """Those of the unit in a slot, (entries, key/value heads)."""
    group = unit.group
    return numbers[unit.slot][: len(group.entries), : group.kv_stop - group.kv_start]
