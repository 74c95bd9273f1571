"""Which calls are so small that they are run whole, without a plan.

Making a plan takes longer than such a call, and a model that decodes makes one of a new length
every time: so lengths are rounded up to a power of two before anything is asked or remembered.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quorum_attention.execution.case import Case
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.pass_spec import spec_of
from quorum_attention.execution.placement import Placement
from quorum_attention.execution.trimming import pairs_of
from quorum_attention.execution.workload import GroupSize, Workload
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.remembered import remembered
from quorum_attention.planner import policy
from quorum_attention.planner.calibration import machine_of
from quorum_attention.planner.search import price, uncut, undivided


def is_small(
    work: Workload,
    kernel: InnerKernel,
    place: Placement,
    device: torch.device,
    *,
    backward: bool,
) -> bool:
    """Whether ``kernel`` takes the call whole, and it is so short that nothing else needs a
    thought."""
    if not place.in_place or len(work.batch_shape) > 1:
        return False
    # A mask of the kernel's own knows the tokens that there are, and no others.
    own_mask = pairs_of(work, kernel).verdict is not None
    about = work if own_mask else rounded(work)
    if _fits(about, kernel, place, device, backward=backward):
        return True
    # In between, a GPU's longer calls: one that has been planned is as quick.
    return backend_of(device).refuses and _fits(work, kernel, place, device, backward=backward)


def rounded(work: Workload) -> Workload:
    """The call with lengths rounded up, square where it is (a causal one is cut otherwise)."""
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
    *,
    backward: bool,
) -> bool:
    machine = machine_of(device, work.dtype, work.head_dim)
    if backend_of(device).refuses:
        return undivided(work, kernel, place, machine, backward=backward) is not None
    schedule = uncut(work, GroupSize(work.batch, work.kv_heads))
    if not schedule.runs(Case(work, kernel, spec_of(backward), place)):
        return False
    found = price(work, schedule, kernel, place, machine, backward=backward)
    return found.footprint.total <= policy.WHOLE_BYTES
