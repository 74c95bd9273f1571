"""Which calls are so small that they are run whole, without a plan.

A plan takes longer than such a call, and a model that decodes makes a call of a new length every
time. So lengths are rounded up to powers of two before answers are looked up or remembered.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quorum_attention.execution.case import Case, Placement
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.pass_spec import spec_of
from quorum_attention.execution.trimming import pairs_of
from quorum_attention.execution.workload import GroupSize, Workload
from quorum_attention.kernels.cache import remembered
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.planner import policy
from quorum_attention.planner.calibration import machine_of, rates_known
from quorum_attention.planner.footprint import footprint_of
from quorum_attention.planner.search import short_monolithic, uncut


def is_small(
    work: Workload,
    kernel: InnerKernel,
    place: Placement,
    device: torch.device,
    *,
    backward: bool,
) -> bool:
    """Whether ``kernel`` takes the call whole, and the call is so short that no plan is worth its
    time."""
    if not place.in_place or len(work.batch_shape) > 1:
        return False
    # A kernel's own mask is defined for these lengths only: they cannot be rounded.
    own_mask = pairs_of(work, kernel).verdict is not None
    about, rates = work if own_mask else rounded(work), rates_known()
    if _fits(about, kernel, place, device, rates, backward=backward):
        return True
    # The rounded call may be too long where the call itself is not. On a CPU that does not matter:
    # there a planned call is as quick.
    refuses = backend_of(device).refuses
    return refuses and _fits(work, kernel, place, device, rates, backward=backward)


def rounded(work: Workload) -> Workload:
    """``work`` with its lengths rounded up. A causal call that is not square is returned as it is:
    other lengths would keep other pairs."""
    n_queries, n_keys = _up(work.n_queries), _up(work.n_keys)
    if work.is_causal and work.n_queries != work.n_keys:
        return work
    if n_queries == work.n_queries and n_keys == work.n_keys:
        return work
    return replace(work, n_queries=n_queries, n_keys=n_keys)


def _up(n: int) -> int:
    return max(policy.SHORTEST, 1 << (n - 1).bit_length())


@remembered(256)
def _fits(
    work: Workload,
    kernel: InnerKernel,
    place: Placement,
    device: torch.device,
    rates: object,
    *,
    backward: bool,
) -> bool:
    """The answer by the rates that ``rates`` stands for, and to be asked again after others."""
    if backend_of(device).refuses:
        machine = machine_of(device, work.dtype, work.head_dim)
        return short_monolithic(work, kernel, place, machine, backward=backward) is not None
    schedule = uncut(work, GroupSize(work.batch, work.kv_heads))
    case = Case(work, kernel, spec_of(backward), place)
    return schedule.runs(case) and footprint_of(schedule, case).total <= policy.WHOLE_BYTES
