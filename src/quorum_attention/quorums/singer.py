"""Singer's construction of perfect cyclic difference sets (Singer, 1938; paper,
Appendix C).

The points of the projective plane over GF(q) are the nonzero elements of GF(q^3) up to
a factor in GF(q). The powers of a generator of GF(q^3) run through all q^2 + q + 1
points in a cycle. The exponents whose points lie on one line form a difference set with
q + 1 elements.
"""

from __future__ import annotations

import math
from random import Random


def singer_set(q: int) -> tuple[int, ...]:
    """A perfect difference set of q + 1 residues modulo q^2 + q + 1, ascending,
    beginning 0, 1.

    Raises:
        ValueError: q is no prime power.
    """
    base = Field(q)
    # About one cubic polynomial in five works. In a simple order the first that works
    # may come late, so they are drawn at random, with a fixed seed.
    draw = Random(q)
    line = None
    while line is None:
        c0 = draw.randrange(1, q)
        c1 = draw.randrange(q)
        c2 = draw.randrange(q)
        line = _line(base, c0, c1, c2)
    # Shifted so that the only two neighbours become 0 and 1.
    modulus = q * q + q + 1
    members = set(line)
    first = next(r for r in line if (r + 1) % modulus in members)
    return tuple(sorted((r - first) % modulus for r in line))


def _line(base: Field, c0: int, c1: int, c2: int) -> list[int] | None:
    """The exponents i < q^2 + q + 1 for which x^i has no x^2 term, where x^3 = c2 x^2 +
    c1 x + c0.

    None if the powers of x do not run through all points of the plane.
    """
    q = base.q
    line_length = q + 1
    line: list[int] = []
    # x^i = a x^2 + b x + c
    a = 0
    b = 0
    c = 1
    for i in range(q * q + q + 1):
        is_first_point = a == 0 and b == 0
        if i and is_first_point:
            return None  # the cycle of points is too short
        if a == 0:
            line.append(i)
            if len(line) > line_length:
                return None
        # Times x, where x^3 = c2 x^2 + c1 x + c0.
        next_a = base.plus(b, base.times(a, c2))
        next_b = base.plus(c, base.times(a, c1))
        c = base.times(a, c0)
        a = next_a
        b = next_b
    is_closed = a == 0 and b == 0
    return line if is_closed and len(line) == line_length else None


def prime_power(q: int) -> tuple[int, int] | None:
    """(p, k) with q = p**k and p prime; None if q is no prime power."""
    if q < 2:
        return None
    p = q
    for divisor in range(2, math.isqrt(q) + 1):
        if q % divisor == 0:
            p = divisor
            break
    k = round(math.log(q, p))
    return (p, k) if p**k == q else None


class Field:
    """GF(q). An element is a number below q; its digits in base p are a polynomial over
    GF(p).

    Attributes:
        q, p: the number of elements, and the prime that it is a power of.
        power: power[i] is the i-th power of a generator, for i < q - 1.
        log: the inverse: log[power[i]] = i.

    Raises:
        ValueError: q is no prime power.
    """

    def __init__(self, q: int) -> None:
        base_and_exponent = prime_power(q)
        if base_and_exponent is None:
            raise ValueError(f"q must be a prime power, got {q}")
        p, k = base_and_exponent
        self.q = q
        self.p = p
        # x is a generator if the polynomial x**k - sum(tail[i] * x**i) is primitive.
        # The digits of ``tail`` in base p are its coefficients; for k = 1, x is the
        # number ``tail`` itself.
        candidates = (_powers_of_x(tail, p, k) for tail in range(1, q))
        self.power = next(powers for powers in candidates if powers is not None)
        self.log = {x: i for i, x in enumerate(self.power)}

    def times(self, a: int, b: int) -> int:
        """Product of two elements."""
        if a == 0 or b == 0:
            return 0
        exponent = self.log[a] + self.log[b]
        return self.power[exponent % (self.q - 1)]

    def plus(self, a: int, b: int) -> int:
        """Sum of two elements: digit by digit in base p, without carry."""
        if self.p == 2:
            return a ^ b
        if self.p == self.q:
            return (a + b) % self.p
        total = 0
        place = 1
        while a or b:
            digit = (a + b) % self.p
            total += digit * place
            place *= self.p
            a //= self.p
            b //= self.p
        return total


def _powers_of_x(tail: int, p: int, k: int) -> list[int] | None:
    """The p**k - 1 powers 1, x, x**2, ... modulo the polynomial; None if some of them
    are equal."""
    if tail % p == 0:
        return None
    n_powers = p**k - 1
    places = [p**i for i in range(k)]
    top = places[-1]
    powers = [1]
    x = 1
    while True:
        # Times x: digits move up by one place, and the leading one comes back as
        # multiples of tail.
        lead, rest = divmod(x, top)
        x = 0
        for place in places:
            digit = rest * p // place + lead * (tail // place)
            x += digit % p * place
        if x == 1:
            return powers if len(powers) == n_powers else None
        if len(powers) == n_powers:
            return None
        powers.append(x)
