"""Rectangles over the whole sequence at once, in place of those of its tasks.

All tasks of a level together keep every pair once. Where nothing has to be brought anywhere, the
pairs need not be taken task by task. Halving gives the fewest and largest rectangles; rows or
blocks of chunks give rectangles that are no larger than memory allows:

    halves [C      ]   rows [C      ]   blocks [C      ]
           [1 C    ]        [1 C    ]          [1 C    ]
           [2 2 C  ]        [2 2 C  ]          [2 3 C  ]
           [2 2 3 C]        [3 3 3 C]          [4 5 6 C]
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

from quorum_attention.decomposition.decomposition import Decomposition
from quorum_attention.decomposition.rectangles import Rectangle, clip, cut
from quorum_attention.decomposition.tasks import Task

Pieces = Literal["halves", "rows", "blocks"]
"""How the pairs of a sequence are laid out in rectangles: by halving it at chunks; a chunk of
queries against all their keys; a chunk of queries against a chunk of keys."""


@lru_cache(maxsize=256)
def pieces_of(
    shape: Decomposition, pieces: Pieces, is_causal: bool, n_queries: int, n_keys: int
) -> tuple[Task, tuple[Rectangle, ...]]:
    """The whole sequence as one task, and rectangles of it that hold every pair of a call once.

    Without levels that is one rectangle; with levels it is cut at the chunks of the first.
    """
    task = shape.whole()
    if pieces == "halves" or not shape.depth:
        return task, task.rectangles(is_causal, n_queries, n_keys)
    found = clip(_rows(task, is_causal), n_queries, n_keys)
    if pieces == "blocks":
        found = cut(found, shape.n_tokens, largest_chunk(shape))
    return task, tuple(found)


def largest_chunk(shape: Decomposition) -> int:
    """Tokens of the largest chunk of the first level; at least 1."""
    return max((span.stop - span.start for span in shape.whole().spans), default=1)


def _rows(task: Task, is_causal: bool) -> Iterator[Rectangle]:
    """Every span of ``task`` against all its keys, those that only some of its queries see last."""
    for span in task.spans:
        if not is_causal:
            yield Rectangle(span.start, span.stop, 0, task.n_tokens)
            continue
        if span.start > 0:
            yield Rectangle(span.start, span.stop, 0, span.start)
        yield Rectangle(span.start, span.stop, span.start, span.stop, causal=True)
