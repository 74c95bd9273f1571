"""Singer's construction of perfect cyclic difference sets (Singer, 1938; paper, Appendix C).

The points of the projective plane over GF(q) are the elements of GF(q^3) up to a factor in GF(q);
powers of a generator run through all q^2 + q + 1 of them in a cycle. The exponents that fall on
one line form a difference set with q + 1 elements.
"""

from __future__ import annotations

from random import Random

from quorum_attention.quorums.fields import Field, field


def singer_set(q: int) -> tuple[int, ...]:
    """A perfect difference set of q + 1 residues modulo q^2 + q + 1, ascending, with 0 and 1.

    Raises:
        ValueError: q is no prime power.
    """
    base = field(q)
    # About one cubic in five will do, but they are not spread evenly in any simple order: drawing
    # them (always the same way) finds one after a few tries.
    draw = Random(q)
    while True:
        line = _line(base, draw.randrange(1, q), draw.randrange(q), draw.randrange(q))
        if line is not None:
            return _normalised(line, q * q + q + 1)


def _line(base: Field, c0: int, c1: int, c2: int) -> list[int] | None:
    """Exponents i < q^2+q+1 where x^i has no x^2 term, for x^3 = c2 x^2 + c1 x + c0; None unless
    x runs through the whole plane."""
    q = base.q
    n_points = q * q + q + 1
    times, plus = base.times, base.plus
    a, b, c = 0, 0, 1  # a x^2 + b x + c
    line = []
    for i in range(n_points):
        if i and a == 0 and b == 0:
            return None  # back at a scalar too early
        if a == 0:
            line.append(i)
            if len(line) > q + 1:
                return None
        a, b, c = plus(b, times(a, c2)), plus(c, times(a, c1)), times(a, c0)
    return line if a == 0 and b == 0 and len(line) == q + 1 else None


def _normalised(residues: list[int], modulus: int) -> tuple[int, ...]:
    """Shifted so that the one pair that differs by 1 becomes (0, 1)."""
    members = set(residues)
    first = next(r for r in residues if (r + 1) % modulus in members)
    return tuple(sorted((r - first) % modulus for r in residues))
