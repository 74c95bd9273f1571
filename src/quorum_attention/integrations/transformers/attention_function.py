"""The attention function that models of Transformers call by name.

Models pass on whatever their ``forward`` was given, so there is more than an attention
needs. What is neither honoured nor known to be without effect is refused: it may change
results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from quorum_attention.api import attention
from quorum_attention.integrations.substitutes import substitutes
from quorum_attention.integrations.transformers.cached_attention import (
    attend_cached,
    cached_pairs,
)
from quorum_attention.integrations.transformers.masks import DescribedMask
from quorum_attention.integrations.transformers.options import ModelOptions
from quorum_attention.integrations.transformers.packing import warn_of_packing
from quorum_attention.integrations.transformers.segmented_tensor import SegmentedTensor
from quorum_attention.integrations.transformers_private import recorded_outputs
from quorum_attention.kernels.one_query import attend_one_query
from quorum_attention.mask import Mask
from quorum_attention.units import counted

# The attention's result is the same, whatever these are: hints for other kernels, what
# is in the mask already (positions, lengths of documents), and what a model's other
# parts read.
WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "deterministic",
        "ignore_index",
        "kernel_options",
        "labels",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "shift_labels",
        "seq_idx",
        "use_cache",
    }
)


def refuse_effects(
    keywords: Mapping[str, Any], module: Any, ignored: tuple[str, ...] = ()
) -> None:
    """Refuse keywords that may change a result, and weights asked for behind the
    attention's back.

    Transformers collects the weights that layers return, and some models (GPT-2, OPT)
    do not tell their attention. Keywords named in ``ignored`` are taken to have no
    effect.

    Raises:
        NotImplementedError: names the keyword, and what to use instead.
    """
    refused = [
        name
        for name, value in keywords.items()
        if name not in ignored and _may_have_effect(name, value)
    ]
    is_traced = torch.compiler.is_compiling()
    if not is_traced and any("attentions" in name for name in recorded_outputs()):
        refused.append("output_attentions")
    if refused:
        name = refused[0]
        raise NotImplementedError(
            f"quorum attention does not support {name!r}, asked by "
            f"{type(module).__name__}: "
            'use attn_implementation="sdpa" or "eager"; if it is new and changes no '
            f"result of attention, register(ignore=({name!r},))"
        )


def _may_have_effect(name: str, value: Any) -> bool:
    return not (value is None or value is False or name in WITHOUT_EFFECT)


def attend(
    options: ModelOptions,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """``_attend``: (batch, queries, heads, value_dim), and no weights."""
    call: Callable[..., torch.Tensor] = partial(_attend, options, module, **keywords)
    substitute = substitutes.attention
    if substitute is None:
        out = call(query, key, value, attention_mask)
    else:
        out = substitute(call, query, key, value, attention_mask)
    return out.transpose(1, 2).contiguous(), None


def _attend(
    options: ModelOptions,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | DescribedMask | BlockMask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    compute: Callable[..., torch.Tensor] = attention,
    **keywords: Any,
) -> torch.Tensor:
    """One attention of a layer, as Transformers' ``AttentionInterface`` calls it.

    Args:
        options: what ``register`` was given.
        module: the layer's attention.
        query: (batch, heads, queries, head_dim).
        key, value: (batch, kv_heads, keys, head_dim or value_dim), not repeated.
        attention_mask: a ``DescribedMask``, which says everything about which pairs are
            kept; or a tensor (batch, 1 or heads, queries, keys), boolean or additive,
            the same; or None.
        scaling, softcap, dropout: of scores, of scores, of weights.
        is_causal, sliding_window: counted where there is no mask; None: the module's
            ``is_causal``.
        s_aux: (heads,) sinks.
        position_bias: (1 or batch, heads, queries, keys), added to the scores.
        cu_seq_lens_q, cu_seq_lens_k: (documents + 1,) where packed documents begin, and
            the end.
        compute: in place of ``attention``.
        keywords: refused if they may change results.

    Returns:
        (batch, heads, queries, value_dim).
    """
    refuse_effects(keywords, module, options.ignore)
    documents = _document_ids(query, cu_seq_lens_q, cu_seq_lens_k)
    if isinstance(key, SegmentedTensor):
        pairs = cached_pairs(attention_mask, query, key.shape[2])
        has_extras = documents is not None or position_bias is not None or dropout > 0.0
        if pairs is not None and not has_extras:
            return attend_cached(
                query, key, pairs, scaling=scaling, softcap=softcap, sinks=s_aux
            )
        key, value = key.layer.concatenated()
    is_described = isinstance(attention_mask, (DescribedMask, BlockMask))
    if query.shape[2] == 1 and documents is None and not is_described:
        return _decode(
            module,
            query,
            key,
            value,
            _cut_keys(attention_mask, key),
            position_bias,
            scaling=scaling,
            dropout=dropout,
            softcap=softcap,
            sinks=s_aux,
        )
    mask, n_seen = _mask(module, query, key, attention_mask, is_causal, sliding_window)
    if documents is not None:
        mask = mask & Mask(documents=documents)
    elif "position_ids" in keywords:
        warn_of_packing(module, attention_mask, keywords["position_ids"])
    key, value = _seen_keys(mask, n_seen, key, value)
    mask = _with_bias(mask, _cut_keys(position_bias, key))
    mask = _with_softcap_and_sinks(mask, softcap, s_aux)
    return _compute(options, compute, query, key, value, mask, scaling, dropout)


def _compute(
    options: ModelOptions,
    compute: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """Attend under a mask; short calls without a mask of their own are torch's."""
    is_plain = _is_plain(mask, query, key)
    call_options = options.of_call()
    if is_plain and query.shape[2] < options.shortest:
        compute = torch.nn.functional.scaled_dot_product_attention
        call_options = {}
    return compute(
        query,
        key,
        value,
        None if is_plain else mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=is_plain and bool(mask.causal),
        enable_gqa=query.shape[1] != key.shape[1],
        **call_options,
    )


