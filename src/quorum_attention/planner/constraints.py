"""What a schedule has to be: the budget, and what a user pinned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from quorum_attention.decomposition import Decomposition, Layout
from quorum_attention.execution.device.allocate import Home
from quorum_attention.execution.head_groups import GroupSize
from quorum_attention.execution.task_levels import deepest
from quorum_attention.planner import policy
from quorum_attention.units import counted


@dataclass(frozen=True, slots=True)
class PlanConstraints:
    """The constraints of a search; None leaves a choice to it.

    Attributes:
        budget_bytes: device bytes the pass may take.
        levels: chunk counts per level.
        depth: number of levels; with ``levels`` None the planner picks their chunk
            counts.
        layout, tile: where chunks are cut, as in ``Decomposition``.
        accumulator: where unfinished rows are kept between tasks.
        group: batch entries and key/value heads of a head group.
        n_cap: most tasks on the device at once.
        pinned: report an out-of-memory failure instead of recovering from it.
        streams: kernel calls in flight at once.
        over_inputs: whether tasks run on the inputs as they lie, or through slots.
        enforce_budget: whether a schedule has to fit the budget; if not and none fits,
            the smallest is taken.
    """

    budget_bytes: int
    levels: tuple[int, ...] | None = None
    depth: int | None = None
    layout: Layout = "aligned"
    tile: int = 128
    accumulator: Home | None = None
    group: GroupSize | None = None
    n_cap: int | None = None
    pinned: bool = False
    streams: int | None = None
    over_inputs: bool | None = None
    enforce_budget: bool = True

    @property
    def is_only_budget(self) -> bool:
        """Whether nothing but a budget is asked for."""
        return replace(
            self, budget_bytes=0, layout="aligned", tile=128
        ) == PlanConstraints(0)

    @property
    def words(self) -> str:
        """The levels or the depth asked for, as the end of a sentence."""
        if self.levels is not None:
            return f" at levels {self.levels}"
        if self.depth is not None:
            return f" at depth {self.depth}"
        return ""

    def decompose(self, n_tokens: int, levels: tuple[int, ...]) -> Decomposition:
        """Return the decomposition of ``n_tokens`` at these levels, from a cache."""
        return _decomposition(n_tokens, levels, self.layout, self.tile)

    def check_depth(self, n_tokens: int) -> None:
        """Refuse a depth whose last levels make no task smaller, and only more tasks.

        Raises:
            ValueError: names the largest depth that is taken.
        """
        if self.depth is None or self.depth <= policy.MAX_LISTED_DEPTH:
            return
        max_depth = max(deepest(self.decompose(n_tokens, ())), policy.MAX_LISTED_DEPTH)
        if self.depth > max_depth:
            tiles = f" in tiles of {self.tile}" if self.layout == "aligned" else ""
            raise ValueError(
                f"depth must be at most {max_depth} for "
                f"{counted(n_tokens, 'token')}{tiles}, got {self.depth}: more levels "
                "make no task smaller"
            )


_decomposition = lru_cache(maxsize=1024)(Decomposition)
