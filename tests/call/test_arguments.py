"""A call's arguments as one object: in the order and with the defaults of the public function."""

from __future__ import annotations

from inspect import signature

import pytest

import quorum_attention as qa
from quorum_attention.call.arguments import Arguments
from quorum_attention.call.options import CallOptions
from quorum_attention.call.request import request_of
from quorum_attention.devices import Pool
from quorum_attention.ray import Farm


def test_in_the_order_of_a_request() -> None:
    parameters = list(signature(request_of).parameters)
    assert tuple(parameters[4:]) == Arguments._fields


@pytest.mark.parametrize("function", [qa.attention, Pool.attention, Farm.attention])
def test_with_the_same_defaults_everywhere(function) -> None:  # type: ignore[no-untyped-def]
    usual = {**Arguments._field_defaults, **CallOptions._field_defaults}
    known = {n: p.default for n, p in signature(function).parameters.items() if n in usual}
    assert {"attn_mask", "dropout_p", "dropout_seed", "is_causal", "depth"} <= known.keys()
    assert known == {name: usual[name] for name in known}
