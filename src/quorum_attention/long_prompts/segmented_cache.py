"""Keys and values of one layer in segments: appending, cropping and sharing copy
nothing.

A layer's tokens lie in blocks of memory, in order of position. A block has room for
more tokens than it holds, so that single tokens are written into it. Caches share
blocks: a fork, a repetition of batch entries or a new order of beams takes other views
of the same blocks. So a block is only written to

* by its only cache, or
* behind all tokens that any cache has written there.

Otherwise a cache begins a new block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from quorum_attention.argument_checks import whole_number
from quorum_attention.arithmetic import round_up
from quorum_attention.long_prompts.places import CachePlaces, Place
from quorum_attention.long_prompts.segments import Segment
from quorum_attention.long_prompts.token_blocks import (
    TokenBlock,
    TokenShapes,
    allocate_block,
)

# A new block has room for an eighth of the tokens that are there, within these limits,
# beyond those that are appended: attention is fastest over one segment.
_GROWTH = 8
_MIN_BLOCK_TOKENS = 256
_MAX_GROWTH_TOKENS = 2048
# Blocks hold a multiple of this many tokens.
_TOKEN_STEP = 64
# The last block is put into a new order of batch entries in place if it has at most
# this many tokens. A larger one keeps its order, and a new block begins.
_MAX_REORDERED_TOKENS = 1024


@dataclass(slots=True)
class _BlockPrefix:
    """The first tokens of a block, as one cache sees them.

    Attributes:
        block: the memory that the tokens lie in.
        n_tokens: how many they are.
        entries: the block's row of each batch entry, as in ``Segment``.
    """

    block: TokenBlock
    n_tokens: int
    entries: tuple[int, ...] | None = None

    def segment(self) -> Segment:
        """Return the tokens, as views."""
        block = self.block
        key = block.key.narrow(2, 0, self.n_tokens)
        value = block.value.narrow(2, 0, self.n_tokens)
        return Segment(key, value, block.place, self.entries)


class SegmentedCache:
    """Keys and values of one layer, which grow without copying what is there.

    Segments that were handed out stay valid until their tokens are cropped and others
    appended.

    Args:
        places: where they may lie; shared by the layers of a model.

    Attributes:
        places: as given.
    """

    def __init__(self, places: CachePlaces) -> None:
        self.places = places
        self._prefixes: list[_BlockPrefix] = []
        self._shapes: TokenShapes | None = None
        self._n_reserved = 0

    @property
    def n_tokens(self) -> int:
        """The number of tokens."""
        return sum(prefix.n_tokens for prefix in self._prefixes)

    @property
    def batch(self) -> int:
        """The number of batch entries; 0 before the first tokens."""
        return 0 if self._shapes is None else self._shapes.rows

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of keys and values; None before the first tokens."""
        return None if self._shapes is None else self._shapes.dtype

    def segments(self) -> list[Segment]:
        """Return all tokens, in order of position."""
        return [prefix.segment() for prefix in self._prefixes if prefix.n_tokens]

    @property
    def is_on_device(self) -> bool:
        """Whether all tokens lie on the device."""
        return all(prefix.block.place is Place.DEVICE for prefix in self._prefixes)

    def reserve(self, n_tokens: int) -> None:
        """Say how many tokens there will be. The next block gets room for all of them,
        in one piece where the places allow it.

        Raises:
            TypeError, ValueError: ``n_tokens`` is no number of tokens.
        """
        self._n_reserved = whole_number(n_tokens, "n_tokens", 0)

    @property
    def n_reserved(self) -> int:
        """The number of tokens that there will be, as ``reserve`` was told."""
        return self._n_reserved

    def bytes_to_take(self, key: torch.Tensor, value: torch.Tensor) -> int:
        """The bytes of the reserved tokens; 0 if the cache has memory.

        Args:
            key, value: tokens like those that will be appended.
        """
        if self._prefixes:
            return 0
        shapes = TokenShapes.from_tensors(key, value)
        return shapes.block_bytes(round_up(self._n_reserved, _TOKEN_STEP))

    def prepare(self, key: torch.Tensor, value: torch.Tensor, place: Place) -> bool:
        """Take the memory of the reserved tokens ahead of the first ones, in one place.

        On a device, memory that all layers take at once leaves no gaps between them.
        Page-locking host memory takes a while, which may pass while something else is
        computed.

        Args:
            key, value: tokens like those that will be appended, (b, h_kv, n, d) and (b,
                h_kv, n, d_v).
            place: where.

        Returns:
            Whether it was taken: not by a cache that has memory, nor where there is too
                little.
        """
        if self._prefixes or self._n_reserved == 0:
            return False
        shapes = TokenShapes.from_tensors(key, value)
        capacity = round_up(self._n_reserved, _TOKEN_STEP)
        if self.places.remaining(place) < shapes.block_bytes(capacity):
            return False
        block = allocate_block(shapes, capacity, self.places, place)
        if block is None:
            return False
        self._shapes = shapes
        self._add_prefix(block, 0)
        return True

    def promote(self, n_bytes: int, n_behind: int) -> int:
        """Move the last tokens from host memory to the device, and take room there for
        the tokens behind them: to copy each of those to host memory takes longer.

        Tokens that another cache has, or that lie in files, stay where they are.

        Args:
            n_bytes: bytes of the device that moved tokens may take.
            n_behind: room for so many tokens behind them.

        Returns:
            The bytes of the tokens that were moved; 0 if the device has no room.
        """
        if self._shapes is None:
            return 0
        n_fitting = max(0, n_bytes) // max(1, self.token_bytes)
        n_moved = min(self._n_movable(), n_fitting)
        block = self._block_on_device(n_moved + n_behind)
        if block is None:
            return 0
        n_kept = self.n_tokens - n_moved
        for segment in self._segments_behind(n_kept):
            block.write(block.n_written, segment.key, segment.value)
        self.crop(n_kept)
        self._add_prefix(block, n_moved)
        return n_moved * self.token_bytes

    def _n_movable(self) -> int:
        """The number of last tokens that lie in host memory, for this cache alone."""
        n_tokens = 0
        for prefix in reversed(self._prefixes):
            is_alone = len(prefix.block.users) == 1 and prefix.entries is None
            if prefix.block.place is not Place.HOST or not is_alone:
                break
            n_tokens += prefix.n_tokens
        return n_tokens

    def _segments_behind(self, n_tokens: int) -> Iterator[Segment]:
        """Yield all but the first ``n_tokens`` tokens."""
        start = 0
        for segment in self.segments():
            stop = start + segment.n_tokens
            if stop > n_tokens:
                first = max(0, n_tokens - start)
                yield segment.narrow(first, segment.n_tokens)
            start = stop

    def _block_on_device(self, n_tokens: int) -> TokenBlock | None:
        """An empty block with room for ``n_tokens``; None for none of them, or if the
        device has no room."""
        if n_tokens == 0:
            return None
        assert self._shapes is not None
        capacity = round_up(n_tokens, _TOKEN_STEP)
        return allocate_block(self._shapes, capacity, self.places, Place.DEVICE)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of all batch entries; 0 before the first tokens."""
        return 0 if self._shapes is None else self._shapes.token_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes of the memory that its tokens lie in."""
        blocks = [prefix.block for prefix in self._prefixes]
        return sum(block.key.nbytes + block.value.nbytes for block in blocks)

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Add tokens behind those that are there.

        Copies from one device to another are made on the current stream, and may be
        under way when this returns.

        Args:
            key: (b, h_kv, n, d), on any device.
            value: (b, h_kv, n, d_v), of the same dtype.

        Raises:
            ValueError, TypeError: they do not fit each other, or the tokens that are
                there.
            OutOfMemoryError: no place has memory left. Nothing has been appended.
        """
        if self.n_tokens == 0 and self._prefixes:
            self._keep_prepared(key, value)
        shapes = TokenShapes.checked(key, value)
        self._check_same_shapes(shapes)
        if key.shape[2] == 0:
            return
        key = key.detach()
        value = value.detach()
        if self._append_in_place(key, value):
            return
        n_before = self.n_tokens
        shapes_before = self._shapes
        self._shapes = shapes
        try:
            # Memory that is allocated in inference mode could not be written to outside
            # of it.
            with torch.inference_mode(False), torch.no_grad():
                self._append(key, value)
        except BaseException:
            self.crop(n_before)
            self._shapes = shapes_before
            raise

    def _append_in_place(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Write tokens into the last block, as each token of an answer is.

        Returns:
            Whether the block had room for them.
        """
        prefix = self._open_prefix()
        n_tokens = key.shape[2]
        if prefix is None or prefix.n_tokens + n_tokens > prefix.block.capacity:
            return False
        if not prefix.block.claim(prefix.n_tokens, n_tokens):
            return False
        prefix.block.write(prefix.n_tokens, key, value)
        prefix.n_tokens += n_tokens
        return True

    def _keep_prepared(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Give prepared memory back if it is not for tokens like these."""
        if key.dim() == 4 and TokenShapes.from_tensors(key, value) != self._shapes:
            self.reset()

    def _append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        n_new = key.shape[2]
        start = 0
        while start < n_new:
            prefix = self._open_prefix() or self._new_prefix(n_new - start)
            stop = min(n_new, start + prefix.block.capacity - prefix.n_tokens)
            if not prefix.block.claim(prefix.n_tokens, stop - start):
                continue
            prefix.block.write(
                prefix.n_tokens, key[:, :, start:stop], value[:, :, start:stop]
            )
            prefix.n_tokens += stop - start
            start = stop

    def adopt(self, segment: Segment) -> None:
        """Add the tokens of a segment behind those that are there, in the memory that
        they lie in.

        The memory is not counted by the places, and is never written to.

        Args:
            segment: as of a cache that was saved.

        Raises:
            ValueError, TypeError: the segment does not fit the tokens that are there.
        """
        shapes = TokenShapes.checked(segment.key, segment.value)
        if segment.entries is not None:
            shapes = shapes._replace(rows=segment.batch)
        self._check_same_shapes(shapes)
        self._shapes = shapes
        prefix = self._add_prefix(TokenBlock.around(segment), segment.n_tokens)
        prefix.entries = segment.entries

    def _check_same_shapes(self, shapes: TokenShapes) -> None:
        if self._shapes is not None and shapes != self._shapes:
            raise ValueError(f"the cache holds tokens of {self._shapes}, got {shapes}")

    def _open_prefix(self) -> _BlockPrefix | None:
        """Return the last prefix if its block has room that this cache may write to."""
        if not self._prefixes:
            return None
        prefix = self._prefixes[-1]
        block = prefix.block
        is_full = prefix.n_tokens == block.capacity
        if is_full or prefix.entries is not None or block.key.shape[0] != self.batch:
            return None
        if block.memory is None:
            # After a crop a block of a saved cache is not full, and it is read alone.
            return None
        is_last_writer = prefix.n_tokens == block.n_written
        return prefix if is_last_writer or len(block.users) == 1 else None

    def _new_prefix(self, n_needed: int) -> _BlockPrefix:
        """Begin a block for ``n_needed`` tokens, or for as many of them as the place
        can hold."""
        assert self._shapes is not None
        n_tokens = self.n_tokens
        n_expected = max(n_needed, self._n_reserved - n_tokens)
        growth = (n_tokens + n_expected) // _GROWTH
        growth = min(max(growth, _MIN_BLOCK_TOKENS), _MAX_GROWTH_TOKENS)
        if n_tokens + n_expected == self._n_reserved:
            growth = 0
        capacity = round_up(n_expected + growth, _TOKEN_STEP)
        block = self._allocate_block(self._shapes, capacity, n_needed)
        return self._add_prefix(block, 0)

    def _add_prefix(self, block: TokenBlock, n_tokens: int) -> _BlockPrefix:
        """Add the first tokens of a block behind the tokens that are there."""
        block.users.add(self)
        prefix = _BlockPrefix(block, n_tokens)
        self._prefixes.append(prefix)
        return prefix

    def _allocate_block(
        self, shapes: TokenShapes, max_capacity: int, n_needed: int
    ) -> TokenBlock:
        """A block of at most ``max_capacity`` tokens, in the first place that can hold
        a few."""
        min_capacity = min(n_needed, _MIN_BLOCK_TOKENS)
        for place in Place:
            n_fitting = shapes.capacity_of(self.places.remaining(place))
            capacity = min(max_capacity, n_fitting)
            if capacity < min_capacity:
                continue
            block = allocate_block(shapes, capacity, self.places, place)
            if block is not None:
                return block
        raise self.places.refusal(shapes.block_bytes(min_capacity))

    def crop(self, n_tokens: int) -> None:
        """Keep the first ``n_tokens`` tokens; all, if there are fewer. Memory of blocks
        behind them is freed if no other cache has tokens there.

        Raises:
            TypeError, ValueError: ``n_tokens`` is no number of tokens.
        """
        n_left = whole_number(n_tokens, "n_tokens", 0)
        prefixes: list[_BlockPrefix] = []
        for prefix in self._prefixes:
            if n_left == 0:
                prefix.block.users.discard(self)
                continue
            prefix.n_tokens = min(prefix.n_tokens, n_left)
            n_left -= prefix.n_tokens
            prefixes.append(prefix)
        self._prefixes = prefixes

    def reset(self) -> None:
        """Remove all tokens. The next ones may have another shape or dtype."""
        self.crop(0)
        self._shapes = None

    def fork(self) -> SegmentedCache:
        """Return a second cache with the same tokens, which shares their memory.

        Each of both may be changed without changing the other.
        """
        forked = SegmentedCache(self.places)
        forked._shapes = self._shapes
        forked._prefixes = [replace(prefix) for prefix in self._prefixes]
        for prefix in forked._prefixes:
            prefix.block.users.add(forked)
        return forked

    def repeat_interleave(self, n: int) -> None:
        """Repeat each batch entry ``n`` times, one after the other, without copying
        tokens.

        Raises:
            TypeError, ValueError: ``n`` is no number of times.
        """
        whole_number(n, "n", 1)
        self._take_entries([entry for entry in range(self.batch) for _ in range(n)])

    def select(self, indices: torch.Tensor | Sequence[int]) -> None:
        """Keep the batch entries ``indices``, in that order; an entry may be there
        several times.

        Args:
            indices: (n,) integers, or (b,) bool.

        Raises:
            ValueError: they are not; or an entry does not exist.
        """
        batch = self.batch
        chosen = _index_list(indices)
        if chosen and not (-batch <= min(chosen) and max(chosen) < batch):
            raise ValueError(
                f"the cache has {batch} batch entries, got indices {chosen}"
            )
        self._take_entries([entry % batch for entry in chosen])

    def _take_entries(self, chosen: list[int]) -> None:
        if self._shapes is None or chosen == list(range(self.batch)):
            return
        is_same_number = len(chosen) == self.batch
        # The last prefix comes first: if there is no memory to reorder it, nothing has
        # been changed.
        for prefix in reversed(self._prefixes):
            if is_same_number and self._can_reorder_in_place(prefix):
                if prefix.block.place is not Place.DEVICE:
                    self.places.finish_copies()
                _reorder_in_place(prefix, chosen)
            else:
                prefix.entries = _composed(prefix.entries, chosen)
        self._shapes = self._shapes._replace(rows=len(chosen))

    def _can_reorder_in_place(self, prefix: _BlockPrefix) -> bool:
        """Whether a prefix is the small last one, which has no other cache and can stay
        open."""
        is_small = prefix.n_tokens <= _MAX_REORDERED_TOKENS
        return (
            prefix is self._open_prefix() and len(prefix.block.users) == 1 and is_small
        )


def _reorder_in_place(prefix: _BlockPrefix, chosen: Sequence[int]) -> None:
    segment = prefix.segment()
    rows = torch.tensor(chosen, dtype=torch.int64, device=segment.key.device)
    key = segment.key[rows]
    value = segment.value[rows]
    segment.key.copy_(key)
    segment.value.copy_(value)


def _composed(
    entries: tuple[int, ...] | None, chosen: Sequence[int]
) -> tuple[int, ...]:
    return (
        tuple(chosen) if entries is None else tuple(entries[entry] for entry in chosen)
    )


def _index_list(indices: torch.Tensor | Sequence[int]) -> list[int]:
    if not isinstance(indices, torch.Tensor):
        return [int(index) for index in indices]
    if indices.dim() != 1:
        raise ValueError(f"indices must be (n,), got shape {tuple(indices.shape)}")
    if indices.dtype == torch.bool:
        indices = indices.nonzero().flatten()
    return [int(index) for index in indices.tolist()]
