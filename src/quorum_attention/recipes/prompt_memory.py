"""What a long prompt takes of the device and of host memory, and where its parts lie.

The device is shared by the weights, the cache, and what computing a layer needs: either
the rows of all tokens, or tiles of them beside an attention call that streams from host
memory.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from quorum_attention.arithmetic import power_of_two_from
from quorum_attention.recipes.model_shape import ModelShape

# The largest tile: more tokens at once do not make matrix products faster.
MAX_TILE = 8192
MIN_TILE = 256
# Device memory beyond which computing a layer gets no faster; and its share of what the
# weights leave, on a smaller device.
_WORKING_BYTES = 5 << 30
_WORKING_SHARE = 3
# Device memory that stays free for later tokens when a prompt is done. Keys and values
# take the rest of what computing the prompt needed.
CHUNK_BYTES = 768 << 20
# An attention call that streams from host memory gets no faster with more.
_ATTENTION_BYTES = 4 << 30
# A tile may take this share of the working memory; so many thirds of it where the rows
# of all tokens lie in host memory. The host launches each tile anew, so larger ones are
# computed sooner.
_TILE_SHARE = 3
_TILE_THIRDS = 2
# Tokens behind a prompt may take this share of what stays free for them; attention over
# the prompt needs the rest.
_CHUNK_SHARE = 2
# A share of the device that nobody plans with: the allocator's gaps, and kernels'
# workspaces.
MARGIN = 0.04
# An attention call over rows on the device takes this share of its output: measured.
_CALL_SHARE = 1.6


@dataclass(frozen=True)
class TokenBytes:
    """Bytes for each token of a prompt.

    Attributes:
        rows: hidden states, queries, keys, values and outputs of one layer, and what
            all layers share (positions).
        output: of these, the outputs of attention.
        keys: of these, the keys and values.
        positions: of these, what all layers share.
        hidden: of these, the hidden states.
        tile: what a layer computes with for a token of a tile, at its peak.
    """

    rows: int
    output: int
    keys: int
    positions: int
    hidden: int
    tile: int

    @classmethod
    def from_shape(cls, shape: ModelShape, size: int) -> TokenBytes:
        """The bytes of a model's tokens, with ``size`` bytes for each number."""
        query = shape.heads * shape.head_dim
        key_and_value = 2 * shape.kv_heads * shape.head_dim
        projected = 2 * query + key_and_value
        # Cosines and sines of a position, and its number.
        position_bytes = 2 * shape.head_dim * size + 8
        # A norm computes in float32, beside its input and its result.
        norm_bytes = 4 * (2 * shape.hidden + query)
        mlp = 3 * shape.mlp_width
        return cls(
            rows=(shape.hidden + projected) * size + position_bytes,
            output=query * size,
            keys=key_and_value * size,
            positions=position_bytes,
            hidden=shape.hidden * size,
            tile=(mlp + 2 * projected + 6 * shape.hidden) * size + norm_bytes,
        )

    def of_batch(self, batch: int) -> TokenBytes:
        """The bytes of one token of every text in a batch."""
        return TokenBytes(*(batch * n_bytes for n_bytes in astuple(self)))


@dataclass(frozen=True)
class PromptPlan:
    """How the layers of a prompt are computed.

    Attributes:
        tile: the tokens of a tile.
        is_on_device: whether rows of all tokens lie on the device; else they lie in
            host memory.
        budget: bytes of an attention call beyond its inputs and outputs on the device.
        device_bytes: all of that, beside weights and cache.
        host_bytes: the rows in host memory.
        fits_at_once: whether each layer can compute all tokens at once, as the model
            does by itself.
    """

    tile: int
    is_on_device: bool
    budget: int
    device_bytes: int
    host_bytes: int
    fits_at_once: bool = False

    def with_tile(self, tile: int) -> PromptPlan:
        """The same with another tile, for prompts that are longer."""
        return replace(self, tile=tile, fits_at_once=False)


