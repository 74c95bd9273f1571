"""A model whose sequence is sharded over the ranks of a group: its masks and its
attention.

Each rank runs the model on its own rows. Transformers makes masks of these rows alone;
what they mean for the whole sequence is found when the first layer calls its attention:
the ranks tell each other what their masks ask for, then positions and padding, a number
or two for each token. Other layers of that forward use what was found.

Where a rank's rows are in the whole sequence ``position_ids`` say. Most models count
from 0 where they are given none, and each rank's would: ``sharded_positions`` fills
them in. Models that count otherwise, by padding, by their input, or by images, are
refused there.
"""

from __future__ import annotations

import inspect
import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from quorum_attention import distributed
from quorum_attention.call.block import CallBlock
from quorum_attention.distributed.agreement import compare
from quorum_attention.distributed.groups import all_gather_objects, deref_group
from quorum_attention.integrations.substitutes import substitutes
from quorum_attention.integrations.transformers.attention_function import (
    attend,
    causal_of,
    refuse_effects,
)
from quorum_attention.integrations.transformers.mask_symbols import (
    Equal,
    KeptPairs,
    MaskFunction,
    MaskSizes,
    Near,
    UnknownError,
    conditions_of,
    mask_of_conditions,
)
from quorum_attention.integrations.transformers.masks import DescribedMask
from quorum_attention.integrations.transformers.options import (
    ModelOptions,
    options_of,
)
from quorum_attention.integrations.transformers_private import (
    attention_name,
    configurations_in,
)
from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.mask import Mask
from quorum_attention.plain_types import Keywords

Conditions = tuple[Near | Equal, ...]
"""Conditions by position, which ranks can compare."""


def mask_conditions(function: MaskFunction) -> tuple[Conditions | None, bool]:
    """The conditions of a mask function, and whether these rows are of several
    documents."""
    try:
        conditions = conditions_of(function).conditions
    except UnknownError:
        return None, False
    is_packed = any(isinstance(c, Equal) and c.chunk == 1 for c in conditions)
    by_position: set[Near | Equal] = set()
    for condition in conditions:
        if isinstance(condition, Near) and (is_packed or condition.counts is None):
            by_position.add(condition._replace(counts=None))
        elif not isinstance(condition, Equal):
            return None, False
        elif condition.chunk > 1:  # documents are found by the positions of all ranks
            by_position.add(condition._replace(ids=None))
    return tuple(sorted(by_position, key=repr)), is_packed


class ShardedMask(DescribedMask):
    """The mask of this rank's rows, until it is known for the whole sequence.

    Attributes:
        conditions, packed: ``mask_conditions`` of its function.
        padding: (batch, rows) bool, True where a token is none; None: there is none.
        lengths: rows of every rank; None until ``mask`` is that of the whole sequence.
    """

    def __init__(
        self,
        conditions: Conditions | None,
        packed: bool,
        padding: torch.Tensor | None,
        sizes: tuple[int, int, int, int],
    ) -> None:
        n_keys = sizes[-1]
        super().__init__(Mask(), sizes, n_keys)
        self.conditions = conditions
        self.packed = packed
        self.padding = padding
        self.lengths: tuple[int, ...] | None = None

    def _cut(self, block: CallBlock) -> Mask:
        """Refuse a part: the whole is not known until all ranks have told each
        other."""
        raise self._refusal("[...]")


@uncompiled
def sharded_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: torch.Tensor | ShardedMask | None = None,
    **options: Any,
) -> ShardedMask:
    """As ``quorum_mask``, of this rank's rows."""
    from transformers import masking_utils

    if isinstance(attention_mask, ShardedMask):
        return attention_mask
    function = mask_function or masking_utils.causal_mask_function
    padding = None
    if attention_mask is not None:
        padding = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    has_empty_cache = q_length == kv_length and int(q_offset) == kv_offset
    fits = padding is None or padding.shape[1] == kv_length
    conditions, packed = None, False
    if has_empty_cache and fits:
        conditions, packed = mask_conditions(function)
    return ShardedMask(
        conditions, packed, padding, (batch_size, 1, q_length, kv_length)
    )


