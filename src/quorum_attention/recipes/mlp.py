"""An MLP some tokens at a time: Liger's, after DeepSpeed's (Arctic Long Sequence Training).

The gate, the product and whatever else an MLP holds between its layers is there for one tile of
tokens; the backward computes it again, tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch

from quorum_attention.recipes.summary import NO_LIGER, Ingredient, left_out

NAME = "tiled MLP"
_PARTS = ("gate_proj", "up_proj", "down_proj")


def tile_mlps(model: torch.nn.Module, tokens: int) -> Ingredient:
    """Let every gated MLP of ``model`` work ``tokens`` tokens at a time."""
    try:
        from liger_kernel.ops.tiled_mlp import apply_tiled_mlp
    except ImportError as error:
        return left_out(NAME, f"{NO_LIGER}: {error}")
    found = [module for module in model.modules() if _is_gated(module)]
    if not found:
        return left_out(NAME, "no MLP of gate_proj, up_proj and down_proj (experts are not tiled)")
    for kind, one in {type(module): module for module in found}.items():
        if not _goes_token_by_token(one):
            return left_out(NAME, f"{kind.__name__} gives other results for some tokens alone")
    for module in found:
        _tile(module, tokens, apply_tiled_mlp)
    return Ingredient(NAME, True, f"Liger's, {tokens:,} tokens at a time, {len(found)} of them")


def _is_gated(module: torch.nn.Module) -> bool:
    """Whether it is an MLP of three layers; adapters around those are fine."""
    parts = [getattr(module, name, None) for name in _PARTS]
    return all(isinstance(part, torch.nn.Module) for part in parts)


@torch.no_grad()
def _goes_token_by_token(module: torch.nn.Module) -> bool:
    """Tried on two tokens: each alone has to give what both together give."""
    weight = next(p for p in module.gate_proj.parameters() if p.dim() == 2)  # type: ignore[union-attr]
    if weight.device.type == "meta" or not weight.is_floating_point():
        return False
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(1, 2, weight.shape[1], generator=generator, device="cpu").to(weight)
    training = module.training
    module.eval()
    try:
        together = module(tokens)
        apart = [module(tokens[:, i : i + 1]) for i in (0, 1)]
    except (RuntimeError, TypeError):
        return False
    finally:
        module.train(training)
    if not isinstance(together, torch.Tensor) or together.shape != tokens.shape:
        return False
    room = 100 * torch.finfo(weight.dtype).eps * together.abs().max()
    return bool((together - torch.cat(apart, 1)).abs().max() <= room)


def _tile(module: torch.nn.Module, tokens: int, apply_tiled_mlp: Callable[..., Any]) -> None:
    plain: Any = type(module).forward

    @wraps(plain)
    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1] if x.numel() else 0
        # Gradients of weights flow through x's: without those the function would make none.
        cut_off = torch.is_grad_enabled() and not x.requires_grad
        if rows <= tokens or cut_off:
            result: torch.Tensor = plain(self, x)
            return result
        shards = min(-(-rows // tokens), x.shape[-2])
        tiled: torch.Tensor = apply_tiled_mlp(plain, self, x, shards, list(self.parameters()))
        return tiled

    # Bound to the module, so that a copy of the module gets one bound to itself.
    module.forward = MethodType(forward, module)


__all__ = ["NAME", "tile_mlps"]
