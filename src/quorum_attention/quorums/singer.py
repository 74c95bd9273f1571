"""Singer's construction of perfect cyclic difference sets (Singer, 1938; paper, Appendix C).

The points of the projective plane over GF(q) are the nonzero elements of GF(q^3) up to a factor in
GF(q). The powers of a generator of GF(q^3) run through all q^2 + q + 1 points in a cycle. The
exponents whose points lie on one line form a difference set with q + 1 elements.
"""

from __future__ import annotations

from random import Random

from quorum_attention.quorums.fields import Field, field


def singer_set(q: int) -> tuple[int, ...]:
    """A perfect difference set of q + 1 residues modulo q^2 + q + 1, ascending, beginning 0, 1.

    Raises:
        ValueError: q is no prime power.
    """
    base = field(q)
    # About one cubic polynomial in five works. In a simple order the first that works may come
    # late, so they are drawn at random, with a fixed seed.
    draw = Random(q)
    while True:
        line = _line(base, draw.randrange(1, q), draw.randrange(q), draw.randrange(q))
        if line is not None:
            return _normalised(line, q * q + q + 1)


def _line(base: Field, c0: int, c1: int, c2: int) -> list[int] | None:
    """The exponents i < q^2 + q + 1 for which x^i has no x^2 term, where x^3 = c2 x^2 + c1 x + c0.

    None if the powers of x do not run through all points of the plane.
    """
    q = base.q
    n_points = q * q + q + 1
    times, plus = base.times, base.plus
    a, b, c = 0, 0, 1  # x^i = a x^2 + b x + c
    line = []
    for i in range(n_points):
        if i and a == 0 and b == 0:
            return None  # the cycle of points is too short
        if a == 0:
            line.append(i)
            if len(line) > q + 1:
                return None
        a, b, c = plus(b, times(a, c2)), plus(c, times(a, c1)), times(a, c0)
    return line if a == 0 and b == 0 and len(line) == q + 1 else None


def _normalised(residues: list[int], modulus: int) -> tuple[int, ...]:
    """``residues`` shifted so that the only two neighbours become 0 and 1; ascending."""
    members = set(residues)
    first = next(r for r in residues if (r + 1) % modulus in members)
    return tuple(sorted((r - first) % modulus for r in residues))
