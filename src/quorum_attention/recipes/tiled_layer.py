"""A decoder layer some tokens at a time, with q, k, v and attention's output in host
memory.

Tokens meet in attention alone. So a layer runs twice for every tile of its tokens:
first up to its attention, which takes q, k and v of the tile to the host; then, when
attention is computed of all of them, from there on, with the tile's rows of the output.
The backward does this again, tile by tile. It adds up the gradients of weights in
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from quorum_attention.call.broadcast import cast_by_autocast
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.integrations.substitutes import substituting
from quorum_attention.kernels.torch_private import restores_modes_and_hooks
from quorum_attention.partition import split_at_multiples
from quorum_attention.recipes.layer_calls import LayerCall
from quorum_attention.recipes.reached_attention import (
    attend_where_heads_are,
    reach_attention,
)
from quorum_attention.recipes.tile_storage import rows_of

TensorList = Sequence[torch.Tensor]


@dataclass(frozen=True)
class ForwardModes:
    """The modes of a forward, in which each tile runs again.

    Attributes:
        device: of the layer.
        seed: of the numbers that a layer draws.
        autocast_dtype, is_autocast: autocast on that kind of device.
        dtype: of the layer's results.
    """

    device: torch.device
    seed: int
    autocast_dtype: torch.dtype
    is_autocast: bool
    dtype: torch.dtype

    @classmethod
    def of_forward(cls, hidden: torch.Tensor) -> ForwardModes:
        """Return the modes of now, for a layer with this input."""
        kind = hidden.device.type
        seed = int(torch.randint(1 << 62, (), device="cpu"))
        autocast_dtype = torch.get_autocast_dtype(kind)
        is_autocast = torch.is_autocast_enabled(kind)
        dtype = autocast_dtype if is_autocast else hidden.dtype
        return cls(hidden.device, seed, autocast_dtype, is_autocast, dtype)

    @contextmanager
    def same(self, number: int) -> Iterator[None]:
        """Draw the same numbers each time, under the forward's autocast.

        Args:
            number: of a tile; others draw other numbers.
        """
        kind = self.device.type
        devices = [self.device] if kind == "cuda" else []
        with (
            torch.random.fork_rng(devices),
            torch.autocast(
                kind, self.autocast_dtype, self.is_autocast, cache_enabled=False
            ),
            backend_of(self.device).current(self.device),
        ):
            torch.default_generator.manual_seed(self.seed + number)
            if devices:
                torch.cuda.manual_seed(self.seed + number)
            yield

    def cast(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cast tensors as autocast would: in host memory it is another device's."""
        if not self.is_autocast:
            return tensors
        return tuple(cast_by_autocast(tensor, self.dtype) for tensor in tensors)


def _unguarded(n_numbers: int, run: Callable[[], Any]) -> Any:
    """Run a layer as it is."""
    return run()


