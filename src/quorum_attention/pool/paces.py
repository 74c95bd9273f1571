"""How quick the workers of a pool were, call after call.

A pace is seconds a query-key pair. What else the time of a pair depends on (pass, dtype, head
dimension, size, where inputs are) is its kind. The first order of a kind also opens, compiles and
plans, and a short one mostly waits for its messages: neither says how quick a device is. Of the
last few calls the quickest one counts: something may have held up the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

# Calls that count.
_KEPT = 3
# A device is believed to be slower than expected if it was in so many of them.
_BELIEVED = 2
# What took less says nothing.
_TELLING_SECONDS = 0.05
# Devices whose paces differ by no more are as quick as each other.
_EVEN = 1.1
# A device that was left out of so many calls in which one of its kind took part is tried again.
_LEFT_OUT = 16


@dataclass(slots=True)
class Readings:
    """What was seen of one worker."""

    _paces: dict[Any, deque[float]] = field(default_factory=dict)
    _met: set[Any] = field(default_factory=set)
    _short: set[Any] = field(default_factory=set)
    _left_out: dict[Any, int] = field(default_factory=dict)

    def met(self, kind: Any) -> bool:
        """Whether it has computed anything of this kind."""
        return kind in self._met

    def short(self, kind: Any) -> bool:
        """Whether its last call of this kind was too short to tell its pace."""
        return kind in self._short

    def pace(self, kind: Any) -> float | None:
        """Its pace, if it was seen."""
        seen = self._paces.get(kind)
        return min(seen) if seen else None

    def believed(self, kind: Any) -> bool:
        """Whether it was seen often enough to be slower than expected."""
        return len(self._paces.get(kind, ())) >= _BELIEVED

    def took_part(self, kind: Any, seconds: float, pairs: int) -> None:
        """Note a call.

        Args:
            seconds, pairs: of its orders, without a first one of its kind.
        """
        self._left_out.pop(kind, None)
        self._met.add(kind)
        if not pairs:
            return
        if seconds < _TELLING_SECONDS:
            self._short.add(kind)
            return
        self._short.discard(kind)
        self._paces.setdefault(kind, deque(maxlen=_KEPT)).append(seconds / pairs)

    def was_left_out(self, kind: Any) -> None:
        """Note a call that another device of its kind took part in, and this one did not."""
        count = self._left_out[kind] = self._left_out.get(kind, 0) + 1
        if count >= _LEFT_OUT:
            self._paces.pop(kind, None)
            self._left_out.pop(kind)


def even(paces: Collection[float], share: float) -> bool:
    """Whether devices that have as much to do should keep to that: they are as equal as kernels of
    the same work are from one time to the next, or the quickest would end later with a part of the
    slowest than the slowest with all of its own.

    Args:
        paces: of each; none: nothing is known.
        share: the smallest part over what each has to do.
    """
    return not paces or max(paces) <= max(_EVEN, 1 + share) * min(paces)


def paces_of(
    readings: Mapping[int, Readings], kind: Any, expected: Mapping[int, float]
) -> dict[int, float]:
    """The pace of each worker, by number: as seen, or as expected beside those that were seen.

    Args:
        expected: of each, before anything was seen.
    """
    seen = {n: pace for n, one in readings.items() if (pace := one.pace(kind)) is not None}
    sure = {n: pace for n, pace in seen.items() if readings[n].believed(kind)}
    # What is expected of the others goes by how those that were seen kept to it.
    scales = [pace / expected[n] for n, pace in (sure or seen).items()]
    scale = (sum(scales) / len(scales) if sure else min(scales)) if scales else 1.0
    found = {n: pace * scale for n, pace in expected.items()}
    return {n: sure.get(n, min(seen.get(n, pace), pace)) for n, pace in found.items()}


__all__ = ["Readings", "even", "paces_of"]
