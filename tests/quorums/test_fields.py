"""Finite fields: the axioms, element by element, for every prime power up to 32."""

import itertools

import pytest

from quorum_attention.quorums.fields import field, prime_power

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


@pytest.mark.parametrize("q", PRIME_POWERS)
def test_addition_and_multiplication_are_commutative_groups(q):
    """Neutral elements, inverses and closure: each row of either table is a permutation."""
    f = field(q)
    everything = list(range(q))
    assert f.p == PRIME_POWERS[q][0]
    for a in everything:
        assert f.plus(a, 0) == a
        assert f.times(a, 1) == a
        assert f.times(a, 0) == f.times(0, a) == 0
        assert sorted(f.plus(a, b) for b in everything) == everything
        if a:
            assert sorted(f.times(a, b) for b in everything) == everything
        for b in everything:
            assert f.plus(a, b) == f.plus(b, a)
            assert f.times(a, b) == f.times(b, a)


@pytest.mark.parametrize("q", PRIME_POWERS)
def test_associative_and_distributive(q):
    """Over all triples: what makes the two groups a field."""
    f = field(q)
    plus = [[f.plus(a, b) for b in range(q)] for a in range(q)]
    times = [[f.times(a, b) for b in range(q)] for a in range(q)]
    for a, b, c in itertools.product(range(q), repeat=3):
        assert plus[plus[a][b]][c] == plus[a][plus[b][c]]
        assert times[times[a][b]][c] == times[a][times[b][c]]
        assert times[a][plus[b][c]] == plus[times[a][b]][times[a][c]]


@pytest.mark.parametrize("q", PRIME_POWERS)
def test_the_characteristic_is_p(q):
    """p times anything is nothing, and no fewer times."""
    f = field(q)
    for a in range(1, q):
        total, count = a, 1
        while total:
            total, count = f.plus(total, a), count + 1
        assert count == f.p


@pytest.mark.parametrize("q", [-8, 0, 1, 6, 10, 12, 15, 30])
def test_no_field_of_other_orders(q):
    """There is none; a wrong one would give a wrong interest set."""
    with pytest.raises(ValueError, match="prime power"):
        field(q)
