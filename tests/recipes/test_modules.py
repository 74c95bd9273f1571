"""A tiled MLP and a fused norm give what they gave, and its gradients; others are left
alone."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.memory import usage
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.checkpoint import checkpoint

from quorum_attention.recipes.changes import Change, changing
from quorum_attention.recipes.fused_norms import FusedNorms
from quorum_attention.recipes.tiled_mlp import TiledMLPs

WIDTH, WIDER = 8, 12


def tile_mlps(model: torch.nn.Module, tokens: int) -> Change:
    with changing(model, "test") as changes:
        return changes.make(model, TiledMLPs(tokens))


def fuse_norms(model: torch.nn.Module) -> Change:
    with changing(model, "test") as changes:
        return changes.make(model, FusedNorms())


class Gated(torch.nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(WIDTH, WIDER) for _ in range(2))
        self.down_proj = torch.nn.Linear(WIDER, WIDTH)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(
            self.gate_proj(self.dropout(x)).sigmoid() * self.up_proj(x)
        )


def two(
    dtype: torch.dtype = torch.float64, kind: type[Gated] = Gated
) -> tuple[Gated, Gated]:
    """An MLP as it is, and a copy that is tiled."""
    plain = kind().to(dtype)
    tiled = copy.deepcopy(plain)
    assert tile_mlps(tiled, 4).done
    return plain, tiled


def tokens(requires_grad: bool = False) -> Tensor:
    return torch.randn(2, 11, WIDTH, dtype=torch.float64, requires_grad=requires_grad)


def same(
    plain: torch.nn.Module, tiled: torch.nn.Module, run: Any = None, **room: float
) -> None:
    """The same weights have gradients, and the same ones, after ``run`` of each."""
    for model in (plain, tiled) if run is not None else ():
        run(model)
    for (name, own), ours in zip(
        plain.named_parameters(), tiled.parameters(), strict=True
    ):
        torch.testing.assert_close(
            ours.grad, own.grad, **room, msg=lambda said, name=name: f"{name}: {said}"
        )


X = tokens()


def penalty(model: torch.nn.Module, x: Tensor) -> Tensor:
    """Of its gradients: second derivatives."""
    weight = model.up_proj.weight
    (first,) = torch.autograd.grad(model(x).square().sum(), weight, create_graph=True)
    return first.square().sum()


LOSSES = {
    "plain": lambda model, x: model(x).square().sum(),
    "penalty": penalty,
    "compiled": lambda model, x: (
        torch.compile(model, backend="eager")(x).square().sum()
    ),
    "checkpoint": lambda model, x: (
        checkpoint(model, x, use_reentrant=False).square().sum()
    ),
    "reentrant": lambda model, x: (
        checkpoint(model, x, use_reentrant=True).square().sum()
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients(loss: str) -> None:
    same(
        *two(), lambda model: LOSSES[loss](model, X.clone().requires_grad_()).backward()
    )


def test_dropout_drops_the_same_in_the_backward() -> None:
    """Against a difference of the loss, drawn with one seed; the last tile is short."""
    model = Gated(0.5).double().train()
    assert tile_mlps(model, 4).done
    x, weight = tokens(True), model.gate_proj.weight

    def loss() -> Tensor:
        torch.manual_seed(0)
        return model(x).square().sum()

    found = loss()
    after = torch.get_rng_state()
    for _ in range(2):  # as often as one likes
        model.zero_grad()
        found.backward(retain_graph=True)
    assert torch.equal(torch.get_rng_state(), after), (
        "a backward drew numbers of its own"
    )
    assert weight.grad is not None
    slope, way = (weight.grad.square().sum().item(), 1e-5 * weight.grad)
    sides = []
    for step in (way, -2 * way):
        with torch.no_grad():
            weight += step
            sides.append(loss().item())
    assert (sides[0] - sides[1]) / 2e-5 == pytest.approx(slope, rel=1e-5)


class Mixing(Gated):
    """Two dimensions, as tiles have, would not show it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


class Without(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Identity()  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Mixing, Without])
def test_an_mlp_of_another_kind_is_left_alone(kind: type[Gated]) -> None:
    assert "left out: " in str(tile_mlps(kind(), 4))


