"""A call is checked once, whatever becomes of it: recorded, mapped, its gradient asked for."""

from __future__ import annotations

from inspect import signature

import pytest
import torch
from helpers_attention import inputs

import quorum_attention as qa
from quorum_attention.call.options import Arguments, CallOptions
from quorum_attention.call.request import Request, request_of
from quorum_attention.call.validation import Tensors
from quorum_attention.devices import Pool
from quorum_attention.ray import Farm

pytestmark = pytest.mark.usefixtures("one_thread")


def made(*three: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[Tensors, Request]:
    return request_of("attention", *three, Arguments(mask))


def test_one_more_dimension_has_the_sizes_of_a_call_with_one_more() -> None:
    three = inputs(20, batch=(2,)).three
    mask = torch.rand(4, 1, 1, 20, 20) < 0.5
    _, request = made(*three, mask=mask[0])
    mapped = request.mapped(4, mask)
    _, wanted = made(*(t.expand(4, *t.shape) for t in three), mask=mask)
    assert mapped.work == wanted.work
    assert mapped.work.mask is not None
    assert mapped.work.mask.batch


@pytest.mark.parametrize("function", [qa.attention, Pool.attention, Farm.attention])
def test_the_same_defaults_everywhere(function) -> None:  # type: ignore[no-untyped-def]
    usual = {**Arguments._field_defaults, **CallOptions._field_defaults}
    known = {n: p.default for n, p in signature(function).parameters.items() if n in usual}
    assert {"attn_mask", "dropout_p", "dropout_seed", "is_causal"} <= known.keys()
    assert known == {name: usual[name] for name in known}
