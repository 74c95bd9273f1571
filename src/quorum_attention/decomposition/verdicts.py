"""What a mask does to a block of pairs: masked, clear or mixed (the paper's words)."""

from __future__ import annotations

from enum import IntEnum


class Verdict(IntEnum):
    """How many pairs of a block are kept. Arrays hold verdicts as these numbers."""

    MASKED = 0
    """No pair is kept."""
    CLEAR = 1
    """Every pair is kept."""
    MIXED = 2
    """Some pairs are kept, or it is not known: each pair has to be asked about."""


# Module names, because looking up an attribute of an enumeration is slow.
MASKED, CLEAR, MIXED = Verdict


def both(one: Verdict, other: Verdict) -> Verdict:
    """The verdict on pairs that have to be kept by both of two masks."""
    if one is MASKED or other is MASKED:
        return MASKED
    return CLEAR if one is other is CLEAR else MIXED


def either(one: Verdict, other: Verdict) -> Verdict:
    """The verdict on pairs that have to be kept by at least one of two masks."""
    if one is CLEAR or other is CLEAR:
        return CLEAR
    return MASKED if one is other is MASKED else MIXED
