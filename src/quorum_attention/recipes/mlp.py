"""An MLP some tokens at a time, after DeepSpeed's TiledMLP (Arctic Long Sequence Training).

The gate, the product and whatever else an MLP holds between its layers is there for one tile of
tokens; the backward computes it again, tile by tile. Autograd sees one function of the tokens and
of the weights, so whatever asks it for gradients gets those of the MLP as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch.autograd import forward_ad

from quorum_attention.kernels.torch_private import first_derivative, uncompiled
from quorum_attention.recipes.patching import eval_mode, has_own_forward, patch_forward
from quorum_attention.recipes.repeat import Repeat
from quorum_attention.recipes.summary import Change, left_out
from quorum_attention.recipes.weights import Weights

NAME = "tiled MLP"
_PARTS = ("gate_proj", "up_proj", "down_proj")


def tile_mlps(model: torch.nn.Module, tokens: int) -> Change:
    """Let every gated MLP of ``model`` work ``tokens`` tokens at a time."""
    found = [module for module in model.modules() if _is_gated(module)]
    if not found:
        return left_out(NAME, "no MLP of gate_proj, up_proj and down_proj (experts are not tiled)")
    if not all(map(has_own_forward, found)):
        return left_out(NAME, "an MLP was given another forward")
    for kind, one in {type(module): module for module in found}.items():
        if not _goes_token_by_token(one):
            return left_out(NAME, f"{kind.__name__} gives other results for some tokens alone")
    for module in found:
        _tile(module, tokens)
    return Change(NAME, True, f"{tokens:,} tokens at a time, {len(found)} of them")


def _is_gated(module: torch.nn.Module) -> bool:
    """Whether it is an MLP of three layers; adapters around those are fine."""
    parts = [getattr(module, name, None) for name in _PARTS]
    return all(isinstance(part, torch.nn.Module) for part in parts)


@torch.no_grad()
def _goes_token_by_token(module: torch.nn.Module) -> bool:
    """Tried on two tokens: each alone has to give what both together give, (tokens, width), in one
    text or in two."""
    sides = (p for p in module.gate_proj.parameters() if p.dim() == 2)  # type: ignore[union-attr]
    weight = next(sides, None)
    if weight is None or weight.device.type == "meta" or not weight.is_floating_point():
        return False
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, weight.shape[1], generator=generator, device="cpu").to(weight)
    try:
        with eval_mode(module):
            together = module(tokens)
            apart = torch.cat([module(tokens[i : i + 1]) for i in (0, 1)])
            others = [apart, *_of_texts(module, tokens)]
    except Exception:  # whatever it is, the MLP stays as it is
        return False
    if not isinstance(together, torch.Tensor) or together.shape != tokens.shape:
        return False
    room = 100 * torch.finfo(weight.dtype).eps * together.abs().max()
    return all(
        other.shape == together.shape and bool((together - other).abs().max() <= room)
        for other in others
    )


def _of_texts(module: torch.nn.Module, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    """What comes of (texts, tokens, width), as (tokens, width); of those experts take none."""
    for dim in (0, 1):
        try:
            yield module(tokens.unsqueeze(dim)).squeeze(dim)
        except (RuntimeError, ValueError, IndexError):
            continue


def _tile(module: torch.nn.Module, tokens: int) -> None:
    plain: Any = type(module).forward

    @wraps(plain)
    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1] if x.numel() else 0
        if rows <= tokens:
            result: torch.Tensor = plain(self, x)
            return result
        # In one row of tokens, cut into tiles of about the same length.
        row, length = x.reshape(rows, x.shape[-1]), -(-rows // -(-rows // tokens))
        if torch.is_grad_enabled():
            return _with_gradients(plain, self, row, length, x.shape)
        return _joined((plain(self, tile) for tile in row.split(length)), x.shape)

    patch_forward(module, forward)


def _joined(parts: Iterator[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """All rows, written part by part: they are there once, and one part beside them."""
    first = next(parts)
    out = first.new_empty(shape)  # and no view of it: what comes after may work in place
    rows, start = out.view(-1, shape[-1]), len(first)
    rows[:start] = first
    del first
    for part in parts:
        rows[start : start + len(part)] = part
        start += len(part)
    return out


@uncompiled
def _with_gradients(
    plain: Callable[..., Any],
    module: torch.nn.Module,
    row: torch.Tensor,
    length: int,
    shape: torch.Size,
) -> torch.Tensor:
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        whole: torch.Tensor = plain(module, row)  # those derive it by their own means
        return whole.view(shape)
    weights = Weights(module)
    tiled: torch.Tensor = _Tiled.apply(plain, module, length, shape, weights, row, *weights.taken())  # type: ignore[no-untyped-call]
    return tiled


class _Tiled(torch.autograd.Function):
    """``plain(module, row)``, ``length`` rows at a time, of the row and the weights that learn."""

    @staticmethod
    def forward(
        ctx: Any, plain: Callable[..., Any], module: torch.nn.Module, length: int,
        shape: torch.Size, weights: Weights, row: torch.Tensor, *learning: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        ctx.plain, ctx.module, ctx.length, ctx.weights = plain, module, length, weights
        ctx.repeat = repeat = Repeat(row.device)
        ctx.save_for_backward(row, *learning)

        def parts() -> Iterator[torch.Tensor]:
            for tile in row.split(length):
                with repeat.first():
                    part = plain(module, tile)
                yield part

        return _joined(parts(), shape)

    @staticmethod
    @first_derivative("a tiled MLP")
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        row, *learning = ctx.saved_tensors
        wanted: bool = ctx.needs_input_grad[5]
        into_row = torch.zeros_like(row) if wanted else None
        start, above = 0, upstream.reshape(row.shape)
        with ctx.weights.swapped_in(learning) as leaves:
            for number, (tile, arrived) in enumerate(
                zip(row.split(ctx.length), above.split(ctx.length), strict=True)
            ):
                piece = tile.detach().requires_grad_(wanted)
                with ctx.repeat.again(number), torch.enable_grad():
                    out = ctx.plain(ctx.module, piece)
                leaves.refuse_others(out, piece)
                if out.requires_grad:
                    # Without ``inputs``: all there are are ours, and reentrant checkpoints within
                    # refuse them.
                    torch.autograd.backward(out, arrived)
                if into_row is not None and piece.grad is not None:
                    into_row[start : start + len(piece)] = piece.grad
                start += len(piece)
        return (None, None, None, None, None, into_row, *leaves.gradients())


__all__ = ["NAME", "tile_mlps"]
