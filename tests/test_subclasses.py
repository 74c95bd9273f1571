"""Subclasses of tensors take part in attention as they do in torch's functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quorum_attention as qa


class Named(torch.Tensor):
    """A subclass as torchvision's: results of torch's functions are of its class."""


class Counting(torch.Tensor):
    """A subclass that notes the functions that it is given to."""

    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.seen.append(func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


WAYS = {
    "auto": {},
    "uncut": {"depth": 0},
    "cut": {"depth": 1},
    "dense": {"kernel": "dense"},
    "a mask": {"attn_mask": qa.Mask(window=7)},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_class_of_results_is_the_same_however_a_call_is_cut(way: str) -> None:
    plain = [torch.randn(1, 2, 200, 16) for _ in range(3)]
    named = [tensor.as_subclass(Named) for tensor in plain]
    exact = qa.attention_with_lse(*plain, **WAYS[way])
    for results in (
        [qa.attention(*named, **WAYS[way])],
        qa.attention_with_lse(*named, **WAYS[way]),
    ):
        for result, expected in zip(results, exact, strict=False):
            assert type(result) is Named
            torch.testing.assert_close(result.as_subclass(torch.Tensor), expected)


def test_gradients_go_through() -> None:
    leaf = torch.randn(1, 2, 60, 16, requires_grad=True)
    named = leaf.as_subclass(Named)
    qa.attention(named, leaf, leaf, depth=1).square().sum().backward()
    (expected,) = torch.autograd.grad(
        qa.attention(leaf, leaf, leaf).square().sum(), leaf
    )
    torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.parametrize("place", range(3))
def test_a_class_is_asked_once_and_by_the_public_name(place: int) -> None:
    tensors = [torch.randn(1, 2, 60, 16) for _ in range(3)]
    tensors[place] = tensors[place].as_subclass(Counting)
    for function in (qa.attention, qa.attention_with_lse):
        Counting.seen.clear()
        function(*tensors, is_causal=True, depth=1)
        assert Counting.seen == [function]
