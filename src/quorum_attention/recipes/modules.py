"""MLPs that run some tokens at a time, and RMS norms that run as torch's kernel.

MLPs run some tokens at a time, after DeepSpeed's TiledMLP (Arctic Long Sequence Training): what an
MLP holds between its layers is there for one tile of tokens, and the backward computes it again:
torch's checkpoints. RMS norms run as torch's own kernel: it keeps a norm's input alone, where
Transformers' norms keep it in float32 as well and take some eight passes over it.

A module whose forward somebody else has replaced (libraries of kernels, offloading, by hand) is
left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import rms_norm
from torch.nn.utils.stateless import _reparametrize_module  # as torch.func.functional_call
from torch.utils.checkpoint import checkpoint

from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.recipes.patching import (
    Change,
    drawn,
    evaluating,
    has_own_forward,
    patch,
    swapping,
)
from quorum_attention.recipes.step import MLP, NORMS
from quorum_attention.sizes import counted


def _tried(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """What it returns in evaluation; None: it takes no such tensor, or makes another of it."""
    try:
        with torch.no_grad(), evaluating(module):
            found = module(x)
    except Exception:  # whatever it is
        return None
    alike = isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (x.shape, x.dtype)
    return found if alike else None


def tile_mlps(model: torch.nn.Module, tokens: int) -> Change:
    """Let every gated MLP of ``model`` work ``tokens`` tokens at a time."""
    parts = ("gate_proj", "up_proj", "down_proj")  # adapters around those are fine
    found = [
        module
        for module in model.modules()
        if all(isinstance(getattr(module, part, None), torch.nn.Module) for part in parts)
    ]
    if not found:
        return Change(MLP, False, "no MLP has gate_proj, up_proj, down_proj (or it has experts)")
    if not all(map(has_own_forward, found)):
        return Change(MLP, False, "an MLP was given another forward")
    for kind, one in {type(module): module for module in found}.items():
        if not _goes_token_by_token(one):
            return Change(MLP, False, f"{kind.__name__} has other results for parts of the tokens")
    for module in found:
        patch(module, "forward", _tile, tokens)
    return Change(MLP, True, f"{counted(len(found), 'MLP')}, {tokens:,} tokens at a time")


def _goes_token_by_token(module: torch.nn.Module) -> bool:
    """Tried on two tokens, (tokens, width) and (1, tokens, width): each alone has to give what both
    together give. Experts may take one of these shapes only."""
    sides = (p for p in module.gate_proj.parameters() if p.dim() == 2)  # type: ignore[union-attr]
    weight = next(sides, None)
    if weight is None or weight.device.type == "meta" or not weight.is_floating_point():
        return False
    tokens, checked = drawn(2, weight.shape[1]).to(weight), 0
    for given in (tokens, tokens[None]):
        whole, *tiles = (_tried(module, part) for part in (given, *given.split(1, -2)))
        if whole is None or any(tile is None for tile in tiles):
            continue
        far = (whole - torch.cat(tiles, -2)).abs().max()  # type: ignore[arg-type]
        if not bool(far <= 100 * torch.finfo(weight.dtype).eps * whole.abs().max()):
            return False
        checked += 1
    return checked > 0


def _tile(tokens: int, plain: Any, module: torch.nn.Module, x: torch.Tensor) -> Any:
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    if rows <= tokens:
        return plain(module, x)
    length = -(-x.shape[-2] // -(-rows // tokens))  # of all texts: tiles of about one length
    return _tiles(plain, module, x.split(length, -2))


@uncompiled
def _tiles(
    plain: Callable[..., Any], module: torch.nn.Module, tiles: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """What comes of all tiles, each a checkpoint.

    Gradients of weights in 16 bits are summed in float32: each tile's would round the sum.
    """
    weights: dict[str, Any] = dict(module.named_parameters())
    wide = {n: w.float() for n, w in weights.items() if w.requires_grad and w.dtype.itemsize < 4}

    def run(tile: torch.Tensor) -> Any:
        held = weights | {name: copy.to(weights[name].dtype) for name, copy in wide.items()}
        with swapping, _reparametrize_module(module, held, tie_weights=True):
            return plain(module, tile)  # without its hooks, which are called once, outside

    return torch.cat([checkpoint(run, tile, use_reentrant=False) for tile in tiles], -2)


def fuse_norms(model: torch.nn.Module) -> Change:
    """Let every RMS norm of ``model`` that computes what torch's does run as torch's."""
    found = [module for module in model.modules() if _epsilon(module) is not None]
    kinds = {type(module): module for module in reversed(found)}
    right = {kind for kind, module in kinds.items() if _computes_the_same(module)}
    fused = [m for m in found if type(m) in right and has_own_forward(m)]
    if not fused:
        return Change(NORMS, False, "torch has no kernel for the norms of this model on its device")
    for module in fused:
        patch(module, "forward", _fused, _epsilon(module))
    return Change(NORMS, True, f"{counted(len(fused), 'norm')}, torch's rms_norm")


def _epsilon(module: torch.nn.Module) -> float | None:
    """Of an RMS norm with one weight; None: it is something else."""
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or not type(module).__name__.endswith("RMSNorm"):
        return None
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) else None


def _computes_the_same(module: torch.nn.Module) -> bool:
    """Tried on rows of three sizes, beside which epsilon is small, alike and large: no further
    apart than a few roundings. (Some multiply by 1 + weight, gate, or take other inputs.)"""
    weight, epsilon = module.weight, _epsilon(module)
    if type(weight) is not torch.nn.Parameter or weight.dim() != 1 or not _is_fused(weight):
        return False
    sizes = torch.tensor([[1e2], [1], [1e-2]], device="cpu", dtype=torch.float64)
    x = (drawn(3, len(weight)) * sizes * (epsilon or 1.0) ** 0.5).to(weight)
    plain = _tried(module, x)
    if plain is None:
        return False
    far = (plain.double() - rms_norm(x, weight.shape, weight, epsilon).double()).abs()
    return bool((far <= 4 * torch.finfo(x.dtype).eps * plain.double().abs()).all())


def _is_fused(weight: torch.Tensor) -> bool:
    """Whether torch has one kernel for it where the weight lies; elsewhere it takes many."""
    with torch.enable_grad():
        x = weight.detach().clone().requires_grad_()
        return "Fused" in type(rms_norm(x, x.shape, weight, 1.0).grad_fn).__name__


def _fused(epsilon: float | None, plain: Any, module: Any, *args: Any, **named: Any) -> Any:
    x, weight = args[0] if len(args) == 1 and not named else None, module.weight
    # Autocast may give such a norm another dtype than its own forward does.
    cast = x is not None and x.dtype.itemsize < 4 and torch.is_autocast_enabled(x.device.type)
    if x is None or x.dtype != weight.dtype or cast:
        return plain(module, *args, **named)
    return rms_norm(x, weight.shape, weight, epsilon)
