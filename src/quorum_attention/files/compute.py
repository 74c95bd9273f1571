"""Computes parts of a call from files, one after the other, into the results' files."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quorum_attention import passes
from quorum_attention.call.block import Block, BlockResults, request_of_block
from quorum_attention.call.options import CallOptions
from quorum_attention.errors import BudgetError
from quorum_attention.execution.device.lookup import HOST, backend_of, on_host
from quorum_attention.execution.report import Report
from quorum_attention.files.call import FileCall, written_as
from quorum_attention.files.formats import Wanted, create_tensors
from quorum_attention.mask import Mask
from quorum_attention.planner import policy
from quorum_attention.planner.decide import Decision
from quorum_attention.progress import progress_bar

# What a kill may cost, about: heads that take less are computed together.
SECONDS_OF_A_PART = 5.0
# Accumulators in host memory that are more than this share of it are put into a file instead.
_SHARE_OF_HOST = 0.25


@dataclass(frozen=True, slots=True)
class Settings:
    """What is chosen once for all parts of a call, so that a resumed run gives what one run gives.

    Attributes:
        heads: key/value heads of a part.
        parts: how many there are.
        budget_bytes: device memory of each.
        in_file: whether accumulators lie in a mapped file.
        plan: how the first part would be run, in words.
    """

    heads: int
    parts: int
    budget_bytes: int
    in_file: bool
    plan: str


@dataclass(slots=True)
class Work:
    """What computes parts needs to know.

    Attributes:
        call, settings: of the call.
        results: all of its results, in their files.
        folder: for files of scratch space.
        report: filled while it runs.
        progress: shows a bar, or lines.
    """

    call: FileCall
    settings: Settings
    results: Mapping[str, torch.Tensor]
    folder: Path
    report: Report
    progress: bool = True

    @property
    def parts(self) -> list[Block]:
        """All parts of the call."""
        return self.call.parts(self.settings.heads)


Compute = Callable[[Work, Sequence[int]], Iterator[int]]
"""Computes parts, anywhere and in any order: writes their results into ``Work.results`` and yields
each part's number when they are written. ``compute_here`` is one."""


def settle(call: FileCall, heads: int | None = None) -> Settings:
    """What is chosen for a call.

    Args:
        heads: key/value heads of a part; None: as many as take some seconds.

    Raises:
        BudgetError, NotImplementedError: a part cannot be run.
    """
    budget = call.written.budget
    if budget is None:
        budget = int(backend_of(call.device).free_bytes(call.device) * (1 - policy.MARGIN))
        call = replace(call, written=call.written._replace(budget=budget))
    assert isinstance(budget, int)
    if heads is None:
        decisions, _ = _decided(call, 1)
        plans = [one.plan for one in decisions if one.plan is not None]
        seconds = max((plan.predicted_seconds for plan in plans), default=0.0)
        every = call.work.batch * max(1, call.work.kv_heads)
        heads = min(every, max(1, int(SECONDS_OF_A_PART / max(seconds, 1e-9))))
    heads = call.heads_of_part(heads)
    decisions, in_file = _decided(call, heads)
    return Settings(heads, len(call.parts(heads)), budget, in_file, _words(decisions))


def _words(decisions: Sequence[Decision]) -> str:
    if not decisions:
        return "nothing to compute"
    kernel, plan = decisions[0].kernel, decisions[0].plan
    if plan is None:
        return f"{kernel.name}, whole"
    schedule = plan.schedule
    rectangles = f"rectangles of {schedule.max_queries} x {schedule.max_keys}"
    return f"{kernel.name}, {plan.levels}, {schedule.route.words}, {rectangles}, {schedule.group}"


def _decided(call: FileCall, heads: int) -> tuple[list[Decision], bool]:
    """The decisions for parts that are unlike, the first part's first (none where there is nothing
    to compute), and whether accumulators are put into a file.

    Raises:
        BudgetError: a part cannot be run, also where others can.
    """
    parts = _unlike(call, call.parts(heads))
    if not parts or 0 in (call.work.n_queries, call.work.n_keys, call.work.value_dim):
        return [], False
    try:
        decisions = [_decision(call, part, in_file=False) for part in parts]
    except BudgetError:
        # Without accumulators in memory less will do.
        return [_decision(call, part, in_file=True) for part in parts], True
    plans = [one.plan for one in decisions if one.plan is not None]
    if on_host(call.device) or all(plan.schedule.accumulator != "host" for plan in plans):
        return decisions, False
    scratch = _scratch(call, parts[0], (), in_file=True).values()
    needed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in scratch)
    if needed < _SHARE_OF_HOST * backend_of(HOST).free_bytes(HOST):
        return decisions, False
    return [_decision(call, part, in_file=True) for part in parts], True


