"""Whether a model can be sharded: attention over the group, and nothing else that mixes tokens.

Otherwise each rank's rows would see only each other somewhere, and be wrong without a word.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from quorum_attention.integrations.transformers.options import Options


@dataclass(frozen=True, slots=True)
class Kept:
    """A weak reference to a group, out of sight of torch's compiler: it looks through plain ones
    among the arguments of what is registered, and keeps what it finds for good."""

    group: weakref.ref[dist.ProcessGroup]


# Kinds of layers, as configurations name them, in which tokens meet in attention alone: others are
# recurrences, convolutions, and keys that are chosen or compressed beside the attention.
_ATTENTION_ALONE = frozenset(
    {
        "attention", "chunked_attention", "full_attention", "sliding_attention",
        "window_attention", "dense", "mlp", "moe", "sparse",
    }
)  # fmt: skip


def check_layers(module: torch.nn.Module) -> None:
    """Nothing, unless the model that an attention module is of mixes tokens elsewhere, too.

    Raises:
        NotImplementedError: it has layers of another kind, which see this rank's rows alone.
    """
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    others = sorted({str(kind) for kind in kinds or ()} - _ATTENTION_ALONE)
    if others:
        raise NotImplementedError(
            f"attention over a group is all that reaches other ranks; this model has layers of "
            f"{', '.join(others)}, whose tokens meet elsewhere as well: each rank's rows would see "
            "only each other there"
        )


def check_is_sharded(model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Nothing, if some attention of the model is over ``group``, or if that cannot be known.

    Raises:
        ValueError: all of it is known to be of each rank's rows alone, or over another group.
    """
    names = set(names_of(getattr(model, "config", None)))
    found = [_is_over(name, group) for name in names]
    if names and all(one is False for one in found):
        shown = ", ".join(repr(name) for name in sorted(names))
        raise ValueError(
            f"the model's attention is {shown}, which is not over this group: each rank's rows "
            "would see only each other; model.set_attn_implementation(register(name, group=...)) "
            "makes it so"
        )


def whose_forward(model: Any) -> torch.nn.Module:
    """The module that runs: that within torch's compiler and PEFT's adapters."""
    while True:
        if isinstance(getattr(model, "_orig_mod", None), torch.nn.Module):
            model = model._orig_mod
        elif callable(getattr(model, "get_base_model", None)):
            model = model.get_base_model()
        else:
            found: torch.nn.Module = model
            return found


def names_of(config: Any) -> Iterator[str]:
    """What attention a configuration asks for, and those within it."""
    name = getattr(config, "_attn_implementation", None)
    if isinstance(name, str):
        yield name
    for part in getattr(config, "sub_configs", None) or ():
        yield from names_of(getattr(config, part, None))


def _is_over(name: str, group: dist.ProcessGroup) -> bool | None:
    """Whether the attention of that name is over the group; None: it is somebody else's."""
    from transformers import AttentionInterface

    function = AttentionInterface._global_mapping.get(name)
    given = getattr(function, "args", ())
    if given and isinstance(given[0], Options):
        return given[0].sharded and given[1].group() is group
    own = function is None or getattr(function, "__module__", "").startswith("transformers.")
    return False if own else None


__all__ = ["Kept", "check_is_sharded", "check_layers", "names_of", "whose_forward"]
