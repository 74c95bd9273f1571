"""The scaled backward: which powers of two, and what to do when they were too large.

For each key/value head of a unit, ``grad_out`` is divided by a power of two (in its slot) and
probabilities are multiplied by another, ``2**shift``, so that everything a kernel rounds to fp16
uses fp16's range: with g the largest row norm of ``grad_out`` after the division and w that of
``value``,

    2**shift P            <= 2**shift                        (P <= 1)
    2**shift |dS|         <= 2**shift * 2 g w  <= 2**15      (|dP - delta| <= 2 g w)

holds by construction (design, section 2). What has no useful bound are the sums over rows, dK and
dV of a key that everything attends to. They are checked as they are added up (kernels/merge.py);
a unit with a gradient that is not finite is run again from its stored state, the heads at fault
with ``grad_out`` divided further, and a little of that taken from the shift instead, so that both
stay normal numbers. That goes on until not even the sum of a sink overflows.

A row that is not finite leaves the others of its head what they are. What is not finite by its
fault is no overflow: a head with nothing else wrong is left as it is, because further scaling would
cost the others digits. One with more wrong gets one more try and no second.

Nothing here makes the device wait: norms and factors stay on it, and the host reads a unit's flags
while the next one computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch

from quorum_attention.execution.control.events import Overflow, Path
from quorum_attention.execution.control.instructions import Repeat
from quorum_attention.execution.control.machine import HERE, Machine
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.engine import Unit
from quorum_attention.execution.workload import Group, Workload
from quorum_attention.kernels.blocks import row_blocks
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.scaling import (
    Scaling,
    divide_gradient_,
    divisor_exponent,
    largest_norm,
)
from quorum_attention.kernels.traits import traits_of

# 2**shift P of a row that attends evenly should come out about here ...
_LOG2_TYPICAL = -8
# ... with a shift of at most this.
_LARGEST_SHIFT = 14
# A head that overflowed is tried again with products smaller by so many powers of two ...
_STEP = 8
# ... of which the shift takes so many, up to the last: typical probabilities stay normal.
_OFF_THE_SHIFT = 4
_MOST_OFF_THE_SHIFT = 6
# Not so far that the largest row of ``grad_out`` itself would be lost.
_SMALLEST_ROW = 2.0**-18


def usual_shift(n_keys: int) -> int:
    """The shift for rows of up to ``n_keys`` keys: 0 where probabilities are no problem."""
    return min(_LARGEST_SHIFT, max(0, math.ceil(math.log2(max(1, n_keys))) + _LOG2_TYPICAL))


def scales(kernel: InnerKernel, work: Workload) -> bool:
    """Whether a backward by ``kernel`` is scaled: some gain nothing, or cannot undo it."""
    return work.dtype in traits_of(kernel).scaled_backward


def all_finite(parts: Sequence[torch.Tensor]) -> bool:
    """Whether 16-bit gradients are finite everywhere; holds the host up once, takes no memory."""
    first, *others = (part.sum(dtype=torch.float32) for part in parts)
    return math.isfinite(float(sum(others, first)))


@dataclass(frozen=True, slots=True)
class Computed:
    """A unit's inputs as they were given, and what came of them.

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
        """What goes with one key/value head."""
        return Computed(
            *(_head(getattr(self, one.name), self.value, entry, head) for one in fields(self))
        )

    def finite(self) -> bool:
        """Whether the inputs are."""
        three = (self.query, self.out, self.grad_out, self.key, self.value)
        return all(bool(_finite_rows(one).all()) for one in three)

    def overflowed(self) -> bool:
        """Whether a gradient is not finite that these inputs would have let be."""
        upstream = _finite_rows(self.grad_out)
        rows = upstream & _finite_rows(self.query) & _finite_rows(self.out)
        # No probability at all times a key or a value that is not finite is NaN, never infinity.
        clean = bool(_finite_rows(self.key).all()) and bool(_finite_rows(self.value).all())
        good = _finite_rows if clean else _rows_without_infinity
        if not bool((good(self.grad_query) | ~rows).all()):
            return True
        if bool(rows.all()) and not bool(good(self.grad_key).all()):
            return True
        # Probabilities are finite but where a score is NaN or plus infinity.
        broken = self.lse.isnan() | (self.lse == torch.inf)
        weighed = bool(upstream.all()) and not bool(broken.any())
        return weighed and not bool(_finite_rows(self.grad_value).all())


