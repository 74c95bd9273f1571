"""The out-of-memory guardrail: a pure state machine (paper, Section 3.4).

Fed with events, it answers with instructions; it allocates nothing, waits for nothing and knows
no device, so every history can be tested without one.

    out of memory, n_cap > 1     -> the offending task goes back to the queue, n_cap - 1
    out of memory, n_cap = 1     -> what remains is decomposed one level further
    ... and nothing left to cut  -> give up
    headroom at the start of a group, after a recovery -> one level less again
    an explicit depth            -> give up at the first failure

Completed tasks are never touched by any instruction.

The paper coarsens once all tasks are resident and memory is left. Here two slots saturate a
device, so all tasks are never resident: *headroom* is measured instead (the coarser slots would
fit twice), and only a depth that a recovery reached is given up again, at most twice a call, so
that a device whose memory comes and goes cannot make the call swing for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum


class Event(Enum):
    """What happened on the device."""

    OUT_OF_MEMORY = "out of memory"
    HEADROOM = "headroom"


@dataclass(frozen=True, slots=True)
class LowerCap:
    """Run on with fewer slots; the offending task is queued again."""

    n_cap: int


@dataclass(frozen=True, slots=True)
class Deepen:
    """Decompose every remaining task one level further and run on with ``n_cap`` slots."""

    n_cap: int


@dataclass(frozen=True, slots=True)
class Coarsen:
    """Decompose what remains one level less and run on with ``n_cap`` slots."""

    n_cap: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Report the failure."""

    reason: str


@dataclass(frozen=True, slots=True)
class Continue:
    """Nothing changes."""


Instruction = LowerCap | Deepen | Coarsen | GiveUp | Continue

_MAX_COARSENINGS = 2


@dataclass(frozen=True, slots=True)
class Guardrail:
    """The state; ``on`` returns the next one together with an instruction.

    Attributes:
        n_cap: slots in use at most.
        depth: levels of the tasks that remain.
        floor_depth: the depth the plan began with; coarsening never goes below it.
        max_depth: deeper than this is pointless (tasks would be smaller than a tile).
        pinned: the user chose the depth: no recovery, report the failure.
        deepened_n_cap: slots to go on with after deepening.
        coarsenings: how often headroom was used.
        history: the events so far, for reports and error messages.
    """

    n_cap: int
    depth: int
    floor_depth: int
    max_depth: int
    pinned: bool = False
    deepened_n_cap: int = 1
    coarsenings: int = 0
    history: tuple[str, ...] = field(default=())

    def on(self, event: Event, *, where: str = "") -> tuple[Guardrail, Instruction]:
        """The next state and what to do; ``where`` names the stage or task, for the history."""
        if event is Event.OUT_OF_MEMORY:
            return self._out_of_memory(where)
        return self._headroom()

    @property
    def may_coarsen(self) -> bool:
        """Whether headroom would change anything."""
        recovered = self.depth > self.floor_depth
        return recovered and not self.pinned and self.coarsenings < _MAX_COARSENINGS

    def _noted(self, line: str) -> tuple[str, ...]:
        return (*self.history, line)

    def _out_of_memory(self, where: str) -> tuple[Guardrail, Instruction]:
        if self.pinned:
            return self, GiveUp("the depth is pinned, so the failure is reported as it is")
        if self.n_cap > 1:
            n_cap = self.n_cap - 1
            line = f"out of memory in {where}: n_cap {self.n_cap} -> {n_cap}"
            return replace(self, n_cap=n_cap, history=self._noted(line)), LowerCap(n_cap)
        if self.depth < self.max_depth:
            line = f"out of memory in {where}: depth {self.depth} -> {self.depth + 1}"
            deeper = replace(
                self, depth=self.depth + 1, n_cap=self.deepened_n_cap, history=self._noted(line)
            )
            return deeper, Deepen(self.deepened_n_cap)
        return self, GiveUp(f"one slot at depth {self.depth} is the finest decomposition there is")

    def _headroom(self) -> tuple[Guardrail, Instruction]:
        if not self.may_coarsen:
            return self, Continue()
        line = f"headroom: depth {self.depth} -> {self.depth - 1}"
        coarser = replace(
            self,
            depth=self.depth - 1,
            coarsenings=self.coarsenings + 1,
            history=self._noted(line),
        )
        return coarser, Coarsen(self.n_cap)
