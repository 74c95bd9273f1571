"""What is chosen once for all parts of a call, so that a resumed run gives what one run
gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quorum_attention.call.block import BlockResults, CallBlock, request_of_block
from quorum_attention.errors import BudgetError
from quorum_attention.execution.device.lookup import HOST, backend_of, on_host
from quorum_attention.files.file_call import FileCall
from quorum_attention.passes.decisions import decide_backward, decide_forward
from quorum_attention.planner.decide import Decision, usable_bytes

# A kill costs about this much: heads that take less are computed together.
_PART_SECONDS = 5.0
# Accumulators that take more than this share of the host's free memory are put into a
# file.
_MAX_HOST_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The choices that hold for all parts of a call.

    Attributes:
        heads: key/value heads of a part.
        parts: the number of parts.
        budget_bytes: device memory of each part.
        in_file: whether accumulators lie in a mapped file.
    """

    heads: int
    parts: int
    budget_bytes: int
    in_file: bool


def choose_settings(call: FileCall, heads: int | None = None) -> RunSettings:
    """Choose the settings of a call.

    Args:
        heads: key/value heads of a part; None for as many as take some seconds.

    Raises:
        BudgetError, NotImplementedError: a part cannot be run.
    """
    budget = call.options.budget
    if budget is None:
        budget = usable_bytes(call.device)
        call = replace(call, options=call.options._replace(budget=budget))
    assert isinstance(budget, int)
    if heads is None:
        heads = _heads_in_seconds(call)
    heads = call.heads_of_part(heads)
    parts = call.parts(heads)
    _, in_file = _decide_parts(call, parts)
    return RunSettings(heads, len(parts), budget, in_file)


def _heads_in_seconds(call: FileCall) -> int:
    """Return how many key/value heads take some seconds."""
    decisions, _ = _decide_parts(call, call.parts(1))
    seconds_per_head = 1e-9
    for decision in decisions:
        if decision.plan is not None:
            seconds_per_head = max(seconds_per_head, decision.plan.predicted_seconds)
    n_heads = max(1, int(_PART_SECONDS / seconds_per_head))
    n_all_heads = call.shape.batch * max(1, call.shape.kv_heads)
    return min(n_heads, n_all_heads)


def _decide_parts(
    call: FileCall, parts: Sequence[CallBlock]
) -> tuple[list[Decision], bool]:
    """Decide how parts are run.

    Returns:
        The decisions for parts that differ, none where there is nothing to compute; and
        whether accumulators are put into a file.

    Raises:
        BudgetError: a part cannot be run, also if others can.
    """
    if call.is_empty:
        return [], False
    differing = _differing_parts(call, parts)
    try:
        decisions = [_decide(call, part, in_file=False) for part in differing]
    except BudgetError:
        pass  # less memory is enough without accumulators in it
    else:
        use_host_memory = any(_uses_host_memory(decision) for decision in decisions)
        if not use_host_memory or not _fill_host_memory(call, len(parts)):
            return decisions, False
    return [_decide(call, part, in_file=True) for part in differing], True


def _differing_parts(call: FileCall, parts: Sequence[CallBlock]) -> list[CallBlock]:
    """Return the first part, or the first of each batch entry if a mask may tell
    entries apart."""
    mask = call.whole_call.mask
    if mask is None or not mask.is_structured:
        return list(parts[:1])
    return [part for part in parts if not part.heads.start]


def _uses_host_memory(decision: Decision) -> bool:
    """Return whether a part has accumulators in host memory."""
    plan = decision.plan
    return plan is not None and plan.schedule.route.accumulator == "host"


def _fill_host_memory(call: FileCall, n_parts: int) -> bool:
    """Return whether accumulators of a part take much of the host's memory."""
    if on_host(call.device):
        return False
    n_elements = 0
    for shape, _ in call.results(lse=True).values():
        n_elements += math.prod(shape)
    n_bytes = n_elements * call.shape.state_dtype.itemsize // n_parts
    free_bytes = backend_of(HOST).free_bytes(HOST)
    return n_bytes >= _MAX_HOST_SHARE * free_bytes


def _decide(call: FileCall, block: CallBlock, *, in_file: bool) -> Decision:
    """Decide how a part is run. Of results only their dtype matters, and that they are
    given."""
    dtype = call.shape.state_dtype if in_file else call.out_dtype
    given_result = torch.empty(0, dtype=dtype, device="cpu")
    inputs = call.whole_call.cut_named(call.tensors, block)
    out_dtype = None if call.backward else call.out_dtype
    with torch.no_grad():
        tensors, request, backward_inputs = request_of_block(
            call.whole_call,
            block,
            inputs,
            call.options,
            BlockResults(out_dtype=out_dtype),
        )
        if backward_inputs is not None:
            grads = (given_result, given_result, given_result)
            return decide_backward(
                tensors, request, backward_inputs._replace(grads=grads)
            )
        lse = given_result if lse_given(call, in_file=in_file) else None
        request = replace(request, out=given_result, out_dtype=dtype, lse=lse)
        return decide_forward(tensors, request)


def lse_given(call: FileCall, *, in_file: bool) -> bool:
    """Return whether the log-sum-exp of a forward lies in a file from the start."""
    return in_file or on_host(call.device) or call.out_dtype == call.shape.state_dtype
