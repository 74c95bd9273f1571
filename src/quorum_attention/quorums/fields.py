"""Finite fields of prime-power order, as tables."""

from __future__ import annotations

from dataclasses import dataclass


def prime_power(q: int) -> tuple[int, int] | None:
    """(p, k) with q = p**k and p prime; None if q is no prime power."""
    if q < 2:
        return None
    p = next((d for d in range(2, int(q**0.5) + 1) if q % d == 0), q)
    k = 0
    while q % p == 0:
        q //= p
        k += 1
    return (p, k) if q == 1 else None


@dataclass(frozen=True)
class Field:
    """GF(q). An element is a number below q; its digits in base p are a polynomial over GF(p).

    Attributes:
        q, p: the number of elements, and the prime that it is a power of.
        power: power[i] is the i-th power of a generator, for i < q - 1.
        log: the inverse: log[power[i]] = i.
    """

    q: int
    p: int
    power: tuple[int, ...]
    log: dict[int, int]

    def times(self, a: int, b: int) -> int:
        """Product of two elements."""
        if a == 0 or b == 0:
            return 0
        return self.power[(self.log[a] + self.log[b]) % (self.q - 1)]

    def plus(self, a: int, b: int) -> int:
        """Sum of two elements: digit by digit in base p, without carry."""
        if self.p == 2:
            return a ^ b
        if self.p == self.q:
            return (a + b) % self.p
        total, place = 0, 1
        while a or b:
            total += (a % self.p + b % self.p) % self.p * place
            a, b, place = a // self.p, b // self.p, place * self.p
        return total


def field(q: int) -> Field:
    """GF(q) for a prime power q.

    Raises:
        ValueError: q is no prime power.
    """
    split = prime_power(q)
    if split is None:
        raise ValueError(f"q must be a prime power, got {q}")
    p, k = split
    # x is a generator if the polynomial x**k - sum(tail[i] * x**i) is primitive. The digits of
    # ``tail`` in base p are its coefficients; for k = 1, x is the number ``tail`` itself.
    for tail in range(1, q):
        powers = _powers_of_x(tail, p, k)
        if powers is not None:
            return Field(q, p, powers, {x: i for i, x in enumerate(powers)})
    raise AssertionError(f"GF({q}) has a primitive polynomial")


def _powers_of_x(tail: int, p: int, k: int) -> tuple[int, ...] | None:
    """The p**k - 1 powers 1, x, x**2, ... modulo the polynomial; None if some of them are equal."""
    size = p**k
    top = size // p
    digits = [tail // p**i % p for i in range(k)]
    if digits[0] == 0:
        return None
    powers, x = [1], 1
    while True:
        lead = x // top
        shifted = x % top * p
        x = 0
        for i in range(k):
            x += (shifted // p**i + lead * digits[i]) % p * p**i
        if x == 1:
            return tuple(powers) if len(powers) == size - 1 else None
        if len(powers) >= size - 1:
            return None
        powers.append(x)
