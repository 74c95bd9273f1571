"""``attention()``: scaled dot-product attention that returns whatever the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from quorum_attention.errors import BudgetError
from quorum_attention.execution.backward import Three, backward
from quorum_attention.execution.call import Call, rows_are_dense
from quorum_attention.execution.forward import forward
from quorum_attention.execution.masks import MaskView
from quorum_attention.execution.memory import (
    available_bytes,
    first_line,
    give_back_cached,
    is_out_of_memory,
    named_out_of_memory,
)
from quorum_attention.execution.report import PassReport, Report
from quorum_attention.execution.tools import Progress
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels.protocol import CallShape, InnerKernel
from quorum_attention.kernels.registry import why_not
from quorum_attention.kernels.select import rivals, select_kernel, unrounded_kernel
from quorum_attention.planner.calibration import machine_of
from quorum_attention.planner.footprint import Placement
from quorum_attention.planner.plan import Plan
from quorum_attention.planner.rivals import quickest
from quorum_attention.planner.search import Candidate, Request, choose, undivided
from quorum_attention.sizes import format_bytes, parse_bytes
from quorum_attention.validation import (
    as_tensor,
    check_apart,
    check_inputs,
    check_options,
    check_result,
)

Device = str | torch.device
_Result = TypeVar("_Result")
# Of what is free, this much is left alone when no budget is given.
_MARGIN = 0.1


@dataclass(frozen=True, slots=True)
class Options:
    """What of a call is not a tensor: checked, with every default settled."""

    scale: float
    attn_mask: torch.Tensor | None
    is_causal: bool
    enable_gqa: bool
    budget_bytes: int | None
    plan: Plan | None
    depth: int | None
    kernel: str | InnerKernel
    accumulator: Literal["device", "host"] | None
    device: torch.device
    progress: Any
    report: Report | None


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    budget: int | str | None = None,
    plan: Plan | None = None,
    depth: int | str = "auto",
    kernel: str | InnerKernel = "auto",
    accumulator: str = "auto",
    devices: Device | Sequence[Device] | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    progress: Any = None,
    report: Report | None = None,
) -> torch.Tensor:
    """Scaled dot-product attention inside a memory budget, exact, with gradients.

    The arguments up to ``enable_gqa`` are those of
    ``torch.nn.functional.scaled_dot_product_attention``. A call that fits the budget runs as one
    kernel call; one that does not is cut into head groups and, by cyclic quorum sets, into
    independent subsequence tasks whose statistics are merged exactly (paper, Section 3).

    Args:
        query: (..., heads, n_queries, head_dim); fp16, bf16, fp32 or fp64; on a CUDA device, in
            host memory, or memory-mapped. A NumPy array (np.memmap too) works as well.
        key: (..., kv_heads, n_keys, head_dim), dtype and device of the query.
        value: (..., kv_heads, n_keys, value_dim).
        attn_mask: boolean (True keeps) or additive, broadcastable to
            (..., heads, n_queries, n_keys), on any device. It is never expanded beyond one
            rectangle of the decomposition.
        dropout_p: only 0.0.
        is_causal: query i sees keys j <= i (top-left, as in torch); may be combined with a mask.
        scale: of the scores; None is head_dim ** -0.5.
        enable_gqa: allow fewer key/value heads than query heads; they are never expanded.
        budget: device bytes the call may take beyond what is allocated when it begins, as a
            number or "2GiB"; None: what is free now, less a tenth. On the CPU this is host
            memory. Holds for the forward and, separately, for the backward.
        plan: from ``quorum_attention.plan``; pins everything in the forward, the kernel and the
            levels in the backward.
        depth: levels of decomposition; 0 is the monolithic call. A number pins the depth: an
            out-of-memory failure is then reported, not recovered from.
        kernel: name of a registered inner kernel (``quorum_attention.kernels()``) or an
            InnerKernel; "auto" takes the fastest that can run the call, in this budget.
        accumulator: where unfinished rows wait between tasks: "device", "host" or "auto".
        devices: where to compute; None: the inputs' device, or for host inputs the current CUDA
            device if there is one. One device so far.
        out: preallocated result (..., heads, n_queries, value_dim) of any dtype and residency.
        out_dtype: of the result, None for the query's. Statistics are merged in fp32 whatever it
            is; torch.float32 returns them without a last rounding.
        progress: True for a progress bar on stderr, or a callable (done, total, label).
        report: a ``Report`` to fill with what happened.

    Returns:
        (..., heads, n_queries, value_dim), on the query's device. Rows whose keys are all masked
        are 0, as in torch.

    Raises:
        ValueError, TypeError: arguments that do not fit; before anything is allocated.
        NotImplementedError: what no kernel here supports; says what would.
        BudgetError: the budget is too small to work in; names the smallest that would do.
        OutOfMemoryError: memory ran out and nothing finer was left to try.
    """
    return attention_with_lse(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        budget=budget,
        plan=plan,
        depth=depth,
        kernel=kernel,
        accumulator=accumulator,
        devices=devices,
        out=out,
        out_dtype=out_dtype,
        progress=progress,
        report=report,
    )[0]


def attention_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    budget: int | str | None = None,
    plan: Plan | None = None,
    depth: int | str = "auto",
    kernel: str | InnerKernel = "auto",
    accumulator: str = "auto",
    devices: Device | Sequence[Device] | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    progress: Any = None,
    report: Report | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``attention`` that also returns the log-sum-exp of every row's scores.

    Returns:
        (out, lse): lse (..., heads, n_queries), natural log, fp32 (fp64 for fp64 inputs), -inf
        for rows without keys; on the query's device, or on the host where the accumulators
        lived there. No gradient flows through lse.
    """
    query, key, value = as_tensor(query, "query"), as_tensor(key, "key"), as_tensor(value, "value")
    mask = None if attn_mask is None else as_tensor(attn_mask, "attn_mask")
    if out is not None:
        out = as_tensor(out, "out")
    check_options(dropout_p, depth, accumulator, out_dtype)
    work = check_inputs(query, key, value, mask, is_causal=is_causal, enable_gqa=enable_gqa)
    if out is not None:
        check_result(out, (*query.shape[:-1], value.shape[-1]), "out", out_dtype)
        check_apart(out, "out", {"query": query, "key": key, "value": value})
    options = _options(
        query, scale, mask, is_causal, enable_gqa, budget, plan, depth, kernel, accumulator,
        devices, progress, report,
    )  # fmt: skip
    _check_plan(plan, work)
    dtype = out.dtype if out is not None else (out_dtype or query.dtype)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        from quorum_attention.autograd import differentiable

        return differentiable(query, key, value, options, out, dtype)
    return run_forward(query, key, value, work, options, out, dtype, needs_grad=False)


def attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    budget: int | str | None = None,
    plan: Plan | None = None,
    depth: int | str = "auto",
    kernel: str | InnerKernel = "auto",
    accumulator: str = "auto",
    devices: Device | Sequence[Device] | None = None,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    progress: Any = None,
    report: Report | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of ``attention``, without autograd, into preallocated tensors if wished.

    Args:
        grad_out: upstream gradient, shape of ``out``.
        query, key, value, attn_mask, is_causal, scale, enable_gqa: as in the forward.
        out, lse: as ``attention_with_lse`` returned them.
        grads: (grad_query, grad_key, grad_value) to fill, one dtype, any residency (so that
            gradients larger than memory can go to memory-mapped files).

    Other arguments, and errors, as in ``attention``.

    Returns:
        (grad_query, grad_key, grad_value), or ``grads``.
    """
    query, key, value = as_tensor(query, "query"), as_tensor(key, "key"), as_tensor(value, "value")
    grad_out, out = as_tensor(grad_out, "grad_out"), as_tensor(out, "out")
    lse = as_tensor(lse, "lse")
    mask = None if attn_mask is None else as_tensor(attn_mask, "attn_mask")
    check_options(0.0, depth, accumulator, None)
    work = check_inputs(query, key, value, mask, is_causal=is_causal, enable_gqa=enable_gqa)
    shape = (*query.shape[:-1], value.shape[-1])
    for name, tensor, wanted in (
        ("grad_out", grad_out, shape),
        ("out", out, shape),
        ("lse", lse, shape[:-1]),
    ):
        if tuple(tensor.shape) != wanted:
            raise ValueError(f"{name} must have shape {wanted}, got {tuple(tensor.shape)}")
    if grads is not None:
        if len(grads) != 3:
            raise ValueError(f"grads must be three tensors, got {len(grads)}")
        grads = tuple(as_tensor(g, "grads") for g in grads)  # type: ignore[assignment]
        assert grads is not None
        for index, like in enumerate((query, key, value)):
            check_result(grads[index], tuple(like.shape), f"grads[{index}]", grads[0].dtype)
            read = {"query": query, "key": key, "value": value, "out": out, "grad_out": grad_out}
            check_apart(grads[index], f"grads[{index}]", read)
    options = _options(
        query, scale, mask, is_causal, enable_gqa, budget, plan, depth, kernel, accumulator,
        devices, progress, report,
    )  # fmt: skip
    _check_plan(plan, work)
    return run_backward(grad_out, query, key, value, out, lse, work, options, grads)


def _options(
    query: torch.Tensor,
    scale: float | None,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
    budget: int | str | None,
    plan: Plan | None,
    depth: int | str,
    kernel: str | InnerKernel,
    accumulator: str,
    devices: Device | Sequence[Device] | None,
    progress: Any,
    report: Report | None,
) -> Options:
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"plan must come from quorum_attention.plan, got {type(plan).__name__}")
    if plan is not None and depth != "auto":
        raise ValueError("plan and depth cannot both be given: a plan pins its own depth")
    if report is not None and not isinstance(report, Report):
        raise TypeError(f"report must be a quorum_attention.Report, got {type(report).__name__}")
    home: Literal["device", "host"] | None = None
    if accumulator == "device":
        home = "device"
    elif accumulator == "host":
        home = "host"
    return Options(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        attn_mask=attn_mask,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        budget_bytes=None if budget is None else parse_bytes(budget),
        plan=plan,
        depth=None if depth == "auto" else int(depth),
        kernel=kernel if plan is None or kernel != "auto" else plan.kernel,
        accumulator=home,
        device=compute_device(query.device, devices),
        progress=progress,
        report=report,
    )


def compute_device(inputs: torch.device, devices: Device | Sequence[Device] | None) -> torch.device:
    """Where a call computes."""
    if devices is None:
        if inputs.type == "cpu" and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return inputs
    chosen = [devices] if isinstance(devices, (str, torch.device)) else list(devices)
    if len(chosen) != 1:
        raise NotImplementedError(
            f"devices must name one device, got {len(chosen)}; several are not supported yet"
        )
    device = torch.device(chosen[0])
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"devices must be 'cpu' or 'cuda', got {device.type!r}")
    if inputs.type != "cpu" and device != inputs:
        raise ValueError(f"devices must be the inputs' device {inputs}, got {device}")
    return device


def _check_plan(plan: Plan | None, work: Workload) -> None:
    if plan is None:
        return
    for name in (
        "n_queries", "n_keys", "heads", "kv_heads", "head_dim", "value_dim", "batch", "dtype",
        "is_causal",
    ):  # fmt: skip
        planned, came = getattr(plan.work, name), getattr(work, name)
        if planned != came:
            raise ValueError(f"plan was made for {name} = {planned}, the call has {came}")


def _budget(options: Options) -> int:
    if options.budget_bytes is not None:
        return options.budget_bytes
    free = int(available_bytes(options.device) * (1 - _MARGIN))
    # In steps of a few per cent, so that a plan is found again when a little more is free.
    step = 1 << max(0, free.bit_length() - 6)
    return free // step * step


def _check_budget(plan: Plan, budget: int | None) -> None:
    """A plan pins everything, but a budget given beside it still holds."""
    if budget is not None and plan.peak_bytes > budget:
        raise BudgetError(
            f"a budget of {format_bytes(budget)} ({budget} bytes) is too small for the plan given, "
            f"which takes {format_bytes(plan.peak_bytes)} ({plan.peak_bytes} bytes)",
            smallest_bytes=plan.peak_bytes,
        )


def make_plan(
    work: Workload,
    options: Options,
    kernel: InnerKernel,
    place: Placement,
    *,
    backward: bool,
) -> Plan:
    """The plan of one pass under the call's options."""
    if options.plan is not None and options.plan.backward == backward:
        _check_budget(options.plan, options.budget_bytes)
        return options.plan
    machine = machine_of(options.device, work.dtype, work.head_dim)
    found = choose(work, _request(options), kernel, place, machine, backward=backward)
    return Plan(work, found, place, kernel.name, options.budget_bytes, backward)


