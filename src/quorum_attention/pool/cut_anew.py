"""Parts that nobody has begun are cut anew when a device leaves a pass.

What it had, and what nobody has begun, are whole heads that divided among the devices as they were.
Among those that are left they may not: of one head more than there are devices, all but one device
would be idle for the last head's time. So the last heads are cut into a piece for each device, as
the last ones of a call are at its beginning (parts.py), as far as that is worth what another kind
of call takes beside computing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# What may be gained is at least such a share of the time that is left.
_WORTH = 0.02
# Cut are at most so many parts for each device: more even things out no better.
_MOST_CUT = 2


def cut_anew(
    free: Sequence[Any],
    pairs: Callable[[Any], int],
    cut: Callable[[Any, int], Sequence[Any]],
    paces: Mapping[int, float],
    busy: Mapping[int, float],
    costs: float,
) -> dict[Any, Sequence[Any]]:
    """Parts that should be cut, each with its pieces.

    Args:
        free: parts that nobody has begun, in the order in which they are taken.
        pairs: how much work a part is.
        cut: a part in at most so many pieces of equal work; one or none: it cannot be cut.
        paces: seconds a pair of each device.
        busy: seconds that devices will still be at what they have.
        costs: seconds that such pieces take beside computing.
    """
    if not paces or not free:
        return {}
    work = {part: pairs(part) for part in free}
    speed = sum(1 / pace for pace in paces.values())
    begun = sum(busy.get(device, 0.0) / pace for device, pace in paces.items())
    ideal = max((sum(work.values()) + begun) / speed, *busy.values(), 0.0)
    best = _ends(work.values(), paces, busy)
    found: dict[Any, Sequence[Any]] = {}
    divided: dict[Any, Sequence[Any]] = {}
    for part in reversed(free):
        if best <= (1 + _WORTH) * ideal or len(divided) >= _MOST_CUT * len(paces):
            break
        pieces = cut(part, len(paces))
        if len(pieces) < 2:
            continue
        divided[part] = pieces
        each = (divided.get(one, (one,)) for one in free)
        seconds = _ends([pairs(one) for some in each for one in some], paces, busy)
        if seconds + costs * (not found) < (1 - _WORTH) * best:
            best, found = seconds, dict(divided)
    return found


def _ends(works: Iterable[float], paces: Mapping[int, float], busy: Mapping[int, float]) -> float:
    """When parts of so much work are done, if whoever would be done with one first takes it."""
    ends = {device: busy.get(device, 0.0) for device in paces}
    for work in works:
        first = min(ends, key=lambda device: ends[device] + work * paces[device])
        ends[first] += work * paces[first]
    return max(ends.values())


__all__ = ["cut_anew"]
