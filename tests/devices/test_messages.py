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


@pytest.fixture
def absent() -> Iterator[Keeps]:
    """A rule of a module that this process alone has."""
    module = types.ModuleType("made_up_rules")
    exec("def later(b, h, q, k):\n    return q >= k", module.__dict__)
    sys.modules["made_up_rules"] = module
    yield module.later
    sys.modules.pop("made_up_rules", None)


width = 5


def near(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A rule that reads a number of this module."""
    return (q - k).abs() < width


def test_workers_have_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's number is changed in this process alone, before a call and before a backward."""
    given = [torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3)]
    with Pool(["cpu", "cpu"], threads=1) as pool:
        out = qa.attention(*given, Mask(keeps=near), devices=pool)
        expected = torch.autograd.grad(
            qa.attention(*given, Mask(keeps=near)).square().sum(), given
        )  # fmt: skip
        monkeypatch.setitem(globals(), "width", 9)
        # The workers compute both passes with what they have.
        for got, wanted in zip(
            torch.autograd.grad(out.square().sum(), given), expected, strict=True
        ):
            assert torch.allclose(got, wanted, atol=1e-5)
        with pytest.raises(RuntimeError, match=r"near.* keeps other pairs than in the process"):
            qa.attention(*given, Mask(keeps=near), devices=pool)
        monkeypatch.setitem(globals(), "width", 5)
        got = qa.attention(*given, Mask(keeps=near), devices=pool)
    assert torch.allclose(got, out, atol=1e-6)


def test_a_pool_refuses_it_by_name_and_goes_on(absent: Keeps) -> None:
    q = torch.randn(1, 2, 40, 8)
    with Pool(["cpu"], threads=1) as pool:
        with pytest.raises(NotImplementedError, match=r"Mask.keeps .*later.*made_up_rules"):
            qa.attention(q, q, q, Mask(keeps=absent), devices=pool)
        got = qa.attention(q, q, q, Mask(keeps=even), devices=pool)
    assert torch.allclose(got, qa.attention(q, q, q, Mask(keeps=even)), atol=1e-6)