@dataclass(slots=True)
class Level:
    """How far one unit is scaled: ``steps`` down for each (entry, key/value head)."""

    n_keys: int
    steps: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def shift(self) -> int:
        """Of the probabilities of all its heads."""
        return usual_shift(self.n_keys) - _off_the_shift(max(self.steps.values(), default=0))

    def divide_(self, grad_out: torch.Tensor, value: torch.Tensor, unscale: torch.Tensor) -> None:
        """Divide ``grad_out`` (b, h, n, dv) in place; ``unscale`` (b, hk) receives by what."""
        divide_gradient_(grad_out, value, unscale, usual_shift(self.n_keys))
        for (entry, head), steps in self.steps.items():
            further = 2.0 ** _off_the_gradient(steps)
            _head(grad_out, value, entry, head).div_(further)
            unscale[entry, head].mul_(further)

    def lower(self, overflow: torch.Tensor, unit: Computed, ask: Ask) -> bool:
        """As many steps down as ``ask`` says for the heads that ``overflow`` (b, hk) flags; False
        where nothing is to be done about any."""
        flagged: list[list[int]] = overflow.nonzero().tolist()
        steps = ask({(e, h): self._most(unit.head(e, h), (e, h)) for e, h in flagged})
        self.steps.update(steps)
        return bool(steps)

    def _most(self, one: Computed, head: tuple[int, int]) -> int:
        """How many steps a head's numbers allow: those taken, or one more."""
        taken = self.steps.get(head, 0)
        if not one.finite() and (taken or not one.overflowed()):
            return taken
        largest = largest_norm(one.grad_out)
        exponent = divisor_exponent(largest, largest_norm(one.value), usual_shift(self.n_keys))
        kept = math.ldexp(largest, -exponent - _off_the_gradient(taken + 1)) >= _SMALLEST_ROW
        return taken + kept


# Told how many steps down heads allow, the heads to run again, and at how many.
Ask = Callable[[dict[tuple[int, int], int]], Mapping[tuple[int, int], int]]


def asking(machine: Machine, group: Group, path: Path = (), part: Group | None = None) -> Ask:
    """Asks a pass's machine about a unit; about ``part`` of its heads, where those are computed by
    themselves."""
    entry, head = 0, 0
    if part is not None:
        entry, head = group.entries.index(part.entries[0]), part.kv_start - group.kv_start

    def ask(most: dict[tuple[int, int], int]) -> Mapping[tuple[int, int], int]:
        named = {(e + entry, h + head): steps for (e, h), steps in most.items()}
        order = machine.on(Overflow(HERE, group, path, named))
        steps = order.steps if isinstance(order, Repeat) else {}
        return {(e - entry, h - head): steps[e, h] for e, h in named if (e, h) in steps}

    return ask


def _off_the_shift(steps: int) -> int:
    return min(_MOST_OFF_THE_SHIFT, steps * _OFF_THE_SHIFT)


def _off_the_gradient(steps: int) -> int:
    # A unit's shift is that of its head with the most steps; the others lose what that takes.
    return steps * _STEP - _off_the_shift(steps)


def _head(tensor: torch.Tensor, value: torch.Tensor, entry: int, head: int) -> torch.Tensor:
    """What of (b, h, n, d) goes with a key/value head, (1, h / hk, n, d)."""
    shared = tensor.shape[1] // value.shape[1]
    return tensor[entry : entry + 1, head * shared : (head + 1) * shared]


