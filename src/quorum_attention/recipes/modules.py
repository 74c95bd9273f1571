"""Changes of a model's modules: another ``forward``, and what was changed or left out, and why.

MLPs run some tokens at a time, after DeepSpeed's TiledMLP (Arctic Long Sequence Training): what an
MLP holds between its layers is there for one tile of tokens, and the backward computes it again:
torch's checkpoints. RMS norms run as torch's own kernel: it keeps a norm's input alone, where
Transformers' norms keep it in float32 as well and take some eight passes over it.

A module whose forward somebody else has replaced (libraries of kernels, offloading, by hand) is
left as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch.nn.functional import rms_norm
from torch.nn.utils.stateless import _reparametrize_module  # as torch.func.functional_call
from torch.utils.checkpoint import checkpoint

from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.recipes.step import MLP, NORMS
from quorum_attention.sizes import counted

_OURS = "_quorum_attention_recipe"
# A module has other weights for a while: calls of other threads wait, or it might keep those.
_swapping = threading.RLock()


@dataclass(frozen=True)
class Change:
    """One change of a model.

    Attributes:
        name: of the change.
        done: whether it was made.
        how: how it was made, or why it was left out.
    """

    name: str
    done: bool
    how: str

    def __str__(self) -> str:
        return f"{self.name}: {'' if self.done else 'left out: '}{self.how}"


def has_own_forward(module: torch.nn.Module) -> bool:
    """Whether the module runs the forward that its class was written with, or ours around that."""
    found, kind = vars(module).get("forward"), type(module)
    of_class = getattr(found, "__func__", None) is kind.forward  # as in a model unpickled
    (written, *_) = (one for one in kind.__mro__ if "forward" in vars(one))
    if kind.forward.__module__ != written.__module__:  # Liger's and Unsloth's, of all models
        return False
    return found is None or of_class or hasattr(found, _OURS)


def patch_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> None:
    """Let the module run ``forward(module, ...)``."""
    setattr(forward, _OURS, True)
    forward.__name__ = "forward"  # what a pickled module looks up in its class
    # Bound to the module, so that a copy of the module gets one bound to itself.
    module.forward = MethodType(forward, module)


@torch.no_grad()
def evaluated(module: torch.nn.Module, *args: Any, **named: Any) -> Any:
    """What the module returns in evaluation; afterwards each part has its own mode again."""
    trained = [part for part in module.modules() if part.training]
    module.eval()
    try:
        return module(*args, **named)
    finally:
        for part in trained:
            part.training = True


def _tried(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """The same; None: the module takes no such tensor, or makes something else of it."""
    try:
        found = evaluated(module, x)
    except Exception:  # whatever it is
        return None
    alike = isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (x.shape, x.dtype)
    return found if alike else None


def _drawn(*sizes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(sizes, generator=generator, device="cpu", dtype=torch.float64)


def tile_mlps(model: torch.nn.Module, tokens: int) -> Change:
    """Let every gated MLP of ``model`` work ``tokens`` tokens at a time."""
    parts = ("gate_proj", "up_proj", "down_proj")  # adapters around those are fine
    found = [
        module
        for module in model.modules()
        if all(isinstance(getattr(module, part, None), torch.nn.Module) for part in parts)
    ]
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


def _goes_token_by_token(module: torch.nn.Module) -> bool:
    """Tried on two tokens, (tokens, width) and (1, tokens, width): each alone has to give what both
    together give. Experts may take one of these shapes only."""
    sides = (p for p in module.gate_proj.parameters() if p.dim() == 2)  # type: ignore[union-attr]
    weight = next(sides, None)
    if weight is None or weight.device.type == "meta" or not weight.is_floating_point():
        return False
    tokens, checked = _drawn(2, weight.shape[1]).to(weight), 0
    for given in (tokens, tokens[None]):
        whole, *tiles = (_tried(module, part) for part in (given, *given.split(1, -2)))
        if whole is None or any(tile is None for tile in tiles):
            continue
        far = (whole - torch.cat(tiles, -2)).abs().max()  # type: ignore[arg-type]
        if not bool(far <= 100 * torch.finfo(weight.dtype).eps * whole.abs().max()):
            return False
        checked += 1
    return checked > 0


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


def fuse_norms(model: torch.nn.Module) -> Change:
    """Let every RMS norm of ``model`` that computes what torch's does run as torch's."""
    found = [module for module in model.modules() if _epsilon(module) is not None]
    kinds = {type(module): module for module in reversed(found)}
    right = {kind for kind, module in kinds.items() if _computes_the_same(module)}
    fused = [m for m in found if type(m) in right and has_own_forward(m)]
    if not fused:
        return Change(NORMS, False, "no norm that torch computes in one kernel here")
    for module in fused:
        _fuse(module)
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
    x = (_drawn(3, len(weight)) * sizes * (epsilon or 1.0) ** 0.5).to(weight)
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


def _fuse(module: torch.nn.Module) -> None:
    plain, epsilon = type(module).forward, _epsilon(module)

    @wraps(plain)
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        x, weight = args[0] if len(args) == 1 and not named else None, self.weight
        # Autocast may give such a norm another dtype than its own forward does.
        cast = x is not None and x.dtype.itemsize < 4 and torch.is_autocast_enabled(x.device.type)
        if x is None or x.dtype != weight.dtype or cast:
            return plain(self, *args, **named)
        return rms_norm(x, weight.shape, weight, epsilon)

    patch_forward(module, forward)


__all__ = ["Change", "evaluated", "fuse_norms", "has_own_forward", "patch_forward", "tile_mlps"]
