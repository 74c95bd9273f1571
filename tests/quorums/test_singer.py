"""Finite fields: the axioms, element by element, for every prime power up to 32."""

import itertools

import pytest

from quorum_attention.quorums.singer import Field, prime_power

PRIME_POWERS = {
    2: (2, 1), 3: (3, 1), 4: (2, 2), 5: (5, 1), 7: (7, 1), 8: (2, 3), 9: (3, 2), 11: (11, 1),
    13: (13, 1), 16: (2, 4), 17: (17, 1), 19: (19, 1), 23: (23, 1), 25: (5, 2), 27: (3, 3),
    29: (29, 1), 31: (31, 1), 32: (2, 5),
}  # fmt: skip


def test_prime_powers_are_told_from_the_rest():
    """Sizes with an interest set are decided by this."""
    assert {q: prime_power(q) for q in range(-4, 33) if prime_power(q)} == PRIME_POWERS
    assert prime_power(3**7) == (3, 7)
    assert prime_power(7919) == (7919, 1)
    assert prime_power(7919 * 2) is None
    for q in (-8, 0, 1, 6, 30):
        with pytest.raises(ValueError, match="prime power"):
            Field(q)


@pytest.mark.parametrize("q", PRIME_POWERS)
def test_the_axioms_of_a_field(q):
    """Two commutative groups (each row of either table is a permutation), tied by the distributive
    law; p times anything is nothing, and no fewer times."""
    f, every = Field(q), list(range(q))
    plus = [[f.plus(a, b) for b in every] for a in every]
    times = [[f.times(a, b) for b in every] for a in every]
    assert f.p == PRIME_POWERS[q][0]
    for a in every:
        assert (plus[a][0], times[a][1], times[a][0], times[0][a]) == (a, a, 0, 0)
        assert sorted(plus[a]) == every
        total, count = a, 1
        while total:
            total, count = plus[total][a], count + 1
        assert not a or (sorted(times[a]) == every and count == f.p)
    for a, b, c in itertools.product(every, repeat=3):
        assert plus[a][b] == plus[b][a]
        assert times[a][b] == times[b][a]
        assert plus[plus[a][b]][c] == plus[a][plus[b][c]]
        assert times[times[a][b]][c] == times[a][times[b][c]]
        assert times[a][plus[b][c]] == plus[times[a][b]][times[a][c]]
