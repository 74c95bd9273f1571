"""RMS norms by torch's own kernel: it keeps a norm's input alone, where Transformers' norms keep it
in float32 as well and take some eight passes over it."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch.nn.functional import rms_norm

from quorum_attention.recipes.changes import Change, eval_mode, has_own_forward, patch_forward
from quorum_attention.recipes.step import NORMS
from quorum_attention.sizes import counted


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


@torch.no_grad()
def _computes_the_same(module: torch.nn.Module) -> bool:
    """Tried on rows of three sizes, beside which epsilon is small, alike and large: no further
    apart than a few roundings. (Some multiply by 1 + weight, gate, or take other inputs.)"""
    weight, epsilon = module.weight, _epsilon(module)
    if type(weight) is not torch.nn.Parameter or weight.dim() != 1 or not _is_fused(weight):
        return False
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, len(weight), generator=generator, device="cpu", dtype=torch.float64)
    sizes = torch.tensor([[1e2], [1], [1e-2]], device="cpu", dtype=torch.float64)
    x = (rows * sizes * (epsilon or 1.0) ** 0.5).to(weight)
    try:
        with eval_mode(module):
            plain = module(x)
    except Exception:  # whatever it is, the module takes no such rows
        return False
    if not isinstance(plain, torch.Tensor) or plain.dtype != x.dtype or plain.shape != x.shape:
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
        if x is None or x.dtype != weight.dtype or _is_cast(x):
            return plain(self, *args, **named)
        return rms_norm(x, weight.shape, weight, epsilon)

    patch_forward(module, forward)


def _is_cast(x: torch.Tensor) -> bool:
    """Whether autocast may give such a norm another dtype than its own forward does."""
    return x.dtype.itemsize < 4 and torch.is_autocast_enabled(x.device.type)


__all__ = ["fuse_norms"]