def working_bytes(free: int) -> int:
    """Bytes of the device that computing layers may take, of what the weights leave
    free. The cache gets the rest."""
    return min(_WORKING_BYTES, free // _WORKING_SHARE)


def plan_prompt(token: TokenBytes, n_tokens: int, working: int) -> PromptPlan:
    """Choose the tile, and the place for rows of all tokens.

    Args:
        token: bytes of a token.
        n_tokens: the prompt.
        working: bytes of the device that computing layers may take.
    """
    tile = _tile_within(token, working // _TILE_SHARE)
    rows_bytes = n_tokens * token.rows
    output_bytes = n_tokens * token.output
    tile_bytes = tile * token.tile
    call_bytes = int(output_bytes * _CALL_SHARE)
    at_once_bytes = n_tokens * token.tile + call_bytes
    if at_once_bytes <= working:
        return PromptPlan(
            tile,
            is_on_device=True,
            budget=working,
            device_bytes=at_once_bytes,
            host_bytes=0,
            fits_at_once=True,
        )
    on_device = rows_bytes + max(tile_bytes, call_bytes)
    if on_device <= working:
        return PromptPlan(
            tile,
            is_on_device=True,
            budget=working - rows_bytes,
            device_bytes=on_device,
            host_bytes=0,
        )
    tile = _tile_within(token, working * _TILE_THIRDS // 3)
    tile_bytes = tile * token.tile
    # Two tiles of hidden states and outputs: one is used, one arrives.
    tile_rows_bytes = tile * (token.hidden + token.output)
    buffer_bytes = 2 * tile_rows_bytes
    budget = min(_ATTENTION_BYTES, working - buffer_bytes)
    budget = max(1, budget)
    return PromptPlan(
        tile,
        is_on_device=False,
        budget=budget,
        device_bytes=buffer_bytes + max(tile_bytes, budget),
        host_bytes=rows_bytes,
    )


def page_locked_bytes(token: TokenBytes, n_tokens: int) -> int:
    """Bytes that torch's allocator takes for rows of all tokens in page-locked memory:
    it rounds each tensor up to a power of two."""
    hidden_bytes = n_tokens * token.hidden
    output_bytes = n_tokens * token.output
    key_bytes = n_tokens * token.keys // 2
    n_bytes = power_of_two_from(hidden_bytes)
    # Queries are as wide as outputs, and values as keys.
    n_bytes += 2 * power_of_two_from(output_bytes)
    n_bytes += 2 * power_of_two_from(key_bytes)
    return n_bytes + n_tokens * token.positions


def smaller_plan(
    token: TokenBytes, n_tokens: int, plan: PromptPlan
) -> PromptPlan | None:
    """Choose a plan for half of the device memory that another one takes.

    Returns:
        Rows lie in host memory, and tiles are at most half as large. None: tiles of the
        other plan are the smallest ones, and rows lie in host memory already.
    """
    if plan.tile <= MIN_TILE and not plan.is_on_device:
        return None
    half = plan_prompt(token, n_tokens, plan.device_bytes // 2)
    tile = min(half.tile, max(1, plan.tile // 2))
    return half.with_tile(tile)


def chunk_within(token: TokenBytes, working: int) -> int:
    """Return the tokens of a chunk that runs through all layers: attention over the
    cache takes memory beside it."""
    return _tile_within(token, working // _TILE_SHARE)


def tile_behind_prompt(token: TokenBytes) -> int:
    """The tile of tokens that are computed when the cache has the prompt's already."""
    return _tile_within(token, CHUNK_BYTES // _CHUNK_SHARE)


def _tile_within(token: TokenBytes, n_bytes: int) -> int:
    """The largest tile, a power of two, that takes at most so many bytes."""
    tile = MAX_TILE
    while tile > MIN_TILE and tile * token.tile > n_bytes:
        tile //= 2
    return tile
