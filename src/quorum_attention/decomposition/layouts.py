"""Rectangles of all pairs of a call at once, not task by task.

All tasks of a level together keep every pair once. Where inputs and states are where
compute is, the pairs need not be taken task by task. Halving gives the fewest and
largest rectangles. Rows or blocks of chunks give rectangles that are no larger than
memory allows:

    halves [C      ]   rows [C      ]   blocks [C      ]
           [1 C    ]        [1 C    ]          [1 C    ]
           [2 2 C  ]        [2 2 C  ]          [2 3 C  ]
           [2 2 3 C]        [3 3 3 C]          [4 5 6 C]
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from quorum_attention.decomposition.bands import Band, rectangles_of_band
from quorum_attention.decomposition.decomposition import Decomposition, Task
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.decomposition.rectangles import Rectangle, cut

Pieces = Literal["halves", "rows", "blocks"]
"""How the pairs of a sequence are laid out in rectangles: by halving it at chunks; a
chunk of queries against all their keys; a chunk of queries against a chunk of keys."""


@lru_cache(maxsize=256)
def pieces_of(
    decomposition: Decomposition,
    pieces: Pieces,
    is_causal: bool,
    n_queries: int,
    n_keys: int,
) -> tuple[Task, tuple[Rectangle, ...]]:
    """Give the whole sequence as one task, and rectangles that hold each pair of a call
    once.

    Without levels that is one rectangle; with levels it is cut at the chunks of the
    first.
    """
    task = decomposition.as_one_task()
    if pieces == "halves" or not decomposition.depth:
        return task, task.rectangles(is_causal, n_queries, n_keys)
    band = Band(high=0 if is_causal else None)
    all_keys = Interval(0, n_keys)
    rectangles: list[Rectangle] = []
    for span in task.spans:
        queries = Interval(span.start, min(span.stop, n_queries))
        rectangles.extend(rectangles_of_band(band, queries, all_keys))
    if pieces == "blocks":
        rectangles = list(
            cut(rectangles, decomposition.n_tokens, decomposition.chunk_tokens)
        )
    return task, tuple(rectangles)
