"""Kinds of cases on a GPU: what Triton compiles for and cuDNN prepares is of a list, not of chance.

On a GPU nearly every free case meets something that no other has: Triton compiles a kernel for each
dtype, width and option, and again for each pattern of strides and addresses that are multiples of
16; cuDNN prepares each shape in each thread. That takes 0.3 to 3 s a call, all else some
hundredths. So a run of ``BLOCK`` seeds is of one kind, which says what is compiled for; everything
else is drawn as freely as ever. One run of seeds in ``_FREE`` has no kind.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache

from random_calls.case import Scores

BLOCK = 16
# Seeds of which all have the shapes of the first, where shapes are prepared.
ALIKE = 8
_FREE = 70


@dataclass(frozen=True)
class Kind:
    """What is compiled for.

    Attributes:
        kernel, dtype, head_dim, value_dim, scores: of the case.
        masked, dropped, of_lse: whether there may be a mask, dropout, a gradient of the
            log-sum-exp, where that is of consequence.
    """

    kernel: str
    dtype: str
    head_dim: int
    value_dim: int
    scores: Scores = field(default_factory=Scores)
    masked: bool = True
    dropped: bool = True
    of_lse: bool = True

    @property
    def native(self) -> bool:
        """Whether Triton kernels read inputs as they lie: few patterns of strides."""
        return self.kernel.startswith("native")

    @property
    def shaped(self) -> bool:
        """Whether shapes are prepared (by cuDNN): those of eight seeds are alike."""
        of_cudnn = self.kernel in ("auto", "cudnn") and self.head_dim % 8 == 0
        return of_cudnn and self.dtype in ("float16", "bfloat16")


def kind_of(seed: int) -> int | None:
    """The number of the kind of a seed, or None; neighbouring numbers compile much alike."""
    r = random.Random(f"kind {seed // BLOCK}")
    kinds = pool()
    return r.choices([None, *range(len(kinds))], [1 / _FREE, *(w for _, w in kinds)])[0]


@cache
def pool() -> list[tuple[Kind, float]]:
    """Kinds and their shares, which add up to about 1."""
    found = [*_of_operators(), *_of_triton()] if _only is None else _of_one(_only)
    # Whoever does one after the other compiles little anew.
    found.sort(key=lambda one: (one[0].dtype, one[0].head_dim, one[0].value_dim, one[0].kernel))
    total = sum(weight for _, weight in found)
    return [(kind, weight / total) for kind, weight in found]


_only: str | None = None


def only(kernel: str | None) -> None:
    """Draw for this kernel alone; None: for all of the list."""
    global _only
    _only = kernel
    pool.cache_clear()


def _of_one(kernel: str) -> list[tuple[Kind, float]]:
    if kernel != "fa4":
        return [one for one in (*_of_operators(), *_of_triton()) if one[0].kernel == kernel]
    sizes = (("float16", 64, 64, 4), ("bfloat16", 64, 64, 2), ("bfloat16", 128, 128, 3),
             ("float16", 96, 96, 1), ("float16", 192, 128, 1),
             ("bfloat16", 256, 256, 0.5))  # fmt: skip
    return [(Kind("fa4", *size, masked=False, dropped=False), weight) for *size, weight in sizes]


def _of_operators() -> list[tuple[Kind, float]]:
    half, brain, single, double = "float16", "bfloat16", "float32", "float64"
    table: dict[str, list[tuple[str, int, int, float]]] = {
        "auto": [(half, 64, 64, 2), (brain, 128, 128, 1), (single, 64, 64, 5), (single, 16, 16, 3),
                 (single, 73, 73, 1), (double, 16, 16, 1.5), (double, 40, 40, 0.5)],
        "cudnn": [(half, 16, 16, 1), (brain, 64, 64, 1.5), (half, 40, 64, 0.5)],
        "flash": [(half, 64, 64, 6), (half, 16, 16, 3), (half, 40, 40, 1), (brain, 64, 64, 4),
                  (brain, 128, 128, 1), (brain, 8, 8, 0.7)],
        "efficient": [(half, 64, 64, 5), (half, 16, 16, 3), (half, 73, 73, 1), (half, 16, 64, 0.7),
                      (brain, 64, 64, 4), (brain, 8, 8, 0.7), (single, 64, 64, 5),
                      (single, 16, 16, 4), (single, 73, 73, 1), (single, 64, 16, 0.7),
                      (single, 257, 257, 0.3)],
        "dense": [(half, 64, 64, 2), (half, 16, 16, 2), (brain, 64, 64, 1), (single, 16, 16, 2),
                  (single, 73, 40, 1), (double, 16, 16, 2), (double, 64, 64, 0.7)],
        "function": [(half, 64, 64, 1), (single, 16, 16, 1), (brain, 64, 64, 0.7),
                     (double, 16, 16, 0.5)],
        "function explicit": [(half, 16, 16, 0.6), (single, 64, 64, 0.6)],
    }  # fmt: skip
    found = []
    for kernel, rows in table.items():
        for dtype, head_dim, value_dim, weight in rows:
            # What "auto" takes for dropout is Triton's; cuDNN prepares a shape for columns too.
            kind = Kind(kernel, dtype, head_dim, value_dim, masked=kernel != "flash",
                        dropped=kernel == "dense" or dtype == double)  # fmt: skip
            found.append((kind, weight))
    return found


def _of_triton() -> list[tuple[Kind, float]]:
    half, brain, single = "float16", "bfloat16", "float32"

    def native(dtype: str, width: int, weight: float, *may: str) -> tuple[Kind, float]:
        asked = {name: name in may for name in ("masked", "dropped", "of_lse")}
        return Kind("native", dtype, width, width, **asked), weight

    found = [
        native(half, 64, 5), native(half, 64, 3, "masked"), native(half, 64, 1, "dropped"),
        native(half, 64, 1, "of_lse"), native(half, 16, 2), native(brain, 64, 3),
        native(brain, 128, 1), native(single, 16, 3), native(single, 16, 2, "masked"),
        native(single, 16, 0.7, "dropped"), native(single, 16, 0.7, "of_lse"), native(half, 73, 1),
        (Kind("auto", half, 64, 64, masked=False), 0.5),
    ]  # fmt: skip
    for dtype, width, scores in (
        (half, 64, Scores(window=(20, 20))),
        (half, 64, Scores(window=(40, 0), softcap=50.0, alibi=True)),
        (single, 16, Scores(window=(3, 1), softcap=2.0)),
        (single, 16, Scores(alibi=True)),
    ):
        kind = Kind("native scores", dtype, width, width, scores, False, False, False)
        found.append((kind, 0.8))
    return found
