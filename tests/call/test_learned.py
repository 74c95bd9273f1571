"""Tensors that users' functions read get no gradient: one that is to be trained is
refused, where nobody could find it by its name as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.attention import attention
from torch.autograd import forward_ad

import quorum_attention as qa
from quorum_attention import Mask

N = 40
LOST = "reads a tensor that would get no gradient"


class Alibi(torch.nn.Module):
    """Slopes where a model may keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Module()
        self.inner.slopes = torch.nn.Parameter(torch.rand(2))
        self.hidden = {"own": [torch.rand(2, requires_grad=True)]}


PLACES: dict[str, Callable[[Alibi, Any], torch.Tensor]] = {
    "a submodule, by its name": lambda m, h: getattr(m.inner, "slo" + "pes")[h],
    "made of one": lambda m, h: (2 * m.inner.slopes)[h],
    "a list in a dictionary": lambda m, h: m.hidden["own"][0][h],
}


def three() -> list[torch.Tensor]:
    return [torch.randn(1, 2, N, 8, requires_grad=True) for _ in range(3)]


def kernels_of(slope: Callable[[Any], torch.Tensor]) -> list[Any]:
    """A score modification, and a function of whole rectangles, with ALiBi."""

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s - slope(h) * (q - k).abs()

    def function(
        query: Any, key: Any, value: Any, *, is_causal: bool, scale: float, head_indices: Any,
        query_positions: Any, key_positions: Any,
    ) -> Any:  # fmt: skip
        apart = (query_positions[:, None] - key_positions[None]).abs()
        bias = -slope(head_indices)[:, None, None] * apart
        return attention(query, key, value, is_causal=is_causal, scale=scale, bias=bias)

    return [
        qa.from_score_mod(score_mod, compiled=False),
        qa.from_lse_function(function),
    ]


@pytest.mark.parametrize("place", PLACES)
def test_a_learned_tensor_is_refused_wherever_it_is(place: str) -> None:
    model = Alibi()
    for kernel in kernels_of(lambda h: PLACES[place](model, h)):
        q, k, v = three()
        for given in ((q, k, v), (q.detach(), k.detach(), v.detach())):
            with pytest.raises(NotImplementedError, match=LOST):
                qa.attention(*given, kernel=kernel)
            with torch.no_grad():
                assert torch.isfinite(qa.attention(*given, kernel=kernel)).all()


def test_a_tensor_that_is_not_learned_is_read_and_masks_have_no_gradient_to_lose() -> (
    None
):
    slopes, reach = torch.rand(2), torch.full((2,), 9.0, requires_grad=True)

    def keeps(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k).abs() < reach[h]

    rule: Any = {"kernel": qa.from_score_mod(mask_mod=keeps, compiled=False)}
    kernels: list[Any] = [
        {"kernel": kernel} for kernel in kernels_of(lambda h: slopes[h])
    ]
    for options in (*kernels, {"attn_mask": Mask(keeps=keeps)}, rule):
        q, k, v = three()
        qa.attention(q, k, v, **options).sum().backward()
        assert q.grad is not None


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda loss, slopes: torch.func.grad(loss)(slopes),
    "jvp": lambda loss, slopes: torch.func.jvp(loss, (slopes,), (slopes,)),
    "vmap": lambda loss, slopes: torch.vmap(loss)(slopes[None]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("which", [0, 1])
def test_a_tensor_of_a_transformation_is_refused(transform: str, which: int) -> None:
    given = [t.detach() for t in three()]

    def loss(slopes: torch.Tensor) -> torch.Tensor:
        return qa.attention(*given, kernel=kernels_of(lambda h: slopes[h])[which]).sum()

    with pytest.raises(NotImplementedError, match=LOST):
        TRANSFORMS[transform](loss, torch.rand(2))


def number_calls() -> dict[str, Callable[[Any], Any]]:
    """Calls that take a number of their own, by its name."""
    q, k, v = (tensor.detach() for tensor in three())
    grad_out, lse = torch.ones_like(q), torch.zeros(q.shape[:-1])
    return {
        "scale": lambda number: qa.attention(q, k, v, scale=number),
        "dropout_p": lambda number: qa.attention_with_lse(
            q, k, v, dropout_p=number, dropout_seed=1
        ),
        "Mask.softcap": lambda number: qa.attention(
            q, k, v, Mask(softcap=number, causal=True)
        ),
        "scale of a backward": lambda number: qa.attention_backward(
            grad_out, q, k, v, q, lse, scale=number
        ),
    }


@pytest.mark.parametrize("name", number_calls())
def test_a_number_with_a_derivative_is_refused(name: str) -> None:
    """The tangent of a tensor that stands for a number was 0; its gradient is refused
    too."""
    call = number_calls()[name]
    number = torch.tensor(0.3)
    named = name.partition(" ")[0]
    call(number)
    with pytest.raises(TypeError, match=f"{named} must be a real number"):
        call(number.clone().requires_grad_())
    with forward_ad.dual_level():
        call(number)
        dual = forward_ad.make_dual(number, torch.ones(()))
        with pytest.raises(NotImplementedError, match=f"{named} .* no derivative"):
            call(dual)
    with pytest.raises(NotImplementedError, match=f"{named} .* no derivative"):
        torch.func.jvp(call, (number,), (number,))


def test_slopes_with_a_derivative_are_refused() -> None:
    """A kernel copies its slopes, so a learned one got no gradient."""
    pytest.importorskip("triton")
    slopes = torch.rand(2)
    learned = slopes.clone().requires_grad_()

    def make(given: torch.Tensor) -> qa.NativeKernel:
        return qa.NativeKernel(alibi_slopes=given)

    for refused in (make, torch.func.grad(make)):
        with pytest.raises(
            NotImplementedError, match=r"alibi_slopes .* slopes\.detach"
        ):
            refused(learned)
    with forward_ad.dual_level():
        with pytest.raises(
            NotImplementedError, match=r"alibi_slopes .* slopes\.detach"
        ):
            make(forward_ad.make_dual(slopes, slopes))
        make(slopes)
    with torch.no_grad():
        make(learned)
    make(learned.detach())
