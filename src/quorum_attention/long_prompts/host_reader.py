"""Keys in page-locked host memory, as the device reads them.

Kernels for a few queries read such memory directly, across the bus. While other layers
compute, the bus would be idle: so the first tokens of what is read next are copied to a
buffer on the device meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quorum_attention.kernels.carving import view_at
from quorum_attention.long_prompts.head_copies import HeadCopies, copy_heads
from quorum_attention.long_prompts.segments import Segment

# Bytes that are copied at once where many queries read them.
PIECE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens.

    Attributes:
        start: the position of the first one.
        segment: the tokens, in host memory or on the device.
    """

    start: int
    segment: Segment

    def first(self, n_tokens: int) -> Piece:
        """Return the first tokens."""
        return Piece(self.start, self.segment.narrow(0, n_tokens))

    def behind(self, n_tokens: int) -> Piece:
        """Return all but the first tokens."""
        rest = self.segment.narrow(n_tokens, self.segment.n_tokens)
        return Piece(self.start + n_tokens, rest)


class HostReader:
    """A buffer on a CUDA device for the first tokens of what is read next.

    Args:
        memory: (n_bytes,) uint8 on the device.

    Attributes:
        was_idle: whether the last copy was over before its tokens were asked for.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._stream = torch.cuda.Stream(memory.device)
        self._copies = HeadCopies(self._stream)
        # The tokens that were copied ahead, in host memory and on the device.
        self._copied: tuple[Segment, Segment] | None = None
        self._is_copied = torch.cuda.Event()
        self.was_idle = False

    def forget(self) -> None:
        """Forget what was copied ahead: the tokens may have changed."""
        self._copied = None

    def arrived(self, piece: Piece) -> list[Piece]:
        """Return the tokens of a piece in host memory: those that were copied ahead, on
        the device, and the others where they lie. The current stream waits for the
        copy."""
        copied = self._copied
        self._copied = None
        self.was_idle = copied is not None and self._is_copied.query()
        if copied is None or not _begins_with(piece.segment, copied[0]):
            return [piece]
        torch.cuda.current_stream(self._memory.device).wait_event(self._is_copied)
        on_device = copied[1]
        n_copied = min(on_device.n_tokens, piece.segment.n_tokens)
        pieces = [Piece(piece.start, on_device.narrow(0, n_copied))]
        if n_copied < piece.segment.n_tokens:
            pieces.append(piece.behind(n_copied))
        return pieces

    def copy_ahead(self, segment: Segment) -> None:
        """Copy the first tokens of a segment, when all that the current stream has been
        given is done: it may read the buffer, and write the tokens."""
        n_fitting = self._memory.nbytes // segment.token_bytes
        n_tokens = min(segment.n_tokens, n_fitting)
        if n_tokens == 0:
            return
        source = segment.narrow(0, n_tokens)
        target = like_segment(self._memory, source)
        self._stream.wait_stream(torch.cuda.current_stream(self._memory.device))
        self._copies.copy_all([(target.key, source.key), (target.value, source.value)])
        self._is_copied.record(self._stream)
        self._copied = (source, target)


def _begins_with(segment: Segment, copied: Segment) -> bool:
    """Whether a segment begins with the tokens that were copied, in the same memory."""
    is_place_same = segment.key.data_ptr() == copied.key.data_ptr()
    return is_place_same and segment.entries == copied.entries


def copy_segment(memory: torch.Tensor, segment: Segment) -> Segment:
    """Copy a segment to the device, on the current stream.

    Args:
        memory: (n_bytes,) uint8 on the device, at least as large as the segment.
        segment: in host memory.
    """
    copied = like_segment(memory, segment)
    copy_heads(copied.key, segment.key)
    copy_heads(copied.value, segment.value)
    return copied


def like_segment(memory: torch.Tensor, segment: Segment) -> Segment:
    """Return a segment of the same shape in ``memory``, uninitialised."""
    key = segment.key
    value = segment.value
    return replace(
        segment,
        key=view_at(memory, 0, key.shape, key.dtype),
        value=view_at(memory, key.nbytes, value.shape, value.dtype),
    )
