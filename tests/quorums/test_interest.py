"""Interest sets: each is a perfect difference set; what has none is refused."""

import pytest

from quorum_attention.quorums import (
    chunk_count,
    interest_set,
    is_interest_set,
    paired_interest_set,
    quorum_size,
    quorum_sizes,
)
from quorum_attention.quorums.interest import has_interest_set

PRIME_POWERS = (
    2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 19, 23, 25, 27, 29, 31, 32, 37, 41, 43, 47, 49, 53, 59,
    61, 64, 67,
)  # fmt: skip
SIZES = (1, 2, *(q + 1 for q in PRIME_POWERS))


@pytest.mark.parametrize("l", SIZES)
def test_every_difference_occurs_exactly_once(l):
    """Exactly-once coverage rests on this, whichever construction made the set. Task
    order and the paired set rely on the normal form (0, 1, ...)."""
    members = interest_set(l)
    counts = [0] * (l * (l - 1) + 1)  # written out, not by is_interest_set
    for a in members:
        for b in members:
            counts[(a - b) % len(counts)] += 1
    assert counts == [l] + [1] * (l * (l - 1))
    assert is_interest_set(members)
    assert list(members) == sorted(set(members))
    assert members[:2] == (0, 1)[:l]
    assert all(type(a) is int for a in members)
    assert interest_set(l) is members, "made once"


def test_the_papers_sets_are_kept():
    """Plans must match the paper's for the sizes in its table."""
    assert interest_set(5) == (0, 1, 4, 14, 16)
    assert interest_set(9) == (0, 1, 3, 7, 15, 31, 36, 54, 63)


def test_sizes_are_one_and_two_and_prime_powers_plus_one():
    """quorum_sizes neither leaves a size out nor promises one that cannot be made."""
    assert quorum_sizes(68) == SIZES
    assert quorum_sizes(1) == (1,)
    assert [l for l in range(-3, 69) if has_interest_set(l)] == list(SIZES)


def test_quorum_size_takes_chunk_counts_of_sets_alone():
    """A chunk count beside the valid ones would leave pairs out or count them twice."""
    valid = {1 + sum(2 * k for k in range(l)): l for l in SIZES}
    assert {chunk_count(l): l for l in SIZES} == valid
    for c in (*range(1, 1000), *valid):
        if c in valid:
            assert quorum_size(c) == valid[c]
        else:
            with pytest.raises(ValueError, match=f"{c} chunks are not possible"):
                quorum_size(c)


@pytest.mark.parametrize("l", sorted(set(range(1, 68)) - set(SIZES)))
def test_a_size_without_a_set_names_its_nearest_neighbours(l):
    """The message must let the user go on: the next size down and the next up, both
    valid."""
    below, above = max(n for n in SIZES if n < l), min(n for n in SIZES if n > l)
    with pytest.raises(
        ValueError, match=f"of size {l}, the nearest sizes are {below} and {above}"
    ):
        interest_set(l)


@pytest.mark.parametrize("ask", [interest_set, quorum_size, quorum_sizes])
def test_sizes_are_whole_numbers_from_one(ask):
    """3.0 or True silently taken for a size would hide a mistake of the caller, and the
    cached answer for 1 is not that of True."""
    ask(1)
    for value in (3.0, "3", True, None):
        with pytest.raises(TypeError, match="must be a whole number"):
            ask(value)
    for value in (0, -1, -7):
        with pytest.raises(ValueError, match="must be at least 1"):
            ask(value)


@pytest.mark.parametrize("l", SIZES[:24])
def test_the_pair_is_an_interest_set_and_pairs_back(l):
    """Mirroring twice is no change; the mirror image is in the same normal form."""
    members = interest_set(l)
    pair = paired_interest_set(a for a in members)
    assert is_interest_set(pair)
    assert list(pair) == sorted(pair)
    assert paired_interest_set(pair) == members
    assert (pair == members) == (l <= 2)