@pytest.mark.parametrize("of_input", [False, True])
def test_some_weights_learn(of_input: bool) -> None:
    """As around adapters; without any, only the input does."""
    for learns in (("up_proj.weight",), ("down_proj.bias", "gate_proj.weight"), ()):
        plain, tiled = two()
        x = tokens(of_input)
        into = []
        for model in (plain, tiled):
            for name, weight in model.named_parameters():
                weight.requires_grad_(name in learns)
            x.grad = None
            out = model(x)
            assert out.requires_grad == (of_input or bool(learns))
            if out.requires_grad:
                out.square().sum().backward()
            into.append(x.grad)
        same(plain, tiled)
        torch.testing.assert_close(*into)


@pytest.mark.parametrize("name", ["down_proj.weight", "down_proj.bias"])
def test_weights_that_change_before_the_backward_are_refused(name: str) -> None:
    """The backward computed tiles with the changed weights: wrong gradients."""
    plain, tiled = two()
    loss = LOSSES["plain"](tiled, X)
    with torch.no_grad():
        for model in (plain, tiled):
            model.get_parameter(name).mul_(2)
    with pytest.raises(RuntimeError, match="change weights after the backward"):
        loss.backward()
    tiled.zero_grad()
    same(plain, tiled, lambda model: LOSSES["plain"](model, X).backward())


def test_tied_weights_get_the_sum() -> None:
    """Within the MLP, and with a layer outside of it; the weight is there once."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Gated().double()
            self.mlp.up_proj.weight = self.mlp.gate_proj.weight
            self.head = torch.nn.Linear(WIDTH, WIDER).double()
            self.head.weight = self.mlp.gate_proj.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.mlp(x))

    plain = Tied()
    tiled = copy.deepcopy(plain)
    assert tile_mlps(tiled, 4).done
    same(plain, tiled, lambda model: model(X).square().sum().backward())
    assert tiled.mlp.up_proj.weight is tiled.head.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_tiles_lose_no_digits(dtype: torch.dtype) -> None:
    """128 tiles: added up in 16 bits, they were off 4 to 8 times as far as one
    product."""
    torch.manual_seed(0)
    plain = Gated().to(dtype)
    exact, tiled = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    assert tile_mlps(tiled, 16).done
    x, upstream = (torch.rand(2048, WIDTH).to(dtype) for _ in range(2))
    errors = []
    for model in (plain, tiled):
        model(x).backward(upstream * 0.01)
    exact(x.double()).backward((upstream * 0.01).double())
    for model in (plain, tiled):
        weights = zip(model.parameters(), exact.parameters(), strict=True)
        errors.append(
            [((w.grad - e.grad).norm() / e.grad.norm()).item() for w, e in weights]
        )
    assert all(ours <= 1.5 * own + 1e-4 for own, ours in zip(*errors, strict=True)), (
        errors
    )


def test_tokens_are_there_once_and_the_rest_for_one_tile() -> None:
    """Output, gradient of the input, and 1/32 of the 24 numbers or more of each token
    between."""
    plain, tiled = (copy.deepcopy(two(torch.float32)[0]) for _ in range(2))
    assert tile_mlps(tiled, 128).done
    x = torch.randn(4096, WIDTH, requires_grad=True)

    def step(model: torch.nn.Module) -> None:
        x.grad = None
        model(x).backward(x.detach())

    for model in (plain, tiled):
        step(model)
    whole, ours = (
        usage(lambda model=model: step(model)).peak for model in (plain, tiled)
    )
    tokens = x.numel() * x.element_size()
    assert ours < 2 * tokens + whole / 8, (ours, whole, tokens)


@pytest.mark.parametrize(
    ("version", "reentrant"), [(0, None), (1, None), (1, True), (2, False), (2, True)]
)
def test_weights_of_ranks(version: int, reentrant: bool | None) -> None:
    """DDP counts every gradient once, twice in a row; with checkpoints FSDP1 has other
    tensors in the weights' places when they compute again."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain, tiled = two()
        x = tokens(True)
        plain(x).square().sum().backward()
        held = torch.nn.Sequential(tiled)
        if version == 0:
            ranks: Any = torch.nn.parallel.DistributedDataParallel(held)
            ranks(x).sum().backward()
            ranks.zero_grad()
        elif version == 1:
            ranks = FullyShardedDataParallel(
                held, use_orig_params=True, device_id=x.device
            )
        else:
            ranks = fully_shard(held, mesh=init_device_mesh("cpu", (1,)))
        if reentrant is not None:
            tiled.forward = partial(checkpoint, tiled.forward, use_reentrant=reentrant)
        ranks(x).square().sum().backward()
        for ours, own in zip(ranks.parameters(), plain.parameters(), strict=True):
            found = ours.grad.full_tensor() if version == 2 else ours.grad
            torch.testing.assert_close(found, own.grad)
    finally:
        dist.destroy_process_group()


