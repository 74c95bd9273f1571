"""The sizes and the kind of a call, without tensors: what kernels are asked about."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.limits import NO_LIMIT

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes of inputs and results."""
Lengths = tuple[int, int, bool]
"""Queries, keys, and whether the call is causal."""


@dataclass(frozen=True, slots=True)
class BiasShape:
    """Which dimensions an attention mask spans, and in which dtype it is added.

    Attributes:
        batch, heads, rows, columns: whether it spans the dimension; it broadcasts over
            the others.
        wide: whether it is added in the state's dtype, because the inputs' dtype would
            round it.
        needs_grad: whether a backward computes its gradient.
    """

    batch: bool
    heads: bool
    rows: bool
    columns: bool = True
    wide: bool = False
    needs_grad: bool = False


@dataclass(frozen=True, slots=True)
class CallShape:
    """The sizes and the kind of a call; hashable, without tensors.

    Attributes:
        device_type: the type of the device that computes.
        dtype: the dtype of query, key and value.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim, value_dim: columns of query and key; columns of value.
        is_causal: whether keys after the query are masked.
        needs_grad: whether a kernel is asked for gradients too; set where kernels are
            asked.
        bias: the shape of an additive or boolean mask.
        positive_scale: whether the scale is above 0.
        dropout: whether probabilities are dropped; asked only of kernels with
            ``dropout``.
        exact_scale: whether nothing is lost by multiplying with the scale; False for
            fp32 inputs unless it is a power of two, and for fp16 if it is small.
        batch_shape: the shape before the head dimension, () for 3-D inputs.
        n_queries, n_keys: 0 where a kernel is asked about calls of any length.
        sinks: whether rows begin with a sink.
        wide_out: whether outputs are not rounded to the inputs' 16 bits: that of a
            forward inside its kernel, and the one that a backward reads.
        columns: how many of the last columns of the value were added to carry the
            gradient of the log-sum-exp (call/lse_columns.py).
    """

    device_type: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    is_causal: bool = False
    needs_grad: bool = False
    bias: BiasShape | None = None
    positive_scale: bool = True
    dropout: bool = False
    exact_scale: bool = True
    batch_shape: tuple[int, ...] = ()
    n_queries: int = 0
    n_keys: int = 0
    sinks: bool = False
    wide_out: bool = False
    columns: int = 0

    @property
    def width(self) -> int:
        """The larger of head and value dimension."""
        return max(self.head_dim, self.value_dim)

    @property
    def kv_width(self) -> int:
        """The numbers of a key and its value."""
        return self.head_dim + self.value_dim

    @property
    def batch(self) -> int:
        """Batch entries, all batch dimensions together."""
        return math.prod(self.batch_shape)

    @property
    def lanes(self) -> int:
        """Query heads of all batch entries."""
        return self.batch * self.heads

    @property
    def lengths(self) -> Lengths:
        """Return what the pairs of a call depend on, beside its kernel."""
        return self.n_queries, self.n_keys, self.is_causal

    @property
    def n_tokens(self) -> int:
        """Positions that are decomposed: the larger of queries and keys."""
        return max(self.n_queries, self.n_keys)

    @property
    def queries_per_key_head(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads if self.kv_heads else 0

    @property
    def state_dtype(self) -> torch.dtype:
        """Return the dtype of statistics and gradients: fp32, or fp64 for fp64
        inputs."""
        return state_dtype(self.dtype)

    @property
    def bias_dtype(self) -> torch.dtype:
        """The dtype in which kernels are given an additive mask."""
        is_wide = self.bias is not None and self.bias.wide
        return self.state_dtype if is_wide else self.dtype

    @property
    def pairs(self) -> int:
        """Query-key pairs of one head that are computed (a mask does not count)."""
        return self.pairs_above(self.n_queries)

    def pairs_above(self, row: int) -> int:
        """Return the pairs of the queries before ``row``."""
        band = Band(high=0 if self.is_causal else None)
        return band.count(0, row, 0, self.n_keys)


@dataclass(frozen=True, slots=True)
class Extent:
    """The largest task a kernel will be handed (counts, not bytes).

    Attributes:
        n_tokens: bound of the task's tokens.
        max_queries, max_keys: bounds of every rectangle.
        direct: the kernel runs on the call's own inputs and allocates the results
            itself.
    """

    batch: int
    query_heads: int
    key_heads: int
    n_tokens: int
    max_queries: int
    max_keys: int
    direct: bool = False

    @property
    def lanes(self) -> int:
        """Query heads of all batch entries."""
        return self.batch * self.query_heads

    @property
    def key_lanes(self) -> int:
        """Key/value heads of all batch entries."""
        return self.batch * self.key_heads

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.query_heads // self.key_heads

    @property
    def rows(self) -> int:
        """Query rows of the largest rectangle, in all lanes."""
        return self.lanes * self.max_queries

    @property
    def key_rows(self) -> int:
        """Key rows of the largest rectangle, in all lanes."""
        return self.key_lanes * self.max_keys

    @property
    def token_rows(self) -> int:
        """Rows of the task's tokens, in all lanes of queries."""
        return self.lanes * self.n_tokens

    def with_sides_within(self, low: int = 0, high: int = NO_LIMIT) -> Extent:
        """Return the extent with rectangles of ``low`` to ``high`` queries and keys."""
        queries = min(max(low, self.max_queries), high)
        keys = min(max(low, self.max_keys), high)
        return replace(self, max_queries=queries, max_keys=keys)


def scale_is_exact(scale: float, dtype: torch.dtype) -> bool:
    """Return the ``exact_scale`` of a call."""
    if dtype == torch.float16:
        # Its products with gradients of scores may else be no normal numbers.
        return scale == 0 or abs(scale) >= 2.0**-9
    if dtype != torch.float32:
        return True
    mantissa, _ = math.frexp(scale)
    return abs(mantissa) in (0.0, 0.5)  # a power of two, or 0


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states: of output, lse and gradients of inputs of ``dtype``
    while they accumulate, and of the lse that a call returns.

    The backward of vendors' operators reads an lse of float32.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_rounded(mask: torch.dtype, inputs: torch.dtype) -> bool:
    """Whether a mask of one dtype would lose digits or range in the inputs' dtype, and
    keeps more of them in the state's. A boolean mask loses nothing."""
    return state_dtype(inputs) != inputs and torch.promote_types(mask, inputs) != inputs
