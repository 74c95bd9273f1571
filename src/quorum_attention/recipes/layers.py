"""A decoder layer some tokens at a time, with q, k, v and attention's output in host memory.

Tokens meet in attention alone. So a layer runs twice for every tile of its tokens: first up to its
attention, which takes q, k and v of the tile to the host; then, when attention is computed of all
of them, from there on, with the tile's rows of the output. The backward does this again, tile by
tile. It adds up the gradients of weights in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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

from quorum_attention.autograd import RESULTS
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.recipes.modules import drawn, swapping

_TRIED = 64  # tokens that a layer is tried on


class _ProjectedError(Exception):
    """A layer has come to its attention."""


class LayerInTiles:
    """One layer of one forward.

    Args:
        layer: as Transformers gives it to a checkpoint: a partial of its forward.
        inputs: those of that; the first is the hidden states (batch, tokens, width).
        tokens: of a tile.
        results: for ``RESULTS``.
    """

    def __init__(self, layer: Any, inputs: Any, tokens: int, results: Callable[..., Any]) -> None:
        hidden, *self._given = inputs
        self._layer, self._tokens, self._results = layer, tokens, results
        self._device, self._length = hidden.device, hidden.shape[1]
        self._seed = int(torch.randint(1 << 62, (), device="cpu"))
        kind = hidden.device.type
        self._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._dtype = self._autocast[1] if self._autocast[2] else hidden.dtype
        self.weights: list[torch.Tensor] = []  # that learn
        self._call: Any = None  # of attention, beside its tensors

    def suits(self, hidden: torch.Tensor) -> bool:
        """Whether it computes the same in tiles, forward and backward, tried on a few drawn tokens
        with something simple in place of attention; and nobody looks on."""
        from quorum_attention.integrations.transformers.masks import DescribedMask

        other = [*self._given, *self._layer.keywords.values()]
        for leaf in tree_leaves(other, is_leaf=lambda part: isinstance(part, dict)):
            plain = (type(None), bool, int, float, str, DescribedMask, torch.Tensor)
            if not isinstance(leaf, plain) or getattr(leaf, "requires_grad", False):
                return False
        module = (*self._layer.args, getattr(self._layer.func, "__self__", None))[0]
        hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
        watched = any(getattr(part, name) for part in module.modules() for name in hooks)
        # Weights that are computed have a graph, which is not of this layer.
        if watched or _has_any_global_hook() or not all(p.is_leaf for p in module.parameters()):
            return False
        try:
            # Statistics of tokens that are drawn are not kept; those of tiles would differ.
            buffers = {name: one.clone() for name, one in module.named_buffers()}
            kept = dict(buffers)
            with swapping, _reparametrize_module(module, buffers), _NoDropout():
                same = self._is_the_same(hidden, module)
            return same and all(buffers[n] is b and not b._version for n, b in kept.items())
        except Exception:  # whatever it is, the layer runs whole
            return False

    def _is_the_same(self, hidden: torch.Tensor, module: torch.nn.Module) -> bool:
        tokens = min(self._length, max(_TRIED // 4, min(_TRIED, 2 * self._tokens)))
        # Small beside what the layer adds to it.
        x, up = drawn(2, hidden.shape[0], tokens, hidden.shape[2]).to(hidden)
        x = (x / 100).requires_grad_()
        seen: list[Any] = []

        def instead(call: Any, query: Any, key: Any, value: Any, *mask: Any) -> Any:
            seen.append(_beside(partial(call, *mask)))
            return _alone(self._cast(query, key, value))

        with torch.enable_grad():
            whole = self._run(0, x, instead)
        # Some experts have no token of these; and a weight may be of another module.
        own = [weight for weight in module.parameters() if weight.requires_grad]
        self.weights = [w for w in dict.fromkeys([*own, *_leaves(whole)]) if w is not x]
        small = copy(self)
        small._tokens, small._attended = tokens // 2 + 1, _alone  # type: ignore[method-assign]
        with _unhooked(self.weights):
            grads = torch.autograd.grad(whole, [x, *self.weights], up, allow_unused=True)
            found, others = small.forward(x.detach()), small.backward(x.detach(), up)
        if seen != [_beside(small._call)]:  # attention is told of all tokens by one tile
            return False
        room = max(8 * torch.finfo(self._dtype).eps, 1e-5)
        rooms = [room, room, *(room**0.5 for _ in self.weights)]  # a token may meet other experts
        return all(map(_near, [whole, *grads], [found, *others], rooms))

    def __call__(self, hidden: torch.Tensor) -> Any:
        """What the layer returns."""
        return _Function.apply(self, hidden, *self.weights)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same, without a graph."""
        three = self._projected(hidden)
        with saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
            out = self._attended(three).detach()
        found = torch.empty_like(hidden)
        for start, tile, target in self._tiles(hidden, found):
            target.copy_(self._finish(start, tile, self._here(out, start)))
        return found

    @torch.no_grad()
    def backward(self, hidden: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor | None]:
        """The gradients of its input and of its weights."""
        sums: list[torch.Tensor | None] = [None] * len(self.weights)

        def gradients(outputs: Any, upstream: Any, *inputs: torch.Tensor) -> Any:
            wanted = [*inputs, *self.weights]
            found = torch.autograd.grad(outputs, wanted, upstream, allow_unused=True)
            for number, one in enumerate(found[len(inputs) :]):
                if one is not None:
                    wide = one.to(torch.promote_types(one.dtype, torch.float32))
                    before = sums[number]
                    sums[number] = wide if before is None else before + wide
            return found

        three = self._projected(hidden)
        out = self._attended(three)
        grad, of_out = torch.zeros_like(hidden), self._on_host(out, out.shape[2])
        for start, tile, up, target in self._tiles(hidden, upstream, grad):
            tile, rows = tile.detach().requires_grad_(), self._here(out, start).requires_grad_()
            with torch.enable_grad():
                whole = self._finish(start, tile, rows)
            of_tile, of_rows, *_ = gradients(whole, up, tile, rows)
            if of_tile is not None:
                target.copy_(of_tile)
            _copy(self._rows(of_out, start), torch.zeros_like(rows) if of_rows is None else of_rows)
        of_three = gradients(out, of_out, *three)[:3]
        del out, of_out, three
        for start, tile, target in self._tiles(hidden, grad):
            tile = tile.detach().requires_grad_()
            with torch.enable_grad():
                found = self._project(start, tile)
            here = [self._here(one, start) for one in of_three]
            target.add_(gradients(found, here, tile)[0])
        pairs = zip(sums, self.weights, strict=True)
        return [grad, *(None if one is None else one.to(weight.dtype) for one, weight in pairs)]

    def _tiles(self, *every: torch.Tensor) -> Iterator[tuple[Any, ...]]:
        """Each tile's first token, and its part of every tensor (batch, tokens, ...)."""
        starts = range(0, every[0].shape[1], self._tokens)
        return zip(starts, *(one.split(self._tokens, 1) for one in every), strict=True)

    def _rows(self, whole: torch.Tensor, start: int) -> torch.Tensor:
        """A tile's, of (batch, heads, tokens, dim)."""
        return whole.detach()[:, :, start : start + self._tokens]

    def _here(self, whole: torch.Tensor, start: int) -> torch.Tensor:
        """The same, on the layer's device."""
        rows = self._rows(whole, start)
        here = torch.empty(rows.shape, dtype=rows.dtype, device=self._device)
        _copy(here, rows)
        return here

    def _on_host(self, like: torch.Tensor, tokens: int) -> torch.Tensor:
        """Host memory, page-locked, for so many tokens (batch, heads, tokens, dim)."""
        shape, locked = (*like.shape[:2], tokens, like.shape[3]), self._device.type == "cuda"
        return torch.empty(shape, dtype=like.dtype, device="cpu", pin_memory=locked)

    def _projected(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """q, k, v of all tokens, in host memory."""
        every: list[torch.Tensor] = []
        for start, tile in self._tiles(hidden):
            three = self._project(start, tile)
            every = every or [self._on_host(one, hidden.shape[1]) for one in three]
            for whole, one in zip(every, three, strict=True):
                _copy(self._rows(whole, start), one)
        return every

    def _cast(self, *three: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As autocast would: in host memory it is another's."""
        return tuple(t.to(self._dtype) for t in three) if self._autocast[2] else three

    def _project(self, start: int, tile: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k, v of a tile; and what else is said of the attention."""
        found: list[tuple[torch.Tensor, ...]] = []

        def end(call: Any, query: Any, key: Any, value: Any, *mask: Any) -> torch.Tensor:
            self._call = self._call or partial(call, *mask)  # of one token, it may differ
            found.append(self._cast(query, key, value))
            raise _ProjectedError

        with suppress(_ProjectedError):
            self._run(start, tile, end)
        return found[0]

    def _attended(self, three: list[torch.Tensor]) -> torch.Tensor:
        """Attention of what is in host memory, with a graph."""
        call, given = self._call.func, self._call.args
        with torch.enable_grad(), self._alike(-1):
            named = tree_map_only(torch.Tensor, torch.Tensor.cpu, self._call.keywords)
            inputs = [one.requires_grad_() for one in three]
            token = RESULTS.set(self._results)
            try:
                out: torch.Tensor = call(*given[:2], *inputs, *given[2:], **named)
            finally:
                RESULTS.reset(token)
        return out

    def _finish(self, start: int, tile: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """What comes of a tile and its rows of attention's output."""
        found: torch.Tensor = self._run(start, tile, lambda *_: rows)
        return found

    def _run(self, start: int, tile: torch.Tensor, instead: Callable[..., Any]) -> Any:
        """The layer on a tile, with something in place of its attention."""
        from quorum_attention.integrations.transformers.attending import HERE

        def part(tensor: torch.Tensor) -> torch.Tensor:
            # (..., tokens, width), or numbers of tokens.
            wide = (tensor.is_floating_point() or tensor.is_complex()) and tensor.dim() > 1
            dim = -2 if wide else -1
            has = tensor.dim() > 0 and tensor.shape[dim] == self._length
            return tensor.narrow(dim, start, tile.shape[1]) if has else tensor

        given, named = tree_map_only(torch.Tensor, part, (self._given, self._layer.keywords))
        outside, HERE.instead = HERE.instead, instead
        try:
            with self._alike(start):
                return self._layer.func(*self._layer.args, tile, *given, **named)
        finally:
            HERE.instead = outside

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


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: LayerInTiles, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(hidden)
        return layer.forward(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        with _unhooked(ctx.layer.weights):
            return None, *ctx.layer.backward(*ctx.saved_tensors, upstream)


class _NoDropout(TorchFunctionMode):
    """Each token has its own numbers, in tiles others."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), named: Any = None) -> Any:
        return args[0] if function is dropout else function(*args, **(named or {}))


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


@torch.enable_grad()
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


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Between devices: of each head all rows in one piece."""
    source = source if source.device.type == "cpu" else source.contiguous()
    for one, other in zip(target.flatten(0, 1), source.flatten(0, 1), strict=True):
        one.copy_(other)


def _beside(call: Any) -> list[Any]:
    """What an attention's result depends on, beside q, k and v."""
    from quorum_attention.integrations.transformers.attending import WITHOUT_EFFECT

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