@dataclass(eq=False)
class TiledLayer:
    """One layer of one forward, for torch's checkpoint.

    Attributes:
        function: the layer's forward.
        module: the layer.
        call: what the forward is given beside the hidden states.
        n_tokens: of the hidden states.
        tile: the tokens of a tile.
        modes: of the forward.
        attend: computes attention of q, k and v of all tokens; None: in host memory.
        guard: calls each run of a tile, its second argument. The first is how many
            numbers in a row the run may not make; 0: it may make any.
        weights: the weights that learn.
        attention_call: attention without its q, k and v; None: no tile has reached it.
    """

    function: Callable[..., Any]
    module: torch.nn.Module
    call: LayerCall
    n_tokens: int
    tile: int
    modes: ForwardModes
    attend: Callable[[TensorList], torch.Tensor] | None = None
    guard: Callable[[int, Callable[[], Any]], Any] = _unguarded
    weights: list[torch.Tensor] = field(default_factory=list)
    attention_call: Any = None
    _has_run: bool = False

    @classmethod
    def of_checkpoint(cls, layer: Any, inputs: Any, tile: int) -> TiledLayer:
        """Return the layer that a checkpoint is given.

        Args:
            layer: as Transformers gives it to a checkpoint: a partial of its forward.
            inputs: those of that; the first is the hidden states (batch, tokens,
                width).
            tile: the tokens of a tile.
        """
        hidden, *args = inputs
        module = checkpointed_module(layer)
        nothing = hidden.new_empty(
            0
        )  # a part of the hidden states would keep all of them
        function = partial(layer.func, *layer.args)
        call = LayerCall(function, nothing, tuple(args), layer.keywords)
        modes = ForwardModes.of_forward(hidden)
        return cls(function, module, call, hidden.shape[1], tile, modes)

    def __call__(self, hidden: torch.Tensor) -> Any:
        """Return what the layer returns."""
        *heads, _ = _run_tiles(self, self._project, hidden)
        output = (
            self._attend_on_host(heads) if self.attend is None else self.attend(heads)
        )
        # The second run of a checkpoint is for what is saved alone.
        finish = None if self._has_run else self._finish
        self._has_run = True
        result, *_ = _run_tiles(self, finish, hidden, output)
        return result

    def spans(self, n_tokens: int) -> list[Interval]:
        """Return the tiles of so many tokens."""
        return split_at_multiples(Interval(0, n_tokens), self.tile)

    def empty_like_tile(self, tile: torch.Tensor, n_tokens: int) -> torch.Tensor:
        """Return an empty tensor shaped like ``tile`` but with ``n_tokens`` rows.
        TensorList with a head dimension are in host memory, page-locked for GPUs."""
        *outer, _, width = tile.shape
        device = self.modes.device
        is_on_host = _has_heads(tile)
        return torch.empty(
            (*outer, n_tokens, width),
            dtype=tile.dtype,
            device="cpu" if is_on_host else device,
            pin_memory=is_on_host and device.type == "cuda",
        )

    def tile_on_device(self, tensor: torch.Tensor, span: Interval) -> torch.Tensor:
        """Return the rows of a span, on the layer's device."""
        tile = rows_of(tensor, span)
        if not _has_heads(tile):
            return tile
        copy = torch.empty(tile.shape, dtype=tile.dtype, device=self.modes.device)
        copy_tile(copy, tile)
        return copy

    def _project(self, start: int, tile: torch.Tensor) -> TensorList:
        """Return q, k, v of a tile, and note what else is said of the attention."""
        run = partial(self.run, start=start, tile=tile, n_numbers=tile.shape[1])
        reached = reach_attention(run)
        # The last tile may have one token, and another call.
        self.attention_call = self.attention_call or reached.call
        return self.modes.cast(*reached.heads)

    def _attend_on_host(self, heads: TensorList) -> torch.Tensor:
        """Compute attention of q, k and v in host memory."""
        with self.modes.same(-1):
            return attend_where_heads_are(self.attention_call, heads)

    def _finish(self, start: int, tile: torch.Tensor, rows: torch.Tensor) -> TensorList:
        """Return the layer's result of a tile and its rows of attention's output."""
        return [self.run(lambda *_: rows, start, tile)]

    def run(
        self,
        attention: Callable[..., Any],
        start: int,
        tile: torch.Tensor,
        n_numbers: int = 0,
    ) -> Any:
        """Run the layer on a tile.

        Args:
            attention: runs in place of its attention.
            start: the tile's first token.
            tile: (batch, tokens, width).
            n_numbers: how many numbers in a row it may not make on trial; 0: it may
                make any.
        """
        rows_of_tile = partial(self._rows_of_tile, start, tile.shape[1])
        call = self.call.map_tensors(rows_of_tile).with_hidden(tile)
        run = partial(call.run, self.function)
        with substituting(attention=attention), self.modes.same(start):
            return self.guard(n_numbers, run)

    def _rows_of_tile(
        self, start: int, length: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Return a tile's part of what the layer is given: of (..., tokens, width) or
        of numbers of tokens; tensors without a dimension of tokens are for all
        tiles."""
        if tensor.dim() == 0:
            return tensor
        is_wide = tensor.is_floating_point() or tensor.is_complex()
        dim = -2 if is_wide and tensor.dim() > 1 else -1
        if tensor.shape[dim] != self.n_tokens:
            return tensor
        return tensor.narrow(dim, start, length)


def checkpointed_module(layer: Any) -> torch.nn.Module:
    """Return the module whose forward Transformers gives to a checkpoint, as a
    partial."""
    module: torch.nn.Module = layer.args[0] if layer.args else layer.func.__self__
    return module


def _has_heads(tensor: torch.Tensor) -> bool:
    """Whether a tensor is (batch, heads, tokens, head_dim), not (batch, tokens,
    width)."""
    return tensor.dim() >= 4


def copy_tile(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy (..., tokens, width) between devices, head by head: each is one run of
    memory."""
    if source.device.type != "cpu":
        source = source.contiguous()
    heads = zip(target.flatten(0, -3), source.flatten(0, -3), strict=True)
    for target_head, source_head in heads:
        target_head.copy_(source_head)


def _run_tiles(
    layer: TiledLayer, run: Callable[..., TensorList] | None, *inputs: torch.Tensor
) -> TensorList:
    results: TensorList = _RunTiles.apply(layer, run, *inputs, *layer.weights)  # type: ignore[no-untyped-call]
    return results


class _RunTiles(torch.autograd.Function):
    """The results of ``run(start, *tiles)`` for each tile of some tensors, put
    together.

    And a number on the device: by that torch knows the stream that it ran on, and goes
    back on it. q, k and v in host memory have none.
    """

    @staticmethod
    def forward(ctx: Any, layer: TiledLayer, run: Any, *tensors: torch.Tensor) -> Any:
        """Run all tiles; none if ``run`` is None."""
        inputs = tensors[: len(tensors) - len(layer.weights)]
        ctx.layer = layer
        ctx.run = run
        ctx.save_for_backward(*inputs)
        results = [] if run is None else _forward_tiles(layer, run, inputs)
        number = inputs[0].new_empty(())
        return (*results, number)

    @staticmethod
    @once_differentiable
    @restores_modes_and_hooks
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        """Run all tiles again, and return the gradients of inputs and weights."""
        *grad_results, _ = upstream
        layer = ctx.layer
        with without_hooks(layer.weights):
            grads = _backward_tiles(layer, ctx.run, ctx.saved_tensors, grad_results)
        return (None, None, *grads)


def _forward_tiles(
    layer: TiledLayer, run: Callable[..., TensorList], inputs: TensorList
) -> TensorList:
    n_tokens = inputs[0].shape[-2]
    results: list[torch.Tensor] = []
    for span in layer.spans(n_tokens):
        tiles = [layer.tile_on_device(tensor, span) for tensor in inputs]
        tile_results = run(span.start, *tiles)
        if not results:
            results = [layer.empty_like_tile(tile, n_tokens) for tile in tile_results]
        for result, tile in zip(results, tile_results, strict=True):
            copy_tile(rows_of(result, span), tile)
    return results


def _backward_tiles(
    layer: TiledLayer,
    run: Callable[..., TensorList],
    inputs: TensorList,
    grad_results: TensorList,
) -> list[torch.Tensor | None]:
    """Return the gradients of inputs and of the layer's weights."""
    n_tokens = inputs[0].shape[-2]
    grads = [layer.empty_like_tile(tensor, n_tokens) for tensor in inputs]
    sums: list[torch.Tensor | None] = [None] * len(layer.weights)
    for span in layer.spans(n_tokens):
        tiles = [
            layer.tile_on_device(x, span).detach().requires_grad_() for x in inputs
        ]
        with torch.enable_grad():
            results = run(span.start, *tiles)
        upstream = [layer.tile_on_device(grad, span) for grad in grad_results]
        learned = [*tiles, *layer.weights]
        tile_grads = torch.autograd.grad(results, learned, upstream, allow_unused=True)
        for grad, tile, tile_grad in zip(grads, tiles, tile_grads, strict=False):
            copy_tile(rows_of(grad, span), _or_zeros(tile_grad, tile))
        for number, grad in enumerate(tile_grads[len(tiles) :]):
            sums[number] = _wide_sum(sums[number], grad)
    weight_grads = [
        None if total is None else total.to(weight.dtype)
        for total, weight in zip(sums, layer.weights, strict=True)
    ]
    return [*grads, *weight_grads]


def _or_zeros(grad: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if grad is None else grad


def _wide_sum(
    total: torch.Tensor | None, grad: torch.Tensor | None
) -> torch.Tensor | None:
    """Add a tile's gradient of a weight to the sum so far, at least in float32; None:
    there is none."""
    if grad is None:
        return total
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    return wide if total is None else total + wide


@contextmanager
def without_hooks(weights: TensorList) -> Iterator[None]:
    """Take hooks of weights off: they are for whole gradients, not for those of
    tiles."""
    hooks_of_weights = [
        weight._backward_hooks for weight in weights if weight._backward_hooks
    ]
    copies = [dict(hooks) for hooks in hooks_of_weights]
    try:
        for hooks in hooks_of_weights:
            hooks.clear()
        yield
    finally:
        for hooks, copy in zip(hooks_of_weights, copies, strict=True):
            hooks.update(copy)
