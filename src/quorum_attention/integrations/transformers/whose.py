"""Whether a model's attention is over a group: with any other, a rank's rows see only each other.

That would be wrong without a word: nothing else of a model looks at other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from quorum_attention.integrations.transformers.options import Options


def check_is_sharded(model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Nothing, if some attention of the model is over ``group``, or if that cannot be known.

    Raises:
        ValueError: all of it is known to be of each rank's rows alone, or over another group.
    """
    names = set(_names(getattr(model, "config", None)))
    found = [_is_over(name, group) for name in names]
    if names and all(one is False for one in found):
        shown = ", ".join(repr(name) for name in sorted(names))
        raise ValueError(
            f"the model's attention is {shown}, which is not over this group: each rank's rows "
            "would see only each other; model.set_attn_implementation(register(name, group=...)) "
            "makes it so"
        )


def _names(config: Any) -> Iterator[str]:
    """What attention a configuration asks for, and those within it."""
    name = getattr(config, "_attn_implementation", None)
    if isinstance(name, str):
        yield name
    for part in getattr(config, "sub_configs", None) or ():
        yield from _names(getattr(config, part, None))


def _is_over(name: str, group: dist.ProcessGroup) -> bool | None:
    """Whether the attention of that name is over the group; None: it is somebody else's."""
    from transformers import AttentionInterface

    function = AttentionInterface._global_mapping.get(name)
    given = getattr(function, "args", ())
    if given and isinstance(given[0], Options):
        return given[0].sharded and given[1]() is group
    own = function is None or getattr(function, "__module__", "").startswith("transformers.")
    return False if own else None


__all__ = ["check_is_sharded"]
