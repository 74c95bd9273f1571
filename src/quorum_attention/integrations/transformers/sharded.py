"""A model whose sequence is sharded over the ranks of a group: its masks and its attention.

Each rank runs the model on its own rows. Transformers makes masks of these rows alone; what they
mean for the whole sequence is found when the first layer calls its attention: the ranks tell each
other what their masks ask for, then positions and padding, a number or two for each token. Other
layers of that forward use what was found.

Where a rank's rows are in the whole sequence ``position_ids`` say. Most models count from 0 where
they are given none, and each rank's would: ``sharded_positions`` fills them in. Models that count
otherwise, by padding, by their input, or by images, are refused there.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from quorum_attention import distributed
from quorum_attention.call.block import CallBlock
from quorum_attention.distributed.agreement import alive, compare, told
from quorum_attention.integrations.transformers import reader
from quorum_attention.integrations.transformers.attending import HERE, attend, causal_of, refuse
from quorum_attention.integrations.transformers.masks import DescribedMask
from quorum_attention.integrations.transformers.options import ModelOptions, names_of, options_of
from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.mask import Mask

# Near and Equal by position, which ranks can compare; None: anything else.
Conditions = tuple[reader.Near | reader.Equal, ...] | None


def asked_of(function: reader.MaskFunction) -> tuple[Conditions, bool]:
    """What ``function`` asks of a pair, and whether these rows are of several documents."""
    try:
        parts = reader.conditions_of(function).parts
    except reader.UnknownError:
        return None, False
    packed = any(isinstance(part, reader.Equal) and part.chunk == 1 for part in parts)
    found: set[reader.Near | reader.Equal] = set()
    for part in parts:
        if isinstance(part, reader.Near) and (packed or part.counts is None):
            found.add(part._replace(counts=None))
        elif not isinstance(part, reader.Equal):
            return None, False
        elif part.chunk > 1:  # documents are found by the positions of all ranks
            found.add(part._replace(ids=None))
    return tuple(sorted(found, key=repr)), packed


class ShardedMask(DescribedMask):
    """What a mask of this rank's rows asks for, until it is known for the whole sequence.

    Attributes:
        asked, packed: by its functions.
        padding: (batch, rows) bool, True where a token is none; None: there is none.
        lengths: rows of every rank; None until ``mask`` is that of the whole sequence.
    """

    def __init__(
        self, asked: tuple[Conditions, bool], padding: Any, sizes: tuple[int, int, int, int]
    ) -> None:
        super().__init__(Mask(), sizes, sizes[3])
        (self.asked, self.packed), self.padding = asked, padding
        self.lengths: tuple[int, ...] | None = None

    def _cut(self, block: CallBlock) -> Mask:
        """Refuse a part: the whole is not known until all ranks have told each other."""
        raise self._refusal("[...]")


@uncompiled
def sharded_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] | None = None,
    attention_mask: torch.Tensor | ShardedMask | None = None,
    **others: Any,
) -> ShardedMask:
    """As ``quorum_mask``, of this rank's rows."""
    from transformers import masking_utils

    if isinstance(attention_mask, ShardedMask):
        return attention_mask
    function = mask_function or masking_utils.causal_mask_function
    padding = None
    if attention_mask is not None:
        padding = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    empty = q_length == kv_length and int(q_offset) == kv_offset  # of a cache
    known = empty and (padding is None or padding.shape[1] == kv_length)
    asked = asked_of(function) if known else (None, False)
    return ShardedMask(asked, padding, (batch_size, 1, q_length, kv_length))


