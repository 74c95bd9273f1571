"""What has no interest set is refused, with the nearest sizes that do."""

import re

import pytest

from quorum_attention.quorums import interest_set, quorum_size, quorum_sizes

SIZES = quorum_sizes(90)


@pytest.mark.parametrize("l", sorted(set(range(1, 71)) - set(SIZES)))
def test_a_size_without_a_set_names_its_nearest_neighbours(l):
    """The message must let the user go on: the next size down and the next up, both valid."""
    below = max(n for n in SIZES if n < l)
    above = min(n for n in SIZES if n > l)
    with pytest.raises(ValueError, match=f"of size {l}, the nearest sizes are {below} and {above}"):
        interest_set(l)


@pytest.mark.parametrize(("l", "near"), [(7, "6 and 8"), (11, "10 and 12"), (13, "12 and 14")])
def test_the_sizes_that_lack_a_plane(l, near):
    """7 and 11 are impossible (Bruck-Ryser, Lam), 13 is unknown; written out by hand."""
    with pytest.raises(ValueError, match=near):
        interest_set(l)


@pytest.mark.parametrize(
    ("c", "near"),
    [(2, "1 and 3"), (6, "3 and 7"), (8, "7 and 13"), (43, "31 and 57"), (44, "31 and 57"),
     (42, "31 and 57"), (111, "91 and 133"), (100, "91 and 133"), (157, "133 and 183")],
)  # fmt: skip
def test_a_chunk_count_without_a_set_names_its_nearest_neighbours(c, near):
    """Also just below and above a count l (l - 1) + 1 that has no set (43, 111, 157)."""
    with pytest.raises(ValueError, match=re.escape(f"nearest chunk counts are {near}") + "$"):
        quorum_size(c)


@pytest.mark.parametrize("ask", [interest_set, quorum_size, quorum_sizes])
@pytest.mark.parametrize("value", [3.0, "3", True, None])
def test_only_whole_numbers_are_sizes(ask, value):
    """3.0 or True silently taken for a size would hide a mistake of the caller."""
    with pytest.raises(TypeError, match="must be a whole number"):
        ask(value)


@pytest.mark.parametrize("ask", [interest_set, quorum_size, quorum_sizes])
@pytest.mark.parametrize("value", [0, -1, -7])
def test_sizes_start_at_one(ask, value):
    """No set, and no neighbour below, exists there."""
    with pytest.raises(ValueError, match="must be at least 1"):
        ask(value)


def test_a_refusal_does_not_hide_behind_the_cache():
    """interest_set(1) is cached and True == 1: True must be refused all the same."""
    interest_set(1)
    with pytest.raises(TypeError):
        interest_set(True)
