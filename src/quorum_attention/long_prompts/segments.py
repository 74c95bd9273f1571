"""Consecutive tokens of one layer, as attention and files read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from quorum_attention.long_prompts.places import Place


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one layer.

    Attributes:
        key: (rows, h_kv, n, d), a view of the cache's memory, of the model's
            dtype: readers use it as it is.
        value: (rows, h_kv, n, d_v), the same.
        place: where both lie.
        entries: the row of each batch entry; None: entry i is row i. Rows that several
            entries share are there once.
    """

    key: torch.Tensor
    value: torch.Tensor
    place: Place
    entries: tuple[int, ...] | None = None

    @property
    def n_tokens(self) -> int:
        """The number of tokens."""
        return self.key.shape[2]

    @property
    def batch(self) -> int:
        """The number of batch entries."""
        return self.key.shape[0] if self.entries is None else len(self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, each row counted once."""
        return self.key.nbytes + self.value.nbytes

    def narrow(self, start: int, stop: int) -> Segment:
        """Return tokens start to stop (exclusive), as views."""
        return replace(
            self, key=self.key[:, :, start:stop], value=self.value[:, :, start:stop]
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of all rows, at least 1."""
        return max(1, self.nbytes // max(1, self.n_tokens))

    def cut(self, n_bytes: int) -> Iterator[Segment]:
        """Yield the tokens in parts of at most so many bytes, or of one token."""
        step = max(1, n_bytes // self.token_bytes)
        for start in range(0, self.n_tokens, step):
            yield self.narrow(start, start + step)

    def expanded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (key, value) with one row for each batch entry: views where entries
        allow it."""
        return _rows_by_entry(self.key, self.entries), _rows_by_entry(
            self.value, self.entries
        )


def _rows_by_entry(tensor: torch.Tensor, entries: Sequence[int] | None) -> torch.Tensor:
    if entries is None:
        return tensor
    if tensor.shape[0] == 1:
        return tensor.expand(len(entries), *tensor.shape[1:])
    return tensor[torch.tensor(entries, dtype=torch.int64, device=tensor.device)]


def concatenate(
    segments: Sequence[Segment], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Return (key, value) of all tokens as two tensors on ``device``: a copy of
    everything.

    Args:
        segments: at least one.
    """
    expanded = [segment.expanded() for segment in segments]
    return tuple(
        torch.cat([tensor.to(device) for tensor in tensors], dim=2)
        for tensors in zip(*expanded, strict=True)
    )
