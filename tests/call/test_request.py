"""A call is checked once, whatever becomes of it: recorded, mapped, its gradient asked for."""

from __future__ import annotations

from inspect import signature

import pytest

import quorum_attention as qa
from quorum_attention.call.options import Arguments, CallOptions
from quorum_attention.devices import Pool
from quorum_attention.files.compute import file_call

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("function", [qa.attention, Pool.attention, file_call])
def test_the_same_defaults_everywhere(function) -> None:  # type: ignore[no-untyped-def]
    usual = {**Arguments._field_defaults, **CallOptions._field_defaults}
    usual.pop("written")
    known = {n: p.default for n, p in signature(function).parameters.items() if n in usual}
    assert {"attn_mask", "dropout_p", "dropout_seed", "is_causal"} <= known.keys()
    assert known == {name: usual[name] for name in known}
