"""A decoder layer some tokens at a time, with q, k, v and attention's output in host memory.

Tokens meet in attention alone. So a layer runs twice for every tile of its tokens: first up to its
attention, which takes q, k and v of the tile to the host; then, when attention is computed of all
of them, from there on, with the tile's rows of the output. The backward does this again, tile by
tile. It adds up the gradients of weights in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from quorum_attention.autograd import RESULTS
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.recipes.modules import drawn, evaluating

_TRIED = 16, 4  # tokens that a layer is tried on, whole and in tiles


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
        """Whether it computes the same in tiles, tried on a few drawn tokens and an output of
        attention that is drawn; and nobody looks on."""
        from quorum_attention.integrations.transformers.masks import DescribedMask

        other = [*self._given, *self._layer.keywords.values()]
        for leaf in tree_leaves(other, is_leaf=lambda part: isinstance(part, dict)):
            if isinstance(leaf, torch.Tensor):
                square = sum(size == self._length for size in leaf.shape) > 1
                if square or leaf.requires_grad:
                    return False
            elif not (leaf is None or isinstance(leaf, (bool, int, float, str, DescribedMask))):
                return False
        module = (*self._layer.args, getattr(self._layer.func, "__self__", None))[0]
        hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
        watched = any(getattr(part, name) for part in module.modules() for name in hooks)
        if watched or _has_any_global_hook() or self._length < _TRIED[0]:
            return False
        try:
            with evaluating(module):
                return self._is_the_same(hidden)
        except Exception:  # whatever it is, the layer runs whole
            return False

    def _is_the_same(self, hidden: torch.Tensor) -> bool:
        tokens, step = _TRIED
        # Small beside what the layer adds to it.
        x = (drawn(hidden.shape[0], tokens, hidden.shape[2]) / 100).to(hidden)
        seen: list[Any] = []

        def note(call: Any, query: Any, key: Any, value: Any, *mask: Any) -> torch.Tensor:
            seen.append((partial(call, *mask), *self._cast(query, key, value)))
            return drawn(*query.shape[:3], value.shape[3]).to(seen[0][3])

        with torch.enable_grad():
            found = self._run(0, x, note)
        ((call, *three),) = seen
        (query, _, value), parts = three, []
        rows = drawn(*query.shape[:3], value.shape[3]).to(value).split(step, 2)
        for start, tile, some in zip(range(0, tokens, step), x.split(step, 1), rows, strict=True):
            with torch.no_grad():
                parts.append((*self._project(start, tile), self._finish(start, tile, some)))
        beside, own = _beside(self._call), _beside(call)
        # It would be given what is of one tile; or made of weights, by which graph is not known.
        if [t.shape for t in beside] != [t.shape for t in own] or not all(t.is_leaf for t in own):
            return False
        if (found.shape, found.dtype) != (x.shape, x.dtype):
            return False
        results, room = [*three, found], max(8 * torch.finfo(self._dtype).eps, 1e-5)
        for whole, some, dim in zip(results, zip(*parts, strict=True), (2, 2, 2, 1), strict=True):
            far = (whole.detach() - torch.cat(some, dim)).double().norm()
            if not bool(far <= room * whole.detach().double().norm()):
                return False
        self.weights = _leaves([*results, *own])
        return not any(one._backward_hooks for one in self.weights)

    def __call__(self, hidden: torch.Tensor) -> Any:
        """What the layer returns."""
        return _Function.apply(self, hidden, *self.weights)  # type: ignore[no-untyped-call]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same, without a graph."""
        three = self._projected(hidden)
        with saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
            out = self._attended(three).detach()
        found = torch.empty_like(hidden)
        for start, tile, target in self._tiles(hidden, found):
            target.copy_(self._finish(start, tile, self._here(out, start)))
        return found

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
        starts = range(0, self._length, self._tokens)
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

    @torch.no_grad()
    def _projected(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """q, k, v of all tokens, in host memory."""
        every: list[torch.Tensor] = []
        for start, tile in self._tiles(hidden):
            three = self._project(start, tile)
            every = every or [self._on_host(one, self._length) for one in three]
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
            self._call = partial(call, *mask)
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
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        return None, *ctx.layer.backward(*ctx.saved_tensors, upstream)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Between devices: of each head all rows in one piece."""
    source = source if source.device.type == "cpu" else source.contiguous()
    for one, other in zip(target.flatten(0, 1), source.flatten(0, 1), strict=True):
        one.copy_(other)


def _beside(call: Any) -> list[torch.Tensor]:
    """Tensors that an attention's result depends on, beside q, k and v."""
    from quorum_attention.integrations.transformers.attending import WITHOUT_EFFECT

    named = [one for name, one in call.keywords.items() if name not in WITHOUT_EFFECT]
    every = tree_leaves([*named, *call.args[2:]])
    return [one for one in every if isinstance(one, torch.Tensor)]


def _leaves(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """What learns of what these are computed of."""
    todo: list[Any] = [get_gradient_edge(one).node for one in results if one.requires_grad]
    nodes: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            todo += [before for before, _ in node.next_functions]
    return [node.variable for node in nodes if hasattr(node, "variable")]
