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

Inputs may hold rows that are not finite. Gradients that are not finite because of such a row are no
overflow. A head with no other fault is left as it is, because further scaling would cost its other
rows digits. A head with such rows and an overflow is scaled down one step and no further.

The device never waits here: norms and factors stay on it, and the host reads a unit's flags while
the next unit computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import torch

from quorum_attention.execution.control.controller import Path, RecoveryController
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.workload import Group, Workload
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.scaling import (
    Scaling,
    divide_gradient_,
    divisor_exponent,
    largest_norm,
    value_norms,
)
from quorum_attention.kernels.tensors import row_blocks

if TYPE_CHECKING:
    from quorum_attention.execution.slot_rows import Unit

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


def scales(kernel: InnerKernel, work: Workload) -> bool:
    """Whether a backward by ``kernel`` is scaled; some kernels gain nothing, or cannot undo it."""
    # Kernels that have dropout compute it in fp32, or scale by themselves.
    return work.dtype in kernel.scaled_backward and not work.dropout


def takes_wide(kernel: InnerKernel, work: Workload) -> bool:
    """Whether a backward by ``kernel`` may be handed an upstream gradient as large as fp16 holds:
    it is divided again for each unit, or meets nothing narrower than fp32, as with dropout."""
    return kernel.wide_products or work.dtype in kernel.scaled_backward


def all_finite(parts: Sequence[torch.Tensor]) -> bool:
    """Whether 16-bit gradients are finite everywhere; the host waits once, nothing is allocated."""
    first, *others = (part.sum(dtype=torch.float32) for part in parts)
    return math.isfinite(float(sum(others, first)))


@dataclass(frozen=True, slots=True)
class Computed:
    """A unit's unscaled inputs, and the gradients that were computed.

    Attributes:
        query, out, grad_out, grad_query: (b, h, n, d) each.
        lse: (b, h, n, 1).
        key, value, grad_key, grad_value: (b, hk, m, d) each.
    """

    query: torch.Tensor
    out: torch.Tensor
    grad_out: torch.Tensor
    lse: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_query: torch.Tensor
    grad_key: torch.Tensor
    grad_value: torch.Tensor

    def head(self, entry: int, head: int) -> Computed:
        """The part that belongs to one key/value head."""
        return Computed(
            *(_head(getattr(self, one.name), self.value, entry, head) for one in fields(self))
        )

    def finite(self) -> bool:
        """Whether all inputs are finite."""
        three = (self.query, self.out, self.grad_out, self.key, self.value)
        return all(bool(_finite_rows(one).all()) for one in three)

    def overflowed(self) -> bool:
        """Whether a gradient is not finite that its inputs alone would leave finite."""
        upstream = _finite_rows(self.grad_out)
        rows = upstream & _finite_rows(self.query) & _finite_rows(self.out)
        # A key or value that is not finite makes NaN of a probability of 0, but never infinity: so
        # where there are any, only an infinite gradient counts.
        clean = bool(_finite_rows(self.key).all()) and bool(_finite_rows(self.value).all())
        good = _finite_rows if clean else _rows_without_infinity
        if not bool((good(self.grad_query) | ~rows).all()):
            return True
        if bool(rows.all()) and not bool(good(self.grad_key).all()):
            return True
        # All probabilities of a row are finite unless one of its scores is NaN or plus infinity.
        broken = self.lse.isnan() | (self.lse == torch.inf)
        if bool(broken.any()):
            return False
        # A number of the upstream gradient that is not finite reaches its own column alone.
        others = _finite_columns(self.grad_out)
        return not bool(_finite_columns(self.grad_value)[others].all())


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

    def lower(self, overflow: torch.Tensor, unit: Computed, ask: Ask) -> bool:
        """Take the heads that ``overflow`` (b, hk) flags as overflowed down by as many steps as
        ``ask`` says; returns whether any head was taken down."""
        flagged: list[list[int]] = overflow.nonzero().tolist()
        steps = ask({(e, h): self._most(unit.head(e, h), (e, h)) for e, h in flagged})
        self.taken.update(steps)
        return bool(steps)

    def _most(self, one: Computed, head: tuple[int, int]) -> int:
        """Most steps that the numbers of a head allow: those taken already, or one more."""
        taken = self.taken.get(head, 0)
        if not one.finite() and (taken or not one.overflowed()):
            return taken
        largest = largest_norm(one.grad_out)
        exponent = divisor_exponent(largest, largest_norm(one.value), usual_shift(self.n_keys))
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

    def repeats(self, computed: Computed, ask: Ask, *, plain: bool = False) -> bool:
        """Scale the heads at fault down further, if that may help; returns whether it does.

        Args:
            plain: whether all inputs of these heads have to be finite.

        Raises:
            OverflowedError: they are not, so it takes tasks to tell.
        """
        flags = self._overflow[:, : self._kv_heads].to("cpu", copy=True)
        self._overflow.zero_()
        if plain and not all(computed.head(e, h).finite() for e, h in flags.nonzero().tolist()):
            raise OverflowedError("a scaled gradient overflowed, beside inputs that are not finite")
        return self._steps.lower(flags, computed, ask)

    def prepare(self, unit: Unit) -> Scaling:
        """Divide the upstream gradient of a unit that streams by."""
        beside = unit.beside
        assert beside is not None
        value = beside.unit.fields["value"]
        if beside.opens:
            self._norms = value_norms(value)
        return self.divide_(unit.fields["grad_out"], value, unit.slot, self._norms)


