"""The mirror image of an interest set (paper, Appendix C), and the check of a set."""

import pytest

from quorum_attention.quorums import (
    interest_set,
    is_interest_set,
    paired_interest_set,
    quorum_sizes,
)

SIZES = quorum_sizes(40)


def test_the_papers_example():
    """For c = 7 the paper names (0, 1, 5) as the pair of (0, 1, 3)."""
    assert paired_interest_set((0, 1, 3)) == (0, 1, 5)


@pytest.mark.parametrize("l", SIZES)
def test_the_pair_is_an_interest_set_and_pairs_back(l):
    """Mirroring twice is no change; the mirror image is in the same normal form."""
    members = interest_set(l)
    pair = paired_interest_set(members)
    assert is_interest_set(pair)
    assert list(pair) == sorted(pair)
    assert paired_interest_set(pair) == members
    assert (pair == members) == (l <= 2)


def test_any_iterable_is_read_once():
    """A generator is as good as a tuple."""
    assert paired_interest_set(a for a in (0, 1, 3)) == (0, 1, 5)
    assert is_interest_set(a for a in (0, 1, 3))


@pytest.mark.parametrize("members", [(0, 1, 2), (0, 1, 4, 9), (0, 1, 1), (0, 1, 10), ()])
def test_only_interest_sets_have_a_pair(members):
    """None of these may be mirrored into something plausible."""
    with pytest.raises(ValueError, match="must be an interest set"):
        paired_interest_set(members)


@pytest.mark.parametrize("members", [(1, 2, 4), (0, 2, 3), (1, 0, 3)])
def test_the_pair_needs_the_normal_form(members):
    """The formula holds for sets that begin with 0, 1 only."""
    assert is_interest_set(members)
    with pytest.raises(ValueError, match="must begin with 0, 1"):
        paired_interest_set(members)


@pytest.mark.parametrize("l", [l for l in SIZES if 3 <= l <= 12])
def test_changing_one_member_is_noticed(l):
    """Every near miss of a set fails the check, unless it is an interest set by a full count."""
    members, c = interest_set(l), l * (l - 1) + 1
    for place in range(l):
        for other in set(range(c)) - set(members):
            near = (*members[:place], other, *members[place + 1 :])
            distinct = {(a - b) % c for a in near for b in near}
            assert is_interest_set(near) == (len(distinct) == c)
    assert not is_interest_set((*members[:-1], members[0]))  # a member twice
    assert not is_interest_set((*members, members[0]), c)
    assert not is_interest_set(members[:-1], c)
    assert not is_interest_set((*members, c - 1), c)
    assert not is_interest_set((*members[:-1], members[-1] + c))  # right only modulo c
    assert not is_interest_set((*members[:-1], members[-1] - c))


def test_the_modulus_can_be_given():
    """A set is one at its own chunk count and at no other modulus."""
    assert [c for c in range(-2, 60) if is_interest_set((0, 1, 3), c)] == [7]
    assert [c for c in range(-2, 60) if is_interest_set((0,), c)] == [1]
    assert not is_interest_set((), 7)
    assert not is_interest_set(())  # nobody would compute the diagonal
