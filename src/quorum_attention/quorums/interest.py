"""Interest sets: which chunks a subsequence takes (paper, Section 3 and Appendix C)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from itertools import count, permutations

from quorum_attention.argument_checks import whole_number
from quorum_attention.quorums.singer import prime_power, singer_set

# The paper's table of example interest sets; l = 1 and 2 are trivial.
_PAPER = {
    1: (0,),
    2: (0, 1),
    3: (0, 1, 3),
    4: (0, 1, 3, 9),
    5: (0, 1, 4, 14, 16),
    6: (0, 1, 3, 8, 12, 18),
    8: (0, 1, 3, 13, 32, 36, 43, 52),
    9: (0, 1, 3, 7, 15, 31, 36, 54, 63),
    10: (0, 1, 3, 9, 27, 49, 56, 61, 77, 81),
    12: (0, 1, 3, 12, 20, 34, 38, 81, 88, 94, 104, 109),
}


def chunk_count(l: int) -> int:
    """The chunk count c = l (l - 1) + 1 of quorum size ``l``."""
    return l * (l - 1) + 1


def has_interest_set(l: int) -> bool:
    """Whether an interest set of size ``l`` is known: l - 1 a prime power, or l <=
    2."""
    if l <= 2:
        return l >= 1
    return prime_power(l - 1) is not None


def quorum_sizes(max_l: int) -> tuple[int, ...]:
    """All quorum sizes up to ``max_l`` for which an interest set is known, ascending.

    Raises:
        TypeError, ValueError: ``max_l`` is no whole number from 1.

    Examples:
        >>> quorum_sizes(9)
        (1, 2, 3, 4, 5, 6, 8, 9)
    """
    max_l = whole_number(max_l, "max_l", 1)
    return tuple(l for l in range(1, max_l + 1) if has_interest_set(l))


# Cached because each call asks many times. ``typed``, so that True does not get the
# answer for 1.
@lru_cache(maxsize=4096, typed=True)
def quorum_size(c: int) -> int:
    """The quorum size whose chunk count is ``c``.

    Raises:
        TypeError: ``c`` is no whole number.
        ValueError: no interest set has that chunk count; names the nearest that work.
    """
    c = whole_number(c, "c", 1)
    # The largest l with l (l - 1) + 1 <= c.
    l = (1 + math.isqrt(4 * c - 3)) // 2
    if chunk_count(l) == c and has_interest_set(l):
        return l
    nearest = _neighbours(l + 1)
    names = " and ".join(str(chunk_count(size)) for size in nearest)
    raise ValueError(f"{c} chunks are not possible; the nearest counts are {names}")


@lru_cache(maxsize=None, typed=True)
def interest_set(l: int) -> tuple[int, ...]:
    """The interest set of quorum size ``l``: ascending residues modulo c = l (l - 1) +
    1.

    Every nonzero residue modulo c is the difference of exactly one ordered pair of its
    members. If the size is in the paper's table, the set is the paper's. Other sets are
    made by Singer's construction.

    Raises:
        ValueError: no set of that size is known (7 and 11 have none); names the nearest
            sizes.
        TypeError: ``l`` is no whole number.

    Examples:
        >>> interest_set(3), interest_set(4)
        ((0, 1, 3), (0, 1, 3, 9))
    """
    l = whole_number(l, "l", 1)
    if l in _PAPER:
        return _PAPER[l]
    if not has_interest_set(l):
        names = " and ".join(map(str, _neighbours(l)))
        raise ValueError(
            "l must be 1, 2 or one more than a prime power; there is no interest set "
            f"of size {l}, the nearest sizes are {names}"
        )
    return singer_set(l - 1)


def chunks_of_task(task: int, c: int) -> list[int]:
    """The chunks of a task, of ``c`` chunks: its own, and those it meets. Ascending."""
    return sorted((task + offset) % c for offset in interest_set(quorum_size(c)))


def tasks_of_chunk(chunk: int, c: int) -> list[int]:
    """The tasks that hold a chunk, ascending."""
    return sorted((chunk - offset) % c for offset in interest_set(quorum_size(c)))


def paired_interest_set(interest: Iterable[int]) -> tuple[int, ...]:
    """The mirror image of an interest set that contains 0 and 1 (paper, Appendix C).

    (0, 1, a_2, ..., a_{l-1}) becomes (0, 1, c+1-a_{l-1}, ..., c+1-a_2), an interest set
    as well.

    Raises:
        ValueError: ``interest`` is no interest set, or does not begin with 0, 1.

    Examples:
        >>> paired_interest_set((0, 1, 3))
        (0, 1, 5)
    """
    members = tuple(interest)
    if not is_interest_set(members):
        raise ValueError(f"interest must be an interest set, got {members}")
    c = chunk_count(len(members))
    if len(members) < 2:
        return members
    if members[:2] != (0, 1):
        raise ValueError(f"interest must begin with 0, 1, got {members}")
    return (0, 1, *sorted(c + 1 - a for a in members[2:]))


def is_interest_set(interest: Iterable[int], c: int | None = None) -> bool:
    """Whether every nonzero residue modulo ``c`` is the difference of exactly one
    ordered pair of members.

    ``c`` defaults to l (l - 1) + 1, the only modulus for which this is possible.

    Examples:
        >>> is_interest_set((0, 1, 3)), is_interest_set((0, 1, 2))
        (True, False)
    """
    members = tuple(interest)
    modulus = chunk_count(len(members)) if c is None else c
    if not members or modulus < 1:
        return False
    are_distinct = len(set(members)) == len(members)
    if not are_distinct or min(members) < 0 or max(members) >= modulus:
        return False
    differences = [(a - b) % modulus for a, b in permutations(members, 2)]
    return sorted(differences) == list(range(1, modulus))


def _neighbours(l: int) -> list[int]:
    """The largest quorum size below ``l``, if there is one, and the smallest from ``l``
    on."""
    smaller = list(filter(has_interest_set, range(1, l)))
    larger = next(filter(has_interest_set, count(l)))
    return [*smaller[-1:], larger]
