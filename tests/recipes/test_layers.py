"""Layers in tiles: loss and gradients of the model as it is; what does not suit runs
whole."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from helpers.models import SIZES, VOCABULARY, tiny
from torch.utils.checkpoint import checkpoint

from quorum_attention import autograd
from quorum_attention.recipes import (
    checkpoints,
    layer_bytes,
    long_context,
    step_estimate,
    switches,
)
from quorum_attention.recipes.model_shape import read_shape
from quorum_attention.recipes.remedies import switch_until_it_fits
from quorum_attention.recipes.training import Training

KINDS: dict[str, dict[str, Any]] = {
    "llama": {}, "gemma2": {}, "gemma3_text": {}, "gpt_oss": {}, "opt": {"dropout": 0.0},
}  # fmt: skip


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Every step is in tiles of 48 tokens, of long texts 4; of each layer whether it
    suits."""
    begin = checkpoints.LayerCheckpoints._begin_step
    reason_to_run_whole = checkpoints.reason_to_run_whole
    suits: list[bool] = []

    def begun(self: Any, hidden: torch.Tensor) -> Any:
        step = begin(self, hidden)
        step.tile = 48 if hidden.shape[1] <= 150 else 4
        return step

    def noted(*args: Any) -> str | None:
        reason = reason_to_run_whole(*args)
        suits.append(reason is None)
        return reason

    monkeypatch.setattr(checkpoints.LayerCheckpoints, "_begin_step", begun)
    monkeypatch.setattr(checkpoints, "reason_to_run_whole", noted)
    return suits


def pair(model: Any, **options: Any) -> tuple[Any, Any]:
    """As it is, and with layers in tiles."""
    plain, other = model.train(), copy.deepcopy(model).train()
    for one, where in ((plain, None), (other, "auto")):
        long_context(one, budget="64MiB", checkpoints=where, mlp_tile=None, **options)
    return plain, other


def assert_the_same(plain: Any, model: Any, room: float = 2e-5, **asked: Any) -> None:
    found = []
    for one in (plain, model):
        one.zero_grad(set_to_none=True)
        loss = one(**asked).loss
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in one.named_parameters()}))
    (loss, wanted), (ours, grads) = found
    assert abs(ours - loss) <= room * abs(loss)
    for name, grad in wanted.items():
        assert (grad is None) == (grads[name] is None), name
        if grad is not None:
            far = (grads[name] - grad).float().norm()
            assert far <= room * grad.float().norm() + 1e-9, name


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients(kind: str, tiled: list[bool]) -> None:
    """Windows, soft caps, sinks, experts; of a batch, of packed texts, with padding."""
    plain, model = pair(tiny(kind, KINDS[kind]))
    ids = torch.randint(1, VOCABULARY, (2, 150))
    assert_the_same(plain, model, input_ids=ids, labels=ids)
    assert len(tiled) == 2
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    assert_the_same(plain, model, input_ids=ids, labels=ids, attention_mask=mask)
    if kind != "opt":
        positions = torch.cat([torch.arange(n) for n in (70, 1, 79)])[None].expand(
            2, -1
        )
        assert_the_same(plain, model, input_ids=ids, labels=ids, position_ids=positions)
    assert all(tiled)


def test_some_weights_beside_frozen_ones_and_experts(tiled: list[bool]) -> None:
    """Twice, as gradients are accumulated; the first layer's input needs no
    gradient."""
    sizes = {
        **SIZES,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    }
    config = transformers.Qwen3MoeConfig(**sizes, use_cache=False)
    model = transformers.Qwen3MoeForCausalLM._from_config(
        config, experts_implementation="eager"
    )
    for name, weight in model.named_parameters():
        weight.requires_grad_(
            "v_proj" in name or "k_norm" in name or "down_proj" in name
        )
    plain, model = pair(model)
    ids = torch.randint(1, VOCABULARY, (1, 150))
    assert_the_same(plain, model, input_ids=ids, labels=ids)
    assert tiled == [True] * 2
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model(input_ids=ids, labels=ids).loss.backward()
    for twice, once in zip(
        (p for p in model.parameters() if p.requires_grad), grads, strict=True
    ):
        torch.testing.assert_close(twice.grad, 2 * once)


