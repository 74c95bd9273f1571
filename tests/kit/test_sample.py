"""Answers of mask functions, remembered or sent by another process, are asked for again."""

from __future__ import annotations

import random

import pytest
import torch

from quorum_attention.kernels.kit.functions import Sample

SIZES = (2, 3, 1000, 700)
HERE = torch.device("cpu")


def test_drawing_moves_no_generator() -> None:
    random.seed(0)
    torch.manual_seed(0)
    before = random.random(), torch.rand(1)
    random.seed(0)
    torch.manual_seed(0)
    Sample.draw(lambda b, h, q, k: q >= k, SIZES, HERE)
    assert (random.random(), torch.rand(1)) == before


def test_another_answer_is_an_error() -> None:
    sample = Sample.draw(lambda b, h, q, k: (q - k).abs() < 40, SIZES, HERE)
    sample.check(lambda b, h, q, k: (q - k).abs() < 40, HERE, "before")
    with pytest.raises(RuntimeError, match="keeps other pairs than before"):
        sample.check(lambda b, h, q, k: (q - k).abs() < 50, HERE, "before")
    empty = Sample.draw(lambda b, h, q, k: q >= k, (0, 1, 2, 3), HERE)
    empty.check(lambda b, h, q, k: q < k, HERE, "before")
