"""A rule of positions reaches workers as it is, and one that they cannot import says so by name."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention.devices import Pool
from quorum_attention.mask import Keeps


def even(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A rule of this module."""
    return (q + k) % 2 == 0


width = 5


def near(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A rule that reads a number of this module."""
    return (q - k).abs() < width


@pytest.fixture
def absent() -> Iterator[Keeps]:
    """A rule of a module that this process alone has."""
    module = types.ModuleType("made_up_rules")
    exec("def later(b, h, q, k):\n    return q >= k", module.__dict__)
    sys.modules["made_up_rules"] = module
    yield module.later
    sys.modules.pop("made_up_rules", None)


def test_a_pool_refuses_it_by_name_and_goes_on(absent: Keeps) -> None:
    q = torch.randn(1, 2, 40, 8)
    with Pool(["cpu"], threads=1) as pool:
        with pytest.raises(NotImplementedError, match=r"Mask.keeps .*later.*made_up_rules"):
            qa.attention(q, q, q, Mask(keeps=absent), devices=pool)
        got = qa.attention(q, q, q, Mask(keeps=even), devices=pool)
    assert torch.allclose(got, qa.attention(q, q, q, Mask(keeps=even)), atol=1e-6)


def test_a_number_that_differs_in_a_worker_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's number is changed in this process alone: its workers would keep other pairs."""
    q = torch.randn(1, 2, 40, 8)
    with Pool(["cpu", "cpu"], threads=1) as pool:
        first = qa.attention(q, q, q, Mask(keeps=near), devices=pool)
        monkeypatch.setitem(globals(), "width", 9)
        with pytest.raises(RuntimeError, match=r"near.* keeps other pairs in a worker"):
            qa.attention(q, q, q, Mask(keeps=near), devices=pool)
        monkeypatch.undo()
        again = qa.attention(q, q, q, Mask(keeps=near), devices=pool)
    assert torch.allclose(again, first, atol=1e-6)
    assert torch.allclose(first, qa.attention(q, q, q, Mask(keeps=near)), atol=1e-6)
