"""What a mask makes of a block of pairs: masked, clear or mixed (the paper's words)."""

from __future__ import annotations

from enum import IntEnum


class Verdict(IntEnum):
    """Of a block of pairs; the numbers stand for it in arrays."""

    MASKED = 0
    """No pair is kept."""
    CLEAR = 1
    """Every pair is kept."""
    MIXED = 2
    """Some are, or it is not known: pairs have to be asked one by one."""


# By name, because an attribute of an enumeration takes long to look up.
MASKED, CLEAR, MIXED = Verdict


def both(one: Verdict, other: Verdict) -> Verdict:
    """Of the pairs that two masks keep."""
    if one is MASKED or other is MASKED:
        return MASKED
    return CLEAR if one is other is CLEAR else MIXED


def either(one: Verdict, other: Verdict) -> Verdict:
    """Of the pairs that one of two masks keeps."""
    if one is CLEAR or other is CLEAR:
        return CLEAR
    return MASKED if one is other is MASKED else MIXED
