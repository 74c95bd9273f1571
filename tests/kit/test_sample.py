"""Answers of mask functions, remembered or sent by another process, are asked for again."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest
import torch

from quorum_attention.kernels.kit import sliding_window
from quorum_attention.kernels.kit.sample import Sample, Watched

SIZES = (2, 3, 1000, 700)
HERE = torch.device("cpu")


class Hidden:
    """A width that nobody sees change."""

    widths: ClassVar = {"now": 40}

    def __getattr__(self, name: str) -> int:
        return self.widths["now"]


def test_pairs_lie_in_the_call_and_near_its_diagonal() -> None:
    sample = Sample.draw(lambda b, h, q, k: (q - k).abs() < 40, SIZES, HERE)
    for numbers, size in zip(sample.pairs, SIZES, strict=True):
        assert min(numbers) >= 0
        assert max(numbers) < size
    assert 20 < sum(sample.kept) < len(sample.kept) - 20
    other = Sample.draw(lambda b, h, q, k: (q - k).abs() < 40, SIZES, HERE)
    assert other.pairs != sample.pairs


def test_drawing_moves_no_generator() -> None:
    random.seed(0)
    torch.manual_seed(0)
    before = random.random(), torch.rand(1)
    random.seed(0)
    torch.manual_seed(0)
    Sample.draw(lambda b, h, q, k: q >= k, SIZES, HERE)
    assert (random.random(), torch.rand(1)) == before


def test_a_change_that_cannot_be_seen_is_found_by_its_answers() -> None:
    hidden = Hidden()

    def keeps(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k).abs() < hidden.anything

    watched = Watched([keeps])
    watched.check(SIZES, HERE)
    watched.check(SIZES, HERE)
    hidden.widths["now"] = 50
    with pytest.raises(RuntimeError, match="keeps other pairs than when its table"):
        watched.check(SIZES, HERE)
    watched.check((1, 1, 90, 90), HERE)  # another call has tables of its own
    hidden.widths["now"] = 40
    watched.check(SIZES, HERE)


def test_a_change_that_is_seen_is_another_table() -> None:
    width = 40

    def keeps(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k).abs() < width

    watched = Watched([keeps, sliding_window(3)])
    watched.check(SIZES, HERE)
    width = 50
    watched.check(SIZES, HERE)


def test_empty_calls_and_functions_of_none() -> None:
    Watched([lambda b, h, q, k: q >= k]).check((0, 1, 2, 3), HERE)
    Watched([sliding_window(3)]).check(SIZES, HERE)
