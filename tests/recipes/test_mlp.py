"""A tiled MLP computes every tile twice: what it draws and how it rounds has to be the same."""

from __future__ import annotations

import copy

import pytest
import torch

from quorum_attention.recipes.mlp import tile_mlps

WIDTH = 8


class Gated(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(WIDTH, 12) for _ in range(2))
        self.down_proj = torch.nn.Linear(12, WIDTH)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(self.dropout(x)).sigmoid() * self.up_proj(x))


def test_dropout_drops_the_same_in_the_backward() -> None:
    """Against differences of the loss, drawn with one seed; the last tile is short."""
    model = Gated(0.5).double().train()
    assert tile_mlps(model, 4).done
    x = torch.randn(2, 11, WIDTH, dtype=torch.float64, requires_grad=True)

    def loss() -> torch.Tensor:
        torch.manual_seed(0)
        return model(x).square().sum()

    found = loss()
    after = torch.get_rng_state()
    for _ in range(2):  # as often as one likes
        model.zero_grad()
        found.backward(retain_graph=True)
    assert torch.equal(torch.get_rng_state(), after), "a backward drew numbers of its own"
    weight = model.gate_proj.weight
    assert weight.grad is not None
    way, step = torch.randn_like(weight), 1e-5
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * step * way
        sides.append(loss().item())
        with torch.no_grad():
            weight -= sign * step * way
    slope = (sides[0] - sides[1]) / (2 * step)
    assert (weight.grad * way).sum().item() == pytest.approx(slope, rel=1e-5)


def test_autocast_is_that_of_the_forward() -> None:
    """The MLP's input is in 16 bits, and its weights are not."""
    plain = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), Gated(0.0))
    tiled = copy.deepcopy(plain)
    assert tile_mlps(tiled, 5).done
    x = torch.randn(2, 11, WIDTH)
    for model in (plain, tiled):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
    for ours, own in zip(tiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, own.grad, rtol=0.02, atol=0.02)


def test_modes_of_its_parts_stay() -> None:
    model = Gated(0.5).train()
    model.dropout.eval()
    tile_mlps(model, 4)
    assert model.training
    assert not model.dropout.training


def test_an_mlp_of_another_kind_is_left_alone() -> None:
    model = Gated(0.0)
    model.gate_proj = torch.nn.Identity()  # type: ignore[assignment]
    assert not tile_mlps(model, 4).done


def test_an_mlp_that_mixes_the_tokens_of_a_text_is_left_alone() -> None:
    """Two dimensions, as tiles have, would not show it."""

    class Mixing(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x - x.mean(1, keepdim=True))

    assert "other results" in str(tile_mlps(Mixing(0.0), 4))


def test_a_penalty_on_its_gradients() -> None:
    plain = Gated(0.0)
    tiled = copy.deepcopy(plain)
    assert tile_mlps(tiled, 5).done
    x, found = torch.randn(2, 11, WIDTH), []
    for model in (plain, tiled):
        weight = model.up_proj.weight
        (first,) = torch.autograd.grad(model(x).square().sum(), weight, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), weight)[0])
    torch.testing.assert_close(*found)


def test_a_short_call_after_a_long_one_in_one_region_of_autocast() -> None:
    """A cast made without gradients is not handed on: the short call's would be missing."""
    plain = Gated(0.0)
    tiled = copy.deepcopy(plain)
    assert tile_mlps(tiled, 5).done
    x = torch.randn(2, 11, WIDTH, requires_grad=True)
    for model in (plain, tiled):
        with torch.autocast("cpu", torch.bfloat16):
            long, short = model(x), model(x[:1, :3])
        (long.float().sum() * 0 + short.float().square().sum()).backward()
    for ours, own in zip(tiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, own.grad, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_within_the_mlp(reentrant: bool) -> None:
    class Within(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=reentrant)

    plain = Within(0.0).double()
    tiled = copy.deepcopy(plain)
    assert tile_mlps(tiled, 4).done
    x = torch.randn(11, WIDTH, dtype=torch.float64, requires_grad=True)
    for model in (plain, tiled):
        model(x).square().sum().backward()
    for ours, own in zip(tiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, own.grad)
