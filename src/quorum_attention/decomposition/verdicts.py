"""What a mask does to a block of pairs: empty, full or partial (FlexAttention's words)."""

from __future__ import annotations

from enum import IntEnum


class Verdict(IntEnum):
    """How many pairs of a block are kept. Arrays hold verdicts as these numbers."""

    EMPTY = 0
    """No pair is kept."""
    FULL = 1
    """Every pair is kept."""
    PARTIAL = 2
    """Some pairs are kept, or it is not known: each pair has to be asked about."""


# Module names, because looking up an attribute of an enumeration is slow.
EMPTY, FULL, PARTIAL = Verdict


def both(one: Verdict, other: Verdict) -> Verdict:
    """The verdict on pairs that have to be kept by both of two masks."""
    if one is EMPTY or other is EMPTY:
        return EMPTY
    return FULL if one is other is FULL else PARTIAL


def either(one: Verdict, other: Verdict) -> Verdict:
    """The verdict on pairs that have to be kept by at least one of two masks."""
    if one is FULL or other is FULL:
        return FULL
    return EMPTY if one is other is EMPTY else PARTIAL