def _mask_of_group(
    mask: ShardedMask, group: dist.ProcessGroup, positions: Any, device: torch.device
) -> tuple[Mask, tuple[int, ...]]:
    """The mask of the whole sequence, and the rows of every rank; all ranks ask
    together.

    Raises:
        NotImplementedError, ValueError: a mask that cannot be honoured; ranks that do
            not agree: on all ranks.
    """
    batch = mask.shape[0]
    conditions = mask.conditions or ()
    answers, has_positions = _compare_masks(mask, group, positions)
    lengths, packed, refusals, rank_positions, paddings = zip(*answers, strict=True)
    if any(refusals):
        raise NotImplementedError(
            "attention over a group supports causal masks, windows, chunks, padding "
            "and documents packed by position_ids (batch, rows); this model asks for "
            "another mask, chunks behind left padding, positions of another shape, or "
            "a cache with keys"
        )
    may_have_documents = _is_causal(conditions) and not any(
        p is not None for p in paddings
    )
    if may_have_documents and not has_positions:
        raise NotImplementedError(
            "this model does not hand position_ids to its attention, so packed "
            "documents cannot be told apart: give attention_mask (batch, rows), of "
            "ones if there is no padding, which says that there are none"
        )
    is_token = [
        torch.ones((batch, length), dtype=torch.bool) if padding is None else padding
        for padding, length in zip(paddings, lengths, strict=True)
    ]
    if has_positions:
        _check_places(rank_positions, is_token)
        # As Transformers: a mask of padding says that there is one document, and a mask
        # in both directions does not ask.
        if may_have_documents:
            conditions = _with_documents(conditions, rank_positions, any(packed))
    n_tokens = sum(lengths)
    sizes = MaskSizes(batch, n_tokens, n_tokens, 0, 0, device)
    kept_keys = torch.cat(is_token, dim=1)
    key_padding = None if bool(kept_keys.all()) else kept_keys.to(device)
    return mask_of_conditions(KeptPairs(*conditions), sizes, key_padding), lengths


def _compare_masks(
    mask: ShardedMask, group: dist.ProcessGroup, positions: Any
) -> tuple[list[Any], bool]:
    """Tell the other ranks what this rank's mask asks for.

    Returns:
        For each rank its (rows, whether they are packed, whether its mask is refused,
        positions, padding); and whether ranks have positions.
    """
    batch, _, rows, _ = mask.shape
    has_positions = _is_of_rows(positions, batch, rows)
    is_refused = mask.conditions is None or (
        positions is not None and not has_positions
    )
    conditions = mask.conditions or ()
    answers = compare(
        group,
        {
            "call": "a mask",
            "conditions": repr(conditions),
            "batch": batch,
            "placed": has_positions,
        },
        rows,
        mask.packed,
        is_refused,
        _on_host(positions if has_positions else None, batch, rows),
        _on_host(None if is_refused else mask.padding, batch, rows),
    )
    return answers, has_positions


def _is_causal(conditions: Conditions) -> bool:
    return any(isinstance(c, Near) and c.after == 0 for c in conditions)


def _is_of_rows(positions: Any, batch: int, rows: int) -> bool:
    """Whether ``positions`` are a tensor with one number for each row."""
    if not isinstance(positions, torch.Tensor):
        return False
    return positions.shape in ((rows,), (1, rows), (batch, rows))


def _on_host(
    numbers: torch.Tensor | None, batch: int, rows: int
) -> torch.Tensor | None:
    return None if numbers is None else numbers.expand(batch, rows).cpu()


def _with_documents(
    conditions: Conditions,
    rank_positions: tuple[torch.Tensor, ...],
    packed: bool,
) -> Conditions:
    """Conditions within packed documents, if there are any (``_documents``)."""
    documents = _documents(rank_positions, packed)
    if documents is None:
        return conditions
    positions = torch.cat(rank_positions, dim=1)
    within_documents = (
        condition._replace(ids=positions) if isinstance(condition, Equal) else condition
        for condition in conditions
    )
    return (*within_documents, Equal(documents, 1))


def _documents(
    rank_positions: tuple[torch.Tensor, ...], packed: bool
) -> torch.Tensor | None:
    """Ids of documents, which begin where positions do not go up by one; None: one
    only.

    Args:
        rank_positions: of each rank's rows.
        packed: whether a rank's mask says that there are some among its rows. If none
            does though there are, the model (or its cache) does not ask for documents.

    Raises:
        ValueError: documents begin with the rows of ranks alone, of which masks say
            nothing.
    """
    begins = torch.cat(rank_positions, dim=1).diff() != 1
    if not bool(begins.any()):
        return None
    if not packed:
        if any(bool((positions.diff() != 1).any()) for positions in rank_positions):
            return None
        raise ValueError(
            "position_ids go up by one within each rank's rows, but not from one rank "
            "to the next, so it is unknown whether documents begin there: give "
            "attention_mask (batch, rows) of ones if there is one document, or cut "
            "the sequence elsewhere"
        )
    return torch.nn.functional.pad(begins.cumsum(1), (1, 0))