class OverflowedError(torch.OutOfMemoryError):
    """A scaled gradient overflowed where inputs are not finite: tasks through slots find out which
    rows that leaves. It is recovered from as if memory had run out."""


@dataclass(slots=True)
class _UnitInSlot:
    """The unit in a slot, how far it is scaled, and its overflow flags in host memory."""

    unit: Unit
    steps: Steps
    flags: torch.Tensor


class UnitScaling:
    """Scales units that run again one by one, in the slots of one arena.

    Attributes:
        repeated: how often a unit was run again.
    """

    def __init__(
        self, work: Workload, device: torch.device, controller: RecoveryController
    ) -> None:
        self.repeated = 0
        self._work, self._pins = work, backend_of(device).pins
        self._controller = controller
        self._units: dict[int, _UnitInSlot] = {}

    def prepare(self, unit: Unit) -> Scaling:
        """Divide the unit's ``grad_out`` in its slot, and write the divisors there; returns how a
        kernel has to undo that."""
        fields, unscale = unit.fields, _by_head(unit, "unscale")
        one = self._units.get(unit.slot)
        if one is None or one.unit.visit.task != unit.visit.task or one.unit.group != unit.group:
            if one is not None and one.flags.shape == unscale.shape:
                flags = one.flags
            else:
                flags = torch.zeros(
                    unscale.shape, dtype=torch.int32, pin_memory=self._pins, device="cpu"
                )
            one = self._units[unit.slot] = _UnitInSlot(unit, Steps(self._work.n_keys), flags)
        one.steps.divide_(fields["grad_out"], fields["value"], unscale)
        return Scaling(one.steps.shift, unscale, _by_head(unit, "overflow").zero_())

    def computed(self, unit: Unit) -> None:
        """Copy the unit's flags to the host, in the stream of its kernel calls."""
        self._units[unit.slot].flags.copy_(_by_head(unit, "overflow"), non_blocking=True)

    def overflowed(self, unit: Unit) -> bool:
        """Whether a gradient of the computed unit is not finite."""
        return bool(self._units[unit.slot].flags.any())

    def repeats(self, unit: Unit) -> bool:
        """Scale a unit that overflowed down further, if that may help; returns whether it is.

        The slot holds the unit's unscaled inputs and its computed gradients.
        """
        one, task = self._units[unit.slot], unit.visit.task
        # Rows of a state beyond the end of the sequence were never written.
        rows = {
            "query": task.count_below(self._work.n_queries),
            "key": task.count_below(self._work.n_keys),
        }
        computed = Computed(
            *(unit.fields[name][:, :, : rows[axis]] for name, axis in _FIELDS_COMPUTED)
        )
        ask = asking(self._controller, unit.group, task.path)
        again = one.steps.lower(one.flags, computed, ask)
        self.repeated += again
        return again


# The fields of a slot in the order of ``Computed``.
_FIELDS_COMPUTED = (
    ("query", "query"), ("out", "query"), ("grad_out", "query"), ("lse", "query"),
    ("key", "key"), ("value", "key"),
    ("state_query", "query"), ("state_key", "key"), ("state_value", "key"),
)  # fmt: skip


def _by_head(unit: Unit, name: str) -> torch.Tensor:
    field = unit.fields[name]
    return field.view(field.shape[:2])


def _finite_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Which rows of (b, h, n, d) are finite everywhere: (b, h, n), boolean."""
    return _rows(tensor, torch.isfinite)


def _finite_columns(tensor: torch.Tensor) -> torch.Tensor:
    """Which columns of (b, h, n, d) are finite everywhere: (d,), boolean."""
    batch, heads, rows, width = tensor.shape
    found = torch.ones(width, dtype=torch.bool, device=tensor.device)
    for block in row_blocks(batch, heads, rows, max(1, width)):
        found &= tensor[block].isfinite().flatten(0, -2).all(dim=0)
    return found


def _rows_without_infinity(tensor: torch.Tensor) -> torch.Tensor:
    return _rows(tensor, lambda part: ~torch.isinf(part))


def _rows(tensor: torch.Tensor, good: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    batch, heads, rows, width = tensor.shape
    found = torch.empty(tensor.shape[:3], dtype=torch.bool, device=tensor.device)
    for block in row_blocks(batch, heads, rows, max(1, width)):
        found[block] = good(tensor[block]).all(dim=-1)
    return found
