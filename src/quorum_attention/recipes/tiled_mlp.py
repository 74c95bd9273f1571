"""MLPs that run some tokens at a time, after DeepSpeed's TiledMLP (Arctic Long Sequence
Training).

What an MLP holds between its layers is there for one tile of tokens, and the backward
computes it again: torch's checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from quorum_attention.kernels.torch_private import (
    restores_modes_and_hooks,
    uncompiled,
)
from quorum_attention.recipes.changes import LeftOutError
from quorum_attention.recipes.lent_weights import run_with_weights
from quorum_attention.recipes.patching import (
    PatchedForwards,
    has_own_forward,
    patch,
)
from quorum_attention.recipes.switches import MLP
from quorum_attention.recipes.trials import differ_by_rounding, drawn, result_like
from quorum_attention.recipes.weight_versions import WeightVersions
from quorum_attention.units import counted

_PARTS = ("gate_proj", "up_proj", "down_proj")  # adapters around those are fine
# Layers call the width of their inputs by these names; the last is that of GPTQ's.
_WIDTHS = ("in_features", "infeatures")


class TiledMLPs(PatchedForwards):
    """Let every gated MLP of a model work some tokens at a time.

    Args:
        tokens: of a tile.
    """

    name = MLP
    checked = "each runs its tiles"

    def __init__(self, tokens: int) -> None:
        super().__init__("MLP", _run_in_tiles, _is_gated)
        self._tokens = tokens

    def make(self, model: torch.nn.Module) -> str:
        """Change all MLPs, if all give for parts of the tokens what they give for
        all."""
        mlps = [module for module in model.modules() if _is_gated(module)]
        reason = _reason_against(mlps)
        if reason is not None:
            raise LeftOutError(reason)
        dtypes = _dtypes(model)
        for kind, module in {type(module): module for module in mlps}.items():
            reason = _reason_to_run_whole(module, dtypes)
            if reason is not None:
                raise LeftOutError(f"{kind.__name__} {reason}")
        for module in mlps:
            patch(module, "forward", _run_in_tiles, self._tokens)
        self.n_changed = len(mlps)
        return (
            f"{counted(len(mlps), 'MLP')}, {counted(self._tokens, 'token')} at a time"
        )


def _is_gated(module: torch.nn.Module) -> bool:
    return all(
        isinstance(getattr(module, part, None), torch.nn.Module) for part in _PARTS
    )


def _reason_against(mlps: list[torch.nn.Module]) -> str | None:
    """Return why the MLPs of a model stay as they are, as far as they say without a
    trial."""
    if not mlps:
        return "no MLP has gate_proj, up_proj, down_proj (or it has experts)"
    if not all(map(has_own_forward, mlps)):
        return (
            "an MLP was given another forward, which a library of kernels or a hook "
            "may have done: call long_context before that"
        )
    if any(map(_is_offloaded, mlps)):
        return (
            "weights of an MLP are offloaded, or not loaded yet: load the model so "
            "that its MLPs lie on devices"
        )
    return None


def _is_offloaded(module: torch.nn.Module) -> bool:
    """Whether weights of the module come from elsewhere in its forward, as by
    Accelerate's offloading, or are not loaded yet."""
    return any(weight.is_meta for weight in module.parameters())


def _dtypes(module: torch.nn.Module) -> list[torch.dtype]:
    """Return dtypes of weights that activations may have. Quantised weights have none
    of these."""
    dtypes = dict.fromkeys(weight.dtype for weight in module.parameters())
    return [dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1]


def _width(module: torch.nn.Module) -> int | None:
    """Return the width of an MLP's inputs, or None if its first layer does not say."""
    layers = list(module.gate_proj.modules())  # type: ignore[union-attr]
    for layer in layers:  # a quantised weight is packed: the layer says how wide it is
        for name in _WIDTHS:
            width = getattr(layer, name, None)
            if isinstance(width, int):
                return width
    for weight in module.gate_proj.parameters():  # type: ignore[union-attr]
        if weight.dim() == 2 and weight.is_floating_point():
            return int(weight.shape[1])
    return None


