"""MLPs that run some tokens at a time, after DeepSpeed's TiledMLP (Arctic Long Sequence Training).

What an MLP holds between its layers is there for one tile of tokens, and the backward computes it
again: torch's checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.nn.utils.stateless import _reparametrize_module  # as torch.func.functional_call
from torch.utils.checkpoint import checkpoint

from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.recipes.patching import (
    Change,
    drawn,
    has_own_forward,
    is_offloaded,
    patch,
    results_on,
    swapping,
)
from quorum_attention.recipes.step import MLP
from quorum_attention.units import counted

_PARTS = ("gate_proj", "up_proj", "down_proj")  # adapters around those are fine
# What layers call the width of their inputs; the last is that of GPTQ's.
_WIDTHS = ("in_features", "infeatures")


def tile_mlps(model: torch.nn.Module, tokens: int) -> Change:
    """Let every gated MLP of ``model`` work ``tokens`` tokens at a time."""
    mlps = [module for module in model.modules() if _is_gated(module)]
    if not mlps:
        return Change(MLP, False, "no MLP has gate_proj, up_proj, down_proj (or it has experts)")
    if not all(map(has_own_forward, mlps)):
        why = "an MLP was given another forward, which a library of kernels or a hook may have done"
        return Change(MLP, False, f"{why}: call long_context before that")
    if any(map(is_offloaded, mlps)):
        why = "weights of an MLP are offloaded, or not loaded yet"
        return Change(MLP, False, f"{why}: load the model so that its MLPs lie on devices")
    dtypes = _dtypes(model)
    for kind, module in {type(module): module for module in mlps}.items():
        why_not = _why_not(module, dtypes)
        if why_not is not None:
            return Change(MLP, False, f"{kind.__name__} {why_not}")
    for module in mlps:
        patch(module, "forward", _run_in_tiles, tokens)
    return Change(MLP, True, f"{counted(len(mlps), 'MLP')}, {counted(tokens, 'token')} at a time")


def _is_gated(module: torch.nn.Module) -> bool:
    return all(isinstance(getattr(module, part, None), torch.nn.Module) for part in _PARTS)


def _dtypes(module: torch.nn.Module) -> list[torch.dtype]:
    """Dtypes of weights that activations may have. Quantised weights have none of these."""
    dtypes = dict.fromkeys(weight.dtype for weight in module.parameters())
    return [dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1]


def _width(module: torch.nn.Module) -> int | None:
    """The width of an MLP's inputs, or None if its first layer does not say."""
    layers = list(module.gate_proj.modules())  # type: ignore[union-attr]
    for layer in layers:  # a quantised weight is packed: the layer says how wide it is
        for name in _WIDTHS:
            if isinstance(getattr(layer, name, None), int):
                return int(getattr(layer, name))
    for layer in layers:
        for weight in layer.parameters():
            if weight.dim() == 2 and weight.is_floating_point():
                return int(weight.shape[1])
    return None


def _why_not(module: torch.nn.Module, dtypes: list[torch.dtype]) -> str | None:
    """Why an MLP has to run whole, if it does: tried on two tokens, (tokens, width) and
    (1, tokens, width), in its own dtypes and then in those of the model. Each token alone has to
    give what both together give. Experts may take one of these shapes only."""
    width = _width(module)
    tensors = chain(module.parameters(), module.buffers())  # some packed weights are buffers
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    if width is None:
        return "does not say how wide its inputs are"
    for dtype in dict.fromkeys([*_dtypes(module), *dtypes]):
        tokens = drawn(2, width).to(device, dtype)
        agreements = list(_agreements(module, tokens))
        if agreements and not all(agreements):
            return "has other results for parts of the tokens"
        if agreements:
            return None
    tried = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes) or "any dtype"
    return f"takes no inputs of width {width} in {tried}"


def _agreements(module: torch.nn.Module, tokens: torch.Tensor) -> Iterator[bool]:
    """For each shape that an MLP takes, whether tokens alone give what they give together."""
    for together in (tokens, tokens[None]):
        whole = results_on(module, together)
        tiles = [results_on(module, part) for part in together.split(1, -2)]
        apart = [tile for tile in tiles if tile is not None]
        if whole is None or len(apart) < len(tiles):
            continue
        distance = (whole - torch.cat(apart, -2)).abs().max()
        room = 100 * torch.finfo(tokens.dtype).eps * whole.abs().max()
        yield bool(distance <= room)


def _run_in_tiles(tokens: int, plain: Any, module: torch.nn.Module, x: torch.Tensor) -> Any:
    if x.numel() == 0:
        return plain(module, x)
    rows = x.numel() // x.shape[-1]
    if rows <= tokens:
        return plain(module, x)
    n_tiles = math.ceil(rows / tokens)
    length = math.ceil(x.shape[-2] / n_tiles)  # of all texts: tiles of about one length
    return _compute_tiles(plain, module, x.split(length, -2))


@uncompiled
def _compute_tiles(
    plain: Callable[..., Any], module: torch.nn.Module, tiles: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """What comes of all tiles, each a checkpoint.

    Gradients of weights in 16 bits are summed in float32: each tile's would round the sum. Without
    gradients nothing is kept, and nothing is widened.
    """
    if not torch.is_grad_enabled():
        return _write_tiles(plain, module, tiles)
    weights: dict[str, Any] = dict(module.named_parameters())
    wide = {name: weight.float() for name, weight in weights.items() if _is_summed_wide(weight)}

    def run(tile: torch.Tensor) -> Any:
        narrow = {name: copy.to(weights[name].dtype) for name, copy in wide.items()}
        swapped = weights | narrow
        with swapping, _reparametrize_module(module, swapped, tie_weights=True):
            return plain(module, tile)  # without its hooks, which are called once, outside

    return torch.cat([checkpoint(run, tile, use_reentrant=False) for tile in tiles], -2)


def _write_tiles(
    plain: Callable[..., Any], module: torch.nn.Module, tiles: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Compute all tiles, each into its part of one tensor."""
    first, *rest = tiles
    first_result = plain(module, first)
    *lead, _, width = first_result.shape
    lengths = [tile.shape[-2] for tile in tiles]
    results: torch.Tensor = first_result.new_empty((*lead, sum(lengths), width))
    first_part, *parts = results.split(lengths, -2)
    first_part.copy_(first_result)
    for part, tile in zip(parts, rest, strict=True):
        result = plain(module, tile)
        part.copy_(result)
    return results


def _is_summed_wide(weight: torch.Tensor) -> bool:
    return weight.requires_grad and weight.dtype.itemsize < 4