def _found(
    mask: ShardedMask, group: dist.ProcessGroup, positions: Any, device: torch.device
) -> tuple[Mask, tuple[int, ...]]:
    """The mask of the whole sequence, and the rows of every rank; all ranks ask together.

    Raises:
        NotImplementedError, ValueError: a mask that cannot be honoured; ranks that do not agree: on
            all ranks.
    """
    batch, _, rows, _ = mask.shape
    placed = isinstance(positions, torch.Tensor) and positions.shape in (
        (rows,), (1, rows), (batch, rows)
    )  # fmt: skip
    asked = mask.asked or ()
    refused = mask.asked is None or (not placed and positions is not None)
    same = {"call": "a mask", "conditions": repr(asked), "batch": batch, "placed": placed}
    numbers = (positions if placed else None, None if refused else mask.padding)
    mine = [None if one is None else one.expand(batch, rows).cpu() for one in numbers]
    listed = compare(group, same, rows, mask.packed, refused, *mine)
    sizes, packed, refusals, positions, paddings = zip(*listed, strict=True)
    if any(refusals):
        raise NotImplementedError(
            "attention over a group supports causal masks, windows, chunks, padding and documents "
            "packed by position_ids (batch, rows); this model asks for another mask, chunks behind "
            "left padding, positions of another shape, or a cache with keys"
        )
    padded = any(one is not None for one in paddings)
    causal = any(isinstance(part, reader.Near) and part.right == 0 for part in asked)
    if causal and not placed and not padded:
        raise NotImplementedError(
            "this model does not hand position_ids to its attention, so packed documents cannot be "
            "told apart: give attention_mask (batch, rows), of ones if there is no padding, which "
            "says that there are none"
        )
    kept = [
        torch.ones((batch, n), dtype=torch.bool) if one is None else one
        for one, n in zip(paddings, sizes, strict=True)
    ]
    if placed:
        _check_places(positions, kept)
        # As Transformers: a mask of padding says that there is one document, and a mask in both
        # directions does not ask.
        documents = _documents(positions, any(packed)) if causal and not padded else None
        if documents is not None:
            places = torch.cat(positions, dim=1)
            within = (p._replace(ids=places) if isinstance(p, reader.Equal) else p for p in asked)
            asked = (*within, reader.Equal(documents, 1))
    tokens = reader.MaskSizes(batch, sum(sizes), sum(sizes), 0, 0, device)
    real = torch.cat(kept, dim=1)
    padding = None if bool(real.all()) else real.to(device)
    return reader.described(reader.KeptPairs(*asked), tokens, padding), sizes


def _documents(positions: tuple[torch.Tensor, ...], packed: bool) -> torch.Tensor | None:
    """Ids of documents, which begin where positions do not go up by one; None: one only.

    Args:
        positions: of each rank's rows.
        packed: whether a rank's mask says that there are some among its rows. If none does
            though there are, the model (or its cache) does not ask for documents.

    Raises:
        ValueError: documents begin with the rows of ranks alone, of which masks say nothing.
    """
    begins = torch.cat(positions, dim=1).diff() != 1
    if not bool(begins.any()):
        return None
    if not packed:
        if any(bool((shard.diff() != 1).any()) for shard in positions):
            return None
        raise ValueError(
            "position_ids go up by one within each rank's rows, but not from one rank to the next, "
            "so it is unknown whether documents begin there: give attention_mask (batch, rows) of "
            "ones if there is one document, or cut the sequence elsewhere"
        )
    return torch.nn.functional.pad(begins.cumsum(1), (1, 0))


def _check_places(positions: tuple[torch.Tensor, ...], real: list[torch.Tensor]) -> None:
    """Refuse positions that begin at 0 on every rank and go up by one: their places are missing.

    What positions say of padding means nothing (``generate`` has 0 there), and is not looked at.

    Raises:
        ValueError: they do.
    """
    missing = [
        bool(((mine == torch.arange(mine.shape[1])) | ~kept).all())
        for mine, kept in zip(positions, real, strict=True)
        if kept.any()
    ]
    if len(missing) > 1 and all(missing):
        raise ValueError(
            "position_ids begin at 0 on every rank: give each rank its own positions in the "
            "sequence, or call sharded_positions(model, group=...) once (if each rank holds a "
            "document of its own, attention needs no group)"
        )


