"""The examples of docs/programs.md for other projects: by their own hooks where they are
installed, else by stand-ins of the hooks' signatures."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.attention import assert_close
from helpers.docs import OTHER_PROJECTS, ROOT, blocks
from torch.nn import functional

import quorum_attention as qa

TOKENS = 600
HAS_DIFFUSERS = find_spec("diffusers") is not None
HAS_TABPFN = find_spec("tabpfn") is not None
HAS_TORCHTITAN = find_spec("torchtitan") is not None
if HAS_TABPFN:
    # Here: it changes the environment when it is imported.
    import tabpfn.architectures.shared.scaled_dot_product_attention as tabpfn_attention
    from tabpfn.architectures.shared import attention_backends


def example(needed: str) -> str:
    """The block of the page that has this text, for the sizes of tests."""
    texts = [b.text for b in blocks() if b.page == "programs.md" and needed in b.text]
    assert len(texts) == 1
    short = texts[0].replace("4096", "512")
    return re.sub(r'"\dGiB"', '"24 MiB"', short)


def run(needed: str, **names: Any) -> dict[str, Any]:
    """Run a block, and return its names."""
    scope = {"qa": qa, "torch": torch, **names}
    exec(compile(example(needed), needed, "exec"), scope)
    return scope


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """A function that puts a stand-in of a module, with its packages, among the
    imported ones."""

    def stand_in(name: str, **contents: Any) -> ModuleType:
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            module = ModuleType(path)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, path, module)
            if depth > 1:
                parent = sys.modules[".".join(parts[: depth - 1])]
                setattr(parent, parts[depth - 1], module)
        vars(module).update(contents)
        return module

    return stand_in


def test_projects_are_named_where_their_blocks_are_left_out() -> None:
    """The page's other blocks are run one after the other (test_commands.py)."""
    page = [b.text for b in blocks() if b.page == "programs.md"]
    assert all(any(name in text for text in page) for name in OTHER_PROJECTS)


def test_tabpfn(modules: Callable[..., ModuleType]) -> None:
    """Its registry gets the backend, which takes long calls and gives torch's
    results."""
    registered: list[Any] = []
    if HAS_TABPFN:
        scope = run("QuorumBackend")
        registered.append(attention_backends.registered_attention_backends()[0])
        assert isinstance(registered[0], scope["QuorumBackend"])
    else:
        modules(
            "tabpfn.architectures.shared.attention_backends",
            register_attention_backend=registered.append,
        )
        run("QuorumBackend")
    backend = registered[0]
    q = torch.randn(3, TOKENS, 4, 16)
    k, v = (torch.randn(3, 520, 2, 16) for _ in range(2))
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    expected = functional.scaled_dot_product_attention(*swapped, enable_gqa=True)
    report = qa.Report()
    with qa.using(report=report):
        if HAS_TABPFN:
            out = tabpfn_attention.scaled_dot_product_attention(q, k, v)
            attention_backends.unregister_attention_backend("quorum")
        else:
            spec = SimpleNamespace(seq_len_q=TOKENS, seq_len_kv=520)
            assert backend.is_preferred(spec)
            assert not backend.is_preferred(SimpleNamespace(seq_len_q=9, seq_len_kv=9))
            out = backend.run(q, k, v, quantized_kv=None)
    assert report.total.forwards == 1
    assert_close([out], [expected.transpose(1, 2)], 1e-5)


class PipelineStandIn:
    """A pipeline of diffusers, as the example uses it.

    Args:
        transformer: its model.
        inputs: arguments of that model.
    """

    def __init__(self, transformer: Any, **inputs: Any) -> None:
        self.transformer = transformer
        self._inputs = inputs

    def __call__(self, prompt: str) -> Any:
        with torch.no_grad():
            return SimpleNamespace(images=[self.transformer(**self._inputs)])


class TransformerStandIn(torch.nn.Module):
    """A transformer of diffusers, with the backend "native"."""

    def set_attention_backend(self, backend: str) -> None:
        assert backend == "native"

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.unflatten(-1, (2, -1)).transpose(1, 2)
        return functional.scaled_dot_product_attention(query=x, key=x, value=x)


def pipeline(n_tokens: int) -> PipelineStandIn:
    if not HAS_DIFFUSERS:
        return PipelineStandIn(
            TransformerStandIn(), hidden_states=torch.randn(1, n_tokens, 32)
        )
    from diffusers import FluxTransformer2DModel

    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1,
        attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
        pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return PipelineStandIn(
        transformer,
        hidden_states=torch.randn(1, n_tokens, 4),
        encoder_hidden_states=torch.randn(1, 8, 32),
        pooled_projections=torch.randn(1, 32),
        timestep=torch.ones(1),
        img_ids=torch.zeros(n_tokens, 3),
        txt_ids=torch.zeros(8, 3),
        return_dict=False,
    )


