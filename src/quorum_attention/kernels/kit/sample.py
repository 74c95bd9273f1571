"""Some hundred pairs of a mask function, asked again in a worker, which imports it by its name.

There it may read something else. Asking for a few of its pairs again costs as much as one small
operator. A difference that touches none of these pairs is not seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quorum_attention.counts import shown
from quorum_attention.kernels.kit.masks import BlockMask, MaskMod
from quorum_attention.kernels.kit.over_pairs import boolean, indexing
from quorum_attention.kernels.protocol import Indices
from quorum_attention.kernels.torch_private import outside

# Queries that are drawn, and keys for each of them: half near the query, half anywhere.
_QUERIES, _KEYS = 16, 32
_Sizes = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Sample:
    """Pairs of a call, and which of them a function keeps.

    Attributes:
        pairs: numbers of batch entries, of heads, and positions of queries and of keys.
        kept: one answer for each pair.
    """

    pairs: tuple[tuple[int, ...], ...]
    kept: tuple[bool, ...]

    @classmethod
    def draw(cls, function: MaskMod, sizes: _Sizes, device: torch.device) -> Sample:
        """The answers of ``function`` on pairs of a call of ``sizes`` (batch entries, heads,
        queries, keys), which are drawn anew each time."""
        pairs = tuple(zip(*_drawn(sizes), strict=True))
        return cls(pairs, _answers(function, pairs, device))

    def check(self, function: MaskMod, device: torch.device, since: str) -> None:
        """Ask again.

        Args:
            since: what was done with the first answers, for the message.

        Raises:
            RuntimeError: an answer is another one.
        """
        if _answers(function, self.pairs, device) != self.kept:
            raise RuntimeError(
                f"the mask function {shown(function)} keeps other pairs than {since}. A function "
                "must stay what it is as long as its Mask or kernel lives: make a new one, and "
                "give values as defaults (lambda b, h, q, k, n=n: ...)"
            )


def results_at(functions: Sequence[Callable[..., Any]], at: Indices) -> list[torch.Tensor]:
    """What mask functions return for the first pair of ``at`` and for the last."""
    each = (at.entries, at.heads, at.queries, at.keys)
    pairs = [[numbers[end] for numbers in each] for end in (0, -1)]
    return [f(*pair) for f in functions if not isinstance(f, BlockMask) for pair in pairs]


def _drawn(sizes: _Sizes) -> list[tuple[int, int, int, int]]:
    batch, heads, n_queries, n_keys = sizes
    if 0 in sizes:
        return []
    draw = random.SystemRandom()  # nobody's own generator moves on
    found = []
    for part in range(_QUERIES):
        query = int((part + draw.random()) * n_queries / _QUERIES)
        for near in range(_KEYS):
            key = draw.randrange(n_keys)
            if near % 2:
                # As often at every order of magnitude of the distance.
                away = int(n_keys ** draw.random()) - draw.randrange(2)
                key = min(n_keys - 1, max(0, query + draw.choice((-1, 1)) * away))
            found.append((draw.randrange(batch), draw.randrange(heads), query, key))
    return found


def _answers(
    function: MaskMod, pairs: tuple[tuple[int, ...], ...], device: torch.device
) -> tuple[bool, ...]:
    if not pairs:
        return ()
    with outside():
        at = [torch.tensor(numbers, device="cpu").to(device) for numbers in pairs]
        kept: torch.Tensor = torch.vmap(indexing(boolean(function)))(*at)
        return tuple(kept.cpu().tolist())