class Quantised(torch.nn.Module):
    """A linear layer of packed weights without a gradient, as bitsandbytes, GPTQ and
    AWQ have it: a parameter of bytes in one column, or buffers alone; its inputs have
    the compute dtype."""

    def __init__(self, layer: torch.nn.Linear, buffers: bool, width_name: str) -> None:
        super().__init__()
        setattr(self, width_name, layer.in_features)
        self.shape, weight = layer.weight.shape, layer.weight.detach()
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 7)
        packed = (
            (weight / self.scale).round().to(torch.int8).view(-1, 1).view(torch.uint8)
        )
        if buffers:
            self.register_buffer("qweight", packed)
        else:
            self.qweight = torch.nn.Parameter(packed, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == self.scale.dtype
        return x @ (self.qweight.view(torch.int8).view(self.shape) * self.scale).mT


class WithAdapter(torch.nn.Module):
    """As PEFT's around a quantised layer: its own weights learn."""

    def __init__(self, base_layer: Quantised, out: int, into: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = torch.nn.Linear(into, 2, bias=False, dtype=torch.float32)
        self.lora_B = torch.nn.Linear(2, out, bias=False, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x.float())).to(x.dtype)


class Decoder(torch.nn.Module):
    """A norm, whose weight has the compute dtype, and a quantised MLP."""

    def __init__(
        self, dtype: torch.dtype, adapted: bool, buffers: bool, width_name: str
    ) -> None:
        super().__init__()
        self.norm, self.mlp = torch.nn.LayerNorm(WIDTH, dtype=dtype), Gated()
        for name, layer in list(self.mlp.named_children()):
            if isinstance(layer, torch.nn.Linear):
                packed: torch.nn.Module = Quantised(
                    layer.to(dtype), buffers, width_name
                )
                if adapted:
                    packed = WithAdapter(packed, layer.out_features, layer.in_features)  # type: ignore[arg-type]
                setattr(self.mlp, name, packed)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.norm(x))
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(
    ("buffers", "width_name"),
    [(False, "in_features"), (True, "in_features"), (True, "infeatures")],
)
def test_quantised_weights(
    dtype: torch.dtype, adapted: bool, buffers: bool, width_name: str
) -> None:
    """They say nothing of an input's width and dtype; the layer and the model do."""
    plain = Decoder(dtype, adapted, buffers, width_name)
    tiled = copy.deepcopy(plain)
    assert str(tile_mlps(tiled, 4)).startswith("tiled MLP: 1 MLP")
    x = torch.randn(2, 11, WIDTH, dtype=dtype)
    step = lambda model: model(x).float().square().sum().backward()  # noqa: E731
    same(plain, tiled, step, rtol=0.05, atol=0.05)
    torch.testing.assert_close(tiled(x), plain(x))
    learned = [
        name for name, weight in tiled.named_parameters() if weight.grad is not None
    ]
    assert learned[:2] == ["norm.weight", "norm.bias"]
    assert len(learned) == (8 if adapted else 2)


