"""``plan()`` and ``estimate()``: how a call would run, without its tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from quorum_attention.argument_checks import chance, one_of, shown, switch, whole_number
from quorum_attention.errors import BudgetError
from quorum_attention.execution.bias import bias_shape
from quorum_attention.execution.device.lookup import (
    available_device,
    backend_of,
    best_device,
    named_device,
    on_host,
)
from quorum_attention.execution.dtypes import check_dtype
from quorum_attention.execution.head_groups import GroupSize
from quorum_attention.execution.pass_spec import spec_of
from quorum_attention.execution.problem import Placement, Problem
from quorum_attention.execution.report import InWords
from quorum_attention.kernels.masked.kernel import kernel_for_mask
from quorum_attention.kernels.protocol import CallShape, InnerKernel, scale_is_exact
from quorum_attention.kernels.select import rivals, select_kernel
from quorum_attention.keywords import check_names, helps_with_names, names_of
from quorum_attention.mask import Mask
from quorum_attention.planner import policy
from quorum_attention.planner.calibration import hardware_of
from quorum_attention.planner.constraints import PlanConstraints
from quorum_attention.planner.decide import both_passes, choose_plan, usable_bytes
from quorum_attention.planner.plan import Plan, is_cut
from quorum_attention.planner.price import forward_flops
from quorum_attention.quorums import quorum_size
from quorum_attention.units import format_bytes, format_seconds, parse_bytes

# The largest size of anything: torch counts in 64 bits.
_MOST = 2**63 - 1


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
    attn_mask: Mask | None = None,
) -> Plan:
    """Plan an attention call of ``n_tokens`` queries.

    Args:
        n_tokens: queries (and keys, unless ``n_keys`` is given).
        heads, kv_heads, head_dim, value_dim, batch, dtype, is_causal: sizes of the call;
            ``kv_heads`` and ``value_dim`` default to ``heads`` and ``head_dim``.
        dropout_p: of the call; above 0 only kernels with dropout are considered.
        budget: device bytes, as a number or "2GiB"; None is the free memory.
        levels: chunk counts per level, e.g. (7, 7) or (57,); () is uncut; None is the planner's
            choice.
        depth: number of levels; the planner chooses their chunk counts.
        layout: "aligned" puts chunk boundaries on multiples of ``tile``; "balanced" is the
            paper's.
        device: what computes; None is CUDA if there is a GPU, else the CPU.
        inputs: where the call's tensors are; None is "host" for CUDA, "device" for the CPU.
        results_given: whether the call will have ``out=`` or ``grads=``, which its budget does not
            count.
        accumulator: where unfinished rows are kept between tasks.
        heads_per_group: query heads of a head group.
        n_cap: most tasks on the device at once.
        streams: kernel calls in flight at once, 1 or 2.
        over_inputs: True runs the tasks of a head group directly on the inputs, which must be on
            the device (at depth 1; the route ``Blockwise``); False runs them through slots. For
            this and the other choices, None leaves it to the planner.
        kernel: an inner kernel, or its name.
        backward: plan the backward pass instead of the forward.
        attn_mask: the call's ``Mask``; its tensors must fit the sizes. Give a tensor as
            ``Mask(bias=tensor)``.

    Raises:
        BudgetError: the budget is too small; names the smallest that works.
        ValueError, TypeError: arguments that do not fit.

    Examples:
        >>> made = qa.plan(1_048_576, is_causal=True, budget="2GiB", levels=(31,), device="cuda")
        >>> made.n_tasks, made.peak_bytes < 2 << 30
        (31, True)
        >>> small = qa.plan(2048, dtype=torch.float32, levels=(7,), device="cpu")
        >>> q = torch.randn(1, 8, 2048, 64)
        >>> out = qa.attention(q, q, q, plan=small)  # the plan's sizes are the call's
    """
    counts = _counts(
        n_tokens=n_tokens,
        n_keys=n_tokens if n_keys is None else n_keys,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        value_dim=head_dim if value_dim is None else value_dim,
        batch=batch,
    )
    check_dtype(dtype, "dtype")
    where = _device(device)
    shape = CallShape(
        where.type, dtype, counts["heads"], counts["kv_heads"], counts["head_dim"],
        counts["value_dim"], switch(is_causal, "is_causal"), batch_shape=(counts["batch"],),
        n_queries=counts["n_tokens"], n_keys=counts["n_keys"],
        dropout=chance(dropout_p, "dropout_p") > 0.0,
        exact_scale=scale_is_exact(counts["head_dim"] ** -0.5, dtype),
    )  # fmt: skip
    backward = switch(backward, "backward")
    given, (shape, kernel) = shape, _under(attn_mask, shape, kernel, where, backward)
    bytes_given = None if budget is None else parse_bytes(budget)
    levels = _levels(levels)
    depth = None if depth is None else whole_number(depth, "depth", 0)
    if levels is not None and depth is not None and depth != len(levels):
        raise ValueError(f"depth is {depth} but levels {levels} has {len(levels)}")
    pinned = levels is not None or depth is not None
    constraints = PlanConstraints(
        budget_bytes=usable_bytes(where) if bytes_given is None else bytes_given,
        levels=levels,
        depth=depth,
        layout=one_of(layout, "layout", ("aligned", "balanced")),
        tile=whole_number(tile, "tile", 1),
        accumulator=one_of(accumulator, "accumulator", (None, "device", "host")),
        group=_group(shape, heads_per_group),
        n_cap=None if n_cap is None else whole_number(n_cap, "n_cap", 1),
        streams=None if streams is None else whole_number(streams, "streams", 1, 2),
        over_inputs=None if over_inputs is None else switch(over_inputs, "over_inputs"),
        pinned=pinned,
        enforce_budget=bytes_given is not None or not pinned,
    )
    one_of(inputs, "inputs", (None, "device", "host"))
    resident = on_host(where) if inputs is None else inputs == "device"
    if on_host(where) and not resident:
        raise ValueError("inputs must be 'device' when the CPU computes")
    # Autograd may hand over an expanded gradient (of a sum): the backward counts a copy of it.
    place = Placement(resident, results_given, dtype, n_unreadable=1 if backward else 0)
    asked_shape = replace(shape, needs_grad=backward)
    preferred = select_kernel(kernel, asked_shape, where, tried=False, flops=forward_flops(shape))
    # Kernels are not tried out.
    chosen, found = choose_plan(
        Problem(shape, preferred, spec_of(backward), place), constraints,
        rivals(preferred, asked_shape, where) if kernel == "auto" else (),
        hardware_of(where, shape.dtype, shape.head_dim), kernel_works=lambda _: True,
    )  # fmt: skip
    pairs = None
    if chosen.sparse:
        pairs = chosen.kept_pairs(shape.n_queries, shape.n_keys, shape.is_causal)
    kept = words_of(attn_mask, given.is_causal)
    return replace(found, budget_bytes=bytes_given, pairs=pairs, kept=kept)


def words_of(mask: Mask | None, is_causal: bool) -> str:
    """What a call keeps, in words: of tensors and functions, that there are some."""
    said = ["causal"] if is_causal else []
    for field in fields(Mask) if mask is not None else ():
        value, name = getattr(mask, field.name), field.name.replace("_", " ")
        if isinstance(value, tuple) and any(isinstance(one, Mask) for one in value):
            joint = " or " if field.name == "either" else " and "
            said.append(joint.join(f"({words_of(one, False)})" for one in value))
        elif value is True or isinstance(value, torch.Tensor) or callable(value):
            said += [name] if name not in said else []
        elif field.name == "documents" and value is not None:
            said.append(name)  # two tensors
        elif value not in (None, False, ()):
            numbers = ",".join(map(str, value)) if isinstance(value, (tuple, list)) else value
            said.append(f"{name} {numbers}")
    return ", ".join(said)


def _under(
    mask: Mask | None,
    shape: CallShape,
    kernel: str | InnerKernel,
    where: torch.device,
    backward: bool,
) -> tuple[CallShape, str | InnerKernel]:
    """The call and its kernel under ``mask``."""
    if mask is None:
        return shape, kernel
    if not isinstance(mask, Mask):
        raise TypeError(f"attn_mask must be a quorum_attention.Mask, got {shown(mask)}")
    bias = None
    if mask.bias is not None:
        bias = bias_shape(mask.bias, len(shape.batch_shape), shape.dtype)
    shape = replace(shape, bias=bias, sinks=mask.sinks is not None)
    return kernel_for_mask(mask, kernel, shape, where, needs_grad=backward, tried=False)


def _counts(**given: int) -> dict[str, int]:
    """The sizes of a call, checked."""
    counts = {
        name: whole_number(count, name, 0 if name in ("n_tokens", "n_keys") else 1, _MOST)
        for name, count in given.items()
    }
    if counts["heads"] % counts["kv_heads"]:
        raise ValueError(
            f"heads must be a multiple of kv_heads, got {counts['heads']} and {counts['kv_heads']}"
        )
    return counts


def _levels(levels: Iterable[int] | None) -> tuple[int, ...] | None:
    if levels is None:
        return None
    if isinstance(levels, str) or not isinstance(levels, Iterable):
        raise TypeError(f"levels must be chunk counts such as (7, 7) or None, got {shown(levels)}")
    numbers = tuple(whole_number(c, "levels", 1) for c in levels)
    for c in numbers:
        quorum_size(c)
    return numbers


def _group(shape: CallShape, heads_per_group: int | None) -> GroupSize | None:
    if heads_per_group is None:
        return None
    shared = shape.queries_per_key_head
    heads_per_group = whole_number(heads_per_group, "heads_per_group", 1)
    if heads_per_group < shared or heads_per_group > shape.heads or heads_per_group % shared:
        raise ValueError(
            f"heads_per_group must be a multiple of {shared} (query heads that share a key/value "
            f"head) up to {shape.heads}, got {heads_per_group}"
        )
    return GroupSize(1, heads_per_group // shared)


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return best_device()
    # A plan can also be made for a device that is not available.
    named = named_device(device, "device")
    return available_device(named, "device") if backend_of(named).is_here() else named


@dataclass(frozen=True, slots=True)
class Estimate(InWords):
    """A dry run: the memory, time and plans of a call.

    Attributes:
        budget_bytes: the budget given; None is what is free.
        fits_monolithic: whether the uncut forward fits the budget.
        monolithic_bytes: device bytes of the uncut forward.
        forward, backward: the plans.
        alternatives: forward plans with other levels that fit, the fastest first.
    """

    budget_bytes: int | None
    fits_monolithic: bool
    monolithic_bytes: int
    forward: Plan
    backward: Plan
    alternatives: tuple[Plan, ...]

    def describe(self) -> str:
        """The estimate in words."""
        fits = "fits" if self.fits_monolithic else "does not fit"
        lines = [
            f"the uncut forward: {format_bytes(self.monolithic_bytes)}, {fits}",
            self.forward.describe(),
            self.backward.describe(),
            "alternatives (forward), with other levels:" if self.alternatives else _NO_OTHERS,
        ]
        for plan in self.alternatives:
            levels = " x ".join(map(str, plan.levels)) or "none"
            peak, seconds = format_bytes(plan.peak_bytes), format_seconds(plan.predicted_seconds)
            other = "" if plan.kernel == self.forward.kernel else f", kernel {plan.kernel}"
            lines.append(f"  {levels:>12}: peak {peak}, predicted {seconds}{other}")
        return "\n".join(lines)

    __str__ = describe


_NO_OTHERS = "alternatives (forward): no other levels that were tried fit"
# Other levels that an estimate tries, and how many of those that fit it names.
_OTHER_LEVELS: tuple[tuple[int, ...], ...] = (
    *((), (7,), (13,), (31,), (57,), (133,), (307,), (553,), (993,)),
    *((7, 7), (13, 13), (31, 31), (57, 57), (133, 133), (307, 307), (993, 993), (2451, 2451)),
    *((57, 57, 57), (133, 133, 133), (57, 57, 57, 57)),
)
_MOST_OTHERS = 6


def estimate(n_tokens: int, *, budget: float | str | None = None, **call: Any) -> Estimate:
    """Whether a call fits; its plans, memory, time and alternatives.

    Takes the arguments of ``plan`` (less ``levels``, ``depth`` and ``backward``).

    Raises:
        BudgetError: a pass does not fit; names it, and the smallest budget that works for both.

    Examples:
        >>> found = qa.estimate(1_048_576, is_causal=True, budget="2GiB", device="cuda")
        >>> found.fits_monolithic, found.forward.peak_bytes < 2 << 30
        (False, True)
    """
    for name in ("levels", "depth", "backward"):
        if name in call:
            raise TypeError(f"estimate does not take {name}: it chooses, and plans both passes")
    check_names("estimate", call, names_of(plan))
    forward, backward = both_passes(
        lambda back: plan(n_tokens, budget=budget, backward=back, **call)
    )
    limit = None if budget is None else parse_bytes(budget)
    room = limit if limit is not None else usable_bytes(torch.device(forward.shape.device_type))
    whole = forward.peak_bytes
    if is_cut(forward) and forward.uncut_bytes is not None:
        whole = forward.uncut_bytes
    others = []
    # Under a mask of the kernel's own each task of a decomposition is looked at.
    most = math.inf if forward.pairs is None else policy.MAX_TRIMMED_TASKS
    for levels in _OTHER_LEVELS:
        looked_at = levels != forward.levels and math.prod(levels) <= most
        if looked_at and n_tokens >= 128 * max(levels, default=0):
            try:
                others.append(plan(n_tokens, levels=levels, budget=room, **call))
            except BudgetError:
                continue
    others.sort(key=lambda other: other.predicted_seconds)
    alternatives = tuple(others[:_MOST_OTHERS])
    return Estimate(limit, whole <= room, whole, forward, backward, alternatives)
