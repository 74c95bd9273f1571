"""A decoder layer some tokens at a time, with q, k, v and attention's output in host memory.

Tokens meet in attention alone. So a layer runs twice for every tile of its tokens: first up to its
attention, which takes q, k and v of the tile to the host; then, when attention is computed of all
of them, from there on, with the tile's rows of the output. The backward does this again, tile by
tile. It adds up the gradients of weights in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.functional import dropout
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from quorum_attention.call.broadcast import cast_by_autocast
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.recipes.patching import drawn, swapping

_TRIED = 64  # tokens that a layer is tried on


class _ProjectedError(Exception):
    """A layer has come to its attention."""


class LayerInTiles:
    """One layer of one forward, for torch's checkpoint.

    Args:
        layer: as Transformers gives it to a checkpoint: a partial of its forward.
        inputs: those of that; the first is the hidden states (batch, tokens, width).
        tokens: of a tile.
    """

    def __init__(self, layer: Any, inputs: Any, tokens: int) -> None:
        hidden, *self._given = inputs
        self._layer, self._tokens = layer, tokens
        self.module = (*layer.args, getattr(layer.func, "__self__", None))[0]
        self._device, self._length = hidden.device, hidden.shape[1]
        self._seed = int(torch.randint(1 << 62, (), device="cpu"))
        kind = hidden.device.type
        self._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._dtype = self._autocast[1] if self._autocast[2] else hidden.dtype
        self.weights: list[torch.Tensor] = []  # that learn
        self._call: Any = None  # of attention, beside its tensors
        self._ran = False
        self._mode: Callable[[int], Any] = nullcontext  # of each run

    def why_not(self, hidden: torch.Tensor) -> str | None:
        """Why it runs whole, if it does: it computes the same in tiles, forward and backward, tried
        on a few drawn tokens with something simple in place of attention; and nobody looks on."""
        from quorum_attention.integrations.transformers.masks import DescribedMask

        other = [*self._given, *self._layer.keywords.values()]
        for leaf in tree_leaves(other, is_leaf=lambda part: isinstance(part, dict)):
            plain = (type(None), bool, int, float, str, DescribedMask, torch.Tensor)
            if not isinstance(leaf, plain) or getattr(leaf, "requires_grad", False):
                return f"it is given a {type(leaf).__name__}, or a tensor that has a gradient"
        hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
        watched = any(getattr(part, name) for part in self.module.modules() for name in hooks)
        # These have a graph, which is not of this layer.
        computed = not all(weight.is_leaf for weight in self.module.parameters())
        if watched or computed or _has_any_global_hook():
            return "it has hooks, or weights that are computed"
        small = copy(self)
        try:
            # Statistics of tokens that are drawn are not kept; those of tiles would differ.
            buffers = {name: one.clone() for name, one in self.module.named_buffers()}
            kept = dict(buffers)
            small._mode = partial(_on_trial, self.module, buffers)
            same = small._is_the_same(hidden)
        except Exception as error:  # whatever it is, the layer runs whole
            return f"it failed on a few tokens: {type(error).__name__}: {error}"
        self.weights = small.weights
        same = same and all(buffers[n] is b and not b._version for n, b in kept.items())
        return None if same else "it has other results for parts of the tokens"

    def _is_the_same(self, hidden: torch.Tensor) -> bool:
        tokens = min(self._length, max(_TRIED // 4, min(_TRIED, 2 * self._tokens)))
        self._tokens, self._attended = tokens // 2 + 1, _alone  # type: ignore[method-assign]
        # Small beside what the layer adds to it.
        x, up = drawn(2, hidden.shape[0], tokens, hidden.shape[2]).to(hidden)
        x = (x / 100).requires_grad_()
        seen: list[Any] = []

        def instead(call: Any, query: Any, key: Any, value: Any, *mask: Any) -> Any:
            seen.append(_beside(partial(call, *mask)))
            return _alone(self._cast(query, key, value))

        # A checkpoint around the model is not to count what is saved here.
        with torch.enable_grad(), saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
            whole = self._run(instead, 0, x)
            # Some experts have no token of these; and a weight may be of another module.
            own = [weight for weight in self.module.parameters() if weight.requires_grad]
            self.weights = [w for w in dict.fromkeys([*own, *_leaves(whole)]) if w is not x]
            both, wanted = (whole, self(x)), [x, *self.weights]
            with _unhooked(self.weights):
                grads = [torch.autograd.grad(one, wanted, up, allow_unused=True) for one in both]
        if seen != [_beside(self._call)]:  # attention is told of all tokens by one tile
            return False
        room = max(8 * torch.finfo(self._dtype).eps, 1e-5)
        rooms = [room, room, *(room**0.5 for _ in self.weights)]  # a token may meet other experts
        found = ([one, *of] for one, of in zip(both, grads, strict=True))
        return all(map(_near, *found, rooms))

    def __call__(self, hidden: torch.Tensor) -> Any:
        """What the layer returns."""
        *three, _ = _RunTiles.apply(self, self._project, hidden, *self.weights)  # type: ignore[no-untyped-call]
        out = self._attended(three)
        finish = None if self._ran else self._finish
        self._ran = True
        found, *_ = _RunTiles.apply(self, finish, hidden, out, *self.weights)  # type: ignore[no-untyped-call]
        return found

    def tiles(self, *every: torch.Tensor) -> Iterator[tuple[Any, ...]]:
        """Each tile's first token, and its part of every tensor (..., tokens, width)."""
        starts = range(0, every[0].shape[-2], self._tokens)
        return zip(starts, *(one.split(self._tokens, -2) for one in every), strict=True)

    def room(self, tile: torch.Tensor, tokens: int) -> torch.Tensor:
        """For so many tokens of what this is a tile of: of heads in host memory, page-locked."""
        here, locked = tile.dim() < 4, self._device.type == "cuda"
        shape, device = (*tile.shape[:-2], tokens, tile.shape[-1]), self._device if here else "cpu"
        return torch.empty(shape, dtype=tile.dtype, device=device, pin_memory=locked and not here)

    def here(self, tile: torch.Tensor) -> torch.Tensor:
        """A tile, on the layer's device."""
        if tile.dim() < 4:
            return tile
        return _copy(torch.empty(tile.shape, dtype=tile.dtype, device=self._device), tile)

    def _cast(self, *three: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As autocast would: in host memory it is another's."""
        return (
            tuple(cast_by_autocast(t, self._dtype) for t in three) if self._autocast[2] else three
        )

    def _project(self, start: int, tile: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k, v of a tile; and what else is said of the attention."""

        def end(call: Any, query: Any, key: Any, value: Any, *mask: Any) -> torch.Tensor:
            self._call = self._call or partial(call, *mask)  # of one token, it may differ
            raise _ProjectedError(self._cast(query, key, value))

        try:
            self._run(end, start, tile, tile.shape[1])
        except _ProjectedError as reached:
            three: tuple[torch.Tensor, ...] = reached.args[0]
            return three
        raise NotImplementedError("it has no attention")

    def _attended(self, three: Any) -> torch.Tensor:
        """Attention of what is in host memory."""
        call, given = self._call.func, self._call.args
        with self._alike(-1):
            named = tree_map_only(torch.Tensor, torch.Tensor.cpu, self._call.keywords)
            out: torch.Tensor = call(*given[:2], *three, *given[2:], **named)
        return out

    def _finish(self, start: int, tile: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
        """What comes of a tile and its rows of attention's output."""
        return [self._run(lambda *_: rows, start, tile)]

    def _run(
        self, instead: Callable[..., Any], start: int, tile: torch.Tensor, numbers: int = 0
    ) -> Any:
        """The layer on a tile, with something in place of its attention; on trial it may not make
        that many numbers."""
        from quorum_attention.integrations.transformers.attention_function import override

        def part(tensor: torch.Tensor) -> torch.Tensor:
            # (..., tokens, width), or numbers of tokens.
            wide = (tensor.is_floating_point() or tensor.is_complex()) and tensor.dim() > 1
            dim = -2 if wide else -1
            has = tensor.dim() > 0 and tensor.shape[dim] == self._length
            return tensor.narrow(dim, start, tile.shape[1]) if has else tensor

        given, named = tree_map_only(torch.Tensor, part, (self._given, self._layer.keywords))
        outside, override.fn = override.fn, instead
        try:
            with self._alike(start), self._mode(numbers):
                return self._layer.func(*self._layer.args, tile, *given, **named)
        finally:
            override.fn = outside

    @contextmanager
    def _alike(self, number: int) -> Iterator[None]:
        """Each time the same numbers are drawn, under the forward's autocast."""
        kind, dtype, enabled = self._autocast
        devices = [self._device] if kind == "cuda" else []
        with (
            torch.random.fork_rng(devices),
            torch.autocast(kind, dtype, enabled, cache_enabled=False),
            backend_of(self._device).current(self._device),
        ):
            torch.default_generator.manual_seed(self._seed + number)
            if devices:
                torch.cuda.manual_seed(self._seed + number)
            yield


class _RunTiles(torch.autograd.Function):
    """What ``run(start, *tiles)`` of a layer returns of each tile of tensors, put together.

    And a number on the device: by that torch knows the stream that it ran on, and goes back on it.
    q, k and v in host memory have none.
    """

    @staticmethod
    def forward(ctx: Any, layer: LayerInTiles, run: Any, *tensors: torch.Tensor) -> Any:
        inputs = tensors[: len(tensors) - len(layer.weights)]
        ctx.layer, ctx.run = layer, run
        ctx.save_for_backward(*inputs)
        wholes: list[torch.Tensor] = []
        # The second run of a checkpoint is for what is saved alone.
        for start, *tiles in layer.tiles(*inputs) if run is not None else ():
            found = run(start, *map(layer.here, tiles))
            wholes = wholes or [layer.room(one, inputs[0].shape[-2]) for one in found]
            for whole, one in zip(wholes, found, strict=True):
                _copy(whole.narrow(-2, start, one.shape[-2]), one)
        return *wholes, inputs[0].new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        layer, inputs, sums = ctx.layer, ctx.saved_tensors, dict[int, torch.Tensor]()
        with _unhooked(layer.weights):
            wholes, count = [layer.room(one, one.shape[-2]) for one in inputs], len(inputs)
            for start, *every in layer.tiles(*inputs, *wholes, *upstream[:-1]):
                tiles = [layer.here(one).detach().requires_grad_() for one in every[:count]]
                with torch.enable_grad():
                    found = ctx.run(start, *tiles)
                up = [*map(layer.here, every[2 * count :])]
                of = torch.autograd.grad(found, [*tiles, *layer.weights], up, allow_unused=True)
                for target, tile, grad in zip(every[count:], tiles, of, strict=False):
                    _copy(target, torch.zeros_like(tile) if grad is None else grad)
                for n, grad in enumerate(of[count:]):
                    if grad is not None:
                        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
                        sums[n] = sums[n] + wide if n in sums else wide
            kinds = enumerate(one.dtype for one in layer.weights)
            return None, None, *wholes, *(sums[n].to(k) if n in sums else None for n, k in kinds)


class _WithoutDropout(TorchFunctionMode):
    """Without dropout: each token has its own random numbers, in tiles others.

    Before its attention a layer is refused ``numbers`` in a row, one of each token: in every tile
    they would begin at 0. Llama 4 scales queries by them, from the 8,192nd on, which is not tried.
    """

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self._numbers = numbers

    def __torch_function__(self, function: Any, _: Any, args: Any = (), named: Any = None) -> Any:
        found = args[0] if function is dropout else function(*args, **(named or {}))
        if function is torch.arange and len(found) == self._numbers:
            raise NotImplementedError("it counts its tokens")
        return found


@contextmanager
def _unhooked(weights: list[torch.Tensor]) -> Iterator[None]:
    """Hooks of weights are for whole gradients, not for those of tiles."""
    held = [
        (one._backward_hooks, dict(one._backward_hooks)) for one in weights if one._backward_hooks
    ]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in held:
            hooks.update(before)


@contextmanager
def _on_trial(module: torch.nn.Module, buffers: Any, numbers: int) -> Iterator[None]:
    with swapping, _reparametrize_module(module, buffers), _WithoutDropout(numbers):
        yield


def _alone(three: Any) -> Any:
    """In place of attention, of each token alone."""
    query, key, value = (one.requires_grad_() for one in three)
    both = value * (1 + key.mean(-1, True))
    return both.repeat_interleave(query.shape[1] // key.shape[1], 1) * (1 + query.mean(-1, True))


def _near(one: torch.Tensor | None, other: torch.Tensor | None, room: float) -> bool:
    if one is None or other is None or one.dtype != other.dtype:
        return one is other
    size = partial(torch.linalg.vector_norm, dtype=torch.float64)
    return bool(size(one.detach() - other) <= room * size(one.detach()))


def _copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Between devices: of each head all rows in one piece."""
    source = source if source.device.type == "cpu" else source.contiguous()
    for one, other in zip(target.flatten(0, -3), source.flatten(0, -3), strict=True):
        one.copy_(other)
    return target


def _beside(call: Any) -> list[Any]:
    """What an attention's result depends on, beside q, k and v."""
    from quorum_attention.integrations.transformers.attention_function import WITHOUT_EFFECT

    named = [one for name, one in call.keywords.items() if name not in WITHOUT_EFFECT]
    return [
        (one.shape, one.is_leaf, one.double().sum().item())
        if isinstance(one, torch.Tensor)
        else one
        for one in tree_leaves([*named, *call.args[2:]])
    ]


def _leaves(result: torch.Tensor) -> list[torch.Tensor]:
    """What learns of what this is computed of."""
    todo, nodes = [get_gradient_edge(result).node], set()
    while todo:
        node = todo.pop()
        nodes.add(node)
        todo += [before for before, _ in node.next_functions if before and before not in nodes]
    return [node.variable for node in nodes if hasattr(node, "variable")]
