"""Whether letting rows pass by is faster than tasks through slots, and how many stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quorum_attention.execution.case import Case
from quorum_attention.execution.routes.passing import Passing
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.schedule import Schedule, schedule_of
from quorum_attention.execution.workload import Axis, GroupSize, count_groups, group_sizes
from quorum_attention.planner import policy
from quorum_attention.planner.footprint import footprint_of
from quorum_attention.planner.machine import Machine


def schedules(instead: Schedule, budget: int, case: Case, machine: Machine) -> Iterator[Schedule]:
    """For every head group and a few sizes of a chunk, the schedule with the largest blocks that
    fits ``budget`` bytes; none where the route cannot run the call.

    Args:
        instead: the schedule through slots that takes over if memory runs out.
    """
    route, work = instead.route, case.work
    if not isinstance(route, Slots) or case.place.resident or not instead.decomposition.depth:
        return
    stays: Axis = "key" if case.spec.backward else "query"
    length = work.n_keys if case.spec.backward else work.n_queries
    for group in group_sizes(work):
        if group.batch > 1:
            continue
        made = replace(instead, group=group)
        if not Passing(stays, 1, 1, route).runs(made, case):
            return
        for chunk in _chunks(group, length, case, machine):
            found = _largest_blocks(made, Passing(stays, chunk, chunk, route), budget, case)
            if found is not None:
                yield found


def _chunks(group: GroupSize, length: int, case: Case, machine: Machine) -> Iterator[int]:
    """Sizes of a chunk: whole waves of rows, all heads of the group together."""
    lanes = group.kv_heads * case.work.queries_per_key_head
    rows = (machine.wave_rows or policy.ROWS_OF_A_WAVE) // lanes
    wave = max(policy.LEAST_ROWS, rows // policy.TILE * policy.TILE)
    most = -(-length // policy.TILE) * policy.TILE
    for waves in policy.WAVES_STAYING:
        if waves * wave >= most:
            yield most
            return
        yield waves * wave


def _largest_blocks(instead: Schedule, route: Passing, budget: int, case: Case) -> Schedule | None:
    """The schedule whose blocks are the largest part of a chunk that fits."""
    work, chunk = case.work, route.rows(route.stays)
    for parts in policy.PARTS_PASSING:
        block, rest = divmod(chunk, parts)
        # Otherwise the rectangles at the diagonal would have many sizes.
        if rest or block % policy.TILE:
            continue
        if block < policy.LEAST_ROWS and parts > 1:
            return None
        sizes = (chunk, block) if route.stays == "query" else (block, chunk)
        one = replace(route, queries=sizes[0], keys=sizes[1])
        units = count_groups(work, instead.group) * one.passage(work).n_units
        if units > policy.MOST_PASSAGES:
            return None
        made = schedule_of(work, instead.decomposition, instead.group, one, pinned=instead.pinned)
        if footprint_of(made, case).total <= budget:
            return made
    return None
