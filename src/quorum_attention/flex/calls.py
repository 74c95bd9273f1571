"""The function that stands in place of FlexAttention's, and where it is put.

A ``block_mask`` becomes ``Mask(keeps=)``; a ``score_mod`` becomes a kernel of
``from_score_mod``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from threading import Lock
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from quorum_attention.api import attention_with_lse
from quorum_attention.call.settings import current_settings
from quorum_attention.flex.settings import LEAST_TOKENS_SETTING
from quorum_attention.kernels.kit import from_score_mod
from quorum_attention.kernels.kit.learned import (
    LearnedScoreModKernel,
    learned_tables,
    with_table_gradients,
)
from quorum_attention.kernels.kit.score_mod import ScoreModKernel
from quorum_attention.kernels.torch_private import PLAIN, uncompiled
from quorum_attention.mask import Mask
from quorum_attention.plain_types import Keywords

_Flex = Callable[..., Any]
_PairTest = Callable[..., torch.Tensor]
_NAME = "flex_attention"
_PACKAGE = "quorum_attention"

_lock = Lock()
_original: _Flex = torch_flex.flex_attention
# How many blocks are open, in all threads.
_n_open = 0
# The pair test of a block mask is kept while the mask lives: blocks are found once for
# a function.
_pair_tests: WeakKeyDictionary[BlockMask, _PairTest] = WeakKeyDictionary()


def count_blocks(change: int) -> None:
    """Count a block that opens (1) or closes (-1), and have our function in place while
    any is open."""
    global _n_open
    with _lock:
        was_open = _n_open > 0
        _n_open += change
        if was_open == (_n_open > 0):
            return
        former = _flex_attention if was_open else _original
        replacement = _original if was_open else _flex_attention
        for module in _users_of(former):
            setattr(module, _NAME, replacement)


def _users_of(function: _Flex) -> list[ModuleType]:
    """Return torch's module and all that imported the function by name, but this
    package's."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and not name.startswith(f"{_PACKAGE}.")
    ]
    return [module for module in modules if vars(module).get(_NAME) is function]


@wraps(_original)
def _flex_attention(*args: Any, **named: Any) -> Any:
    """The function that stands in place of torch's.

    ``torch.compile`` of it compiles this call alone: a function that is itself marked
    as uncompiled would be taken out of its mark.
    """
    return _attend(*args, **named)


@uncompiled
def _attend(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., torch.Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Compute a call, with the arguments of torch's function."""
    is_taken = _is_taken(query, key, value, block_mask, return_aux)
    if not (is_taken and _sizes_agree(query, key, value, enable_gqa)):
        return _original(
            query,
            key,
            value,
            score_mod,
            block_mask,
            scale,
            enable_gqa,
            return_lse,
            kernel_options,
            return_aux=return_aux,
        )
    pair_test = None if block_mask is None else _pair_test_of(block_mask)
    named: Keywords = {"scale": scale, "enable_gqa": enable_gqa}
    kernel = None
    if score_mod is not None:
        kernel = _kernel_of(score_mod, pair_test)
        named["kernel"] = kernel
    elif pair_test is not None:
        named["attn_mask"] = Mask(keeps=pair_test)
    out, lse = attention_with_lse(query, key, value, **named)
    if isinstance(kernel, LearnedScoreModKernel):
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        inputs = (query, key, value)
        out, lse = with_table_gradients(kernel, inputs, factor, (out, lse))
    if return_aux is not None:
        return out, torch_flex.AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _kernel_of(
    score_mod: Callable[..., torch.Tensor], pair_test: _PairTest | None
) -> ScoreModKernel:
    """Return the kernel of a call with a score modification."""
    if torch.is_grad_enabled() and learned_tables(score_mod):
        return LearnedScoreModKernel(score_mod, pair_test, "flex, learned")
    return from_score_mod(score_mod, pair_test)


def _is_taken(
    query: Any, key: Any, value: Any, block_mask: BlockMask | None, return_aux: Any
) -> bool:
    """Tell whether a call is ours: of plain tensors, long enough, with a mask of its
    lengths."""
    settings = current_settings() or {}
    min_tokens = settings.get(LEAST_TOKENS_SETTING, sys.maxsize)
    if any(
        type(tensor) not in PLAIN or tensor.dim() != 4 for tensor in (query, key, value)
    ):
        return False
    n_queries = query.shape[2]
    n_keys = key.shape[2]
    if n_queries <= 1 or max(n_queries, n_keys) < min_tokens:
        return False
    if return_aux is not None and return_aux.max_scores:
        return False
    return block_mask is None or _has_lengths(block_mask, n_queries, n_keys)


def _sizes_agree(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> bool:
    """Tell whether tensors have one dtype, one batch size, and heads that need no
    broadcasting. torch computes other calls, or says what is wrong with them."""
    if not (query.dtype == key.dtype == value.dtype):
        return False
    if not (len(query) == len(key) == len(value)):
        return False
    query_heads = query.shape[1]
    key_heads = key.shape[1]
    value_heads = value.shape[1]
    if key_heads != value_heads:
        return False
    return enable_gqa or query_heads == key_heads


def _has_lengths(block_mask: BlockMask, n_queries: int, n_keys: int) -> bool:
    """Tell whether a mask is for these lengths. torch says of any other what is wrong
    with it."""
    return tuple(block_mask.shape[-2:]) == (n_queries, n_keys)


def _pair_test_of(block_mask: BlockMask) -> _PairTest:
    """Return the function of a pair (batch, head, query, key) that a mask keeps.

    A mask lists full blocks, which it keeps whole, and partial ones, of which it keeps
    what its ``mask_mod`` says. Nothing else is kept, whatever ``mask_mod`` says.
    """
    pair_test = _pair_tests.get(block_mask)
    if pair_test is not None:
        return pair_test
    block_rows, block_columns = block_mask.BLOCK_SIZE
    mask_mod = block_mask.mask_mod
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = torch.zeros_like(partial)
    if (
        block_mask.full_kv_num_blocks is not None
        and block_mask.full_kv_indices is not None
    ):
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    n_batch, n_heads = partial.shape[:2]

    def keeps(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        # A mask of one entry or head is for all.
        block = (b % n_batch, h % n_heads, q // block_rows, k // block_columns)
        is_kept = mask_mod(b, h, q, k)
        return full[block] | (partial[block] & is_kept)

    _pair_tests[block_mask] = keeps
    return keeps


def _listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return which blocks of keys each block of queries lists.

    Args:
        counts: (batch, heads, query_blocks) how many.
        indices: (batch, heads, query_blocks, key_blocks) their numbers, then anything.

    Returns:
        (batch, heads, query_blocks, key_blocks), boolean.
    """
    dense: torch.Tensor = BlockMask.from_kv_blocks(counts, indices).to_dense()
    return dense.bool()
