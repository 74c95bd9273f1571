"""What a pool and its workers tell each other."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from quorum_attention.counts import shown
from quorum_attention.execution.report import Report
from quorum_attention.kernels.kit.functions import Sample
from quorum_attention.mask import Keeps, Mask


@dataclass(frozen=True, slots=True)
class Begin:
    """A pass begins.

    Attributes:
        number: of the pass, in this pool.
        backward: which of the two it is.
        call: the whole call, a ``WholeCall``; its mask has no bias and no sinks.
        tensors: handles by name: query, key, value, mask, out, lse; grad_out, grad_query, grad_key,
            grad_value, grad_mask; grad_lse, sinks.
        options: ``CallOptions``'s depth, kernel and accumulator.
        watched: whether somebody reads the report.
        unequal: whether other workers may have more memory.
        budget: bytes that each part may take on the device; None: what is free.
    """

    number: int
    backward: bool
    call: Any
    tensors: dict[str, Any]
    options: dict[str, Any]
    watched: bool = True
    unequal: bool = False
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute a part of the pass that has begun.

    In a pool ``part`` is a ``Block``, and ``sums`` is where those of its gradients go that have to
    be added up, by name: grad_key and grad_value, grad_mask.
    """

    number: int
    index: int
    part: Any
    sums: Any = None


@dataclass(frozen=True, slots=True)
class End:
    """A pass is over: let go of its tensors, and say so if ``confirm``."""

    number: int
    confirm: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker has let go of a pass's tensors."""

    number: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has its device; ``name`` is the device's own name."""

    name: str


@dataclass(frozen=True, slots=True)
class Done:
    """The results of a part are in place, after so many seconds of the worker's."""

    number: int
    index: int
    seconds: float
    report: Report


@dataclass(frozen=True, slots=True)
class Failed:
    """A part could not be computed.

    Attributes:
        memory: whether memory ran out at every depth; others may still compute it.
        broken: whether the worker can compute nothing any more, and ends.
        error: the exception, if it can be sent, else its text.
        trace: the traceback in words.
    """

    number: int
    index: int
    memory: bool
    error: BaseException | str
    trace: str
    broken: bool = False


@dataclass(frozen=True, eq=False)
class Rule:
    """A mask's function of positions (``Mask.keeps``), as it is sent: by its name.

    A worker that cannot import it would fail while it reads the message, and could not say which
    pass that was. So the name is looked up on its own, and the part that asks the function says
    what came of that. What the function reads (a global) may have another value in a worker: so
    some of its answers are sent along, in ``sample``.
    """

    keeps: Keeps
    sample: Sample

    def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        """What ``keeps`` says."""
        return self.keeps(batch, head, query, key)

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, (pickle.dumps(self.keeps), shown(self.keeps), self.sample)


def _read(pickled: bytes, name: str, sample: Sample) -> Any:
    try:
        return Rule(pickle.loads(pickled), sample)
    except Exception as error:
        reason = (
            f"Mask.keeps must be a function that other processes can import where several devices "
            f"compute, and {name} cannot be ({type(error).__name__}: {error}): put it into a module"
        )

    def missing(batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        raise NotImplementedError(reason)

    return missing


def with_functions(mask: Mask, change: Callable[[Keeps], Keeps]) -> Mask:
    """The mask with each of its functions changed."""
    changes: dict[str, Any] = {
        name: tuple(with_functions(one, change) for one in getattr(mask, name))
        for name in ("either", "every")
    }
    if mask.keeps is not None:
        changes["keeps"] = change(mask.keeps)
    return replace(mask, **changes)


def checked(keeps: Keeps, device: torch.device) -> Keeps:
    """A function of a mask that has arrived.

    Raises:
        RuntimeError: it answers otherwise than where it was sent.
    """
    if isinstance(keeps, Rule):
        keeps.sample.check(
            keeps.keeps, device,
            "in the process that made the call: what it reads differs here, because a worker "
            "imports the function by its name",
        )  # fmt: skip
    return keeps


__all__ = [
    "Begin", "Compute", "Done", "End", "Ended", "Failed", "Ready", "Rule", "checked",
    "with_functions",
]  # fmt: skip
