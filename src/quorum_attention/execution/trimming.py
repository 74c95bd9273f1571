"""The tasks of a call, less the tokens that its kernel's mask leaves without a partner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MethodType
from weakref import WeakMethod

from quorum_attention.decomposition import Decomposition, Pairs, Ranges, Task, Verdict
from quorum_attention.decomposition.trimming import trimmed
from quorum_attention.execution.shares import count_shared
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.remembered import remembered
from quorum_attention.kernels.traits import sparse

# A kernel works in blocks, which reach beyond the tokens that it needs; of tasks that end within
# one, as far as the mask keeps anything of it, whoever's pairs those are.
_BLOCK = 128
_MARGIN = 512


@dataclass(frozen=True, slots=True)
class Tally:
    """What trimmed tasks come to.

    Attributes:
        n_tasks: how many are left.
        tokens: of all of them together.
        largest: of the largest.
        before: tokens that the tasks would have had.
        widest: positions from a task's first token to its last, at most, with a margin.
        shared: positions that lie within several tasks' first and last tokens, with a margin.
    """

    n_tasks: int
    tokens: int
    largest: int
    before: int
    widest: int
    shared: int

    @property
    def left_out(self) -> float:
        """The share of the tokens that was left out."""
        return 1.0 - self.tokens / self.before if self.before else 0.0


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Tasks of a decomposition, trimmed, in order; ``before`` as in ``Tally``."""

    shape: Decomposition
    tasks: tuple[Task, ...]
    before: int

    def tally(self) -> Tally:
        """What they come to."""
        sizes = [task.n_tokens for task in self.tasks]
        wide = [
            (max(0, task.spans[0].start - _MARGIN), task.spans[-1].stop + _MARGIN)
            for task in self.tasks
            if task.spans
        ]
        n = widest = shared = self.shape.n_tokens
        if self.shape.layout == "aligned" and self.shape.tile % _BLOCK == 0:
            widest = min(n, max((stop - start for start, stop in wide), default=0))
            shared = min(n, count_shared(wide))
        return Tally(len(sizes), sum(sizes), max(sizes, default=0), self.before, widest, shared)


def pairs_of(work: Workload, kernel: InnerKernel) -> Pairs:
    """The pairs of a call, by its sizes and the kernel's own mask."""
    knowing = sparse(kernel)
    if knowing is None:
        return Pairs(work.n_queries, work.n_keys, work.is_causal)
    found = knowing.kept_pairs(work.n_queries, work.n_keys, work.is_causal)
    if isinstance(found.verdict, MethodType) and found.verdict.__self__ is kernel:
        return replace(found, verdict=_Weakly(found.verdict))
    return found


class _Weakly:
    """A kernel's method that does not keep the kernel: what is remembered about it must not."""

    __slots__ = ("method",)

    def __init__(self, method: MethodType) -> None:
        self.method = WeakMethod(method)

    def __call__(self, block: Ranges) -> Verdict:
        method = self.method()
        assert method is not None, "whoever asks has the kernel"
        found: Verdict = method(block)
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Weakly) and self.method == other.method

    def __hash__(self) -> int:
        return hash(self.method)


# Few: thousands of tasks are some megabytes.
@remembered(8)
def trimmed_tasks(
    shape: Decomposition, pairs: Pairs, kernel: InnerKernel, backward: bool
) -> Trimmed:
    """The tasks that are run; remembered as long as the kernel lives."""
    return _trim(shape, pairs, backward)


@remembered(256)
def tally(shape: Decomposition, pairs: Pairs, kernel: InnerKernel, backward: bool) -> Tally:
    """What ``trimmed_tasks`` come to, without keeping them."""
    return _trim(shape, pairs, backward).tally()


def _trim(shape: Decomposition, pairs: Pairs, backward: bool) -> Trimmed:
    tasks = list(shape.tasks())
    found = tasks
    if shape.depth:
        found = trimmed(tasks, pairs, shape.tile, written(pairs, backward))
    return Trimmed(shape, tuple(found), sum(task.n_tokens for task in tasks))


def written(pairs: Pairs, backward: bool) -> int:
    """Tokens below this position have rows that the pass returns."""
    return max(pairs.n_queries, pairs.n_keys) if backward else pairs.n_queries