@uncompiled  # a graph would keep the group, and its threads, for good
def attend_sharded(
    options: ModelOptions,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | DescribedMask | None,
    *,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_ids: Any = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """One attention of a layer over the sequence of all ranks; arguments as in ``attend``."""
    refuse({name: others.pop(name, None) for name in _IN_ONE_PROCESS}, module)
    if HERE.instead is not None:
        raise NotImplementedError("a layer of ranks is never computed in tiles")
    name = type(module).__name__
    if query.shape[2] != key.shape[2]:
        raise NotImplementedError(
            f"attention over a group takes as many queries as keys on each rank; {name} gives "
            f"{query.shape[2]} and {key.shape[2]}, from a cache: generate in one process"
        )
    if attention_mask is None:
        side = None if sliding_window is None else sliding_window - 1
        near = reader.Near(None, side, 0 if causal_of(module, is_causal) else side)
        sizes = (query.shape[0], 1, query.shape[2], query.shape[2])
        attention_mask = ShardedMask(((near,), False), None, sizes)
    if not isinstance(attention_mask, ShardedMask):
        raise NotImplementedError(
            f"attention over a group makes its masks itself; {name} was given one of shape "
            f"{tuple(attention_mask.shape)}"
        )
    assert options.group is not None
    group = alive(options.group.group)
    if attention_mask.lengths is None:
        mask, lengths = _found(attention_mask, group, position_ids, query.device)
        _check_layers(module, sum(lengths))
        attention_mask.mask, attention_mask.lengths = mask, lengths
    compute = partial(distributed.attention, group=group, lengths=attention_mask.lengths)
    return attend(options, module, query, key, value, attention_mask, compute=compute, **others)


_IN_ONE_PROCESS = ("position_bias", "cu_seq_lens_q", "cu_seq_lens_k")
# Kinds of layers, as configurations name them, in which tokens meet in attention alone: others are
# recurrences, convolutions, and keys that are chosen or compressed beside the attention.
_ATTENTION_ALONE = frozenset(
    {
        "attention", "chunked_attention", "full_attention", "sliding_attention",
        "window_attention", "dense", "mlp", "moe", "sparse",
    }
)  # fmt: skip


def _check_layers(module: torch.nn.Module, tokens: int) -> None:
    """Nothing, unless the model that an attention module is of mixes tokens elsewhere, too.

    Raises:
        NotImplementedError: it has layers of another kind, which see this rank's rows alone; or it
            scales queries by a count of these (Llama 4, which begins to at ``floor_scale``).
    """
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    others = sorted({str(kind) for kind in kinds or ()} - _ATTENTION_ALONE)
    if others:
        raise NotImplementedError(
            f"only attention reaches other ranks, and this model has layers {', '.join(others)}, "
            "which mix tokens too: each rank's rows would see only each other there"
        )
    scales = getattr(module, "attn_temperature_tuning", False) and not module.use_rope
    if scales and tokens >= getattr(module, "floor_scale", 0):
        raise NotImplementedError(
            f"{type(module).__name__} scales queries by a count of tokens, which would begin at 0 "
            f"on each rank: it can be sharded below {module.floor_scale} of them"
        )


def sharded_positions(
    model: torch.nn.Module, *, group: dist.ProcessGroup | None = None
) -> torch.utils.hooks.RemovableHandle:
    """Give a model's forwards ``position_ids`` of this rank's place, where a call has none.

    Each such forward begins with the ranks telling each other their rows, for which the host waits.
    It raises ``ValueError`` if the model's attention is not over the group; and, on all ranks, if
    one has no rows.

    Args:
        model: called with ``input_ids`` or ``inputs_embeds`` (batch, rows, ...) by name.
        group: over which the sequence is sharded; None is the default one.

    Returns:
        A handle; its ``remove()`` takes it back.

    Raises:
        ValueError: the model takes no ``position_ids``, or counts them otherwise than from 0 up: by
            its inputs, padding or images.
    """
    kept = None if group is None else weakref.ref(group)
    del group  # the function below would keep it
    _check_counts_from_zero(model)

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
        config = getattr(_transformer_of(model), "config", None)
        names = sorted(set(names_of(config)))
        groups = [options.group for name in names if (options := options_of(name)) is not None]
        if not any(one is not None and one.group() is everyone for one in groups):
            raise ValueError(
                f"the model's attention {', '.join(map(repr, names))} is not over this group: each "
                "rank's rows would see only each other; "
                "model.set_attn_implementation(register(name, group=...)) makes it so"
            )
        rows = [n for (n,) in told(everyone, (ids.shape[1],))]
        if not all(rows):
            raise ValueError(
                f"models of Transformers need at least one row on each rank, got {rows}"
            )
        start = sum(rows[: everyone.rank()])
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        return args, {**named, "position_ids": positions}

    return model.register_forward_pre_hook(uncompiled(placed), with_kwargs=True)


def _transformer_of(model: torch.nn.Module) -> Any:
    """The model within torch's compiler and PEFT's adapters."""
    from transformers import PreTrainedModel

    return next((part for part in model.modules() if isinstance(part, PreTrainedModel)), model)


def _check_counts_from_zero(model: torch.nn.Module) -> None:
    """Nothing, if the model's positions count from 0 up.

    Raises:
        ValueError: it takes none, or counts otherwise.
    """
    run = _transformer_of(model)
    name = type(run).__name__
    taken = inspect.signature(run.forward).parameters
    if "input_ids" in taken and "position_ids" not in taken:
        raise ValueError(
            f"{name} takes no position_ids: each rank would count its rows from 0, and the "
            "sequence cannot be sharded"
        )
    own = ("create_position_ids_from_input_ids", "get_rope_index")
    for part in run.modules():
        is_table = isinstance(part, torch.nn.Embedding)
        by_mask = is_table and "attention_mask" in inspect.signature(part.forward).parameters
        if by_mask or any(hasattr(part, one) for one in own):
            raise ValueError(
                f"{name} counts positions by its inputs, its attention_mask or its images: give it "
                "position_ids as it counts them"
            )