def _request(options: Options) -> Request:
    given = options.plan
    return Request(
        budget_bytes=_budget(options),
        levels=given.levels if given is not None else None,
        depth=options.depth,
        layout=given.decomposition.layout if given is not None else "aligned",
        tile=given.decomposition.tile if given is not None else 128,
        accumulator=options.accumulator,
        pinned=options.depth is not None or given is not None,
        # Without a budget a pinned depth is tried as it is: that is what pinning is for.
        enforce_budget=options.budget_bytes is not None
        or (options.depth is None and given is None),
    )


def _kernel(
    work: Workload,
    options: Options,
    shape: CallShape,
    place: Placement,
    result: torch.dtype,
    *,
    backward: bool,
) -> InnerKernel:
    """The kernel of a pass: the one asked for (a plan asks for its own), or else the planner's."""
    wanted = unrounded_kernel(options.kernel, shape, options.device, result)
    preferred = select_kernel(wanted, shape, options.device)
    if wanted != "auto" or _short_plan(work, options, preferred, place, backward=backward):
        return preferred
    others = rivals(preferred, shape, options.device)
    if not others:
        return preferred
    return quickest(
        work,
        _request(options),
        preferred,
        others,
        place,
        machine_of(options.device, work.dtype, work.head_dim),
        backward=backward,
        believed=lambda kernel: why_not(kernel, shape, options.device) is None,
    )


