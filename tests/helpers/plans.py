"""Plans that tests need and users do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import quorum_attention as qa
from quorum_attention.execution.head_groups import GroupSize
from quorum_attention.execution.pass_spec import spec_of
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.routes.streaming import Streaming
from quorum_attention.execution.schedule import schedule_of
from quorum_attention.kernels import CallShape, get_kernel
from quorum_attention.planner.hardware import HardwareModel
from quorum_attention.planner.price import price
from quorum_attention.planner.rates import assumed_hardware


def shape_of(
    batch: tuple[int, ...],
    heads: int,
    kv_heads: int,
    n: int,
    m: int,
    causal: bool = False,
    **more: Any,
) -> CallShape:
    """Of a call on a GPU, in fp16."""
    of_heads = heads, kv_heads, 64, 64
    of_rows: Any = {"batch_shape": batch, "n_queries": n, "n_keys": m}
    return CallShape("cuda", torch.float16, *of_heads, causal, **of_rows, **more)


def assumed(device: str, dtype: torch.dtype, head_dim: int = 64) -> HardwareModel:
    """The rates of a kind of device where none were measured; those of CUDA are an
    H200's."""
    return assumed_hardware(torch.device(device), dtype, head_dim)


def unpinned(plan: qa.Plan) -> qa.Plan:
    """The plan with its decomposition, but free to recover from running out of
    memory."""
    schedule = replace(plan.schedule, pinned=False)
    return replace(plan, schedule=schedule)


def passing(
    plan: qa.Plan,
    queries: int,
    keys: int,
    *,
    group: int = 1,
    n_cap: int = 2,
    chunk_slots: int = 2,
    kernel: qa.InnerKernel | None = None,
) -> qa.Plan:
    """The call of ``plan`` on the route ``passing``: queries stay in a forward, keys in
    a backward. Its own decomposition takes over if that fails."""
    shape, place = plan.shape, plan.place
    stays = "key" if plan.backward else "query"
    route = Streaming(
        n_cap,
        chunk_slots=chunk_slots,
        resident_axis=stays,
        queries=queries,
        keys=keys,
        instead=Slots(1, "host"),
    )
    schedule = schedule_of(shape, plan.decomposition, GroupSize(1, group), route)
    problem = Problem(
        shape, kernel or get_kernel(plan.kernel), spec_of(plan.backward), place
    )
    machine = assumed(shape.device_type, shape.dtype, shape.head_dim)
    return price(schedule, problem, machine)