def _reason_to_run_whole(
    module: torch.nn.Module, dtypes: list[torch.dtype]
) -> str | None:
    """Try an MLP on two tokens, (tokens, width) and (1, tokens, width): each token
    alone has to give what both together give. Experts may take one of these shapes
    only.

    Args:
        module: the MLP.
        dtypes: to try after those of its own weights.

    Returns:
        Why it has to run whole, or None.
    """
    width = _width(module)
    if width is None:
        return "does not say how wide its inputs are"
    tensors = chain(
        module.parameters(), module.buffers()
    )  # some packed weights are buffers
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    for dtype in dict.fromkeys([*_dtypes(module), *dtypes]):
        tokens = drawn(2, width).to(device, dtype)
        agreements = list(_agreements(module, tokens))
        if agreements and not all(agreements):
            return "has other results for parts of the tokens"
        if agreements:
            return None
    tried = (
        ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes) or "any dtype"
    )
    return f"takes no inputs of width {width} in {tried}"


def _agreements(module: torch.nn.Module, tokens: torch.Tensor) -> Iterator[bool]:
    """For each shape that an MLP takes, say whether tokens alone give what they give
    together."""
    for inputs in (tokens, tokens[None]):
        together = result_like(module, inputs)
        results = [result_like(module, token) for token in inputs.split(1, -2)]
        by_token = [result for result in results if result is not None]
        if together is None or len(by_token) < len(results):
            continue
        yield differ_by_rounding(together, torch.cat(by_token, -2))


def _run_in_tiles(
    tokens: int, plain: Any, module: torch.nn.Module, x: torch.Tensor
) -> Any:
    """The forward of a changed MLP."""
    if x.numel() == 0:
        return plain(module, x)
    rows = x.numel() // x.shape[-1]
    if rows <= tokens:
        return plain(module, x)
    n_tiles = math.ceil(rows / tokens)
    length = math.ceil(x.shape[-2] / n_tiles)  # of all texts: tiles of about one length
    return _compute_tiles(plain, module, x.split(length, -2))


@uncompiled
@restores_modes_and_hooks
def _compute_tiles(
    plain: Callable[..., Any], module: torch.nn.Module, tiles: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Compute all tiles, each as a checkpoint, and join them.

    Gradients of weights in 16 bits are summed in float32: each tile's would round the
    sum. Without gradients nothing is kept, and nothing is widened.
    """
    if not torch.is_grad_enabled():
        return _write_tiles(plain, module, tiles)
    weights: dict[str, Any] = dict(module.named_parameters())
    versions = WeightVersions.record(weights)
    wide = {
        name: weight.float()
        for name, weight in weights.items()
        if _is_summed_wide(weight)
    }

    def run(tile: torch.Tensor) -> Any:
        if versions.have_changed():
            raise RuntimeError(
                "weights of an MLP have changed between its forward and its backward, "
                "which computes tiles again: change weights after the backward"
            )
        narrow = {name: copy.to(weights[name].dtype) for name, copy in wide.items()}
        swapped = weights | narrow
        # Without the module's hooks, which are called once, outside.
        return run_with_weights(module, swapped, plain, module, tile)

    return torch.cat([checkpoint(run, tile, use_reentrant=False) for tile in tiles], -2)


def _write_tiles(
    plain: Callable[..., Any], module: torch.nn.Module, tiles: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Compute all tiles, each into its part of one tensor."""
    n_tokens = sum(tile.shape[-2] for tile in tiles)
    results = torch.empty(0)
    start = 0
    for tile in tiles:
        result = plain(module, tile)
        length = tile.shape[-2]
        if not start:
            *lead, _, width = result.shape
            results = result.new_empty((*lead, n_tokens, width))
        results.narrow(-2, start, length).copy_(result)
        start += length
    return results


def _is_summed_wide(weight: torch.Tensor) -> bool:
    return weight.requires_grad and weight.dtype.itemsize < 4
