"""Interest sets of every size that is cheap: each is a perfect difference set."""

import pytest

from quorum_attention.quorums import (
    chunk_count,
    has_interest_set,
    interest_set,
    is_interest_set,
    quorum_size,
    quorum_sizes,
)

PRIME_POWERS = (
    2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 19, 23, 25, 27, 29, 31, 32, 37, 41, 43, 47, 49, 53, 59,
    61, 64, 67,
)  # fmt: skip
SIZES = (1, 2, *(q + 1 for q in PRIME_POWERS))

# Table "Example interest sets for several l values" of the paper, by chunk count.
PAPER = {
    7: (0, 1, 3),
    13: (0, 1, 3, 9),
    21: (0, 1, 4, 14, 16),
    31: (0, 1, 3, 8, 12, 18),
    57: (0, 1, 3, 13, 32, 36, 43, 52),
    73: (0, 1, 3, 7, 15, 31, 36, 54, 63),
    91: (0, 1, 3, 9, 27, 49, 56, 61, 77, 81),
    133: (0, 1, 3, 12, 20, 34, 38, 81, 88, 94, 104, 109),
}


def differences_by_hand(members: tuple[int, ...], modulus: int) -> list[int]:
    """How often every residue is a difference: written out, not by is_interest_set."""
    counts = [0] * modulus
    for a in members:
        for b in members:
            counts[(a - b) % modulus] += 1
    return counts


@pytest.mark.parametrize("l", SIZES)
def test_every_difference_occurs_exactly_once(l):
    """Exactly-once coverage rests on this, whichever construction made the set."""
    members = interest_set(l)
    assert len(members) == l
    assert differences_by_hand(members, l * (l - 1) + 1) == [l] + [1] * (l * (l - 1))
    assert is_interest_set(members)


@pytest.mark.parametrize("l", SIZES)
def test_sets_ascend_from_zero_and_one(l):
    """Task order and the paired set rely on the normal form (0, 1, ...)."""
    members = interest_set(l)
    assert list(members) == sorted(set(members))
    assert members[:2] == (0, 1)[:l]
    assert all(type(a) is int for a in members)


@pytest.mark.parametrize(("c", "members"), PAPER.items())
def test_the_papers_sets_are_kept(c, members):
    """Plans must match the paper's for the sizes in its table."""
    assert interest_set(len(members)) == members
    assert quorum_size(c) == len(members)


def test_the_trivial_sizes():
    """c = 1 is the monolithic call; c = 3 has three chunks of which each task takes two."""
    assert interest_set(1) == (0,)
    assert interest_set(2) == (0, 1)


def test_a_set_is_made_once():
    """The construction is searched for; every task asks for the set anew."""
    assert interest_set(20) is interest_set(20)


def test_sizes_are_one_and_two_and_prime_powers_plus_one():
    """quorum_sizes neither leaves a size out nor promises one that cannot be made."""
    assert quorum_sizes(68) == SIZES
    assert quorum_sizes(1) == (1,)
    assert quorum_sizes(13) == (1, 2, 3, 4, 5, 6, 8, 9, 10, 12)
    assert [l for l in range(-3, 69) if has_interest_set(l)] == list(SIZES)


@pytest.mark.parametrize("l", SIZES)
def test_quorum_size_inverts_chunk_count(l):
    """Levels are given as chunk counts; the quorum size comes back from them."""
    assert chunk_count(l) == 1 + sum(2 * k for k in range(l))
    assert quorum_size(chunk_count(l)) == l


def test_quorum_size_takes_no_other_chunk_count():
    """A chunk count beside the valid ones would leave pairs out or count them twice."""
    valid = {chunk_count(l) for l in SIZES}
    for c in range(1, 1000):
        if c in valid:
            assert chunk_count(quorum_size(c)) == c
        else:
            with pytest.raises(ValueError, match=f"no interest set has {c} chunks"):
                quorum_size(c)
