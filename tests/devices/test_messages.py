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


def test_a_pool_refuses_it_by_name_and_goes_on(absent: Keeps) -> None:
    q = torch.randn(1, 2, 40, 8)
    with Pool(["cpu"], threads=1) as pool:
        with pytest.raises(NotImplementedError, match=r"Mask.keeps .*later.*made_up_rules"):
            qa.attention(q, q, q, Mask(keeps=absent), devices=pool)
        got = qa.attention(q, q, q, Mask(keeps=even), devices=pool)
    assert torch.allclose(got, qa.attention(q, q, q, Mask(keeps=even)), atol=1e-6)
