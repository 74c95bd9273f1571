"""A fused norm gives what the norm gave; what is no such norm is left as it is."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch

from quorum_attention.recipes.modules import fuse_norms


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, for which torch has one kernel."""
    monkeypatch.setattr("quorum_attention.recipes.modules._is_fused", lambda weight: True)


def norm(kind: str, *sizes: Any) -> torch.nn.Module:
    module, name = kind.split(".")
    models = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    found: torch.nn.Module = getattr(models, name)(*sizes)
    torch.nn.init.normal_(found.weight, 1.0)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", ["llama.LlamaRMSNorm", "qwen3.Qwen3RMSNorm", "gpt_oss.GptOssRMSNorm"]
)
def test_results_and_gradients_are_those_of_the_norm(kind: str, dtype: torch.dtype) -> None:
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
        torch.testing.assert_close(found, grads[0], rtol=4 * torch.finfo(dtype).eps, atol=1e-2)
        torch.testing.assert_close(found[0], grads[0][0], rtol=4 * torch.finfo(dtype).eps, atol=0)
    wide = x.double()
    torch.testing.assert_close(fused(wide), plain(wide))  # another dtype than the weight's
    torch.testing.assert_close(fused(hidden_states=x), plain(x))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(fused(x), plain(x), rtol=4 * torch.finfo(dtype).eps, atol=0)
    graph = torch.compile(fused, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(x), fused(x))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("gemma2.Gemma2RMSNorm", (24,)),  # 1 + weight
        ("qwen3_next.Qwen3NextRMSNormGated", (24,)),
    ],
)
def test_other_norms_are_left(kind: str, sizes: tuple[Any, ...]) -> None:
    module = norm(kind, *sizes)
    assert not fuse_norms(module).done
    assert "forward" not in vars(module)


def test_a_norm_with_another_forward_is_left() -> None:
    module = norm("llama.LlamaRMSNorm", 24)
    module.forward = lambda x: x  # type: ignore[method-assign]
    assert not fuse_norms(module).done
    assert not fuse_norms(torch.nn.LayerNorm(24)).done
