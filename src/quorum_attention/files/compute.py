"""Calls whose tensors are in files, and their parts: blocks that need nothing of each other, here
computed one after the other into the results' files."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quorum_attention.call.backward_inputs import BackwardInputs, check_backward_inputs
from quorum_attention.call.block import BlockResults, CallBlock, WholeCall, request_of_block
from quorum_attention.call.options import Arguments, CallOptions
from quorum_attention.call.request import request_of
from quorum_attention.call.validation import as_mask
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.errors import BudgetError
from quorum_attention.execution.device.lookup import HOST, backend_of, on_host
from quorum_attention.execution.report import Report
from quorum_attention.files.formats import Wanted, create_tensors
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.mask import Mask
from quorum_attention.partition import split_at_multiples
from quorum_attention.passes.block_call import check_forward, compute_block
from quorum_attention.passes.decisions import decide_backward, decide_forward
from quorum_attention.planner.decide import Decision, usable_bytes
from quorum_attention.progress import progress_bar

GRADIENTS = ("dq", "dk", "dv")
OF_KEYS = ("key", "value", "dk", "dv")
# What a kill may cost, about: heads that take less are computed together.
SECONDS_OF_A_PART = 5.0
# Accumulators in host memory that are more than this share of it are put into a file instead.
_SHARE_OF_HOST = 0.25


@dataclass(frozen=True, slots=True)
class FileCall:
    """A forward, or a backward from files; made by ``file_call``.

    Attributes:
        tensors: what it reads, by role: (*batch, heads, n, d), lse (*batch, heads, n_queries).
        whole: the call that parts are blocks of.
        out_dtype: of all results but the lse.
        backward: whether it gives gradients.
        options: its options.
        without_heads: inputs were (tokens, head_dim), and so are results.
    """

    tensors: Mapping[str, torch.Tensor]
    whole: WholeCall
    out_dtype: torch.dtype
    backward: bool
    options: CallOptions
    without_heads: bool

    @property
    def shape(self) -> CallShape:
        """Its sizes."""
        return self.whole.shape

    @property
    def device(self) -> torch.device:
        """What computes it."""
        device = self.options.devices
        assert isinstance(device, torch.device)
        return device

    def results(self, *, lse: bool = False) -> Wanted:
        """Shapes and dtypes of the results, by name.

        Args:
            lse: whether the log-sum-exp of a forward is wanted.
        """
        shape = self.shape
        rows = (*shape.batch_shape, shape.heads, shape.n_queries)
        keys = (*shape.batch_shape, shape.kv_heads, shape.n_keys)
        if self.backward:
            sizes = (*rows, shape.head_dim), (*keys, shape.head_dim), (*keys, shape.value_dim)
            wanted = {n: (size, self.out_dtype) for n, size in zip(GRADIENTS, sizes, strict=True)}
        else:
            wanted = {"out": ((*rows, shape.value_dim), self.out_dtype)}
            if lse:
                wanted["lse"] = (rows, shape.state_dtype)
        if self.without_heads:
            wanted = {name: (size[1:], dtype) for name, (size, dtype) in wanted.items()}
        return wanted

    def with_heads(self, results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Results with a dimension of heads, views."""
        return {n: t.unsqueeze(0) if self.without_heads else t for n, t in results.items()}

    def parts(self, heads: int) -> list[CallBlock]:
        """Its parts: all rows and keys of some heads of one batch entry, or of some entries.

        Args:
            heads: key/value heads of each, from ``heads_of_part``.
        """
        shape = self.shape
        all_rows = Interval(0, shape.n_queries)
        all_keys = Interval(0, shape.n_keys)
        n_entries = max(1, heads // max(1, shape.kv_heads))
        return [
            CallBlock(entries, self.whole.query_heads(kv_heads), all_rows, all_keys)
            for entries in split_at_multiples(Interval(0, shape.batch), n_entries)
            for kv_heads in split_at_multiples(Interval(0, shape.kv_heads), heads)
        ]

    def heads_of_part(self, wanted: int) -> int:
        """How many key/value heads a part has that should have about ``wanted``: some of one batch
        entry, or all of some entries."""
        most = max(1, self.shape.kv_heads)
        if wanted < most or len(self.shape.batch_shape) != 1:
            return max(1, min(wanted, most))
        return min(wanted // most, max(1, self.shape.batch)) * most

    def cut(self, tensors: Mapping[str, torch.Tensor], block: CallBlock) -> dict[str, torch.Tensor]:
        """The part of inputs or results (*batch, heads, ...), views (entries, heads, ...)."""
        return {n: self.whole.cut(t, block, of_keys=n in OF_KEYS) for n, t in tensors.items()}


def file_call(
    options: CallOptions,
    tensors: Mapping[str, torch.Tensor],
    attn_mask: torch.Tensor | Mask | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> FileCall:
    """A call on ``tensors``, checked as a call of ``attention`` is.

    Args:
        options: its options.
        tensors: query, key and value; with grad_out, out and lse it is a backward.
        attn_mask and so on: as there.

    Raises:
        ValueError, TypeError, NotImplementedError: what does not fit, by name.
    """
    backward = "grad_out" in tensors
    query, key, value = three = tuple(tensors[name] for name in ("query", "key", "value"))
    mask = as_mask(attn_mask, query, key)
    function = "attention_backward" if backward else "attention"
    arguments = Arguments(
        mask, dropout_p, dropout_seed, is_causal, scale, enable_gqa, None, out_dtype, options
    )
    checked, request = request_of(function, query, key, value, arguments)
    if request.records:
        raise NotImplementedError(
            "query, key, value and attn_mask must require no gradient: gradients of files are "
            "computed by a backward of its own"
        )
    # Views with all dimensions; a bias is broadcast by ``WholeCall.cut_bias``.
    inputs = {"query": checked.query, "key": checked.key, "value": checked.value}
    if backward:
        heads = 1 if request.without_heads else 0
        if any(a.shape[heads:] != b.shape for a, b in zip(inputs.values(), three, strict=True)):
            raise NotImplementedError("a backward from files takes no inputs that are broadcast")
        rest = BackwardInputs(tensors["grad_out"], tensors["out"], tensors["lse"])
        rest = check_backward_inputs(checked, request, rest, three)
        inputs |= {"grad_out": rest.grad_out, "out": rest.out, "lse": rest.lse}
    if mask is not None and not isinstance(mask, Mask):
        mask = Mask(bias=checked.bias)
    # A mask may have made it causal: the rest of the mask is cut as it was given.
    whole = WholeCall(replace(request.shape, is_causal=is_causal), mask, scale, request.dropout)
    return FileCall(
        inputs, whole, out_dtype or query.dtype, backward, options, request.without_heads
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """What is chosen once for all parts of a call, so that a resumed run gives what one run gives.

    Attributes:
        heads: key/value heads of a part.
        parts: how many there are.
        budget_bytes: device memory of each.
        in_file: whether accumulators lie in a mapped file.
    """

    heads: int
    parts: int
    budget_bytes: int
    in_file: bool

    @classmethod
    def of(cls, call: FileCall, heads: int | None = None) -> Settings:
        """What is chosen for a call.

        Args:
            heads: key/value heads of a part; None: as many as take some seconds.

        Raises:
            BudgetError, NotImplementedError: a part cannot be run.
        """
        budget = call.options.budget
        if budget is None:
            budget = usable_bytes(call.device)
            call = replace(call, options=call.options._replace(budget=budget))
        assert isinstance(budget, int)
        if heads is None:
            decisions, _ = _decided(call, 1)
            plans = [one.plan for one in decisions if one.plan is not None]
            seconds = max((plan.predicted_seconds for plan in plans), default=0.0)
            every = call.shape.batch * max(1, call.shape.kv_heads)
            heads = min(every, max(1, int(SECONDS_OF_A_PART / max(seconds, 1e-9))))
        heads = call.heads_of_part(heads)
        _, in_file = _decided(call, heads)
        return cls(heads, len(call.parts(heads)), budget, in_file)


@dataclass(slots=True)
class Work:
    """What computes parts needs to know.

    Attributes:
        call, settings: of the call.
        results: all of its results, in their files, with a dimension of heads.
        folder: for files of scratch space.
        report: filled while it runs.
    """

    call: FileCall
    settings: Settings
    results: Mapping[str, torch.Tensor]
    folder: Path
    report: Report

    @property
    def parts(self) -> list[CallBlock]:
        """All parts of the call."""
        return self.call.parts(self.settings.heads)


Compute = Callable[[Work, Sequence[int]], Iterator[int]]
"""Computes parts, anywhere and in any order: writes their results into ``Work.results`` and yields
each part's number when they are written. ``compute_here`` is one."""


def _decided(call: FileCall, heads: int) -> tuple[list[Decision], bool]:
    """The decisions for parts that are unlike, the first part's first (none where there is nothing
    to compute), and whether accumulators are put into a file.

    Raises:
        BudgetError: a part cannot be run, also where others can.
    """
    parts = _unlike(call, call.parts(heads))
    if not parts or 0 in (call.shape.n_queries, call.shape.n_keys, call.shape.value_dim):
        return [], False
    try:
        decisions = [_decision(call, part, in_file=False) for part in parts]
    except BudgetError:
        # Without accumulators in memory less will do.
        return [_decision(call, part, in_file=True) for part in parts], True
    plans = [one.plan for one in decisions if one.plan is not None]
    if on_host(call.device) or all(plan.schedule.route.accumulator != "host" for plan in plans):
        return decisions, False
    numbers = sum(math.prod(shape) for shape, _ in call.results(lse=True).values())
    needed = numbers * call.shape.state_dtype.itemsize // len(call.parts(heads))
    if needed < _SHARE_OF_HOST * backend_of(HOST).free_bytes(HOST):
        return decisions, False
    return [_decision(call, part, in_file=True) for part in parts], True


def _unlike(call: FileCall, parts: Sequence[CallBlock]) -> list[CallBlock]:
    """The first part of each batch entry where a mask may tell entries apart, else the first."""
    found = [part for part in parts if not part.heads.start]
    mask = call.whole.mask
    return found if mask is not None and mask.is_structured else found[:1]


def _decision(call: FileCall, block: CallBlock, *, in_file: bool) -> Decision:
    """How a part would be run. Of results it matters only that they are given, and their dtype."""
    with torch.no_grad():
        dtype = call.shape.state_dtype if in_file else call.out_dtype
        target = torch.empty(0, dtype=dtype, device="cpu")
        tensors, request, backward_inputs = request_of_block(
            call.whole, block, call.cut(call.tensors, block), call.options,
            BlockResults(out_dtype=None if call.backward else call.out_dtype),
        )  # fmt: skip
        if backward_inputs is not None:
            backward_inputs = backward_inputs._replace(grads=(target, target, target))
            return decide_backward(tensors, request, backward_inputs)
        lse = target if lse_given(call, in_file=in_file) else None
        return decide_forward(tensors, replace(request, out=target, out_dtype=dtype, lse=lse))


def lse_given(call: FileCall, *, in_file: bool) -> bool:
    """Whether the log-sum-exp of a forward lies in a file from the start."""
    return in_file or on_host(call.device) or call.out_dtype == call.shape.state_dtype


def compute_here(work: Work, numbers: Sequence[int]) -> Iterator[int]:
    """Compute parts one after the other in this process."""
    call, parts = work.call, work.parts
    with progress_bar() as bar, torch.no_grad():
        for number in numbers:
            progress = _shifted(bar, number, len(parts))
            options = call.options._replace(report=work.report, progress=progress)
            _compute(work, parts[number], options)
            yield number


def _shifted(bar: Any, number: int, parts: int) -> Any:
    """Progress of a part as progress of all."""
    return lambda done, total, label: bar(number * total + done, parts * total, label)


def _compute(work: Work, block: CallBlock, options: CallOptions) -> None:
    call, in_file = work.call, work.settings.in_file
    wanted, dtype = call.cut(work.results, block), call.shape.state_dtype
    made: dict[str, Any] = dict(wanted)
    unlike = (n for n, t in wanted.items() if in_file and t.dtype != dtype)
    scratch = {name: (tuple(wanted[name].shape), dtype) for name in unlike}
    if lse_given(call, in_file=in_file) and not {"lse", "dq"} & wanted.keys():
        scratch["lse"] = tuple(wanted["out"].shape[:3]), dtype
    if scratch:
        # Without a name: the system writes it to the disk and reads it back, so it may be larger
        # than the host's memory.
        path = work.folder / f"{secrets.token_hex(4)}-accumulators"
        made |= create_tensors(path, scratch)
        path.unlink()
    if not lse_given(call, in_file=in_file):
        made.pop("lse", None)
    results = BlockResults(made.get("out"), made.get("lse"))
    block_call = call.whole, block, call.cut(call.tensors, block), options
    if call.backward:
        results = BlockResults(grads=(made["dq"], made["dk"], made["dv"]))
        check_forward(*block_call, work.settings.parts)
    found = compute_block(*block_call, results)
    for name, target in wanted.items():
        accumulated = made.get(name, found[1])  # an lse may be made by the call
        if accumulated is not target:
            target.copy_(accumulated)