def _with_softcap_and_sinks(
    mask: Mask, softcap: float | None, sinks: torch.Tensor | None
) -> Mask:
    if softcap is None and sinks is None:
        return mask
    return replace(mask, softcap=softcap, sinks=sinks)


def _seen_keys(
    mask: Mask, n_seen: int, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values without those that no query sees, if no tensor of the mask is for
    them."""
    if n_seen == key.shape[2] or not has_only(
        mask, "causal", "offset", "window", "chunk"
    ):
        return key, value
    return key[:, :, :n_seen], value[:, :, :n_seen]


def _cut_keys(tensor: Any, key: torch.Tensor) -> Any:
    """A tensor (..., keys) without what it has beyond the last key; None for None."""
    return None if tensor is None else tensor[..., : key.shape[2]]


def _is_plain(mask: Mask, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether a mask says no more than ``is_causal`` can."""
    if not has_only(mask, "causal", "offset"):
        return False
    is_square = mask.offset in (None, 0) and query.shape[2] == key.shape[2]
    return is_square or not mask.causal


def _mask(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | DescribedMask | BlockMask | None,
    is_causal: bool | None,
    sliding_window: int | None,
) -> tuple[Mask, int]:
    """The mask of a call, and how many keys any query may see."""
    n_queries = query.shape[2]
    n_keys = key.shape[2]
    name = type(module).__name__
    if isinstance(attention_mask, DescribedMask):
        if attention_mask.shape[2:] != (n_queries, n_keys):
            raise ValueError(
                f"{name} was given a mask of {_lengths(*attention_mask.shape[2:])} for "
                f"{_lengths(n_queries, n_keys)}, so it computes with its mask: use "
                'attn_implementation="sdpa" or "eager"'
            )
        return attention_mask.on(query.device), min(attention_mask.seen, n_keys)
    if isinstance(attention_mask, BlockMask):
        return Mask(keeps=attention_mask.mask_mod), n_keys
    if attention_mask is None:
        causal = causal_of(module, is_causal)
        if causal and n_queries != n_keys:
            raise ValueError(
                f"{name} asks for causal attention of {_lengths(n_queries, n_keys)} "
                "without a mask: the position of the first query among the keys is "
                "unknown"
            )
        return Mask(
            causal=causal, window=_window(sliding_window, causal, query, key)
        ), n_keys
    is_whole = attention_mask.dim() == 4 and attention_mask.shape[2] in (1, n_queries)
    if not is_whole or attention_mask.shape[3] < n_keys:
        raise ValueError(
            f"{name} was given a mask of shape {tuple(attention_mask.shape)} for "
            f"{_lengths(n_queries, n_keys)}: it must be (batch, heads, queries, keys)"
        )
    return Mask(bias=_cut_keys(attention_mask, key)), n_keys


def _window(
    sliding_window: int | None, causal: bool, query: torch.Tensor, key: torch.Tensor
) -> tuple[int, int] | None:
    """The window of a call without a mask; None if it reaches all keys."""
    if sliding_window is None or sliding_window >= max(query.shape[2], key.shape[2]):
        return None
    return sliding_window - 1, -1 if causal else sliding_window - 1


def _lengths(n_queries: int, n_keys: int) -> str:
    return f"{counted(n_queries, 'query', 'queries')} and {counted(n_keys, 'key')}"


def causal_of(module: torch.nn.Module, is_causal: bool | None) -> bool:
    """Whether a call without a mask is causal."""
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if causal is None:
        raise ValueError(
            f"{type(module).__name__} gives its attention neither a mask nor "
            "is_causal, so it is unknown whether it is causal"
        )
    return bool(causal)


def _document_ids(
    query: torch.Tensor, begin_q: Any, begin_k: Any
) -> torch.Tensor | None:
    """The ids of the documents that queries and keys are in; None if they are not
    packed."""
    if begin_q is None and begin_k is None:
        return None
    if begin_q is None or begin_k is None:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be given both")
    if query.shape[0] != 1:
        raise ValueError(
            "cu_seq_lens are for packed documents in one row, got a batch of "
            f"{query.shape[0]}"
        )
    if begin_q is not begin_k and not torch.equal(begin_q, begin_k):
        raise NotImplementedError(
            "quorum attention does not support cu_seq_lens_q unlike cu_seq_lens_k"
        )
    positions = torch.arange(query.shape[2], device=query.device)
    return torch.searchsorted(begin_q.to(positions), positions, right=True)


def has_only(mask: Mask, *fields: str) -> bool:
    """Whether a mask has no other fields than these."""
    return all(name in fields for name in mask.set_fields())


def _with_bias(mask: Mask, bias: torch.Tensor | None) -> Mask:
    """The mask with ``bias`` added to the scores, and to a bias that it has."""
    if bias is None:
        return mask
    if mask.bias is None:
        return replace(mask, bias=bias)
    if mask.bias.dtype == torch.bool:
        return replace(mask, bias=bias.masked_fill(~mask.bias, -torch.inf))
    return replace(mask, bias=bias + mask.bias)


def _decode(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    *,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend by one query, as a step of decoding does: (batch, heads, 1, value_dim).

    Its scores are no larger than the keys, so nothing is cut.
    """
    takes_bias = bias is None or bias.dtype in (torch.bool, query.dtype)
    if softcap is not None or sinks is not None or not takes_bias:
        mask = _with_bias(Mask(bias=bias, softcap=softcap, sinks=sinks), position_bias)
        return _attend_by_formula(query, key, value, mask, scaling, dropout)
    is_bias_of_keys = bias is None or (bias.dim() == 4 and bias.shape[1] == 1)
    if is_bias_of_keys and position_bias is None:
        return attend_one_query(
            query, key, value, bias=bias, scale=scaling, dropout=dropout
        )
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    out: torch.Tensor = sdpa_attention_forward(
        module,
        query,
        key,
        value,
        bias,
        dropout=dropout,
        scaling=scaling,
        is_causal=False,
        position_bias=position_bias,
    )[0]
    return out.transpose(1, 2)


def _attend_by_formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """Attend by one query under a bias, a soft cap and sinks: (batch, heads, 1,
    value_dim)."""
    batch, heads, _, head_dim = query.shape
    kv_heads, n_keys = key.shape[1:3]
    grouped = (batch, kv_heads, heads // kv_heads, -1)
    if scaling is None:
        scaling = head_dim**-0.5
    products = query.reshape(grouped) @ key.mT
    scores = products.reshape(batch, heads, 1, -1)
    scores_dtype = torch.promote_types(scores.dtype, torch.float32)
    scores = scores.to(scores_dtype) * scaling
    if mask.softcap is not None:
        scores = mask.softcap * torch.tanh(scores / mask.softcap)
    if mask.bias is not None and mask.bias.dtype == torch.bool:
        scores = scores.masked_fill(~mask.bias, -torch.inf)
    elif mask.bias is not None:
        scores = scores + mask.bias
    if mask.sinks is not None:
        sinks = mask.sinks.reshape(1, -1, 1, 1)
        sinks = sinks.expand(batch, -1, 1, 1).to(scores)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)
    weights = weights[..., :n_keys].nan_to_num()  # a row without a key is 0
    weights = weights.to(value.dtype)
    weights = torch.nn.functional.dropout(weights, dropout, training=dropout > 0)
    out = weights.reshape(grouped) @ value
    return out.reshape(batch, heads, 1, -1)
