"""A cache with a limit: never exceeded, the last used stay, usable from several threads."""

from __future__ import annotations

import gc
import weakref

from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.kernels.cache import Cache, remembered


@settings(max_examples=80, deadline=None)
@given(
    asked=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 12)), max_size=40),
    limit=st.integers(1, 20),
)
def test_sizes_stay_within_the_limit(asked: list[tuple[int, int]], limit: int) -> None:
    sizes: dict[int, int] = {}
    cache: Cache[tuple[int, int]] = Cache(limit, lambda value: value[1])
    used: list[int] = []  # the keys held, the last used last
    for key, size in asked:
        size = sizes.setdefault(key, size)
        assert cache.get(key, lambda key=key, size=size: (key, size)) == (key, size)
        used = [*(k for k in used if k != key), key]
        while sum(sizes[k] for k in used) > limit:
            used.pop(0)
        assert len(cache) == len(used)


class Kernel:
    pass


def test_asked_once_for_each_kernel_and_question() -> None:
    asked = []

    @remembered(8)
    def answer(question: int, kernel: object, more: int = 0) -> int:
        """Says it."""
        asked.append(question)
        return question + more

    one, other = Kernel(), Kernel()
    assert [answer(1, one), answer(1, one), answer(1, other), answer(2, one)] == [1, 1, 1, 2]
    assert asked == [1, 1, 2]
    assert answer(1, one, more=5) == 6
    assert answer(1, one, more=5) == 6
    assert asked == [1, 1, 2, 1]
    assert (answer.__name__, answer.__doc__) == ("answer", "Says it.")


def test_a_kernel_goes_with_what_is_known_of_it() -> None:
    @remembered(8)
    def answer(kernel: object) -> list[int]:
        return [1]

    kernel = Kernel()
    watched = weakref.ref(kernel)
    answer(kernel)
    del kernel
    gc.collect()
    assert watched() is None