def _unlike(call: FileCall, parts: Sequence[Block]) -> list[Block]:
    """The first part of each batch entry where a mask may tell entries apart, else the first."""
    found = [part for part in parts if not part.heads.start]
    return found if isinstance(call.whole.mask, Mask) else found[:1]


def _decision(call: FileCall, part: Block, *, in_file: bool) -> Decision:
    """How a part would be run. Of results it matters only that they are given, and their dtype."""
    with torch.no_grad():
        dtype = call.work.state_dtype if in_file else call.out_dtype
        target = torch.empty(0, dtype=dtype, device="cpu")
        tensors, request, given = request_of_block(
            call.whole, part, call.cut(call.tensors, part), call.written,
            BlockResults(out_dtype=None if call.backward else call.out_dtype),
        )  # fmt: skip
        if given is not None:
            given = given._replace(grads=(target, target, target))
            return passes.decide_backward(tensors, request, given)
        lse = target if lse_given(call, in_file=in_file) else None
        return passes.decide_forward(
            tensors, replace(request, out=target, out_dtype=dtype, lse=lse)
        )


def lse_given(call: FileCall, *, in_file: bool) -> bool:
    """Whether the log-sum-exp of a forward lies in a file from the start."""
    return in_file or on_host(call.device) or call.out_dtype == call.work.state_dtype


def compute_here(work: Work, numbers: Sequence[int]) -> Iterator[int]:
    """Compute parts one after the other in this process."""
    call, parts = work.call, work.parts
    shown: AbstractContextManager[Any] = progress_bar() if work.progress else nullcontext()
    with shown as bar, torch.no_grad():
        for number in numbers:
            progress = None if bar is None else _shifted(bar, number, len(parts))
            written = call.written._replace(report=work.report, progress=progress)
            _compute(work, parts[number], written)
            yield number


def _shifted(bar: Any, number: int, parts: int) -> Any:
    """Progress of a part as progress of all."""
    return lambda done, total, label: bar(number * total + done, parts * total, label)


def _compute(work: Work, part: Block, written: CallOptions) -> None:
    call, in_file = work.call, work.settings.in_file
    wanted = call.cut(written_as(call, work.results), part)
    made: dict[str, Any] = dict(wanted)
    if scratch := _scratch(call, part, wanted, in_file=in_file):
        # Without a name: the system writes it to the disk and reads it back, so it may be larger
        # than the host's memory.
        path = work.folder / f"{secrets.token_hex(4)}-accumulators"
        made |= create_tensors(path, scratch)
        path.unlink()
    if not lse_given(call, in_file=in_file):
        made.pop("lse", None)
    results = BlockResults(made.get("out"), made.get("lse"))
    if call.backward:
        results = BlockResults(grads=(made["dq"], made["dk"], made["dv"]))
    block = call.whole, part, call.cut(call.tensors, part), written
    if call.backward:
        passes.check_forward(*block, work.settings.parts)
    found = passes.compute_block(*block, results)
    for name, target in wanted.items():
        accumulated = made.get(name, found[1])  # an lse may be made by the call
        if accumulated is not target:
            target.copy_(accumulated)


def _scratch(call: FileCall, part: Block, results: Container[str], *, in_file: bool) -> Wanted:
    """What a part is computed into and is no result."""
    accumulated = in_file and call.out_dtype != call.work.state_dtype
    whole = {
        name: torch.empty(shape, device="meta")
        for name, (shape, _) in call.results(lse=lse_given(call, in_file=in_file)).items()
        if (name not in results if name == "lse" else accumulated)
    }
    cut = call.cut(written_as(call, whole), part)
    return {name: (tuple(t.shape), call.work.state_dtype) for name, t in cut.items()}
