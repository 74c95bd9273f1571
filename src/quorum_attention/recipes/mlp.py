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

from quorum_attention.execution.device.lookup import BACKENDS, on_host
from quorum_attention.kernels.uncompiled import uncompiled
from quorum_attention.recipes.modes import evaluated
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
    """Tried on two tokens, (tokens, width): each alone has to give what both together give."""
    sides = (p for p in module.gate_proj.parameters() if p.dim() == 2)  # type: ignore[union-attr]
    weight = next(sides, None)
    if weight is None or weight.device.type == "meta" or not weight.is_floating_point():
        return False
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, weight.shape[1], generator=generator, device="cpu").to(weight)
    try:
        with evaluated(module):
            together = module(tokens)
            apart = [module(tokens[i : i + 1]) for i in (0, 1)]
    except Exception:  # whatever it is, the MLP stays as it is
        return False
    if not isinstance(together, torch.Tensor) or together.shape != tokens.shape:
        return False
    room = 100 * torch.finfo(weight.dtype).eps * together.abs().max()
    return bool((together - torch.cat(apart)).abs().max() <= room)


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
        # In one row of tokens: a batch would be cut otherwise in the backward than in the forward.
        row, weights = x.reshape(rows, x.shape[-1]), list(self.parameters())
        shards = -(-rows // tokens)
        again = torch.is_grad_enabled() and x.device.type in BACKENDS
        run = _Repeatable(plain, x.device) if again else plain
        tiled: torch.Tensor = apply_tiled_mlp(run, self, row, shards, weights)
        return tiled.view(x.shape)

    # Bound to the module, so that a copy of the module gets one bound to itself.
    module.forward = MethodType(forward, module)


class _Repeatable:
    """A function of a module and a tile, whose second run of a tile is like its first.

    Dropout (an adapter's, say) has to drop the same again, and autocast is that of the forward,
    wherever the backward runs. The first runs are those without gradients, tile after tile; the
    others come in the same order, as often as there are backwards.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        kind = device.type
        self._function, self._kind = function, kind
        self._devices = [] if on_host(device) else [device]
        self._dtype = torch.get_autocast_dtype(kind)
        self._enabled = torch.is_autocast_enabled(kind)
        self._states: list[tuple[torch.Tensor, ...]] = []
        self._next = 0

    def __call__(self, module: torch.nn.Module, tile: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            self._note()
            first: torch.Tensor = self._function(module, tile)
            return first
        with (
            torch.random.fork_rng(self._devices, device_type=self._kind),
            torch.autocast(self._kind, self._dtype, self._enabled),
        ):
            self._recall()
            again: torch.Tensor = self._function(module, tile)
        return again

    @uncompiled
    def _note(self) -> None:
        there = getattr(torch, self._kind)
        states = (there.get_rng_state(device) for device in self._devices)
        self._states.append((torch.get_rng_state(), *states))

    @uncompiled
    def _recall(self) -> None:
        host, *others = self._states[self._next % len(self._states)]
        self._next += 1
        torch.set_rng_state(host)
        for device, state in zip(self._devices, others, strict=True):
            getattr(torch, self._kind).set_rng_state(state, device)


__all__ = ["NAME", "tile_mlps"]
