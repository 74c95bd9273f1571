"""A cache with a limit: never beyond it, the last used stay, several threads may ask."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.kernels.kept import Kept


@settings(max_examples=80, deadline=None)
@given(
    asked=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 12)), max_size=40),
    limit=st.integers(1, 20),
)
def test_sizes_stay_within_the_limit(asked: list[tuple[int, int]], limit: int) -> None:
    sizes: dict[int, int] = {}
    kept: Kept[tuple[int, int]] = Kept(limit, lambda value: value[1])
    used: list[int] = []  # what is kept, the last used last
    for key, size in asked:
        size = sizes.setdefault(key, size)
        assert kept.get(key, lambda key=key, size=size: (key, size)) == (key, size)
        used = [*(k for k in used if k != key), key]
        while sum(sizes[k] for k in used) > limit:
            used.pop(0)
        assert len(kept) == len(used)


def test_what_fails_to_be_made_is_made_again() -> None:
    kept: Kept[int] = Kept(4, lambda value: 1)
    with pytest.raises(ZeroDivisionError):
        kept.get("a", lambda: 1 // 0)
    assert kept.get("a", lambda: 2) == 2
    assert kept.get("a", lambda: 1 // 0) == 2


def test_none_is_an_answer() -> None:
    kept: Kept[None] = Kept(4, lambda value: 1)
    kept.get("a", lambda: None)
    kept.get("a", lambda: pytest.fail("asked twice"))


def test_many_threads() -> None:
    kept: Kept[int] = Kept(3, lambda value: 1)
    wrong: list[int] = []

    def ask() -> None:
        for number in range(500):
            if kept.get(number % 7, lambda number=number: number % 7) != number % 7:
                wrong.append(number)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(kept) <= 3
    assert kept._bytes == len(kept)
