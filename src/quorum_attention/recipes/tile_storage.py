"""Tensors with a row for every token of a prompt, on the device or in page-locked host
memory.

A prompt of a million tokens has hidden states, queries and outputs of gigabytes. They
stay in host memory, and the device sees one tile of tokens at a time. Copies run on
streams of their own: the rows of the next tile come while the rows of this one are
computed, and results leave meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from quorum_attention.arithmetic import even_part
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.execution.device.mover import ImmediateStream
from quorum_attention.kernels.torch_private import lock_pages_with_threads
from quorum_attention.long_prompts.head_copies import HeadCopies
from quorum_attention.partition import split_at_multiples


def spans_of(n_tokens: int, tile: int) -> list[Interval]:
    """Return spans of about one length, at most ``tile`` tokens, that cover all
    tokens."""
    return split_at_multiples(Interval(0, n_tokens), even_part(n_tokens, tile))


def rows_of(tensor: torch.Tensor, span: Interval) -> torch.Tensor:
    """Return the rows of a span as a view: tensors are (..., tokens, width)."""
    return tensor.narrow(-2, span.start, span.length)


class SideStream:
    """Copies between host and device on a stream beside the computation.

    On a device that is no GPU copies are made at once.
    """

    def __init__(self, device: torch.device) -> None:
        lock_pages_with_threads()
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copies = None if self._stream is None else HeadCopies(self._stream)

    def empty_on_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in host memory, page-locked for a GPU."""
        is_locked = self._stream is not None
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=is_locked)

    def copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> Any:
        """Copy tensors when all that the computation has been given so far is done.

        Returns:
            An event for ``wait``.
        """
        if self._stream is None or self._copies is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return ImmediateStream()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for target, source in zip(targets, sources, strict=True):
            self._copy(self._copies, target, source)
        return self._stream.record_event()

    def _copy(
        self, copies: HeadCopies, target: torch.Tensor, source: torch.Tensor
    ) -> None:
        """Begin a copy of one tensor."""
        stays = target.device == source.device
        if stays or target.dim() < 3:
            with torch.cuda.stream(self._stream):
                target.copy_(source, non_blocking=True)
            return
        copies.copy(target, source)

    def wait(self, event: Any) -> None:
        """Let the computation wait for a copy."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def synchronize(self) -> None:
        """Wait until all copies are made."""
        if self._stream is not None:
            self._stream.synchronize()


class DeviceTiles:
    """Rows that all lie on the device: tiles are views."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, tile: torch.Tensor, n_tokens: int) -> torch.Tensor:
        """Return an uninitialised tensor shaped like ``tile`` but with ``n_tokens``
        rows."""
        shape = (*tile.shape[:-2], n_tokens, tile.shape[-1])
        return torch.empty(shape, dtype=tile.dtype, device=self.device)

    def load(
        self, spans: Sequence[Interval], *tensors: torch.Tensor
    ) -> Iterator[tuple[Interval, list[torch.Tensor]]]:
        """Yield each span with its rows of every tensor, on the device."""
        for span in spans:
            yield span, [rows_of(tensor, span) for tensor in tensors]

    def store(
        self, span: Interval, tensors: Sequence[torch.Tensor], tiles: Any
    ) -> None:
        """Write the tiles of a span, one for each tensor."""
        for tensor, tile in zip(tensors, tiles, strict=True):
            rows_of(tensor, span).copy_(tile)

    def stash(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a small tensor of a tile where it may stay until its tile's turn."""
        return tensor

    def unstash(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a stashed tensor on the device."""
        return tensor

    def finish(self) -> None:
        """Wait until all rows are stored."""


class HostTiles(DeviceTiles):
    """Rows in page-locked host memory: tiles are copied to the device and back."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._loads = SideStream(device)
        self._stores = SideStream(device)
        # Two device tensors for each tensor that tiles are loaded of: one is used, one
        # is filled.
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}
        # Tiles that are being stored: the computation must not reuse their memory.
        self._leaving: tuple[Any, Any] | None = None

    def empty(self, tile: torch.Tensor, n_tokens: int) -> torch.Tensor:
        """Return uninitialised page-locked memory like ``tile``, with ``n_tokens``
        rows."""
        shape = (*tile.shape[:-2], n_tokens, tile.shape[-1])
        return self._stores.empty_on_host(shape, tile.dtype)

    def load(
        self, spans: Sequence[Interval], *tensors: torch.Tensor
    ) -> Iterator[tuple[Interval, list[torch.Tensor]]]:
        """Yield each span with its rows, on the device. The next span's rows come
        meanwhile."""
        upcoming = self._begin_load(spans, 0, tensors)
        for number, span in enumerate(spans):
            tiles, event = upcoming
            upcoming = self._begin_load(spans, number + 1, tensors)
            self._loads.wait(event)
            yield span, tiles

    def _begin_load(
        self, spans: Sequence[Interval], number: int, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Any]:
        if number >= len(spans):
            return [], None
        span = spans[number]
        sources = [rows_of(tensor, span) for tensor in tensors]
        targets = [
            self._buffer(source, position, number)
            for position, source in enumerate(sources)
        ]
        return targets, self._loads.copy(targets, sources)

    def _buffer(self, rows: torch.Tensor, position: int, number: int) -> torch.Tensor:
        """Device memory for some rows: two buffers take turns."""
        n_numbers = rows.numel()
        *outer, _, width = rows.shape
        key = (position, tuple(outer), width, rows.dtype)
        pair = self._buffers.get(key)
        if pair is None or pair.shape[1] < n_numbers:
            pair = torch.empty((2, n_numbers), dtype=rows.dtype, device=self.device)
            self._buffers[key] = pair
        memory = pair[number % 2]
        return memory[:n_numbers].view(rows.shape)

    def store(
        self, span: Interval, tensors: Sequence[torch.Tensor], tiles: Any
    ) -> None:
        """Write the tiles of a span to host memory, beside the computation."""
        targets = [rows_of(tensor, span) for tensor in tensors]
        dense = [tile.contiguous() for tile in tiles]
        event = self._stores.copy(targets, dense)
        self._let_go()
        self._leaving = (event, dense)

    def _let_go(self) -> None:
        """Free the tiles of the store before this one, once they are copied."""
        if self._leaving is not None:
            self._stores.wait(self._leaving[0])
            self._leaving = None

    def stash(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in page-locked host memory."""
        return tensor.cpu().pin_memory() if tensor.is_cuda else tensor

    def unstash(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device."""
        return tensor.to(self.device, non_blocking=True)

    def finish(self) -> None:
        """Wait until all rows are stored: others read host memory without knowing of
        streams. Attention gets the memory of the device."""
        self._let_go()
        self._stores.synchronize()
        self._buffers.clear()
