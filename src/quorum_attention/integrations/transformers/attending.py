"""The attention function that models of Transformers call by name.

Models pass on whatever their ``forward`` was given, so there is more than an attention needs. What
is neither honoured nor known to be without effect is refused: it may change results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from quorum_attention.api import attention
from quorum_attention.integrations.transformers.cached_attention import (
    attend_cached,
    cached_pairs,
)
from quorum_attention.integrations.transformers.masks import DescribedMask
from quorum_attention.integrations.transformers.options import ModelOptions
from quorum_attention.integrations.transformers.packing import warn_of_packing
from quorum_attention.integrations.transformers.segmented_tensor import SegmentedTensor
from quorum_attention.mask import Mask
from quorum_attention.units import counted

# Of these the attention's result is the same, whatever they are: hints for other kernels, what is
# in the mask already (positions, lengths of documents), and what a model's other parts read.
WITHOUT_EFFECT = frozenset({
    "cache_position", "deterministic", "ignore_index", "kernel_options", "labels",
    "logits_to_keep", "max_length_k", "max_length_q", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "position_ids", "return_dict", "shift_labels", "seq_idx", "use_cache",
})  # fmt: skip


def refuse(others: Mapping[str, Any], module: Any) -> None:
    """Nothing, if no keyword is among ``others`` that may change a result, nor weights are asked
    for behind the attention's back: Transformers collects those that layers return, and some
    models (GPT-2, OPT) do not tell their attention.

    Raises:
        NotImplementedError: names the keyword, and what to use instead.
    """
    asked = [
        name
        for name, value in others.items()
        if not (value is None or value is False or name in WITHOUT_EFFECT)
    ]
    if not torch.compiler.is_compiling():
        from transformers.utils.output_capturing import _active_collector

        if any("attentions" in name for name in _active_collector.get() or ()):
            asked.append("output_attentions")
    if asked:
        raise NotImplementedError(
            f"quorum attention does not support {asked[0]!r}, asked by {type(module).__name__}: "
            'use attn_implementation="sdpa" or "eager"'
        )


class _Here(threading.local):  # torch's compiler reads it
    """Of this thread: ``instead(call, query, key, value, attention_mask)`` in place of an
    attention, which ``call`` of these computes: (batch, heads, queries, value_dim)."""

    instead: Callable[..., torch.Tensor] | None = None


HERE = _Here()


def attend(
    options: ModelOptions, module: torch.nn.Module, *given: Any, **named: Any
) -> tuple[torch.Tensor, None]:
    """``_attend``: (batch, queries, heads, value_dim), and no weights."""
    call = partial(_attend, options, module, **named)
    out = call(*given) if HERE.instead is None else HERE.instead(call, *given)
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
    **others: Any,
) -> torch.Tensor:
    """One attention of a layer, as Transformers' ``AttentionInterface`` calls it.

    Args:
        options: what ``register`` was given.
        module: the layer's attention.
        query: (batch, heads, queries, head_dim).
        key, value: (batch, kv_heads, keys, head_dim or value_dim), not repeated.
        attention_mask: a ``DescribedMask``, which says everything about which pairs are kept; or a
            tensor (batch, 1 or heads, queries, keys), boolean or additive, the same; or None.
        scaling, softcap, dropout: of scores, of scores, of weights.
        is_causal, sliding_window: counted where there is no mask; None: the module's ``is_causal``.
        s_aux: (heads,) sinks.
        position_bias: (1 or batch, heads, queries, keys), added to the scores.
        cu_seq_lens_q, cu_seq_lens_k: (documents + 1,) where packed documents begin, and the end.
        compute: in place of ``attention``.
        others: refused if they may change results.

    Returns:
        (batch, heads, queries, value_dim).
    """
    refuse(others, module)
    packed = cu_seq_lens_q is not None or cu_seq_lens_k is not None
    if isinstance(key, SegmentedTensor):
        pairs = cached_pairs(attention_mask, query, key.shape[2])
        if pairs is not None and not packed and position_bias is None and dropout == 0.0:
            return attend_cached(query, key, pairs, scaling=scaling, softcap=softcap, sinks=s_aux)
        key, value = key.layer.concatenated()
    described = isinstance(attention_mask, (DescribedMask, BlockMask))
    if query.shape[2] == 1 and not packed and not described:
        # A step of decoding: its scores are no larger than the keys, so nothing is cut.
        given: Any = attention_mask
        given = None if given is None else given[..., : key.shape[2]]
        fits = given is None or given.dtype in (torch.bool, query.dtype)
        if softcap is None and s_aux is None and fits:
            from transformers.integrations.sdpa_attention import sdpa_attention_forward

            result: torch.Tensor = sdpa_attention_forward(
                module, query, key, value, given, dropout=dropout, scaling=scaling,
                is_causal=False, position_bias=position_bias,
            )[0]  # fmt: skip
            return result.transpose(1, 2)
        mask = _biased(Mask(bias=given, softcap=softcap, sinks=s_aux), position_bias)
        return _one_query(query, key, value, mask, scaling, dropout)
    mask, seen = _mask(module, query, key, attention_mask, is_causal, sliding_window)
    if not packed and "position_ids" in others:
        warn_of_packing(module, attention_mask, others["position_ids"])
    if packed:
        mask = mask & Mask(documents=_packed(query, cu_seq_lens_q, cu_seq_lens_k))
    if seen < key.shape[2] and says_only(mask, "causal", "offset", "window", "chunk"):
        key, value = key[:, :, :seen], value[:, :, :seen]
    if position_bias is not None:
        mask = _biased(mask, position_bias[..., : key.shape[2]])
    if softcap is not None or s_aux is not None:
        mask = replace(mask, softcap=softcap, sinks=s_aux)
    square = mask.offset in (None, 0) and query.shape[2] == key.shape[2]
    plain = says_only(mask, "causal", "offset") and (square or not mask.causal)
    small = plain and query.shape[2] < options.shortest
    sdpa: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention
    return (sdpa if small else compute)(
        query, key, value, None if plain else mask, dropout_p=dropout, scale=scaling,
        is_causal=plain and bool(mask.causal), enable_gqa=query.shape[1] != key.shape[1],
        **({} if small else options.of_call()),
    )  # fmt: skip


def _mask(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    given: torch.Tensor | DescribedMask | BlockMask | None,
    is_causal: bool | None,
    sliding_window: int | None,
) -> tuple[Mask, int]:
    """The mask of a call, and how many keys any query may see."""
    queries, keys = query.shape[2], key.shape[2]
    if isinstance(given, DescribedMask):
        if given.shape[2:] != (queries, keys):
            raise ValueError(
                f"{type(module).__name__} was given a mask of {_lengths(*given.shape[2:])} for "
                f"{_lengths(queries, keys)}, so it computes with its mask: use "
                'attn_implementation="sdpa" or "eager"'
            )
        return given.on(query.device), min(given.seen, keys)
    if isinstance(given, BlockMask):
        return Mask(keeps=given.mask_mod), keys
    if given is not None:
        if given.dim() != 4 or given.shape[2] not in (1, queries) or given.shape[3] < keys:
            raise ValueError(
                f"{type(module).__name__} was given a mask of shape {tuple(given.shape)} for "
                f"{_lengths(queries, keys)}: it must be (batch, heads, queries, keys)"
            )
        return Mask(bias=given[..., :keys]), keys
    causal = causal_of(module, is_causal)
    if causal and queries != keys:
        raise ValueError(
            f"{type(module).__name__} asks for causal attention of {_lengths(queries, keys)} "
            "without a mask: the position of the first query among the keys is unknown"
        )
    window = None
    if sliding_window is not None and sliding_window < max(queries, keys):
        window = (sliding_window - 1, -1 if causal else sliding_window - 1)
    return Mask(causal=causal, window=window), keys


def _lengths(queries: int, keys: int) -> str:
    return f"{counted(queries, 'query', 'queries')} and {counted(keys, 'key')}"


def causal_of(module: torch.nn.Module, is_causal: bool | None) -> bool:
    """Whether a call without a mask is causal."""
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if causal is None:
        raise ValueError(
            f"{type(module).__name__} gives its attention neither a mask nor is_causal, "
            "so it is unknown whether it is causal"
        )
    return bool(causal)


def _packed(query: torch.Tensor, begin_q: Any, begin_k: Any) -> torch.Tensor:
    """Ids of the documents that queries and keys are in."""
    if begin_q is None or begin_k is None:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be given both")
    if query.shape[0] != 1:
        raise ValueError(
            f"cu_seq_lens are for packed documents in one row, got a batch of {query.shape[0]}"
        )
    if begin_q is not begin_k and not torch.equal(begin_q, begin_k):
        raise NotImplementedError(
            "quorum attention does not support cu_seq_lens_q unlike cu_seq_lens_k"
        )
    positions = torch.arange(query.shape[2], device=query.device)
    return torch.searchsorted(begin_q.to(positions), positions, right=True)


def says_only(mask: Mask, *fields: str) -> bool:
    """Whether a mask has no other fields than these."""
    return all(name in fields for name in mask.set_fields())


def _biased(mask: Mask, bias: torch.Tensor | None) -> Mask:
    """The mask with ``bias`` added to the scores, and to a bias that it has."""
    if bias is None:
        return mask
    if mask.bias is None:
        return replace(mask, bias=bias)
    if mask.bias.dtype == torch.bool:
        return replace(mask, bias=bias.masked_fill(~mask.bias, -torch.inf))
    return replace(mask, bias=bias + mask.bias)


def _one_query(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """(batch, heads, 1, value_dim) by the formula, under a bias, a soft cap and sinks."""
    batch, heads, _, dim = query.shape
    grouped = (batch, key.shape[1], heads // key.shape[1], -1)
    scores = (query.reshape(grouped) @ key.mT).reshape(batch, heads, 1, -1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores * (dim**-0.5 if scaling is None else scaling)
    if mask.softcap is not None:
        scores = mask.softcap * torch.tanh(scores / mask.softcap)
    if mask.bias is not None:
        whole = mask.bias.dtype == torch.bool
        scores = scores.masked_fill(~mask.bias, -torch.inf) if whole else scores + mask.bias
    if mask.sinks is not None:
        sinks = mask.sinks.reshape(1, -1, 1, 1).expand(batch, -1, 1, 1)
        scores = torch.cat((scores, sinks.to(scores)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]].nan_to_num()  # a row without a key is 0
    weights = torch.nn.functional.dropout(weights.to(value.dtype), dropout, training=dropout > 0)
    return (weights.reshape(grouped) @ value).reshape(batch, heads, 1, -1)
