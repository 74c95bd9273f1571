"""Where a rank's rows are in the whole sequence: ``position_ids`` for a model whose call has none.

Most models count from 0 where they are given no positions, and each rank's would. Some count
otherwise, by padding, by their input, or by images: what they would find for the whole sequence is
not known from a rank's rows, and so it is refused.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
import torch.distributed as dist

from quorum_attention.distributed.agreement import alive, told
from quorum_attention.integrations.transformers.options import names_of, options_of
from quorum_attention.kernels.torch_private import uncompiled

# Inputs beside text, from which models of several media count positions.
_MEDIA = ("pixel_values", "pixel_values_videos", "input_features", "image_grid_thw",
          "video_grid_thw")  # fmt: skip


def sharded_positions(
    model: torch.nn.Module, *, group: dist.ProcessGroup | None = None
) -> torch.utils.hooks.RemovableHandle:
    """Give a model's forwards ``position_ids`` of this rank's place, where a call has none.

    Each such forward begins with the ranks telling each other their rows, for which the host waits.
    It raises ``ValueError`` if the model's attention is not over the group, and where the model
    itself would count otherwise than from 0 up: by an ``attention_mask`` that masks something, or
    by images; and, on all ranks, if one has no rows.

    Args:
        model: called with ``input_ids`` or ``inputs_embeds`` (batch, rows, ...) by name.
        group: over which the sequence is sharded; None is the default one.

    Returns:
        A handle; its ``remove()`` takes it back.

    Raises:
        ValueError: the model takes no ``position_ids``, or counts from another number than 0.
    """
    kept = None if group is None else weakref.ref(group)
    del group  # the function below would keep it
    by_mask, by_media = _counts_otherwise(model)

    def placed(
        model: torch.nn.Module, args: Any, named: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if named.get("position_ids") is not None:
            return args, named
        ids = named.get("input_ids")
        ids = named.get("inputs_embeds") if ids is None else ids
        if ids is None:
            raise TypeError("a sharded model must be given input_ids or inputs_embeds by name")
        everyone = dist.group.WORLD if kept is None else alive(kept)
        assert everyone is not None
        _check_is_sharded(model, everyone)
        mask = named.get("attention_mask")
        masked = by_mask and mask is not None and not bool(mask.all())
        shown = by_media and any(named.get(name) is not None for name in _MEDIA)
        listed = told(everyone, (ids.shape[1], int(masked or shown)))
        if not all(rows for rows, _ in listed):
            raise ValueError(
                "models of Transformers do not run on no rows, got "
                f"{[rows for rows, _ in listed]} on the ranks: give each at least one"
            )
        if any(one[1] for one in listed):
            raise ValueError(
                f"{type(model).__name__} counts positions by its attention_mask or its images, "
                "which are not known for the whole sequence: give it position_ids"
            )
        start = sum(rows for rows, _ in listed[: everyone.rank()])
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        return args, {**named, "position_ids": positions}

    return model.register_forward_pre_hook(uncompiled(placed), with_kwargs=True)


def _counts_otherwise(model: torch.nn.Module) -> tuple[bool, bool]:
    """Whether a model without ``position_ids`` counts by its mask, and whether by its images.

    Raises:
        ValueError: it takes none, or begins with another number than 0.
    """
    run = _inner_model(model)
    name, taken = type(run).__name__, inspect.signature(run.forward).parameters
    if "input_ids" in taken and "position_ids" not in taken:
        raise ValueError(
            f"{name} takes no position_ids: each rank would count its rows from 0, and the "
            "sequence cannot be sharded"
        )
    parts = list(run.modules())
    if any(hasattr(part, "create_position_ids_from_input_ids") for part in parts):
        raise ValueError(
            f"{name} counts positions from its input_ids, behind a number of its own: give it "
            "position_ids as it counts them"
        )
    tables = [part for part in parts if isinstance(part, torch.nn.Embedding)]
    by_mask = any("attention_mask" in inspect.signature(one.forward).parameters for one in tables)
    return by_mask, any(hasattr(part, "get_rope_index") for part in parts)


def _check_is_sharded(model: torch.nn.Module, group: dist.ProcessGroup) -> None:
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


def _inner_model(model: Any) -> torch.nn.Module:
    """The module that runs: that within torch's compiler and PEFT's adapters."""
    while True:
        if isinstance(getattr(model, "_orig_mod", None), torch.nn.Module):
            model = model._orig_mod
        elif callable(getattr(model, "get_base_model", None)):
            model = model.get_base_model()
        else:
            found: torch.nn.Module = model
            return found


def _is_over(name: str, group: dist.ProcessGroup) -> bool | None:
    """Whether the attention of that name is over the group; None: it is somebody else's."""
    from transformers import AttentionInterface

    options = options_of(name)
    if options is not None:
        return options.group is not None and options.group.group() is group
    function = AttentionInterface._global_mapping.get(name)
    own = function is None or getattr(function, "__module__", "").startswith("transformers.")
    return False if own else None


__all__ = ["sharded_positions"]
