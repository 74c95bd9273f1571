"""What a part takes on a device, as the planner predicts it from the device's rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from quorum_attention.execution.case import Case
from quorum_attention.execution.pass_spec import spec_of
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.planner.cost import cost
from quorum_attention.planner.machine import Machine
from quorum_attention.planner.make import plan
from quorum_attention.pool.parts import Part, Sizes


def predicted(
    sizes: Sizes, machines: Sequence[Machine | None], *, backward: bool, **call: Any
) -> Callable[[int, Part], float]:
    """A function (device, part) -> seconds, for ``simulate``.

    Args:
        sizes: of the call.
        machines: the rates of each device (``Pool.measure``); None: those that plans are made by.
        call: other arguments of ``plan``: head_dim, dtype, budget, kernel, device ...

    The schedule is the one that is planned for it, whatever the rates: a worker plans by what has
    been calibrated.
    """

    @lru_cache
    def whole(machine: Machine | None, heads: int, kv_heads: int) -> float:
        made = plan(
            sizes.n_queries, n_keys=sizes.n_keys, heads=heads, kv_heads=kv_heads,
            is_causal=sizes.is_causal, backward=backward, **call,
        )  # fmt: skip
        if machine is None:
            return made.predicted_seconds
        case = Case(made.work, get_kernel(made.kernel), spec_of(backward), made.place)
        return cost(made.schedule, case, machine).seconds

    def seconds(device: int, part: Part) -> float:
        kv = part.kv(sizes)
        all_rows = part._replace(rows=type(part.rows)(0, sizes.n_queries))
        share = part.pairs(sizes) / all_rows.pairs(sizes)
        # Some query heads of one key/value head: a share of all of them.
        heads = part.heads.length if part.heads.length % kv.length == 0 else kv.length * sizes.share
        return whole(machines[device], heads, kv.length) * share * part.heads.length / heads

    return seconds


__all__ = ["predicted"]
