"""The sizes of one attention call, and the head groups it is cut into."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch

from quorum_attention.kernels.protocol import CallShape, MaskShape
from quorum_attention.kernels.rectangles import SMALL_FACTOR

ELEMENT_BYTES = {
    torch.float16: 2,
    torch.bfloat16: 2,
    torch.float32: 4,
    torch.float64: 8,
}
DTYPE_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in ELEMENT_BYTES)


@dataclass(frozen=True, slots=True)
class Workload:
    """The sizes of one call; hashable, without tensors.

    ``batch_shape`` is the shape before the head dimension, () for 3-D inputs. ``positive_scale``
    says whether the factor of the scores is above 0, ``sinks`` whether rows begin with a sink,
    ``dropout`` whether probabilities are dropped.
    ``columns`` is how many of the last columns of the value were added to carry the gradient of the
    log-sum-exp (call/lse_columns.py). ``exact_scale``: see ``CallShape``.
    """

    batch_shape: tuple[int, ...]
    heads: int
    kv_heads: int
    n_queries: int
    n_keys: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    is_causal: bool
    mask: MaskShape | None = None
    positive_scale: bool = True
    sinks: bool = False
    dropout: bool = False
    columns: int = 0
    exact_scale: bool = True

    @property
    def batch(self) -> int:
        """Batch entries, all batch dimensions together."""
        return math.prod(self.batch_shape)

    @property
    def n_tokens(self) -> int:
        """Positions that are decomposed: the larger of queries and keys."""
        return max(self.n_queries, self.n_keys)

    @property
    def queries_per_key_head(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads if self.kv_heads else 0

    @property
    def element_bytes(self) -> int:
        """Bytes of one input element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def state_dtype(self) -> torch.dtype:
        """What statistics and gradients accumulate in: fp32, or fp64 for fp64 inputs."""
        return state_dtype(self.dtype)

    @property
    def pairs(self) -> int:
        """Query-key pairs of one head that are computed (a mask does not count)."""
        if not self.is_causal:
            return self.n_queries * self.n_keys
        square = min(self.n_queries, self.n_keys)
        below = max(0, self.n_queries - self.n_keys)
        return square * (square + 1) // 2 + below * self.n_keys

    def call_shape(self, device_type: str, needs_grad: bool) -> CallShape:
        """The part of this workload that inner kernels ask about."""
        return CallShape(
            device_type=device_type,
            dtype=self.dtype,
            query_heads=self.heads,
            key_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            is_causal=self.is_causal,
            needs_grad=needs_grad,
            mask=self.mask,
            positive_scale=self.positive_scale,
            dropout=self.dropout,
            exact_scale=self.exact_scale,
        )


def scale_is_exact(scale: float, dtype: torch.dtype) -> bool:
    """The ``exact_scale`` of a call."""
    if dtype == torch.float16:
        return scale == 0 or abs(scale) >= SMALL_FACTOR
    return dtype != torch.float32 or abs(math.frexp(scale)[0]) in (0.0, 0.5)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """What statistics and gradients of inputs of ``dtype`` accumulate in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class GroupSize:
    """The size of a head group.

    Heads never meet, so cutting between them costs nothing. A group is either some key/value heads
    of one batch entry (``batch`` is 1), or several whole batch entries.
    """

    batch: int
    kv_heads: int


@dataclass(frozen=True, slots=True)
class Group:
    """One head group: batch entries by index, and a range of key/value heads."""

    entries: tuple[tuple[int, ...], ...]
    kv_start: int
    kv_stop: int
    queries_per_key_head: int

    @property
    def query_heads(self) -> slice:
        """The query heads that go with the key/value heads."""
        g = self.queries_per_key_head
        return slice(self.kv_start * g, self.kv_stop * g)

    @property
    def key_heads(self) -> slice:
        """The key/value heads."""
        return slice(self.kv_start, self.kv_stop)


def group_sizes(work: Workload) -> list[GroupSize]:
    """Group sizes to choose from, largest first: batch entries are halved, then heads."""
    if work.batch == 0 or work.kv_heads == 0:
        return []
    sizes = []
    entries = work.batch
    while entries > 1:
        sizes.append(GroupSize(entries, work.kv_heads))
        entries = -(-entries // 2)
    heads = work.kv_heads
    while heads > 1:
        sizes.append(GroupSize(1, heads))
        heads = -(-heads // 2)
    sizes.append(GroupSize(1, 1))
    return sizes


def groups(work: Workload, size: GroupSize) -> Iterator[Group]:
    """The head groups of a call, none larger than ``size``, in order."""
    entries = list(product(*(range(n) for n in work.batch_shape)))
    shared = work.queries_per_key_head
    for first in range(0, len(entries), size.batch):
        chosen = tuple(entries[first : first + size.batch])
        for head in range(0, work.kv_heads, size.kv_heads):
            yield Group(chosen, head, min(head + size.kv_heads, work.kv_heads), shared)


def flat_entries(work: Workload, group: Group) -> tuple[int, ...]:
    """The indices of a group's batch entries when the batch dimensions are flattened."""
    return tuple(flat_entry(work, entry) for entry in group.entries)


def flat_entry(work: Workload, entry: tuple[int, ...]) -> int:
    """The index of a batch entry when the batch dimensions are flattened."""
    number = 0
    for index, size in zip(entry, work.batch_shape, strict=True):
        number = number * size + index
    return number


def count_groups(work: Workload, size: GroupSize) -> int:
    """How many groups ``groups`` yields."""
    return -(-work.batch // size.batch) * -(-work.kv_heads // size.kv_heads)


Axis = Literal["query", "key"]


@dataclass(frozen=True, slots=True)
class RowTensor:
    """A tensor whose rows and heads are those of queries or of keys.

    It is (*batch, heads, n, width); or, ``of_group``, (entries, heads, n, width): memory for the
    state of one head group, used by one group after another.
    """

    tensor: torch.Tensor
    axis: Axis
    of_group: bool = False

    def blocks(self, group: Group) -> list[torch.Tensor]:
        """The group's part: a view (heads, n, width) for each batch entry."""
        heads = group.query_heads if self.axis == "query" else group.key_heads
        if self.of_group:
            count = heads.stop - heads.start
            return [self.tensor[entry, :count] for entry in range(len(group.entries))]
        return [self.tensor[entry][heads] for entry in group.entries]


def group_part(tensor: torch.Tensor, group: Group, axis: Axis) -> torch.Tensor:
    """A head group's part of (*batch, heads, ...), as a view (1, heads, ...); of one entry."""
    heads = group.query_heads if axis == "query" else group.key_heads
    return tensor[group.entries[0]][heads].unsqueeze(0)
