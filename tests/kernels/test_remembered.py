"""Answers about a kernel are kept while it lives, its last few, and never the kernel itself."""

from __future__ import annotations

import gc
import weakref

from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.kernels.remembered import remembered


class Kernel:
    pass


class Slotted:
    __slots__ = ()


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


def test_without_weak_references_it_is_asked_every_time() -> None:
    asked = []

    @remembered(8)
    def answer(kernel: object) -> None:
        asked.append(kernel)

    kernel = Slotted()
    answer(kernel)
    answer(kernel)
    assert len(asked) == 2


@settings(max_examples=50, deadline=None)
@given(questions=st.lists(st.integers(0, 6), max_size=40), most=st.integers(1, 5))
def test_the_last_answers_are_kept_and_no_more(questions: list[int], most: int) -> None:
    asked: list[int] = []

    @remembered(most)
    def answer(kernel: object, question: int) -> int:
        asked.append(question)
        return 10 * question

    kernel = Kernel()
    recent: list[int] = []
    for question in questions:
        before = len(asked)
        assert answer(kernel, question) == 10 * question
        assert (len(asked) > before) == (question not in recent)
        recent = [*(r for r in recent if r != question), question][-most:]