def test_quantised_weights_take_the_memory_of_a_tile() -> None:
    plain = Decoder(
        torch.float32, adapted=False, buffers=True, width_name="in_features"
    ).mlp
    tiled = copy.deepcopy(plain)
    assert tile_mlps(torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), tiled), 128).done
    x = torch.randn(1, 4096, WIDTH, requires_grad=True)

    def step(model: torch.nn.Module) -> None:
        x.grad = None
        model(x).backward(x.detach())

    for model in (plain, tiled):
        step(model)
    whole, ours = (
        usage(lambda model=model: step(model)).peak for model in (plain, tiled)
    )
    tokens = x.numel() * x.element_size()
    assert ours < 2 * tokens + whole / 8, (ours, whole, tokens)


def test_an_mlp_that_does_not_say_its_width_is_told_so() -> None:
    model = Decoder(torch.float32, adapted=False, buffers=True, width_name="columns")
    assert "Gated does not say how wide its inputs are" in str(tile_mlps(model, 4))
    model = Decoder(
        torch.float32, adapted=False, buffers=True, width_name="in_features"
    )
    del model.norm
    assert "Gated takes no inputs of width 8 in any dtype" in str(tile_mlps(model, 4))


class Hook:
    """As Accelerate's ``AlignDevicesHook``: moves inputs, and may fetch weights."""

    no_grad = False

    def __init__(self) -> None:
        self.calls = 0

    def pre_forward(self, module: torch.nn.Module, *args: Any, **named: Any) -> Any:
        self.calls += 1
        return args, named

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        return output


def add_hooks(model: torch.nn.Module) -> None:
    """As Accelerate's ``add_hook_to_module`` to all modules, for ``device_map``."""

    def new_forward(module: Any, *args: Any, **named: Any) -> Any:
        args, named = module._hf_hook.pre_forward(module, *args, **named)
        return module._hf_hook.post_forward(module, module._old_forward(*args, **named))

    for module in model.modules():
        hooked: Any = module
        before = hooked.forward
        hooked._old_forward, hooked._hf_hook = before, Hook()
        hooked.forward = functools.update_wrapper(partial(new_forward, hooked), before)


def remove_hooks(model: torch.nn.Module) -> None:
    """As Accelerate's ``remove_hook_from_module``."""
    for module in model.modules():
        hooked: Any = module
        hooked.forward = hooked._old_forward
        del hooked._old_forward, hooked._hf_hook


@pytest.mark.parametrize("first", ["hooks", "tiles"])
def test_accelerate_s_hooks_stay_around_a_tiled_mlp(first: str) -> None:
    plain = Gated().double()
    tiled = copy.deepcopy(plain)
    for step in ("hooks", "tiles") if first == "hooks" else ("tiles", "hooks"):
        if step == "hooks":
            add_hooks(tiled)
        else:
            assert tile_mlps(tiled, 4).done
    hooks: Any = tiled._hf_hook
    hooks.calls = tiled.gate_proj._hf_hook.calls = 0  # type: ignore[union-attr]
    same(plain, tiled, lambda model: model(X).square().sum().backward())
    assert hooks.calls == 1, "inputs are moved once"
    assert tiled.gate_proj._hf_hook.calls > 1  # type: ignore[union-attr]
    assert tile_mlps(tiled, 5).done
    other = copy.deepcopy(tiled)
    with torch.no_grad():
        other.down_proj.weight.zero_()
        other.down_proj.bias.zero_()
    assert not other(X).any()
    torch.testing.assert_close(tiled(X), plain(X))
    remove_hooks(tiled)
    torch.testing.assert_close(tiled(X), plain(X))
    assert tile_mlps(tiled, 6).done


def test_what_is_replaced_or_offloaded_is_said_with_a_way_out() -> None:
    model = Gated()
    model.gate_proj.to("meta")
    assert "left out: weights of an MLP are offloaded" in str(tile_mlps(model, 4))
    assert "load the model so that its MLPs lie on devices" in str(tile_mlps(model, 4))
    model = Gated()
    model.forward = lambda x: -x  # type: ignore[method-assign]
    add_hooks(model)
    assert "call long_context before that" in str(tile_mlps(model, 4))


