"""What a pool and its workers tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from quorum_attention.execution.report import Report
from quorum_attention.pool.parts import Sizes
from quorum_attention.pool.shared import Handle


@dataclass(frozen=True, slots=True)
class Begin:
    """A pass begins.

    Attributes:
        number: of the pass, in this pool.
        backward: which of the two it is.
        tensors: by name: query, key, value, mask, out, lse; grad_out, grad_query, grad_key,
            grad_value, grad_mask; grad_lse, sinks.
        options: of each call.
        budget: bytes that each part may take on the device; None: what is free.
    """

    number: int
    backward: bool
    sizes: Sizes
    tensors: dict[str, Handle]
    options: dict[str, Any] = field(default_factory=dict)
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute a part of the pass that has begun.

    In a pool ``part`` is a ``Part``, and ``sums`` is where those of its gradients go that have to
    be added up, by name: grad_key and grad_value, grad_mask; and ``near`` is the part with those
    beside it that the worker will presumably compute too, whose memory is locked with its own.
    """

    number: int
    index: int
    part: Any
    sums: Any = None
    near: Any = None


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
class Begun:
    """A worker has a part, and begins with it. Another one may be laid on its shelf from now on,
    and nothing else is there."""

    number: int
    index: int


@dataclass(frozen=True, slots=True)
class Done:
    """The results of a part are in place.

    Attributes:
        seconds: that the worker was at it.
        opening: how many of them went into opening and page-locking memory.
        new: whether it was the first part of its sizes there: some of them went into compiling,
            planning or what else a first call does.
    """

    number: int
    index: int
    seconds: float
    report: Report
    opening: float = 0.0
    new: bool = False


@dataclass(frozen=True, slots=True)
class Measure:
    """Measure how quick the device is, between passes.

    Attributes:
        dtype, head_dim: of calls.
        host: shared memory, uint8, to copy from and to; None: kernels are measured, not copies.
    """

    dtype: torch.dtype
    head_dim: int
    host: Handle | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured: fields of ``planner.machine.Machine``; or why nothing was."""

    rates: dict[str, Any]
    error: str = ""


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


__all__ = [
    "Begin", "Begun", "Compute", "Done", "End", "Ended", "Failed", "Measure", "Measurement",
    "Ready",
]  # fmt: skip
