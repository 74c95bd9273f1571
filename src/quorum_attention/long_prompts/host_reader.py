"""Copies keys from host memory to the device, a piece at a time, ahead of the attention
over them.

Pieces go through a ring of buffers on the device. A copy waits until the attention over
the piece before in its buffer is done; the device does all the waiting, so that the
host is free to compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch

from quorum_attention.execution.device.cuda_mover import cuda_runtime
from quorum_attention.execution.device.staging import BatchedCopies
from quorum_attention.long_prompts.segments import Segment

PIECE_BYTES = 32 << 20
N_BUFFERS = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that are copied together.

    Attributes:
        start: the position of the first one.
        segment: the tokens, in host memory or on the device.
    """

    start: int
    segment: Segment

    @property
    def identity(self) -> tuple[int, int, int]:
        """A key that tells pieces of living segments apart."""
        return self.start, self.segment.key.data_ptr(), self.segment.n_tokens


def whole_pieces(start: int, segment: Segment, piece_bytes: int) -> list[Piece]:
    """Cut a segment into pieces of equal size. What is left at its end is in no piece:
    there tokens may still be added.

    Args:
        start: the position of its first token.
    """
    token_bytes = max(1, segment.nbytes // max(1, segment.n_tokens))
    step = piece_bytes // token_bytes
    if step == 0:
        return []
    starts = range(0, segment.n_tokens - step + 1, step)
    return [
        Piece(start + first, segment.narrow(first, first + step)) for first in starts
    ]


@dataclass(slots=True)
class _RingBuffer:
    """A part of the ring.

    Attributes:
        memory: (n_bytes,) uint8 on the device.
        copied: recorded behind the last copy to it.
        released: recorded behind the last attention over it.
    """

    memory: torch.Tensor
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    released: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class HostReader:
    """A ring of buffers on a CUDA device, filled from page-locked host memory.

    Args:
        memory: (n_bytes,) uint8 on the device, for the ring.
        n_buffers: into how many buffers it is cut.

    Attributes:
        piece_bytes: the largest piece.
    """

    def __init__(self, memory: torch.Tensor, n_buffers: int = N_BUFFERS) -> None:
        # Values begin at an aligned address behind the keys.
        self.piece_bytes = memory.nbytes // n_buffers // 512 * 512
        self._free = deque(
            _RingBuffer(memory[at * self.piece_bytes : (at + 1) * self.piece_bytes])
            for at in range(n_buffers)
        )
        self._staged: deque[tuple[Piece, _RingBuffer, Segment]] = deque()
        self._stream = torch.cuda.Stream(memory.device)
        self._device = memory.device
        runtime = cuda_runtime()
        self._copies = None if runtime is None else BatchedCopies(runtime)
        # Recorded behind the last attention over pieces.
        self._attended = torch.cuda.Event()

    @property
    def is_done(self) -> bool:
        """Whether the device has attended over all pieces that were asked for."""
        return bool(self._attended.query())

    def forget(self) -> None:
        """Forget what was copied ahead: the tokens may have changed."""
        while self._staged:
            self._free.append(self._staged.popleft()[1])

    def staged_pieces(
        self, pieces: Sequence[Piece], following: Iterable[Piece]
    ) -> Iterator[Piece]:
        """Yield ``pieces`` on the device, one after the other.

        The current stream waits for each. What the caller launches on it before it asks
        for the next piece may read the piece. Nothing here waits on the host.

        Args:
            pieces: in host memory, page-locked. What ``following`` said before should
                begin them.
            following: what is likely to be read next, which is copied as far as buffers
                are free.
        """
        compute = torch.cuda.current_stream(self._device)
        # Tokens may have been written by what is on the current stream already.
        writes_done = compute.record_event()
        self._drop_other_than(pieces)
        waiting = deque((*pieces[len(self._staged) :], *following))
        for piece in pieces:
            self._fill(waiting, writes_done)
            _, buffer, segment = self._staged.popleft()
            compute.wait_event(buffer.copied)
            yield Piece(piece.start, segment)
            buffer.released.record(compute)
            self._free.append(buffer)
        self._attended.record(compute)
        self._fill(waiting, writes_done)

    def _drop_other_than(self, pieces: Sequence[Piece]) -> None:
        """Keep what was copied ahead as far as it is what is read now."""
        while len(self._staged) > len(pieces):
            self._free.append(self._staged.pop()[1])
        staged = [piece.identity for piece, _, _ in self._staged]
        if staged != [piece.identity for piece in pieces[: len(staged)]]:
            self.forget()

    def _fill(self, waiting: deque[Piece], writes_done: torch.cuda.Event) -> None:
        while waiting and self._free:
            piece = waiting.popleft()
            buffer = self._free.popleft()
            self._stream.wait_event(buffer.released)
            self._stream.wait_event(writes_done)
            segment = self._copy(buffer.memory, piece.segment)
            buffer.copied.record(self._stream)
            self._staged.append((piece, buffer, segment))

    def _copy(self, memory: torch.Tensor, segment: Segment) -> Segment:
        """Copy a segment on the stream for copies; see ``copy_segment``."""
        if self._copies is None:
            with torch.cuda.stream(self._stream):
                return copy_segment(memory, segment)
        copied = _like_segment(memory, segment)
        _note_heads(self._copies, copied.key, segment.key)
        _note_heads(self._copies, copied.value, segment.value)
        self._copies.flush(self._stream)
        return copied


def _note_heads(
    copies: BatchedCopies, target: torch.Tensor, source: torch.Tensor
) -> None:
    """Note the copies of all heads of (rows, h, n, d), each one run of memory."""
    size = source.element_size()
    n_bytes = size * source.shape[2] * source.shape[3]
    for row, head in product(range(source.shape[0]), range(source.shape[1])):
        target_start = row * target.stride(0) + head * target.stride(1)
        source_start = row * source.stride(0) + head * source.stride(1)
        copies.add(
            target.data_ptr() + size * target_start,
            source.data_ptr() + size * source_start,
            n_bytes,
        )


def copy_segment(memory: torch.Tensor, segment: Segment) -> Segment:
    """Copy a segment to the device, head by head, each as one run of memory.

    Args:
        memory: (n_bytes,) uint8 on the device, at least as large as the segment.
        segment: in host memory.
    """
    copied = _like_segment(memory, segment)
    tensors = ((copied.key, segment.key), (copied.value, segment.value))
    for target, source in tensors:
        target_heads = target.flatten(0, 1)
        source_heads = source.flatten(0, 1)
        for target_head, source_head in zip(target_heads, source_heads, strict=True):
            target_head.copy_(source_head, non_blocking=True)
    return copied


def _like_segment(memory: torch.Tensor, segment: Segment) -> Segment:
    """A segment of the same shape in ``memory``."""
    key = _view_like(memory, segment.key)
    value = _view_like(memory[key.nbytes :], segment.value)
    return Segment(key, value, segment.place, segment.entries)


def _view_like(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
