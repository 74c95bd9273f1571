"""A call is checked once, whatever becomes of it: recorded, mapped, its gradient asked for."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from inspect import signature
from typing import Any

import pytest
import torch
from helpers_attention import inputs

import quorum_attention as qa
from quorum_attention.call import request as module
from quorum_attention.call.options import Arguments, CallOptions
from quorum_attention.call.request import Request, Tensors, request_of
from quorum_attention.devices import Pool
from quorum_attention.ray import Farm

pytestmark = pytest.mark.usefixtures("one_thread")


def made(*three: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[Tensors, Request]:
    return request_of("attention", *three, Arguments(mask))


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of every time that sizes are checked, the sizes."""
    found: list[Any] = []
    original = module.sizes_of

    def noted(*args: Any) -> Any:
        found.append(original(*args))
        return found[-1]

    monkeypatch.setattr(module, "sizes_of", noted)
    return found


def test_the_gradient_carries_the_request(checks: list[Any]) -> None:
    given = inputs(50)
    tensors = [t.requires_grad_() for t in given.three]
    out = qa.attention(*tensors, is_causal=True)
    torch.autograd.grad(out, tensors, given.grad_out)
    assert len(checks) == 1


def test_one_more_dimension_is_not_checked_again(checks: list[Any]) -> None:
    query, key, value = (t.expand(3, *t.shape) for t in inputs(20).three)
    found = torch.vmap(qa.attention)(query, key, value)
    assert len(checks) == 1
    torch.testing.assert_close(found[1], qa.attention(query[1], key[1], value[1]))


def test_one_more_dimension_has_the_sizes_of_a_call_with_one_more() -> None:
    three = inputs(20, batch=(2,)).three
    mask = torch.rand(4, 1, 1, 20, 20) < 0.5
    _, request = made(*three, mask=mask[0])
    mapped = request.mapped(4, mask)
    _, wanted = made(*(t.expand(4, *t.shape) for t in three), mask=mask)
    assert mapped.work == wanted.work
    assert mapped.work.mask is not None
    assert mapped.work.mask.batch


def test_a_request_holds_no_input_and_does_not_change() -> None:
    tensors, request = made(*(t.requires_grad_() for t in inputs(20).three))
    held = [getattr(request, name) for name in Request.__dataclass_fields__]
    assert not any(isinstance(value, torch.Tensor) for value in held)
    assert request.records
    assert request.work.n_queries == tensors.query.shape[-2] == 20
    with pytest.raises(FrozenInstanceError):
        request.scale = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("function", [qa.attention, Pool.attention, Farm.attention])
def test_the_same_defaults_everywhere(function) -> None:  # type: ignore[no-untyped-def]
    usual = {**Arguments._field_defaults, **CallOptions._field_defaults}
    known = {n: p.default for n, p in signature(function).parameters.items() if n in usual}
    assert {"attn_mask", "dropout_p", "dropout_seed", "is_causal"} <= known.keys()
    assert known == {name: usual[name] for name in known}
