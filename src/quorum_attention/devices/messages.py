"""The messages between a pool's process and its workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from quorum_attention.call.block import CallBlock, WholeCall
from quorum_attention.call.options import CallOptions
from quorum_attention.devices.handles import Handles
from quorum_attention.execution.report import Report

INPUTS = ("query", "key", "value")
GRADIENTS = ("grad_query", "grad_key", "grad_value")
RESULTS = {"out", "lse", *GRADIENTS}


@dataclass(frozen=True, slots=True)
class WorkerPass:
    """A pass, as workers get it.

    Attributes:
        number: the number of the pass in its pool.
        backward: whether it is a backward.
        call: the whole call, without its mask.
        mask: the mask without bias and sinks, from ``pickle_mask``; None if there is
            none.
        tensors: the handles of INPUTS, bias and sinks, and of the results; in a
            backward those of grad_out, out, lse and grad_lse too.
        options: depth, kernel, accumulator and exact_delta.
    """

    number: int
    backward: bool
    call: WholeCall
    mask: bytes | None = None
    tensors: Handles = field(default_factory=dict)
    options: CallOptions = field(default_factory=CallOptions)


@dataclass(frozen=True, slots=True)
class Compute:
    """Ask a worker to compute a block of a pass.

    Attributes:
        worker_pass: the pass.
        block: the block of its call.
        budget: bytes of the device; None for what is free there.
        sums: the handles of those of the block's gradients that are added up: grad_key
            and grad_value, grad_bias.
    """

    worker_pass: WorkerPass
    block: CallBlock
    budget: int | None = None
    sums: Handles = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredHeads:
    """A worker's note on the block that it computes: some of the results are in place,
    whatever becomes of the worker.

    Attributes:
        number: the number of the pass.
        count: how many of the block's key/value heads, from its first one on.
    """

    number: int
    count: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's answer: the block was computed and its results are in place, or it was
    not.

    Attributes:
        number: the number of the pass.
        report: what the call did.
        error: why the block could not be computed; None if it was.
        trace: the traceback as text.
        is_out_of_memory: whether memory ran out at every depth; other workers may still
            compute the block.
        is_broken: whether the worker can compute nothing any more, and ends.
    """

    number: int
    report: Report
    error: Exception | None = None
    trace: str = ""
    is_out_of_memory: bool = False
    is_broken: bool = False