def test_without_gradients_and_forward_mode() -> None:
    plain, tiled = two()
    x = tokens()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(tiled(x), plain(x))
    with pytest.raises(
        RuntimeError, match="saved tensor hooks"
    ):  # as of any of torch's checkpoints
        torch.func.grad(lambda x: tiled(x).sum())(x)
    direction = (torch.ones_like(x),)
    _, expected = torch.func.jvp(plain, (x,), direction)
    if torch.__version__ < "2.9":  # its checkpoints have no forward mode
        with pytest.raises(NotImplementedError, match="jvp"):
            torch.func.jvp(tiled, (x,), direction)
        return
    _, tangent = torch.func.jvp(tiled, (x,), direction)
    torch.testing.assert_close(tangent, expected)


def test_threads_that_train_one_model_wait_for_each_other() -> None:
    """In a backward the module has other weights: another thread's forward must not
    take those."""
    plain, tiled = two()
    held = list(tiled.parameters())
    batches = [
        [torch.randn(23, WIDTH, dtype=torch.float64) for _ in range(10)]
        for _ in range(3)
    ]

    def work(batch: list[Tensor]) -> list[tuple[Tensor, ...]]:
        return [torch.autograd.grad(tiled(x).square().sum(), held) for x in batch]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as threads:
            found = list(threads.map(work, batches))
    finally:
        sys.setswitchinterval(before)
    for mine, ours in zip(batches, found, strict=True):
        for x, got in zip(mine, ours, strict=True):
            wanted = torch.autograd.grad(
                plain(x).square().sum(), list(plain.parameters())
            )
            torch.testing.assert_close(got, wanted)
    assert all(a is b for a, b in zip(held, tiled.parameters(), strict=True))


def norm(kind: str, *sizes: Any) -> torch.nn.Module:
    module, name = kind.split(".")
    models = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    found: torch.nn.Module = getattr(models, name)(*sizes)
    torch.nn.init.normal_(found.weight, 1.0)  # type: ignore[arg-type]
    return found


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, for which torch has one kernel."""
    monkeypatch.setattr(
        "quorum_attention.recipes.fused_norms._is_fused", lambda weight: True
    )


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("llama.LlamaRMSNorm", torch.bfloat16), ("qwen3.Qwen3RMSNorm", torch.float32),
     ("gpt_oss.GptOssRMSNorm", torch.bfloat16)],
)  # fmt: skip
def test_results_and_gradients_are_those_of_the_norm(
    kind: str, dtype: torch.dtype
) -> None:
    plain = norm(kind, 24, 1e-5).to(dtype)
    fused = copy.deepcopy(plain)
    assert fuse_norms(fused).done
    x = torch.randn(2, 3, 5, 24, dtype=dtype).transpose(1, 2) * 1e-2  # near epsilon
    grads = []
    for one in (plain, fused, copy.deepcopy(fused)):
        given = x.clone().requires_grad_()
        out = one(given)
        out.backward(torch.ones_like(out))
        grads.append((out.detach(), given.grad, one.weight.grad))
    for found in grads[1:]:
        torch.testing.assert_close(
            found, grads[0], rtol=4 * torch.finfo(dtype).eps, atol=1e-2
        )
        torch.testing.assert_close(
            found[0], grads[0][0], rtol=4 * torch.finfo(dtype).eps, atol=0
        )
    wide = x.double()
    torch.testing.assert_close(
        fused(wide), plain(wide)
    )  # another dtype than the weight's
    torch.testing.assert_close(fused(hidden_states=x), plain(x))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            fused(x), plain(x), rtol=4 * torch.finfo(dtype).eps, atol=0
        )
    graph = torch.compile(fused, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(x), fused(x))


@pytest.mark.usefixtures("everywhere")
def test_other_norms_are_left() -> None:
    """1 + weight; gates; another forward; no RMS norm."""
    others = [
        norm("gemma2.Gemma2RMSNorm", 24),
        norm("qwen3_next.Qwen3NextRMSNormGated", 24),
    ]
    others += [norm("llama.LlamaRMSNorm", 24), torch.nn.LayerNorm(24)]
    others[2].forward = lambda x: x  # type: ignore[method-assign]
    for module in others:
        before = vars(module).get("forward")
        assert not fuse_norms(module).done
        assert vars(module).get("forward") is before
