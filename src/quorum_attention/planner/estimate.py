"""``plan()`` and ``estimate()``: how a call would run, without its tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from quorum_attention.argument_checks import one_of, shown, switch, whole_number
from quorum_attention.errors import BudgetError
from quorum_attention.execution.bias import bias_shape
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.execution.pass_spec import spec_of
from quorum_attention.execution.problem import Placement, Problem
from quorum_attention.execution.report import InWords
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.masked.choose import kernel_for_mask
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.select import rivals, select_kernel
from quorum_attention.keywords import check_names, helps_with_names, names_of
from quorum_attention.mask import Mask
from quorum_attention.plain_types import Keywords
from quorum_attention.planner import policy
from quorum_attention.planner.calibration import hardware_of
from quorum_attention.planner.constraints import PlanConstraints
from quorum_attention.planner.decide import both_passes, usable_bytes
from quorum_attention.planner.kernel_choice import choose_plan
from quorum_attention.planner.mask_words import mask_words
from quorum_attention.planner.plan import Plan, is_cut
from quorum_attention.planner.plan_arguments import (
    checked_device,
    checked_group,
    checked_levels,
    checked_shape,
    optional_number,
)
from quorum_attention.planner.price import forward_flops
from quorum_attention.units import format_bytes, format_seconds, parse_bytes


@helps_with_names
def plan(
    n_tokens: int,
    *,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 64,
    value_dim: int | None = None,
    batch: int = 1,
    n_keys: int | None = None,
    dtype: torch.dtype = torch.float16,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    budget: float | str | None = None,
    levels: tuple[int, ...] | None = None,
    depth: int | None = None,
    layout: Literal["aligned", "balanced"] = "aligned",
    tile: int = 128,
    device: str | torch.device | None = None,
    inputs: Literal["device", "host"] | None = None,
    results_given: bool = False,
    accumulator: Literal["device", "host"] | None = None,
    heads_per_group: int | None = None,
    n_cap: int | None = None,
    streams: int | None = None,
    over_inputs: bool | None = None,
    kernel: str | InnerKernel = "auto",
    backward: bool = False,
    attn_mask: torch.Tensor | Mask | None = None,
) -> Plan:
    """Plan an attention call of ``n_tokens`` queries.

    Args:
        n_tokens: queries (and keys, unless ``n_keys`` is given).
        n_keys: keys; None is ``n_tokens``.
        heads: query heads.
        kv_heads: key/value heads; None is ``heads``.
        head_dim: width of queries and keys.
        value_dim: width of values; None is ``head_dim``.
        batch: batch entries.
        dtype: of the inputs.
        is_causal: as in ``quorum_attention.attention``.
        dropout_p: dropout of the call. Above 0 only kernels with dropout are
            considered.
        budget: device bytes, as a number or "2GiB"; None is the free memory.
        levels: the number of chunks at each level, e.g. (7, 7) or (57,); () is uncut;
            None leaves it to the planner.
        depth: number of levels; the planner chooses their chunk counts.
        layout: "aligned" puts chunk boundaries on multiples of ``tile``; "balanced" is
            the paper's.
        device: what computes; None is CUDA if there is a GPU, else the CPU.
        inputs: where the call's tensors are, "host" or "device"; None is "host" if a
            GPU computes, "device" on a CPU.
        results_given: whether the call will get ``out=`` or ``grads=``, which the
            budget does not count.
        accumulator: where unfinished rows are kept between tasks.
        heads_per_group: query heads of a head group.
        n_cap: the largest number of tasks on the device at once.
        streams: kernel calls in flight at once, 1 or 2.
        over_inputs: True runs the tasks of a head group directly on the inputs (the
            route ``Blockwise``, at depth 1), which must be on the device. False copies
            tasks into slots. None leaves this to the planner, as for the other choices.
        kernel: an inner kernel, or its name.
        backward: plan the backward pass instead of the forward.
        attn_mask: the call's mask, a tensor or a ``Mask`` whose tensors fit the sizes.

    Raises:
        BudgetError: the budget is too small; names the smallest that works.
        ValueError, TypeError: arguments that do not fit.

    Examples:
        >>> made = qa.plan(
        ...     1_048_576, is_causal=True, budget="2GiB", levels=(31,), device="cuda"
        ... )
        >>> made.n_tasks, made.peak_bytes < 2 << 30
        (31, True)
        >>> small = qa.plan(2048, dtype=torch.float32, levels=(7,), device="cpu")
        >>> q = torch.randn(1, 8, 2048, 64)
        >>> out = qa.attention(q, q, q, plan=small)  # the plan's sizes are the call's
    """
    where = checked_device(device)
    plain_shape = checked_shape(
        where,
        dtype,
        n_tokens=n_tokens,
        n_keys=n_keys,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        batch=batch,
        is_causal=is_causal,
        dropout_p=dropout_p,
    )
    backward = switch(backward, "backward")
    mask = Mask(bias=attn_mask) if isinstance(attn_mask, torch.Tensor) else attn_mask
    shape, kernel = _under_mask(mask, plain_shape, kernel, where, backward)
    levels, depth = checked_levels(levels, depth)
    pinned = levels is not None or depth is not None
    budget_bytes = None if budget is None else parse_bytes(budget)
    constraints = PlanConstraints(
        budget_bytes=usable_bytes(where) if budget_bytes is None else budget_bytes,
        levels=levels,
        depth=depth,
        layout=one_of(layout, "layout", ("aligned", "balanced")),
        tile=whole_number(tile, "tile", 1),
        accumulator=one_of(accumulator, "accumulator", (None, "device", "host")),
        group=checked_group(shape, heads_per_group),
        n_cap=optional_number(n_cap, "n_cap", 1),
        pinned=pinned,
        streams=optional_number(streams, "streams", 1, 2),
        over_inputs=None if over_inputs is None else switch(over_inputs, "over_inputs"),
        enforce_budget=budget_bytes is not None or not pinned,
    )
    place = Placement(
        _are_inputs_resident(inputs, where),
        results_given,
        dtype,
        # Autograd may hand over an expanded gradient (of a sum): the backward counts a
        # copy of it.
        n_unreadable=1 if backward else 0,
    )
    asked_shape = replace(shape, needs_grad=backward)
    preferred = select_kernel(
        kernel,
        asked_shape,
        where,
        tried=False,
        flops=forward_flops(shape),
        backward=backward,
    )
    other_kernels = rivals(preferred, asked_shape, where) if kernel == "auto" else ()
    chosen_kernel, chosen_plan = choose_plan(
        Problem(shape, preferred, spec_of(backward), place),
        constraints,
        other_kernels,
        hardware_of(where, shape.dtype, shape.head_dim),
        kernel_works=lambda _: True,  # kernels are not tried out
    )
    pairs = None
    if chosen_kernel.sparse:
        # A kernel that gets the mask as a bias runs a call that is not causal by
        # itself.
        is_causal = shape.is_causal or plain_shape.is_causal
        pairs = chosen_kernel.kept_pairs(shape.n_queries, shape.n_keys, is_causal)
    words = mask_words(mask, plain_shape.is_causal)
    return replace(
        chosen_plan, budget_bytes=budget_bytes, pairs=pairs, mask_words=words
    )


def _are_inputs_resident(
    inputs: Literal["device", "host"] | None, device: torch.device
) -> bool:
    """Whether the call's tensors are where ``device`` computes.

    Raises:
        ValueError: ``inputs`` says that the CPU's are elsewhere, or something unknown.
    """
    one_of(inputs, "inputs", (None, "device", "host"))
    if on_host(device) and inputs == "host":
        raise ValueError("inputs must be 'device' when the CPU computes")
    return on_host(device) if inputs is None else inputs == "device"


def _under_mask(
    mask: Mask | None,
    shape: CallShape,
    kernel: str | InnerKernel,
    device: torch.device,
    backward: bool,
) -> tuple[CallShape, str | InnerKernel]:
    """Return a call and its kernel under ``mask``.

    Raises:
        TypeError: ``mask`` is no ``Mask``.
    """
    if mask is not None:
        if not isinstance(mask, Mask):
            raise TypeError(
                "attn_mask must be a tensor or a quorum_attention.Mask, got "
                f"{shown(mask)}"
            )
        bias = None
        if mask.bias is not None:
            bias = bias_shape(mask.bias, len(shape.batch_shape), shape.dtype)
        shape = replace(shape, bias=bias, sinks=mask.sinks is not None)
    return kernel_for_mask(
        mask, kernel, shape, device, needs_grad=backward, tried=False
    )


@dataclass(frozen=True, slots=True)
class Estimate(InWords):
    """A dry run: the memory, time and plans of a call.

    Attributes:
        budget_bytes: the budget given; None is what is free.
        fits_monolithic: whether the uncut forward fits the budget.
        monolithic_bytes: device bytes of the uncut forward.
        forward: the plan of the forward.
        backward: the plan of the backward.
        alternatives: forward plans with other levels that fit, the fastest first.
    """

    budget_bytes: int | None
    fits_monolithic: bool
    monolithic_bytes: int
    forward: Plan
    backward: Plan
    alternatives: tuple[Plan, ...]

    def _verdict(self) -> str:
        """Return whether the call fits, and what it takes."""
        passes = ", ".join(
            f"{name} {format_seconds(plan.predicted_seconds)} in "
            f"{format_bytes(plan.peak_bytes)}"
            for name, plan in (("forward", self.forward), ("backward", self.backward))
        )
        if self.fits_monolithic:
            return f"fits: {passes}"
        uncut = format_bytes(self.monolithic_bytes)
        return f"fits in parts: {passes} (the uncut forward: {uncut})"

    def describe(self) -> str:
        """Return the estimate in words."""
        lines = [
            self._verdict(),
            self.forward.describe(),
            self.backward.describe(),
        ]
        if not self.alternatives:
            return "\n".join(
                [*lines, "alternatives (forward): no other levels that were tried fit"]
            )
        lines.append("alternatives (forward), with other levels:")
        for plan in self.alternatives:
            levels = " x ".join(map(str, plan.levels)) or "none"
            peak = format_bytes(plan.peak_bytes)
            seconds = format_seconds(plan.predicted_seconds)
            line = f"  {levels:>12}: peak {peak}, predicted {seconds}"
            if plan.kernel != self.forward.kernel:
                line += f", kernel {plan.kernel}"
            lines.append(line)
        return "\n".join(lines)

    __str__ = describe


# Other levels that an estimate tries: none, and equal ones of so many chunks, by depth.
_CHUNKS_BY_DEPTH = {
    1: (7, 13, 31, 57, 133, 307, 553, 993),
    2: (7, 13, 31, 57, 133, 307, 993, 2451),
    3: (57, 133),
    4: (57,),
}
_OTHER_LEVELS: list[tuple[int, ...]] = [
    (),
    *(
        (n_chunks,) * depth
        for depth, chunk_counts in _CHUNKS_BY_DEPTH.items()
        for n_chunks in chunk_counts
    ),
]
# The most of those that fit that it names.
_MAX_ALTERNATIVES = 6


def estimate(
    n_tokens: int, *, budget: float | str | None = None, **call: Any
) -> Estimate:
    """Predict whether a call fits, and its memory and time, and plan both passes.

    Takes the arguments of ``plan`` (less ``levels``, ``depth`` and ``backward``).

    Raises:
        BudgetError: a pass does not fit; names the pass, and the smallest budget that
            works for both.

    Examples:
        >>> found = qa.estimate(1_048_576, is_causal=True, budget="2GiB", device="cuda")
        >>> found.fits_monolithic, found.forward.peak_bytes < 2 << 30
        (False, True)
    """
    for name in ("levels", "depth", "backward"):
        if name in call:
            raise TypeError(
                f"estimate does not take {name}: it chooses, and plans both passes"
            )
    check_names("estimate", call, names_of(plan))
    forward, backward = both_passes(
        lambda back: plan(n_tokens, budget=budget, backward=back, **call)
    )
    budget_bytes = None if budget is None else parse_bytes(budget)
    available = budget_bytes
    if available is None:
        available = usable_bytes(torch.device(forward.shape.device_type))
    uncut_bytes = forward.peak_bytes
    if is_cut(forward) and forward.uncut_bytes is not None:
        uncut_bytes = forward.uncut_bytes
    return Estimate(
        budget_bytes=budget_bytes,
        fits_monolithic=uncut_bytes <= available,
        monolithic_bytes=uncut_bytes,
        forward=forward,
        backward=backward,
        alternatives=_alternatives(
            n_tokens,
            available,
            call,
            without_levels=forward.levels,
            is_trimmed=forward.pairs is not None,
        ),
    )


def _alternatives(
    n_tokens: int,
    available: int,
    call: Keywords,
    *,
    without_levels: tuple[int, ...],
    is_trimmed: bool,
) -> tuple[Plan, ...]:
    """Return forward plans with other levels that fit ``available`` bytes, the fastest
    first.

    Args:
        without_levels: the levels that are left out.
        is_trimmed: whether each task of a decomposition is looked at, under a kernel's
            own mask.
    """
    max_tasks = policy.MAX_TRIMMED_TASKS if is_trimmed else math.inf
    alternatives = []
    for levels in _OTHER_LEVELS:
        has_small_chunks = n_tokens < 128 * max(levels, default=0)
        if (
            levels == without_levels
            or math.prod(levels) > max_tasks
            or has_small_chunks
        ):
            continue
        try:
            alternatives.append(plan(n_tokens, levels=levels, budget=available, **call))
        except BudgetError:
            continue
    alternatives.sort(key=lambda alternative: alternative.predicted_seconds)
    return tuple(alternatives[:_MAX_ALTERNATIVES])
