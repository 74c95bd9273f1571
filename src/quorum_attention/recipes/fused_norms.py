"""RMS norms that run as torch's own kernel.

The kernel keeps a norm's input alone, where Transformers' norms keep it in float32 as
well and take some eight passes over it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import rms_norm

from quorum_attention.recipes.changes import LeftOutError
from quorum_attention.recipes.patching import (
    PatchedForwards,
    has_own_forward,
    patch,
)
from quorum_attention.recipes.switches import NORMS
from quorum_attention.recipes.trials import drawn, result_like
from quorum_attention.units import counted

# A norm is tried on rows of these sizes, beside which epsilon is small, alike and
# large.
_TRIED_SIZES = (1e2, 1.0, 1e-2)


class FusedNorms(PatchedForwards):
    """Let every RMS norm of a model that computes what torch's does run as torch's."""

    name = NORMS
    checked = "each runs torch's kernel"

    def __init__(self) -> None:
        super().__init__("norm", _run_fused, _is_norm)

    def make(self, model: torch.nn.Module) -> str:
        """Change all norms that are RMS norms with one weight, and no more than
        that."""
        norms = [module for module in model.modules() if _is_norm(module)]
        of_kinds = {type(module): module for module in norms}
        suited = {
            kind for kind, module in of_kinds.items() if _computes_the_same(module)
        }
        changed = [
            norm for norm in norms if type(norm) in suited and has_own_forward(norm)
        ]
        if not changed:
            raise LeftOutError(
                "torch has no kernel for the norms of this model on its device"
            )
        for module in changed:
            patch(module, "forward", _run_fused, _epsilon(module))
        self.n_changed = len(changed)
        return f"{counted(len(changed), 'norm')}, torch's rms_norm"


def _epsilon(module: torch.nn.Module) -> float | None:
    """Return the epsilon of an RMS norm with one weight; None for any other module."""
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or not type(module).__name__.endswith("RMSNorm"):
        return None
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return epsilon if isinstance(epsilon, float) else None


def _is_norm(module: torch.nn.Module) -> bool:
    return _epsilon(module) is not None


def _computes_the_same(module: torch.nn.Module) -> bool:
    """Whether a norm and torch's differ by a few roundings at most, tried on a few
    rows.

    Some norms multiply by 1 + weight, gate, or take other inputs.
    """
    weight = module.weight
    if (
        type(weight) is not torch.nn.Parameter
        or weight.dim() != 1
        or not _is_fused(weight)
    ):
        return False
    epsilon = _epsilon(module) or 1.0
    sizes = torch.tensor(_TRIED_SIZES, device="cpu", dtype=torch.float64)[:, None]
    rows = drawn(len(sizes), len(weight)) * sizes * epsilon**0.5
    x = rows.to(weight)
    plain = result_like(module, x)
    if plain is None:
        return False
    exact = plain.double()
    fused = rms_norm(x, weight.shape, weight, _epsilon(module)).double()
    tolerance = 4 * torch.finfo(x.dtype).eps * exact.abs()
    return bool(((exact - fused).abs() <= tolerance).all())


def _is_fused(weight: torch.Tensor) -> bool:
    """Whether torch has one kernel for it where the weight lies; elsewhere it takes
    many."""
    with torch.enable_grad():
        x = weight.detach().clone().requires_grad_()
        return "Fused" in type(rms_norm(x, x.shape, weight, 1.0).grad_fn).__name__


def _run_fused(
    epsilon: float | None,
    plain: Callable[..., Any],
    module: Any,
    *args: Any,
    **named: Any,
) -> Any:
    """The forward of a changed norm."""
    weight = module.weight
    if named or len(args) != 1 or args[0].dtype != weight.dtype:
        return plain(module, *args, **named)
    (x,) = args
    # Autocast may give such a norm another dtype than its own forward does.
    if x.dtype.itemsize < 4 and torch.is_autocast_enabled(x.device.type):
        return plain(module, x)
    return rms_norm(x, weight.shape, weight, epsilon)