@pytest.mark.parametrize("auto", [False, True])
def test_sixteen_bits(auto: bool, tiled: list[bool]) -> None:
    """Weights of bf16, or autocast: as near to float32 as the model as it is, within a
    tenth."""
    exact, model = pair(tiny("qwen3"))
    plain = copy.deepcopy(exact)
    ids, found = torch.randint(1, VOCABULARY, (2, 300)), []
    for one in (exact, plain, model):
        with torch.autocast("cpu", torch.bfloat16, enabled=auto and one is not exact):
            one = one if auto or one is exact else one.bfloat16()
            loss = one(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append(torch.cat([p.grad.float().flatten() for p in one.parameters()]))
    far = [(one - found[0]).norm() for one in found[1:]]
    assert far[1] <= 1.1 * far[0]
    assert tiled == [True] * 2


def test_within_another_checkpoint_and_two_backwards(tiled: list[bool]) -> None:
    found, ids = [], torch.randint(1, VOCABULARY, (1, 150))
    for model in pair(tiny("llama")):
        words = model.get_input_embeddings()(ids).detach()
        run = partial(model, labels=ids)
        loss = checkpoint(
            lambda x, run=run: run(inputs_embeds=x).loss, words, use_reentrant=False
        )
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad for p in model.model.layers.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert len(tiled) >= 4
    assert all(tiled)


def test_autocast_leaves_float64_as_it_is(tiled: list[bool]) -> None:
    plain, model = pair(tiny("llama").double())
    ids = torch.randint(1, VOCABULARY, (1, 150))
    with torch.autocast("cpu", torch.bfloat16):
        assert_the_same(plain, model, 1e-9, input_ids=ids, labels=ids)
    assert tiled == [True] * 2


def test_attention_runs_once_and_the_same_is_dropped_again(
    tiled: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward's gradient is that of the loss: held against differences of
    losses."""
    model = pair(tiny("opt", {"dropout": 0.3, "attention_dropout": 0.2}))[1].double()
    made, run = [], autograd.run_forward
    monkeypatch.setattr(
        autograd, "run_forward", lambda *a: (made.append(1), run(*a))[1]
    )
    ids = torch.randint(1, VOCABULARY, (1, 150))
    weight = model.model.decoder.layers[0].self_attn.v_proj.weight
    way, losses = torch.randn_like(weight), []
    for shift in (0.0, 1e-5, -2e-5):
        weight.data += shift * way
        torch.manual_seed(5)
        losses.append(model(input_ids=ids).logits.square().mean())
    made.clear()
    torch.manual_seed(5)
    weight.data += 1e-5 * way
    model(input_ids=ids).logits.square().mean().backward()
    assert len(made) == 2
    slope = (losses[1] - losses[2]).item() / 2e-5
    assert (weight.grad * way).sum().item() == pytest.approx(slope, rel=1e-4)
    assert all(tiled)


class Experts(torch.nn.Module):
    """Many, of which a few tokens meet a few."""

    def __init__(self) -> None:
        super().__init__()
        width = SIZES["hidden_size"]
        self.every = torch.nn.ModuleList(
            torch.nn.Linear(width, width) for _ in range(200)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = (x[..., 0] * 1e4).long().remainder(200)
        return sum(
            (numbers == n)[..., None] * self.every[n](x)
            for n in numbers.unique().tolist()
        )  # type: ignore[return-value]


def test_experts_without_a_token_in_the_trial_and_late_hooks(tiled: list[bool]) -> None:
    """Their gradients are there, and those of a weight of another module; a weight's
    hook sees one gradient; a second derivative raises."""
    pairs = pair(tiny("llama"))
    for one in pairs:
        torch.manual_seed(2)
        lent = one.model.norm.lent = torch.nn.Parameter(torch.ones(()))
        for layer in one.model.layers:
            layer.mlp = Experts()
            around(layer.mlp, lambda plain, x, lent=lent: plain(x) * lent)
    plain, model = pairs
    ids = torch.randint(1, VOCABULARY, (1, 150))
    assert_the_same(plain, model, input_ids=ids, labels=ids)
    weight = model.model.layers[0].self_attn.q_proj.weight
    wanted, weight.grad = weight.grad.sign(), None
    loss = model(input_ids=ids, labels=ids).loss
    handle = weight.register_hook(torch.sign)
    loss.backward()
    handle.remove()
    assert torch.equal(weight.grad, wanted)
    loss = model(input_ids=ids, labels=ids).loss
    (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    assert all(tiled)


def around(module: Any, change: Any) -> None:
    module.forward = partial(change, module.forward)


def counting(layer: Any, rotary: Any) -> None:
    """Positions from 0 in every call."""

    def forward(plain: Any, hidden_states: Any, **named: Any) -> Any:
        at = rotary(hidden_states, torch.arange(hidden_states.shape[1])[None])
        return plain(
            hidden_states=hidden_states, **{**named, "position_embeddings": at}
        )

    around(layer.self_attn, forward)


def averaging(layer: Any, _: Any) -> None:
    """Of all tokens something, by a weight that is 0 yet."""
    gate = layer.gate = torch.nn.Parameter(torch.zeros(SIZES["hidden_size"]))
    around(layer.mlp, lambda plain, x: plain(x) + gate * x.mean(1, keepdim=True))


def normed(layer: Any, _: Any) -> None:
    """Statistics of all tokens, in training."""
    layer.norm = torch.nn.BatchNorm1d(SIZES["hidden_size"])
    around(layer.mlp, lambda plain, x: layer.norm(plain(x).mT).mT)


def scaled(layer: Any, _: Any) -> None:
    """Scores by the number of tokens."""

    def forward(plain: Any, hidden_states: Any, **named: Any) -> Any:
        layer.self_attn.scaling = 0.1 * hidden_states.shape[1] ** 0.5
        return plain(hidden_states=hidden_states, **named)

    around(layer.self_attn, forward)


def tuned(layer: Any, _: Any) -> None:
    """Queries are scaled by their number, as Llama 4's, from so far on that no trial
    sees it."""
    around(
        layer.self_attn.q_proj,
        lambda f, x: f(x) * (1 + torch.arange(len(x[0])) // 70)[:, None],
    )


OTHERS: dict[str, Any] = {
    "counting": counting, "averaging": averaging, "normed": normed, "scaled": scaled,
    "tuned": tuned,
    "convolved": lambda layer, _: around(layer.mlp, lambda plain, x: plain(x + x.roll(1, 1))),
    "detached": lambda layer, _: around(layer.self_attn.k_proj, lambda f, x: f(x).detach()),
    "twice": lambda layer, _: around(layer.self_attn, lambda f, **n: (f(**n)[0] + f(**n)[0], 0)),
    "watched": lambda layer, _: layer.mlp.register_forward_hook(lambda *_: None),
}  # fmt: skip


@pytest.mark.parametrize("what", [*OTHERS, "mask", "mixer"])
def test_what_does_not_suit_runs_whole(what: str, tiled: list[bool]) -> None:
    sizes = {
        **SIZES,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
    }
    mixer = transformers.FalconH1Config(**sizes, mamba_chunk_size=16, use_cache=False)
    pairs = pair(
        transformers.FalconH1ForCausalLM(mixer) if what == "mixer" else tiny("llama")
    )
    for model in pairs if what in OTHERS else ():
        for layer in model.model.layers:
            OTHERS[what](layer, model.model.rotary_emb)
    ids = torch.randint(1, VOCABULARY, (1, 60))
    square = torch.full((1, 1, 60, 60), -1e9).triu(1)
    asked = {"attention_mask": square} if what == "mask" else {}
    with pytest.warns(UserWarning, match="DecoderLayer runs whole: it ") as said:
        assert_the_same(*pairs, input_ids=ids, labels=ids, **asked)
    assert tiled == [False] * 2
    assert len(said) == 1


@pytest.mark.slow
def test_when_a_layer_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of Qwen3-4B's shape on a device with 16 GiB free."""
    sizes = {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128,
             "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
             "model_type": "qwen3"}  # fmt: skip
    shape, every = read_shape(sizes), (*switches.SWITCHES, switches.TILES)
    training = Training(
        340_000, lora=16, budget=8 << 30, device="cuda", on=switches.SWITCHES
    )
    backend = SimpleNamespace(free_bytes=lambda device: 16 << 30)
    monkeypatch.setattr(checkpoints, "backend_of", lambda device: backend)
    monkeypatch.setattr(checkpoints, "host_room", lambda: 300 << 30)
    monkeypatch.setattr(checkpoints, "SideStream", lambda device: None)
    monkeypatch.setattr(checkpoints, "shape_of_model", lambda model: shape)
    ours = checkpoints.LayerCheckpoints("auto", training)
    ours.make(tiny("llama"))
    kept: list[int] = []

    def split(*room: Any) -> layer_bytes.OffloadSplit:
        kept.append(room[-1])
        return layer_bytes.OffloadSplit(0, 0)

    monkeypatch.setattr(layer_bytes, "split_offload", split)
    for tokens, tile in (
        (50_000, 0),
        (340_000, 8192),
        (1_200_000, 8192),
        (1_200_000, 8192),
    ):
        x = SimpleNamespace(
            device=torch.device("cuda", 0), shape=(1, tokens, 2560), dtype=torch.bfloat16,
            nbytes=tokens * 5120, numel=lambda n=tokens: n * 2560,
        )  # fmt: skip
        assert ours._begin_step(x).tile == tile  # type: ignore[arg-type]
    # What tiles page-locked in one step is there in the next.
    others = layer_bytes.tiled_bytes(shape, replace(training, tokens=1_310_720))[1]
    assert kept[2] < kept[3] == (300 << 30) - others
    found, fits = switch_until_it_fits(shape, replace(training, on=()), "24GiB")
    assert fits
    assert {switches.TILES, switches.ATTENTION, switches.HOST} <= set(found.on)
    tiles, whole = (
        step_estimate.step_memory(shape, replace(training, on=on))
        for on in (every, every[:5])
    )
    assert tiles.peak_bytes < 20 << 30 < 35 << 30 < whole.peak_bytes
    assert tiles.host_bytes > whole.host_bytes