def _check_places(
    rank_positions: tuple[torch.Tensor, ...], is_token: list[torch.Tensor]
) -> None:
    """Refuse positions that begin at 0 on every rank and go up by one: their places are
    missing.

    The positions of padding mean nothing (``generate`` has 0 there), and are not looked
    at.

    Raises:
        ValueError: they do.
    """
    begins_at_zero = [
        bool(((positions == torch.arange(positions.shape[1])) | ~tokens).all())
        for positions, tokens in zip(rank_positions, is_token, strict=True)
        if tokens.any()
    ]
    if len(begins_at_zero) > 1 and all(begins_at_zero):
        raise ValueError(
            "position_ids begin at 0 on every rank: give each rank its own positions "
            "in the sequence, or call sharded_positions(model, group=...) once (if "
            "each rank holds a document of its own, attention needs no group)"
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
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """One attention of a layer over the sequence of all ranks; arguments as in
    ``attend``."""
    refuse_effects({name: keywords.pop(name, None) for name in _IN_ONE_PROCESS}, module)
    if substitutes.attention is not None:
        raise NotImplementedError("a layer of ranks is never computed in tiles")
    name = type(module).__name__
    if query.shape[2] != key.shape[2]:
        raise NotImplementedError(
            "attention over a group takes as many queries as keys on each rank; "
            f"{name} gives {query.shape[2]} and {key.shape[2]}, from a cache: generate "
            "in one process"
        )
    if attention_mask is None:
        side = None if sliding_window is None else sliding_window - 1
        near = Near(None, side, 0 if causal_of(module, is_causal) else side)
        batch, _, rows, _ = query.shape
        attention_mask = ShardedMask((near,), False, None, (batch, 1, rows, rows))
    if not isinstance(attention_mask, ShardedMask):
        raise NotImplementedError(
            f"attention over a group makes its masks itself; {name} was given one of "
            f"shape {tuple(attention_mask.shape)}"
        )
    assert options.group is not None
    group = deref_group(options.group.group)
    if attention_mask.lengths is None:
        mask, lengths = _mask_of_group(
            attention_mask, group, position_ids, query.device
        )
        _check_layers(module, sum(lengths))
        attention_mask.mask = mask
        attention_mask.lengths = lengths
    compute = partial(
        distributed.attention, group=group, lengths=attention_mask.lengths
    )
    return attend(
        options, module, query, key, value, attention_mask, compute=compute, **keywords
    )


_IN_ONE_PROCESS = ("position_bias", "cu_seq_lens_q", "cu_seq_lens_k")
# Kinds of layers, as configurations name them, in which tokens meet in attention alone:
# others are recurrences, convolutions, and keys that are chosen or compressed beside
# the attention.
_ATTENTION_ALONE = frozenset(
    {
        "attention",
        "chunked_attention",
        "full_attention",
        "sliding_attention",
        "window_attention",
        "dense",
        "mlp",
        "moe",
        "sparse",
    }
)


def _check_layers(module: torch.nn.Module, n_tokens: int) -> None:
    """Refuse a model that mixes tokens elsewhere than in attention, given one of its
    attentions.

    Raises:
        NotImplementedError: it has layers of another kind, which see this rank's rows
            alone; or it scales queries by a count of these (Llama 4, which begins to at
            ``floor_scale``).
    """
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or getattr(
        config, "layers_block_type", None
    )
    refused = sorted({str(kind) for kind in kinds or ()} - _ATTENTION_ALONE)
    if refused:
        raise NotImplementedError(
            "only attention reaches other ranks, and this model has layers "
            f"{', '.join(refused)}, which mix tokens too: each rank's rows would see "
            "only each other there"
        )
    scales_queries = (
        getattr(module, "attn_temperature_tuning", False) and not module.use_rope
    )
    if scales_queries and n_tokens >= getattr(module, "floor_scale", 0):
        raise NotImplementedError(
            f"{type(module).__name__} scales queries by a count of tokens, which would "
            f"begin at 0 on each rank: it can be sharded below {module.floor_scale} of "
            "them"
        )


def sharded_positions(
    model: torch.nn.Module, *, group: dist.ProcessGroup | None = None
) -> torch.utils.hooks.RemovableHandle:
    """Let a model's forward fill in ``position_ids`` of the whole sequence, in calls
    that give none.

    In each such forward the ranks first tell each other how many rows they have, and
    the host waits for that. The forward raises ``ValueError`` if the model's attention
    is not over the group. If a rank has no rows, it raises on all ranks.

    Args:
        model: called with ``input_ids`` or ``inputs_embeds`` (batch, rows, ...) by
            name.
        group: the process group over which the sequence is sharded; None is the default
            group.

    Returns:
        A handle. Its ``remove()`` undoes the change.

    Raises:
        ValueError: the model takes no ``position_ids``, or counts positions in its own
            way (by its inputs, padding or images).
    """
    reference = None if group is None else weakref.ref(group)
    del group  # the function below would keep it
    _check_counts_from_zero(model)

    def add_positions(
        model: torch.nn.Module, args: Any, keywords: Keywords
    ) -> tuple[Any, Keywords]:
        if keywords.get("position_ids") is not None:
            return args, keywords
        ids = keywords.get("input_ids")
        if ids is None:
            ids = keywords.get("inputs_embeds")
        if ids is None:
            raise TypeError(
                "a sharded model must be given input_ids or inputs_embeds by name"
            )
        everyone = dist.group.WORLD if reference is None else deref_group(reference)
        assert everyone is not None
        _check_is_over_group(model, everyone)
        positions = _positions_of_rank(ids.shape[1], everyone, ids.device)
        return args, {**keywords, "position_ids": positions}

    return model.register_forward_pre_hook(uncompiled(add_positions), with_kwargs=True)


def _check_is_over_group(model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Refuse a model whose attention is not over a group.

    Raises:
        ValueError: it is not.
    """
    config = getattr(_transformer_of(model), "config", None)
    asked_names = {attention_name(part) for part in configurations_in(config)}
    names = sorted(filter(None, asked_names))
    for name in names:
        options = options_of(name)
        if (
            options is not None
            and options.group is not None
            and options.group.group() is group
        ):
            return
    raise ValueError(
        f"the model's attention {', '.join(map(repr, names))} is not over this group: "
        "each rank's rows would see only each other; "
        "model.set_attn_implementation(register(name, group=...)) makes it so"
    )


def _positions_of_rank(
    n_rows: int, group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    """(1, n_rows) positions of this rank's rows, which the ranks tell each other.

    Raises:
        ValueError: a rank has no rows.
    """
    rows_of_ranks = [n for (n,) in all_gather_objects(group, (n_rows,))]
    if not all(rows_of_ranks):
        raise ValueError(
            "models of Transformers need at least one row on each rank, got "
            f"{rows_of_ranks}"
        )
    start = sum(rows_of_ranks[: group.rank()])
    return torch.arange(start, start + n_rows, device=device)[None]


def _transformer_of(model: torch.nn.Module) -> Any:
    """The model within torch's compiler and PEFT's adapters."""
    from transformers import PreTrainedModel

    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            return part
    return model


def _check_counts_from_zero(model: torch.nn.Module) -> None:
    """Refuse a model whose positions do not count from 0 up.

    Raises:
        ValueError: it takes none, or counts otherwise.
    """
    transformer = _transformer_of(model)
    name = type(transformer).__name__
    parameters = inspect.signature(transformer.forward).parameters
    if "input_ids" in parameters and "position_ids" not in parameters:
        raise ValueError(
            f"{name} takes no position_ids: each rank would count its rows from 0, and "
            "the sequence cannot be sharded"
        )
    for part in transformer.modules():
        if _counts_by_inputs(part):
            raise ValueError(
                f"{name} counts positions by its inputs, its attention_mask or its "
                "images: give it position_ids as it counts them"
            )


def _counts_by_inputs(part: torch.nn.Module) -> bool:
    """Whether a part of a model makes positions of what the model is given."""
    if hasattr(part, "create_position_ids_from_input_ids") or hasattr(
        part, "get_rope_index"
    ):
        return True
    if not isinstance(part, torch.nn.Embedding):
        return False
    return "attention_mask" in inspect.signature(part.forward).parameters
