"""An MLP some tokens at a time, after DeepSpeed's TiledMLP (Arctic Long Sequence Training).

The gate, the product and whatever else an MLP holds between its layers is there for one tile of
tokens; the backward computes it again, tile by tile: torch's checkpoints.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.nn.utils.stateless import _reparametrize_module  # as torch.func.functional_call
from torch.utils.checkpoint import checkpoint

from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.recipes.changes import Change, eval_mode, has_own_forward, patch_forward
from quorum_attention.recipes.step import MLP
from quorum_attention.sizes import counted

_PARTS = ("gate_proj", "up_proj", "down_proj")
# A module has other weights for a while: calls of other threads wait, or it might keep those.
_swapping = threading.RLock()


def tile_mlps(model: torch.nn.Module, tokens: int) -> Change:
    """Let every gated MLP of ``model`` work ``tokens`` tokens at a time."""
    found = [module for module in model.modules() if _is_gated(module)]
    if not found:
        return Change(MLP, False, "no MLP of gate_proj, up_proj, down_proj (experts stay whole)")
    if not all(map(has_own_forward, found)):
        return Change(MLP, False, "an MLP was given another forward")
    for kind, one in {type(module): module for module in found}.items():
        if not _goes_token_by_token(one):
            return Change(MLP, False, f"{kind.__name__} gives other results for some tokens alone")
    for module in found:
        _tile(module, tokens)
    return Change(MLP, True, f"{counted(len(found), 'MLP')}, {tokens:,} tokens at a time")


def _is_gated(module: torch.nn.Module) -> bool:
    """Whether it is an MLP of three layers; adapters around those are fine."""
    parts = [getattr(module, name, None) for name in _PARTS]
    return all(isinstance(part, torch.nn.Module) for part in parts)


@torch.no_grad()
def _goes_token_by_token(module: torch.nn.Module) -> bool:
    """Tried on two tokens, (tokens, width) and (1, tokens, width): each alone has to give what both
    together give. Experts may take one of these shapes only."""
    sides = (p for p in module.gate_proj.parameters() if p.dim() == 2)  # type: ignore[union-attr]
    weight = next(sides, None)
    if weight is None or weight.device.type == "meta" or not weight.is_floating_point():
        return False
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, weight.shape[1], generator=generator, device="cpu").to(weight)
    room, tried = 100 * torch.finfo(weight.dtype).eps, 0
    for given in (tokens, tokens[None]):
        try:
            with eval_mode(module):
                whole = module(given)
                apart = torch.cat([module(tile) for tile in given.split(1, -2)], -2)
                far = (whole - apart).abs().max()
        except Exception:  # whatever it is, the module takes no such tokens
            continue
        if whole.shape != given.shape or not bool(far <= room * whole.abs().max()):
            return False
        tried += 1
    return tried > 0


def _tile(module: torch.nn.Module, tokens: int) -> None:
    plain: Any = type(module).forward

    @wraps(plain)
    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1] if x.numel() else 0
        if rows <= tokens:
            result: torch.Tensor = plain(self, x)
            return result
        length = -(-x.shape[-2] // -(-rows // tokens))  # of all texts: tiles of about one length
        return _tiles(plain, self, x.split(length, -2))

    patch_forward(module, forward)


@uncompiled
def _tiles(
    plain: Callable[..., Any], module: torch.nn.Module, tiles: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """What comes of all tiles, each a checkpoint.

    Gradients of weights in 16 bits are summed in float32: each tile's would round the sum.
    """
    weights: dict[str, Any] = dict(module.named_parameters())
    wide = {n: w.float() for n, w in weights.items() if w.requires_grad and w.dtype.itemsize < 4}
    versions = _versions(weights)

    def run(tile: torch.Tensor) -> Any:
        if _versions(weights) != versions:
            raise RuntimeError(
                f"a weight of {type(module).__name__} has been changed in place since the forward "
                "of the tiled MLP, which its gradient needs"
            )
        held = weights | {name: copy.to(weights[name].dtype) for name, copy in wide.items()}
        with _swapping, _reparametrize_module(module, held, tie_weights=True):
            return plain(module, tile)  # without its hooks, which are called once, outside

    return torch.cat([checkpoint(run, tile, use_reentrant=False) for tile in tiles], -2)


def _versions(weights: dict[str, Any]) -> list[int]:
    return [0 if w.is_inference() else w._version for w in weights.values()]


__all__ = ["tile_mlps"]