def _short_plan(
    work: Workload, options: Options, kernel: InnerKernel, place: Placement, *, backward: bool
) -> Candidate | None:
    """The monolithic call, where it is so short that it is tried without planning."""
    if options.budget_bytes is not None or options.plan is not None or options.depth is not None:
        return None
    machine = machine_of(options.device, work.dtype, work.head_dim)
    return undivided(work, kernel, place, machine, backward=backward)


def _attempts(
    work: Workload,
    options: Options,
    kernel: InnerKernel,
    place: Placement,
    *,
    backward: bool,
) -> Iterator[Plan]:
    """The plan to run, and before it one that is tried without planning.

    A short call is not worth asking how much memory is free: where it runs out, the next is.
    """
    found = _short_plan(work, options, kernel, place, backward=backward)
    if found is not None:
        yield Plan(work, found, place, kernel.name, None, backward)
    yield make_plan(work, options, kernel, place, backward=backward)


def _run(
    plans: Iterator[Plan],
    options: Options,
    attempt: Callable[[Plan, PassReport, Progress | None], _Result],
    note: Callable[[PassReport], None],
) -> _Result:
    """The result of the first of ``plans`` that does not run out of memory."""
    recoveries: list[str] = []
    plan = next(plans)
    while True:
        report = _pass_report(plan, options)
        report.recoveries.extend(recoveries)
        note(report)
        failure = None
        following: Plan | None = None
        with (
            _device(options.device),
            _PeakMemory(options.device, report, options.report is not None),
            _progress(options) as progress,
            torch.no_grad(),
            named_out_of_memory(pinned=plan.schedule.pinned),
        ):
            try:
                return attempt(plan, report, progress)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                # Only where this plan was a try without planning is there another.
                following = next(plans, None)
                if following is None:
                    raise
                failure = first_line(error)
        give_back_cached(options.device)
        recoveries.append(f"monolithic call out of memory ({failure}): planned anew")
        plan = following


def _pass_report(plan: Plan, options: Options) -> PassReport:
    return PassReport(
        kernel=plan.kernel,
        levels=plan.levels,
        planned_levels=plan.levels,
        n_groups=plan.n_groups,
        heads_per_group=plan.schedule.group.kv_heads * plan.work.queries_per_key_head,
        n_cap=plan.schedule.n_cap,
        accumulator=plan.schedule.accumulator,
        streams=plan.schedule.streams,
        planned_peak_bytes=plan.peak_bytes,
        budget_bytes=plan.budget_bytes,
        timed=options.report is not None,
    )


class _PeakMemory:
    """Measures what the device's allocator hands out at most, for a report."""

    def __init__(self, device: torch.device, report: PassReport, wanted: bool) -> None:
        self.device, self.report = device, report
        self.wanted = wanted and device.type == "cuda"

    def __enter__(self) -> None:
        if self.wanted:
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)

    def __exit__(self, *exc: object) -> None:
        if self.wanted:
            peak = torch.cuda.max_memory_allocated(self.device)
            self.report.peak_bytes = peak - self.before


