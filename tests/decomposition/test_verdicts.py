"""Verdicts of two masks together: what each keeps of a block decides."""

import itertools

from quorum_attention.decomposition.verdicts import EMPTY, FULL, PARTIAL, Verdict, both, either

PATTERNS = {EMPTY: [(0, 0, 0)], FULL: [(1, 1, 1)], PARTIAL: [(0, 1, 1), (1, 0, 0), (0, 0, 1)]}


def verdict_of(kept: tuple[int, ...]) -> Verdict:
    return FULL if all(kept) else PARTIAL if any(kept) else EMPTY


def test_two_masks_together() -> None:
    """Sure answers are right of every block that could have got them; nothing sure is given away
    that follows from the two verdicts alone."""
    for one, other in itertools.product(Verdict, repeat=2):
        blocks = list(itertools.product(PATTERNS[one], PATTERNS[other]))
        for together, combine in ((both, min), (either, max)):
            true = {verdict_of(tuple(map(combine, a, b))) for a, b in blocks}
            found = together(one, other)
            assert true == {found} if len(true) == 1 else found is PARTIAL


def test_the_numbers_stand_for_them_in_arrays() -> None:
    """Kernels compare with these codes, and take what is not 0 for listed."""
    assert [int(v) for v in (EMPTY, FULL, PARTIAL)] == [0, 1, 2]