@dataclass(slots=True)
class _Held:
    """Of the unit in a slot: its level, and its flags as the host gets them."""

    unit: Unit
    level: Level
    flags: torch.Tensor


class BackwardScaling:
    """Scales the units of one backward pass; one object for an arena of slots.

    Attributes:
        repeated: how often a unit had to be run again.
    """

    def __init__(self, work: Workload, device: torch.device, machine: Machine) -> None:
        self.repeated = 0
        self._machine = machine
        self._work = work
        self._device = device
        self._held: dict[int, _Held] = {}

    def prepare(self, unit: Unit) -> None:
        """Divide the unit's ``grad_out`` in its slot, and note by what."""
        unscale = _by_head(unit, "unscale")
        held = self._held.get(unit.slot)
        again = (
            held is not None
            and held.unit.visit.task == unit.visit.task
            and held.unit.group == unit.group
        )
        if held is None or not again:
            if held is not None and held.flags.shape == unscale.shape:
                flags = held.flags
            else:
                pins = backend_of(self._device).pins
                flags = torch.zeros(unscale.shape, dtype=torch.int32, pin_memory=pins)
            held = self._held[unit.slot] = _Held(unit, Level(self._work.n_keys), flags)
        held.level.divide_(unit.fields["grad_out"], unit.fields["value"], unscale)

    def scaling(self, unit: Unit) -> Scaling:
        """What the kernel is told of a prepared unit."""
        overflow = _by_head(unit, "overflow").zero_()
        return Scaling(self._held[unit.slot].level.shift, _by_head(unit, "unscale"), overflow)

    def computed(self, unit: Unit) -> None:
        """After the unit's kernel calls, in their stream: send the flags to the host."""
        self._held[unit.slot].flags.copy_(_by_head(unit, "overflow"), non_blocking=True)

    def spoiled(self, unit: Unit) -> bool:
        """Whether a gradient of the unit, now computed, is not finite."""
        return bool(self._held[unit.slot].flags.any())

    def mended(self, unit: Unit) -> bool:
        """Whether the unit, whose inputs are in its slot as they were given and its gradients as
        they were computed, is scaled less now."""
        held, work = self._held[unit.slot], self._work
        # What lies beyond the sequence in a state has never been anything.
        below = unit.visit.task.count_below
        rows = {"query": below(work.n_queries), "key": below(work.n_keys)}

        def given(name: str, axis: str) -> torch.Tensor:
            return unit.fields[name][:, :, : rows[axis]]

        computed = Computed(
            query=given("query", "query"),
            out=given("out", "query"),
            grad_out=given("grad_out", "query"),
            lse=given("lse", "query"),
            key=given("key", "key"),
            value=given("value", "key"),
            grad_query=given("state_query", "query"),
            grad_key=given("state_key", "key"),
            grad_value=given("state_value", "key"),
        )
        ask = asking(self._machine, unit.group, unit.visit.task.path)
        lowered = held.level.lower(held.flags, computed, ask)
        self.repeated += lowered
        return lowered


def _by_head(unit: Unit, name: str) -> torch.Tensor:
    field = unit.fields[name]
    return field.view(field.shape[:2])


def _finite_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Which rows of (b, h, n, d) have finite elements alone, (b, h, n)."""
    return _rows(tensor, torch.isfinite)


def _rows_without_infinity(tensor: torch.Tensor) -> torch.Tensor:
    return _rows(tensor, lambda part: ~torch.isinf(part))


def _rows(tensor: torch.Tensor, good: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    batch, heads, rows, width = tensor.shape
    found = torch.empty(tensor.shape[:3], dtype=torch.bool, device=tensor.device)
    for block in row_blocks(batch, heads, rows, max(1, width)):
        found[block] = good(tensor[block]).all(dim=-1)
    return found
