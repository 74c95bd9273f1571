"""RMS norms that run as torch's own kernel.

The kernel keeps a norm's input alone, where Transformers' norms keep it in float32 as well and take
some eight passes over it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import rms_norm

from quorum_attention.recipes.patching import Change, drawn, has_own_forward, patch, results_on
from quorum_attention.recipes.step import NORMS
from quorum_attention.units import counted


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
    plain = results_on(module, x)
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
