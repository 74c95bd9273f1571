"""Which way runs the whole calls of a mask of tokens: with a bias, packed, or by
blocks."""

from __future__ import annotations

from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.masked.costs import (
    blocks_of,
    cost_of_bias,
    cost_of_blocks,
)
from quorum_attention.kernels.masked.packing import Packing, packing_of
from quorum_attention.kernels.masked.pair_bias import PairBias
from quorum_attention.kernels.masked.token_rules import Ids, TokenRules

DEVICES_FOR_BIAS = ("cuda",)
"""Where kernels take a bias as fast as anything else."""
LITTLE = 1 << 27
"""A bias that costs so little is made whatever the mask keeps: the host looks at no
tokens."""
MOST_BYTES = 64 << 20
"""Most bytes of the bias of a batch entry."""
# Blocks that take no more calls are not packed.
_FEW_CALLS = 2


def fastest_way(
    rules: TokenRules, by_query: Ids, by_key: Ids, shape: CallShape, *, biases: bool
) -> PairBias | Packing | None:
    """The way in which whole calls are run; None: blocks of neighbouring tokens.

    Args:
        by_query, by_key: ids, (1 or batch, n); of keys ``NO_KEY`` in those that no
            query keeps.
        biases: whether it may be a bias.
    """
    pair_bias = _bias_of(rules, by_query, by_key, shape) if biases else None
    if pair_bias is not None:
        n_pairs = shape.lanes * shape.n_queries * shape.n_keys
        bias_cost = cost_of_bias(pair_bias.calls(shape, shape.batch), n_pairs)
        if bias_cost <= LITTLE:
            return pair_bias
    blocks = blocks_of(by_query, by_key, shape)
    cost = cost_of_blocks(blocks, shape)
    fastest: PairBias | None = None
    if pair_bias is not None and bias_cost <= cost:
        fastest = pair_bias
        cost = bias_cost
    if blocks.n_calls <= _FEW_CALLS:
        return fastest
    packing = packing_of(by_query, by_key, rules.places, shape, cost)
    return fastest if packing is None else packing


def _bias_of(
    rules: TokenRules, by_query: Ids, by_key: Ids, shape: CallShape
) -> PairBias | None:
    """The bias of a mask; None where it would be too large, or slow."""
    if shape.device_type not in DEVICES_FOR_BIAS:
        return None
    places = rules.places
    is_causal = places.is_causal_call(shape.n_keys)
    has_places = not (is_causal or places.keeps_all)
    n_rows = max(len(by_query), len(by_key), len(places.places) if has_places else 1)
    pair_bias = PairBias(
        rules,
        is_causal=is_causal,
        has_rows=rules.has_documents or has_places,
        has_entries=n_rows > 1,
    )
    return pair_bias if pair_bias.bytes_of_entry(shape) <= MOST_BYTES else None
