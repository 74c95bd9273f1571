"""The memory that the tokens of a layer are written to.

All keys of a block lie before all of its values, in memory of one place.
"""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import torch

from quorum_attention.errors import OutOfMemoryError
from quorum_attention.kernels.carving import ALIGNMENT, aligned, view_at
from quorum_attention.long_prompts.head_copies import copy_heads
from quorum_attention.long_prompts.places import CachePlaces, Place
from quorum_attention.long_prompts.segments import Segment

# Forks of a cache may be used in several threads.
_CLAIMS = threading.Lock()


class TokenBlock:
    """Memory for the tokens of some batch entries.

    Attributes:
        key, value: (rows, h_kv, capacity, d) and (rows, h_kv, capacity, d_v).
        place: where both lie.
        memory: what places count, which both lie in; None: it is not counted.
        n_written: tokens that any cache has written.
        users: the caches that have tokens here.
    """

    def __init__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        place: Place,
        memory: torch.Tensor | None,
    ) -> None:
        self.key = key
        self.value = value
        self.place = place
        self.memory = memory
        self.n_written = 0
        self.users: weakref.WeakSet[object] = weakref.WeakSet()

    @classmethod
    def around(cls, segment: Segment) -> TokenBlock:
        """Return a full block in the memory of a segment."""
        block = cls(segment.key, segment.value, segment.place, None)
        block.n_written = segment.n_tokens
        return block

    @property
    def capacity(self) -> int:
        """How many tokens it has room for."""
        return self.key.shape[2]

    def claim(self, start: int, n_tokens: int) -> bool:
        """Take the places of tokens behind the first ``start``, before they are
        written.

        Returns:
            Whether this was possible: another thread's cache may have been first.
        """
        with _CLAIMS:
            if start != self.n_written and len(self.users) > 1:
                return False
            self.n_written = start + n_tokens
            return True

    def write(self, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write tokens behind the first ``start``."""
        n_tokens = key.shape[2]
        _copy_rows(self.key.narrow(2, start, n_tokens), key)
        _copy_rows(self.value.narrow(2, start, n_tokens), value)
        self.n_written = start + n_tokens


def _copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy tokens (b, h, n, d); between devices head by head, each as one run of
    memory."""
    if target.device == source.device:
        target.copy_(source)
        return
    if source.device.type != "cpu":
        source = source.contiguous()
    copy_heads(target, source)


class TokenShapes(NamedTuple):
    """The shape of a token's keys and values, which all tokens of a layer share.

    Attributes:
        rows: the number of batch entries.
        heads: the number of heads of keys and values.
        key_dim, value_dim: elements of one head's key, and of its value.
        dtype: the dtype of both.
    """

    rows: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @classmethod
    def from_tensors(cls, key: torch.Tensor, value: torch.Tensor) -> TokenShapes:
        """Return the shapes of tokens (b, h_kv, n, d) and (b, h_kv, n, d_v)."""
        rows, heads, _, key_dim = key.shape
        return cls(rows, heads, key_dim, value.shape[3], key.dtype)

    @classmethod
    def checked(cls, key: torch.Tensor, value: torch.Tensor) -> TokenShapes:
        """Return the same of tensors that may not fit each other.

        Raises:
            ValueError: shapes that are no tokens.
            TypeError: dtypes that differ, or are not floating-point.
        """
        if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
            raise ValueError(
                "key and value must be (b, h_kv, n, d) and (b, h_kv, n, d_v), got "
                f"{tuple(key.shape)} and {tuple(value.shape)}"
            )
        if key.dtype != value.dtype or not key.is_floating_point():
            raise TypeError(
                "key and value must have one floating-point dtype, got "
                f"{key.dtype} and {value.dtype}"
            )
        return cls.from_tensors(key, value)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of all rows."""
        return (
            self.rows
            * self.heads
            * (self.key_dim + self.value_dim)
            * self.dtype.itemsize
        )

    def block_bytes(self, capacity: int) -> int:
        """Bytes of a block for ``capacity`` tokens."""
        return self.token_bytes * capacity + ALIGNMENT

    def capacity_of(self, n_bytes: int) -> int:
        """How many tokens a block of ``n_bytes`` has room for."""
        return (n_bytes - ALIGNMENT) // max(1, self.token_bytes)

    def carve(
        self, memory: torch.Tensor, capacity: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as views of ``memory``."""
        key_shape = (self.rows, self.heads, capacity, self.key_dim)
        value_shape = (self.rows, self.heads, capacity, self.value_dim)
        key = view_at(memory, 0, key_shape, self.dtype)
        value_start = aligned(key.nbytes)
        value = view_at(memory, value_start, value_shape, self.dtype)
        return key, value


def allocate_block(
    shapes: TokenShapes, capacity: int, places: CachePlaces, place: Place
) -> TokenBlock | None:
    """Take memory for ``capacity`` tokens.

    Returns:
        An empty block; None if the place cannot hold it.

    Raises:
        OSError: the file of the block cannot be made.
    """
    try:
        memory = places.allocate(shapes.block_bytes(capacity), place)
    except OutOfMemoryError:
        return None
    key, value = shapes.carve(memory, capacity)
    return TokenBlock(key, value, place, memory)
