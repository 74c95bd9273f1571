"""Hugging Face Transformers: ``register()``, then ``attn_implementation="quorum"``."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from quorum_attention.argument_checks import shown
from quorum_attention.distributed import ShardedReport
from quorum_attention.execution.report import Report
from quorum_attention.integrations.transformers.attention_function import attend
from quorum_attention.integrations.transformers.masks import quorum_mask
from quorum_attention.integrations.transformers.options import (
    GroupReference,
    ModelOptions,
    options_of,
)
from quorum_attention.integrations.transformers.sharded import (
    attend_sharded,
    sharded_mask,
    sharded_positions,
)
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.keywords import helps_with_names
from quorum_attention.units import parse_bytes

NAME = "quorum"


@helps_with_names
def register(
    name: str = NAME,
    *,
    budget: int | str | None = None,
    kernel: str | InnerKernel = "auto",
    depth: int | str = "auto",
    accumulator: str = "auto",
    report: Report | ShardedReport | None = None,
    min_tokens: int | None = None,
    group: dist.ProcessGroup | None = None,
    ignore: tuple[str, ...] = (),
) -> str:
    """Make this attention known to Transformers, for ``attn_implementation=name``.

    Any model that takes its attention by name can use it: in training, in ``generate``,
    with gradient checkpointing. No tensor of queries times keys is made for causal
    masks, windows, chunks, padding, packed documents and their combinations: they
    become a ``quorum_attention.Mask``. If a model asks for something that is not
    supported, the error names it.

    Another call with the same name changes the options of this name. Another name may
    have other options.

    Args:
        name: how models ask for it.
        budget, kernel, depth, accumulator, report: of ``attention``, for every call of
            a model. The budget covers one attention call, forward and backward each.
        min_tokens: SDPA computes calls with fewer queries, if they have no mask, or a
            causal one and as many queries as keys. None is 1,024, or 0 if budget,
            kernel or depth is given. One query (decoding) always goes to SDPA, or to
            FlashAttention-2 on GPUs.
        group: make the model's attention sequence-parallel over this process group.
            Each rank runs the model on its contiguous rows, by
            ``distributed.attention``, with ``position_ids`` in the whole sequence (your
            own, or from ``sharded_positions``). ``report`` is then a ``ShardedReport``;
            accumulator and min_tokens cannot be given (docs/distributed.md). After
            ``destroy_process_group`` the model's attention raises ``RuntimeError``.
        ignore: keywords that a model gives its attention, and that do not change its
            result. Other unknown keywords, for example of a newer Transformers, are
            refused by name.

    Returns:
        ``name``.

    Raises:
        ImportError: Transformers is not installed, or its version is not supported.
        ValueError, TypeError: the name is one of Transformers' own, or an option is
            wrong.
    """
    from transformers import AttentionInterface

    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"name must be a word that can be a variable's, got {name!r}")
    if name == "eager" or (name in AttentionInterface() and options_of(name) is None):
        raise ValueError(f"name must not be that of another attention, got {name!r}")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a process group or None, got {shown(group)}")
    reference = None if group is None else GroupReference(weakref.ref(group))
    options = ModelOptions(
        budget, kernel, depth, accumulator, report, min_tokens, reference, ignore
    )
    return _add(name, options)


def _add(name: str, options: ModelOptions) -> str:
    """Make an attention with these options known to Transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    sharded = options.group is not None
    AttentionInterface.register(
        name, partial(attend_sharded if sharded else attend, options)
    )
    AttentionMaskInterface.register(name, sharded_mask if sharded else quorum_mask)
    return name


def name_for(budget: int | str | None) -> tuple[str, int | str | None]:
    """A name whose attention has that budget, and the budget. Other models' names stay
    as they are.

    What ``register`` was given for "quorum" holds for it too; None: so does its budget.
    """
    if options_of(NAME) is None:
        register()
    options = options_of(NAME)
    assert options is not None
    if budget is None or (
        options.budget and parse_bytes(budget) == parse_bytes(options.budget)
    ):
        return NAME, options.budget
    return _add(
        f"{NAME}_{parse_bytes(budget)}", replace(options, budget=budget)
    ), budget


__all__ = ["quorum_mask", "register", "sharded_positions"]