def test_diffusers() -> None:
    """Its backend "native" calls torch's function, by keywords."""
    pipe = pipeline(4200)
    expected = pipe("").images[0]
    report = qa.Report()
    with qa.using(report=report):
        image = run("pipe.transformer", pipe=pipe)["image"]
    assert report.total.forwards > 0
    for ours, theirs in zip(image, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class ModelPatcherStandIn:
    """The model of ComfyUI that its nodes hand on."""

    def __init__(self) -> None:
        self.model_options: dict[str, Any] = {"transformer_options": {}}

    def clone(self) -> ModelPatcherStandIn:
        return ModelPatcherStandIn()


def comfy_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int,
    mask: torch.Tensor | None = None, attn_precision: Any = None,
    skip_reshape: bool = False, skip_output_reshape: bool = False, **named: Any,
) -> torch.Tensor:  # fmt: skip
    """The signature of ComfyUI's attention functions, computed by torch."""
    if not skip_reshape:
        dim = q.shape[-1] // heads
        q, k, v = (x.unflatten(-1, (-1, dim)).transpose(1, 2) for x in (q, k, v))
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    out = functional.scaled_dot_product_attention(
        q, k, v, mask, scale=named.get("scale"), enable_gqa=True
    )
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("n_mask_dims", [0, 2, 3])
@pytest.mark.parametrize("skips", [False, True])
def test_comfyui(
    n_mask_dims: int, skips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of the override gives what ComfyUI's function gives; short calls are that
    function's."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    import comfyui_node

    node = comfyui_node.NODE_CLASS_MAPPINGS["QuorumAttention"]
    assert set(node.INPUT_TYPES()["required"]) == {"model", "budget", "min_tokens"}
    (model,) = getattr(node(), node.FUNCTION)(ModelPatcherStandIn(), "20 MiB", 512)
    options = model.model_options["transformer_options"]
    override = options["optimized_attention_override"]
    shapes = [(2, 4, TOKENS, 16), (2, 2, 520, 16), (2, 2, 520, 16)]
    tensors = [torch.randn(shape) for shape in shapes]
    if not skips:
        tensors = [x.transpose(1, 2).flatten(2) for x in tensors]
    mask = torch.randn((2, TOKENS, 520)[3 - n_mask_dims :]) if n_mask_dims else None
    named = {"mask": mask, "skip_reshape": skips, "skip_output_reshape": skips, "scale": 0.2,
             "transformer_options": options, "_inside_attn_wrapper": True}  # fmt: skip
    expected = comfy_attention(*tensors, 4, **named)
    report = qa.Report()
    with qa.using(report=report):
        assert_close(
            [override(comfy_attention, *tensors, 4, **named)], [expected], 1e-5
        )
        assert report.total.forwards == 1
        named["mask"] = None
        short = [x[..., :9, :] for x in tensors]
        override(comfy_attention, *short, 4, **named)
        assert report.total.forwards == 1


def folding_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    biases: list[torch.Tensor],
) -> torch.Tensor:
    """The signature of OpenFold's and Boltz's ``_attention``, of scaled queries."""
    scores = query @ key.mT
    for bias in biases:
        scores = scores + bias
    return scores.softmax(-1) @ value


def test_openfold_and_boltz(modules: Callable[..., ModuleType]) -> None:
    """A pair bias shared over rows, with padding: results and gradients."""
    primitives = modules(
        "boltz.model.layers.triangular_attention.primitives",
        _attention=folding_attention,
    )
    run("attention_with_pair_bias")
    assert primitives._attention is not folding_attention
    tensors = [torch.randn(2, 3, 2, 520, 8, requires_grad=True) for _ in range(3)]
    pair_bias = torch.randn(2, 1, 2, 520, 520, requires_grad=True)
    kept = torch.rand(2, 3, 1, 1, 520) > 0.2
    biases = [1e9 * (kept.float() - 1), pair_bias]
    learned = [*tensors, pair_bias]
    grad_out = torch.randn(2, 3, 2, 520, 8)
    results = []
    for attention in (folding_attention, primitives._attention):
        out = attention(*tensors, biases)
        results.append([out, *torch.autograd.grad(out, learned, grad_out)])
    assert_close(results[1], results[0], 1e-4)


class TitanAttentionStandIn(torch.nn.Module):
    """TorchTitan's ``ScaledDotProductAttention``."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = True
    ) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        backends = [torch.nn.attention.SDPBackend.FLASH_ATTENTION,
                    torch.nn.attention.SDPBackend.MATH]  # fmt: skip
        with torch.nn.attention.sdpa_kernel(backends, set_priority=True):
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return out.transpose(1, 2)


def test_torchtitan(
    modules: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attention is ours from the launcher on."""
    layer: torch.nn.Module = TitanAttentionStandIn()
    if HAS_TORCHTITAN:
        from torchtitan.models.common.attention import ScaledDotProductAttention

        layer = ScaledDotProductAttention(ScaledDotProductAttention.Config())
    q, k, v = (torch.randn(1, 4100, 1, 8) for _ in range(3))
    expected = layer(q, k, v)
    counted = []

    def train() -> None:
        report = qa.Report()
        with qa.using(report=report):
            out = layer(q, k, v)
        assert_close([out], [expected], 1e-4)
        counted.append(report.total.forwards)

    if not HAS_TORCHTITAN:
        modules("torchtitan.train", main=train)
    else:
        monkeypatch.setattr("torchtitan.train.main", train)
    try:
        run("torchtitan.train")
    finally:
        qa.unpatch_sdpa()
    assert counted == [1]
