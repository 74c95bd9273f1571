"""Hugging Face Transformers: ``register()``, then ``attn_implementation="quorum"``."""

from __future__ import annotations

import weakref
from functools import partial

from quorum_attention.integrations.transformers.versions import check_version

check_version()

import torch.distributed as dist  # noqa: E402

from quorum_attention.counts import shown  # noqa: E402
from quorum_attention.distributed import ShardedReport  # noqa: E402
from quorum_attention.execution.report import Report  # noqa: E402
from quorum_attention.integrations.transformers.attending import attend  # noqa: E402
from quorum_attention.integrations.transformers.masks import quorum_mask  # noqa: E402
from quorum_attention.integrations.transformers.options import Options  # noqa: E402
from quorum_attention.integrations.transformers.positions import sharded_positions  # noqa: E402
from quorum_attention.integrations.transformers.sharded import (  # noqa: E402
    attend_sharded,
    sharded_mask,
)
from quorum_attention.integrations.transformers.whose import Kept  # noqa: E402
from quorum_attention.kernels.protocol import InnerKernel  # noqa: E402


def register(
    name: str = "quorum",
    *,
    budget: int | str | None = None,
    kernel: str | InnerKernel = "auto",
    depth: int | str = "auto",
    accumulator: str = "auto",
    report: Report | ShardedReport | None = None,
    min_tokens: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> str:
    """Make this attention known to Transformers, for ``attn_implementation=name``.

    Any model that takes its attention by name runs on it: in training, ``generate``, under
    gradient checkpointing. Its masks become descriptions (``quorum_attention.Mask``): no tensor of
    queries times keys is made for causal masks, windows, chunks, padding, packed documents and what
    is joined of them. What a model asks for that cannot be honoured is refused by name.

    May be called again, to change the options of a name, or with another name for other options.

    Args:
        name: how models ask for it.
        budget, kernel, depth, accumulator, report: of ``attention``, for every call of a model. A
            budget is of one attention call, forward and backward each.
        min_tokens: calls of fewer queries go to SDPA if their mask is none or a causal square;
            None: 1,024, or 0 where budget, kernel or depth is given. One query (decoding) always
            does.
        group: make the model's attention sequence-parallel over this process group: each rank runs
            the model on its contiguous rows, by ``distributed.attention``, with ``position_ids`` of
            their places (its own, or ``sharded_positions``). ``report`` is a ``ShardedReport``
            then; accumulator and min_tokens cannot be given (docs/distributed.md). It is not kept
            alive: after ``destroy_process_group`` the model's attention raises ``RuntimeError``.

    Returns:
        ``name``.

    Raises:
        ImportError: Transformers is not installed, or not a version this was written for.
        ValueError, TypeError: a name of Transformers' own, or options that make no sense.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"name must be a word that can be a variable's, got {name!r}")
    taken = AttentionInterface._global_mapping.get(name)
    ours = (attend, attend_sharded)
    if name == "eager" or (taken is not None and getattr(taken, "func", None) not in ours):
        raise ValueError(f"name must not be that of another attention, got {name!r}")
    sharded = group is not None
    options = Options(budget, kernel, depth, accumulator, report, min_tokens, sharded)
    if group is None:
        AttentionInterface.register(name, partial(attend, options))
        AttentionMaskInterface.register(name, quorum_mask)
        return name
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a process group or None, got {shown(group)}")
    AttentionInterface.register(name, partial(attend_sharded, options, Kept(weakref.ref(group))))
    AttentionMaskInterface.register(name, sharded_mask)
    return name


__all__ = ["quorum_mask", "register", "sharded_positions"]
