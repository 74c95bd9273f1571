"""Computes parts of a call from files, one after the other, into the results' files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quorum_attention.blocks import compute_block
from quorum_attention.call.block import BlockResults, request_of_block
from quorum_attention.call.options import Written
from quorum_attention.errors import BudgetError
from quorum_attention.execution.device.lookup import HOST, backend_of, on_host
from quorum_attention.execution.report import Report
from quorum_attention.mask import Mask
from quorum_attention.on_disk.call import GRADIENTS, FileCall, written_as
from quorum_attention.on_disk.parts import Part
from quorum_attention.on_disk.scratch import bytes_of, scratch
from quorum_attention.passes import check_forward, decide_backward, decide_forward, is_trivial
from quorum_attention.planner import policy
from quorum_attention.planner.decide import Decision
from quorum_attention.planner.first_calls import alike
from quorum_attention.progress import progress_bar

# What a kill may cost, about: heads that take less are computed together.
SECONDS_OF_A_PART = 5.0
# Accumulators in host memory that are more than this share of it are put into a file instead.
_SHARE_OF_HOST = 0.25


@dataclass(frozen=True, slots=True)
class Settings:
    """What is chosen once for all parts of a call, so that an output that is resumed is the one
    that it would have been.

    Attributes:
        heads: key/value heads of a part.
        parts: how many there are.
        budget_bytes: device memory of each.
        in_file: whether accumulators lie in a mapped file.
        plan: how the first part would be run, in words.
    """

    heads: int
    parts: int
    budget_bytes: int | None
    in_file: bool
    plan: str

    def to_dict(self) -> dict[str, Any]:
        """For the journal."""
        return asdict(self)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Settings:
        """From the journal.

        Raises:
            ValueError: it has other settings than these.
        """
        try:
            made = cls(**{name: found[name] for name in cls.__dataclass_fields__})
        except KeyError as error:
            raise ValueError(f"the journal has no {error.args[0]}") from None
        if type(made.heads) is not int or made.heads < 1 or not isinstance(made.in_file, bool):
            raise ValueError("the journal has settings that make no sense")
        return made


def settle(call: FileCall, heads: int | None = None) -> Settings:
    """What is chosen for a call.

    Args:
        heads: key/value heads of a part; None: as many as take some seconds.

    Raises:
        BudgetError, NotImplementedError: a part cannot be run.
    """
    if call.written.budget is None:
        device = _device(call)
        free = backend_of(device).free_bytes(device) * (1 - policy.MARGIN)
        call = replace(call, written=call.written._replace(budget=int(free)))
    if heads is None:
        found = _decided(call, 1)
        plans = [] if found is None else [one.plan for one in found[0]]
        seconds = max((plan.predicted_seconds for plan in plans if plan is not None), default=0.0)
        every = call.work.batch * max(1, call.work.kv_heads)
        heads = min(every, max(1, int(SECONDS_OF_A_PART / max(seconds, 1e-9))))
    heads = call.heads_of_part(heads)
    decided = _decided(call, heads)
    words, in_file = ("nothing to compute", False) if decided is None else _told(decided)
    budget = call.written.budget
    assert budget is None or isinstance(budget, int)
    return Settings(heads, len(call.parts(heads)), budget, in_file, words)


def plan_words(call: FileCall, settings: Settings) -> str:
    """How a part would be run, as ``Settings.plan`` has it."""
    made = replace(call, written=call.written._replace(budget=settings.budget_bytes))
    decided = _decided(made, settings.heads)
    return settings.plan if decided is None else _told(decided)[0]


def _told(decided: tuple[list[Decision], bool]) -> tuple[str, bool]:
    (decision, *_), in_file = decided
    if decision.plan is None:
        return f"{decision.kernel.name}, whole", in_file
    schedule, levels = decision.plan.schedule, decision.plan.levels
    cut = " x ".join(map(str, levels)) or "uncut"
    words = (
        f"{decision.kernel.name}, {cut}, groups of {schedule.group.batch} x "
        f"{schedule.group.kv_heads} key/value heads, {schedule.route.words}, rectangles of "
        f"{schedule.max_queries} x {schedule.max_keys}"
    )
    return words, in_file


def _decided(call: FileCall, heads: int) -> tuple[list[Decision], bool] | None:
    """The decisions for parts that are unlike, the first part's first, and whether accumulators are
    put into a file; None where there is nothing to compute.

    Raises:
        BudgetError: a part cannot be run, also where others can.
    """
    parts = _unlike(call, call.parts(heads))
    if not parts or 0 in (call.work.n_queries, call.work.n_keys, call.work.value_dim):
        return None
    try:
        decisions = [_decision(call, part, in_file=False) for part in parts]
    except BudgetError:
        # Without accumulators in memory less will do.
        return [_decision(call, part, in_file=True) for part in parts], True
    plans = [one.plan for one in decisions if one.plan is not None]
    if on_host(_device(call)) or all(plan.schedule.accumulator != "host" for plan in plans):
        return decisions, False
    needed = bytes_of(*_scratch_of(call, parts[0], in_file=True))
    if needed < _SHARE_OF_HOST * backend_of(HOST).free_bytes(HOST):
        return decisions, False
    return [_decision(call, part, in_file=True) for part in parts], True


def _unlike(call: FileCall, parts: Sequence[Part]) -> list[Part]:
    """The first part, and the first of each of whose batch entries a mask keeps something else."""
    found: dict[int, Part] = {}
    for part in parts:
        if part.key_heads.start:
            continue  # other heads of the same entries
        of_part, _ = call.whole.mask_of(call.block(part))
        mine, every = _by_entry(of_part), _by_entry(call.mask)
        if all(one is other for one, other in zip(mine, every, strict=True)):
            return [part]
        kept = tuple(None if one is None else one.cpu().numpy().tobytes() for one in mine)
        found.setdefault(hash(kept), part)
    return list(found.values())


def _by_entry(mask: torch.Tensor | Mask | None) -> tuple[torch.Tensor | None, ...]:
    """What a mask may say of each batch entry and how it is computed depends on."""
    if not isinstance(mask, Mask):
        return ()
    both = mask.documents if isinstance(mask.documents, tuple) else (mask.documents,)
    return mask.key_lengths, mask.key_padding, *both


@alike()
def _decision(call: FileCall, part: Part, *, in_file: bool) -> Decision:
    """How a part would be run. Of results it matters only that they are given, and their dtype."""
    with torch.no_grad():
        dtype = call.work.state_dtype if in_file else call.out_dtype
        target = torch.empty(0, dtype=dtype, device="cpu")
        tensors, request, given = request_of_block(
            call.whole, call.block(part), call.inputs(part), call.written,
            BlockResults(out_dtype=None if call.backward else call.out_dtype),
        )  # fmt: skip
        if given is not None:
            given = given._replace(grads=(target, target, target))
            return decide_backward(tensors, request, given)[1]
        lse = target if lse_given(call, in_file=in_file) else None
        return decide_forward(tensors, replace(request, out=target, out_dtype=dtype, lse=lse))[1]


def lse_given(call: FileCall, *, in_file: bool) -> bool:
    """Whether the log-sum-exp of a forward lies in a file from the start."""
    return in_file or on_host(_device(call)) or call.out_dtype == call.work.state_dtype


def _device(call: FileCall) -> torch.device:
    device = call.written.devices
    assert isinstance(device, torch.device)
    return device


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


def compute_here(work: Work, parts: Sequence[Part]) -> Iterator[Part]:
    """Compute parts one after the other in this process.

    Yields:
        each part whose results are written.
    """
    call, settings = work.call, work.settings
    results = written_as(call, work.results)
    if not parts:
        return
    biggest = max(parts, key=lambda part: part.heads)
    shapes, dtype = _scratch_of(call, biggest, in_file=settings.in_file)
    if "lse" not in results and not call.backward and lse_given(call, in_file=settings.in_file):
        shapes = [*shapes, _lse_shape(call, biggest)]
    shown: AbstractContextManager[Any] = progress_bar() if work.progress else nullcontext()
    with shown as bar, scratch(work.folder, bytes_of(shapes, dtype)) as space, torch.no_grad():
        for part in parts:
            written = call.written._replace(
                budget=settings.budget_bytes,
                report=work.report,
                progress=None if bar is None else _Shifted(bar, part.number, settings.parts),
            )
            targets = {name: call.sliced(t, part, name) for name, t in results.items()}
            mine, _ = _scratch_of(call, part, in_file=settings.in_file)
            if call.backward:
                _backward(call, part, written, targets, space.tensors(mine, dtype))
            else:
                if len(shapes) > len(mine) and "lse" not in targets:
                    mine = [*mine, _lse_shape(call, part)]
                _forward(call, part, written, targets, space.tensors(mine, dtype), settings)
            yield part


def _scratch_of(
    call: FileCall, part: Part, *, in_file: bool
) -> tuple[list[tuple[int, ...]], torch.dtype]:
    """Shapes and dtype of the accumulators of a part that lie in a file, and are not results."""
    work, dtype = call.work, call.work.state_dtype
    if not in_file or call.out_dtype == dtype:
        return [], dtype
    entries, queries, keys = (
        part.entries.length, part.query_heads.length, part.key_heads.length,
    )  # fmt: skip
    if not call.backward:
        return [(entries, queries, work.n_queries, work.value_dim)], dtype
    return [
        (entries, queries, work.n_queries, work.head_dim),
        (entries, keys, work.n_keys, work.head_dim),
        (entries, keys, work.n_keys, work.value_dim),
    ], dtype


def _lse_shape(call: FileCall, part: Part) -> tuple[int, ...]:
    return part.entries.length, part.query_heads.length, call.work.n_queries


@alike()
def _forward(
    call: FileCall,
    part: Part,
    written: Written,
    targets: Mapping[str, torch.Tensor],
    space: tuple[torch.Tensor, ...],
    settings: Settings,
) -> None:
    accumulated = settings.in_file and call.out_dtype != call.work.state_dtype
    out = space[0] if accumulated else targets["out"]
    given = lse_given(call, in_file=settings.in_file)
    lse = targets.get("lse", space[-1] if space else None)
    into = BlockResults(out, lse if given else None)
    _, made = compute_block(call.whole, call.block(part), call.inputs(part), written, into)
    if accumulated:
        targets["out"].copy_(out)
    if not given and "lse" in targets:
        targets["lse"].copy_(made)


@alike()
def _backward(
    call: FileCall,
    part: Part,
    written: Written,
    targets: Mapping[str, torch.Tensor],
    space: tuple[torch.Tensor, ...],
) -> None:
    wanted = tuple(targets[name] for name in GRADIENTS)
    grads = space or wanted
    into = BlockResults(grads=(grads[0], grads[1], grads[2]))
    made = call.whole, call.block(part), call.inputs(part), written, into
    tensors, request, given = request_of_block(*made)
    if given is not None and not is_trivial(tensors):
        check_forward(tensors, request, given)
    compute_block(*made)
    if space:
        for target, grad in zip(wanted, grads, strict=True):
            target.copy_(grad)


class _Shifted:
    """Progress of a part as progress of all."""

    def __init__(self, bar: Any, number: int, parts: int) -> None:
        self._bar, self._number, self._parts = bar, number, parts

    def __call__(self, done: int, total: int, label: str) -> None:
        self._bar(self._number * total + done, self._parts * total, label)


__all__ = ["Settings", "Work", "compute_here", "plan_words", "settle"]
