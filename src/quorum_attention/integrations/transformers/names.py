"""Names of attention for models that differ in their budgets."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quorum_attention.integrations.transformers import register
from quorum_attention.integrations.transformers.options import Options
from quorum_attention.sizes import parse_bytes

NAME = "quorum"


def name_for(budget: int | str | None) -> tuple[str, int | str | None]:
    """A name whose attention has that budget, and the budget. Other models' names stay as they are.

    What ``register`` was given for "quorum" holds for it too; None: so does its budget.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    known = AttentionInterface._global_mapping
    if not isinstance(next(iter(getattr(known.get(NAME), "args", ())), None), Options):
        register(NAME)
    found = known[NAME]
    options, *rest = found.args
    if budget is None or _bytes(budget) == _bytes(options.budget):
        return NAME, options.budget
    name = f"{NAME}_{_bytes(budget)}"
    own = partial(found.func, replace(options, budget=budget), *rest)
    AttentionInterface.register(name, own)
    AttentionMaskInterface.register(name, AttentionMaskInterface()[NAME])
    return name, budget


def _bytes(budget: int | str | None) -> int | None:
    return None if budget is None else parse_bytes(budget)


__all__ = ["NAME", "name_for"]
