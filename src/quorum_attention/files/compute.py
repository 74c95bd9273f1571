"""Computes parts of a call from files, one after the other, into the results' files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quorum_attention.blocks import compute_block
from quorum_attention.call.block import BlockResults, request_of_block
from quorum_attention.call.options import Written
from quorum_attention.errors import BudgetError
from quorum_attention.execution.device.lookup import HOST, backend_of, on_host
from quorum_attention.execution.report import Report
from quorum_attention.files.call import GRADIENTS, FileCall, Part, written_as
from quorum_attention.files.scratch import bytes_of, scratch
from quorum_attention.mask import Mask
from quorum_attention.passes import check_forward, decide_backward, decide_forward, is_trivial
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


Compute = Callable[[Work, Sequence[Part]], Iterator[Part]]
"""Computes parts, anywhere and in any order: writes their results into ``Work.results`` and yields
each part when they are written. ``compute_here`` is one."""


def settle(call: FileCall, heads: int | None = None) -> Settings:
    """What is chosen for a call.

    Args:
        heads: key/value heads of a part; None: as many as take some seconds.

    Raises:
        BudgetError, NotImplementedError: a part cannot be run.
    """
    budget = call.written.budget
    if budget is None:
        free = backend_of(call.device).free_bytes(call.device)
        budget = int(free * (1 - policy.MARGIN))
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


def plan_words(call: FileCall, settings: Settings) -> str:
    """How a part would be run now, as ``Settings.plan`` has it."""
    made = replace(call, written=call.written._replace(budget=settings.budget_bytes))
    return _words(_decided(made, settings.heads)[0])


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
    needed = bytes_of(_accumulators(call, parts[0], in_file=True), call.work.state_dtype)
    if needed < _SHARE_OF_HOST * backend_of(HOST).free_bytes(HOST):
        return decisions, False
    return [_decision(call, part, in_file=True) for part in parts], True


def _unlike(call: FileCall, parts: Sequence[Part]) -> list[Part]:
    """The first part of each batch entry where a mask tells entries apart, else the first."""
    found = [part for part in parts if not part.key_heads.start]
    return found if _tells_entries_apart(call.mask) else found[:1]


def _tells_entries_apart(mask: torch.Tensor | Mask | None) -> bool:
    if not isinstance(mask, Mask):
        return False
    by_entry = (mask.key_lengths, mask.key_padding, mask.documents)
    inner = (*mask.either, *mask.every)
    return any(one is not None for one in by_entry) or any(map(_tells_entries_apart, inner))


def _decision(call: FileCall, part: Part, *, in_file: bool) -> Decision:
    """How a part would be run. Of results it matters only that they are given, and their dtype."""
    with torch.no_grad():
        dtype = call.work.state_dtype if in_file else call.out_dtype
        target = torch.empty(0, dtype=dtype, device="cpu")
        tensors, request, given = request_of_block(
            call.whole, call.block(part), call.cut(call.tensors, part), call.written,
            BlockResults(out_dtype=None if call.backward else call.out_dtype),
        )  # fmt: skip
        if given is not None:
            given = given._replace(grads=(target, target, target))
            return decide_backward(tensors, request, given)[1]
        lse = target if lse_given(call, in_file=in_file) else None
        return decide_forward(tensors, replace(request, out=target, out_dtype=dtype, lse=lse))[1]


def lse_given(call: FileCall, *, in_file: bool) -> bool:
    """Whether the log-sum-exp of a forward lies in a file from the start."""
    return in_file or on_host(call.device) or call.out_dtype == call.work.state_dtype


def compute_here(work: Work, parts: Sequence[Part]) -> Iterator[Part]:
    """Compute parts one after the other in this process.

    Yields:
        each part whose results are written.
    """
    call, settings, dtype = work.call, work.settings, work.call.work.state_dtype
    results = written_as(call, work.results)
    space = [bytes_of(_scratch_of(work, part), dtype) for part in parts]
    shown: AbstractContextManager[Any] = progress_bar() if work.progress else nullcontext()
    with shown as bar, scratch(work.folder, max(space, default=0)) as file, torch.no_grad():
        for part in parts:
            written = call.written._replace(
                budget=settings.budget_bytes,
                report=work.report,
                progress=None if bar is None else _Shifted(bar, part.number, settings.parts),
            )
            temporary = file.tensors(_scratch_of(work, part), dtype)
            _compute(work, part, written, call.cut(results, part), temporary)
            yield part


def _accumulators(call: FileCall, part: Part, *, in_file: bool) -> list[tuple[int, ...]]:
    """Shapes, in the state's dtype, of accumulators that lie in a file and are not results."""
    work = call.work
    if not in_file or call.out_dtype == work.state_dtype:
        return []
    queries = _rows(call, part)
    if not call.backward:
        return [(*queries, work.value_dim)]
    keys = part.entries.length, part.key_heads.length, work.n_keys
    return [(*queries, work.head_dim), (*keys, work.head_dim), (*keys, work.value_dim)]


def _rows(call: FileCall, part: Part) -> tuple[int, int, int]:
    return part.entries.length, part.query_heads.length, call.work.n_queries


def _scratch_of(work: Work, part: Part) -> list[tuple[int, ...]]:
    """Accumulators of a part, and a log-sum-exp that is no result."""
    call, in_file = work.call, work.settings.in_file
    shapes = _accumulators(call, part, in_file=in_file)
    if not call.backward and "lse" not in work.results and lse_given(call, in_file=in_file):
        shapes.append(_rows(call, part))
    return shapes


def _compute(
    work: Work,
    part: Part,
    written: Written,
    targets: Mapping[str, torch.Tensor],
    temporary: Sequence[torch.Tensor],
) -> None:
    call, in_file = work.call, work.settings.in_file
    wanted = [targets[name] for name in (GRADIENTS if call.backward else ("out",))]
    made = list(temporary[: len(_accumulators(call, part, in_file=in_file))]) or wanted
    given = not call.backward and lse_given(call, in_file=in_file)
    if call.backward:
        results = BlockResults(grads=(made[0], made[1], made[2]))
    else:
        lse = targets.get("lse", temporary[-1] if temporary else None)
        results = BlockResults(made[0], lse if given else None)
    block = call.whole, call.block(part), call.cut(call.tensors, part), written, results
    if call.backward:
        tensors, request, read = request_of_block(*block)
        if read is not None and not is_trivial(tensors):
            check_forward(tensors, request, read)
    found = compute_block(*block)
    for target, accumulated in zip(wanted, made, strict=True):
        if accumulated is not target:
            target.copy_(accumulated)
    if not call.backward and not given and "lse" in targets:
        targets["lse"].copy_(found[1])


class _Shifted:
    """Progress of a part as progress of all."""

    def __init__(self, bar: Any, number: int, parts: int) -> None:
        self._bar, self._number, self._parts = bar, number, parts

    def __call__(self, done: int, total: int, label: str) -> None:
        self._bar(self._number * total + done, self._parts * total, label)


__all__ = ["Compute", "Settings", "Work", "compute_here", "plan_words", "settle"]
