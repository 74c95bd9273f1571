"""Which rows are held by one task and which by several, checked by counting row by row."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from quorum_attention.execution.row_owners import count_shared, row_owners

N = 40


@st.composite
def spans(draw) -> list[tuple[int, int] | None]:  # type: ignore[no-untyped-def]
    """The rows of every task; some tasks have none."""
    pairs = st.tuples(st.integers(0, N), st.integers(0, N)).map(sorted).map(tuple)
    real = pairs.filter(lambda one: one[0] < one[1])
    return draw(st.lists(st.one_of(st.none(), real), max_size=6))


@given(spans())
def test_every_row_of_every_task_is_in_one_piece_that_says_who_else_has_it(held) -> None:
    found = row_owners(held, N)
    having = [
        [index for index, one in enumerate(held) if one is not None and one[0] <= row < one[1]]
        for row in range(N)
    ]
    places: dict[int, int] = {}
    for index, (one, pieces) in enumerate(zip(held, found.tasks, strict=True)):
        rows = [row for piece in pieces for row in range(N)[piece.rows]]
        assert rows == ([] if one is None else list(range(*one)))
        for piece in pieces:
            within = list(range(N)[piece.rows])
            assert [row - one[0] for row in within] == list(range(N)[piece.part])
            state = list(range(N)[piece.state])
            assert len(state) == (0 if piece.holder == "only" else len(within))
            for row in within:
                others = having[row]
                expected = (
                    "only" if others == [index] else "first" if others[0] == index
                    else "last" if others[-1] == index else "next"
                )  # fmt: skip
                assert piece.holder == expected
            # A row has the same position in the state for every task.
            for row, place in zip(within, state, strict=False):
                assert places.setdefault(row, place) == place
        kinds = [piece.holder for piece in pieces]
        assert all(a != b for a, b in itertools.pairwise(kinds)), "as few as can be"
    shared = [row for row in range(N) if len(having[row]) > 1]
    assert found.n_shared == len(shared) == len(places)
    assert sorted(places.values()) == list(range(len(shared)))
    assert [row for part in found.nobody for row in range(N)[part]] == [
        row for row in range(N) if not having[row]
    ]
    assert count_shared([one for one in held if one is not None]) == len(shared)