def _progress(options: Options) -> AbstractContextManager[Progress | None]:
    if options.progress is None or options.progress is False:
        return nullcontext(None)
    if options.progress is True:
        from quorum_attention.progress import progress_bar  # rich, only where it is shown

        return progress_bar()
    if not callable(options.progress):
        raise TypeError(
            f"progress must be None, True or a callable (done, total, label), "
            f"got {type(options.progress).__name__}"
        )
    return nullcontext(options.progress)


def _is_trivial(work: Workload) -> bool:
    return 0 in (work.batch, work.heads, work.n_queries, work.n_keys, work.value_dim)


def run_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    work: Workload,
    options: Options,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    needs_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plan the forward and run it, on checked arguments."""
    if _is_trivial(work):
        rows = tuple(query.shape[:-1])
        if out is None:
            out = torch.empty((*rows, work.value_dim), dtype=out_dtype, device=query.device)
        lse = torch.full(rows, float("-inf"), dtype=work.state_dtype, device=query.device)
        return out.zero_(), lse
    shape = work.call_shape(options.device.type, needs_grad)
    place = Placement(
        options.device.type,
        query.device == options.device,
        out is not None,
        out_dtype,
        rows_are_dense(query, key, value),
    )
    kernel = _kernel(work, options, shape, place, out_dtype, backward=False)
    call = _call(query, key, value, work, options, kernel)

    def attempt(
        plan: Plan, report: PassReport, progress: Progress | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return forward(
            call, plan.schedule, out=out, out_dtype=out_dtype, report=report, progress=progress
        )

    def note(report: PassReport) -> None:
        if options.report is not None:
            options.report.forward = report

    plans = _attempts(work, options, kernel, place, backward=False)
    return _run(plans, options, attempt, note)


def run_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    work: Workload,
    options: Options,
    grads: Three | None = None,
) -> Three:
    """Plan the backward and run it, on checked arguments."""
    if _is_trivial(work):
        if grads is None:
            return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        return grads[0].zero_(), grads[1].zero_(), grads[2].zero_()
    shape = work.call_shape(options.device.type, needs_grad=True)
    dtype = work.dtype if grads is None else grads[0].dtype
    place = Placement(
        options.device.type,
        query.device == options.device,
        grads is not None,
        dtype,
        rows_are_dense(query, key, value),
        tuple(_copied_bytes(tensor, work.dtype, options.device) for tensor in (grad_out, out)),
    )
    # Rows whose output was not rounded: the same kernel as in the forward.
    kernel = _kernel(work, options, shape, place, out.dtype, backward=True)
    call = _call(query, key, value, work, options, kernel)

    def attempt(plan: Plan, report: PassReport, progress: Progress | None) -> Three:
        return backward(
            call,
            plan.schedule,
            _dense_rows(grad_out.to(work.dtype)),
            _dense_rows(out.to(work.dtype)),
            lse,
            grads=grads,
            report=report,
            progress=progress,
        )

    def note(report: PassReport) -> None:
        if options.report is not None:
            options.report.backward = report

    plans = _attempts(work, options, kernel, place, backward=True)
    return _run(plans, options, attempt, note)


def _has_dense_rows(tensor: torch.Tensor) -> bool:
    return tensor.stride(-1) == 1 and 0 not in tensor.stride()


def _dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """An expanded gradient (of a sum, say) has stride 0, which kernels do not take."""
    return tensor if _has_dense_rows(tensor) else tensor.contiguous()


def _copied_bytes(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> int:
    """Device bytes of ``_dense_rows(tensor.to(dtype))``, 0 where that is the tensor itself."""
    stays = tensor.dtype == dtype and _has_dense_rows(tensor)
    return 0 if stays or tensor.device != device else tensor.numel() * dtype.itemsize


def _device(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    work: Workload,
    options: Options,
    kernel: InnerKernel,
) -> Call:
    mask = None
    if options.attn_mask is not None:
        mask = MaskView(options.attn_mask, len(work.batch_shape))
    return Call(
        work,
        query.detach(),
        key.detach(),
        value.detach(),
        mask,
        options.scale,
        options.device,
        kernel,
    )


__all__ = ["attention", "attention_backward", "attention_with_lse"]
