"""Verdicts of two masks together: what each keeps of a block decides."""

import itertools

from quorum_attention.decomposition.verdicts import CLEAR, MASKED, MIXED, Verdict, both, either

PATTERNS = {MASKED: [(0, 0, 0)], CLEAR: [(1, 1, 1)], MIXED: [(0, 1, 1), (1, 0, 0), (0, 0, 1)]}


def verdict_of(kept: tuple[int, ...]) -> Verdict:
    return CLEAR if all(kept) else MIXED if any(kept) else MASKED


def test_two_masks_together() -> None:
    """Sure answers are right of every block that could have got them; nothing sure is given away
    that follows from the two verdicts alone."""
    for one, other in itertools.product(Verdict, repeat=2):
        blocks = list(itertools.product(PATTERNS[one], PATTERNS[other]))
        for together, combine in ((both, min), (either, max)):
            true = {verdict_of(tuple(map(combine, a, b))) for a, b in blocks}
            found = together(one, other)
            assert true == {found} if len(true) == 1 else found is MIXED


def test_the_numbers_stand_for_them_in_arrays() -> None:
    """Kernels compare with these codes, and take what is not 0 for listed."""
    assert [int(v) for v in (MASKED, CLEAR, MIXED)] == [0, 1, 2]
