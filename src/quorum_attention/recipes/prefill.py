"""Prefill one layer at a time over a whole prompt.

Tokens meet in attention alone. So each layer runs in three steps:

1. tile by tile up to its attention: queries, keys and values of all tokens are stored,
   keys and values in the cache as well;
2. one attention call over the whole prompt;
3. tile by tile from its attention on: the hidden states of all tokens become the
   layer's results.

The layer's own code runs, once in each of the tiled steps, with something in place of
its attention. The model's code around its layers runs tile by tile before the first and
after the last layer (``layer_calls``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from quorum_attention.api import attention
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.errors import OutOfMemoryError, first_line, is_out_of_memory
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.integrations.substitutes import substituting
from quorum_attention.integrations.transformers.prompt_tiles import TileCache
from quorum_attention.recipes.handed_states import HandedStates, hands_states_on
from quorum_attention.recipes.host_weights import HostWeights, weights_on_device
from quorum_attention.recipes.layer_calls import LayerCall
from quorum_attention.recipes.prompt_inputs import (
    CACHE_NAMES,
    PromptInputs,
    cache_name,
)
from quorum_attention.recipes.reached_attention import (
    attend_where_heads_are,
    reach_attention,
)
from quorum_attention.recipes.tile_storage import DeviceTiles, rows_of, spans_of
from quorum_attention.threads import try_start
from quorum_attention.units import counted


class _RecordedError(Exception):
    """Ends a model's forward at its last layer."""


@dataclass(frozen=True)
class LayeredModel:
    """A model whose layers can run one after the other over a whole prompt.

    Attributes:
        model: the model. Its layers are replaceable, and call an attention that is.
        run_model: called with the model and arguments, its own forward.
        layers: the decoder's layers, in the order in which they run.
        tuple_lengths: for each layer, how many results its forward returns as a tuple,
            of which the first is the hidden states; 0: it returns a tensor.
        weights: of the layers, if they are in host memory.
    """

    model: torch.nn.Module
    run_model: Callable[..., Any]
    layers: Sequence[Any]
    tuple_lengths: Sequence[int]
    weights: HostWeights | None = None

    def result_of(self, number: int, hidden: torch.Tensor) -> Any:
        """Hidden states as a layer's forward returns them."""
        length = self.tuple_lengths[number]
        return (hidden, *[None] * (length - 1)) if length else hidden

    def hidden_of(self, number: int, result: Any) -> torch.Tensor:
        """The hidden states in what a layer's forward returned."""
        hidden: torch.Tensor = result[0] if self.tuple_lengths[number] else result
        return hidden


class _Recorder:
    """Runs in place of a model's layers, and records what each is given for one tile.

    Attributes:
        hidden: (batch, tokens, width), the first layer's input.
        calls: of all layers, with tensors where they may stay.
        counts: the tokens that each layer is given.
    """

    def __init__(self, model: LayeredModel, tiles: DeviceTiles) -> None:
        self._model = model
        self._tiles = tiles
        # Layers share tensors (positions): each is stashed once. By id, with the tensor
        # itself.
        self._stashed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._states = HandedStates(tiles)
        self.hidden: torch.Tensor | None = None
        self.calls: list[LayerCall] = []
        self.counts: list[int] = []

    def __call__(self, number: int, call: LayerCall) -> Any:
        """Record a layer's call. The last one ends the model's forward."""
        hidden = call.hidden
        if number == 0:
            self.hidden = hidden
        call = call.replace_arguments(hands_states_on, self._states)
        stashed = call.map_tensors(self._stash)
        self.calls.append(stashed)
        self.counts.append(hidden.shape[-2])
        n_layers = len(self._model.layers)
        if number + 1 == n_layers:
            raise _RecordedError
        return self._model.result_of(number, hidden)

    def _stash(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._stashed:
            self._stashed[id(tensor)] = (tensor, self._tiles.stash(tensor))
        return self._stashed[id(tensor)][1]


@dataclass
class LayerwisePrefill:
    """One prompt on its way through a model.

    Attributes:
        model: the model.
        inputs: the prompt; its cache is empty.
        cache: gets keys and values of all layers.
        tiles: keeps rows of all tokens.
        tile: the tokens of a tile.
        budget: bytes of device memory for an attention call; None: what is free.
        report: called with (layers done, layers) after each layer.
    """

    model: LayeredModel
    inputs: PromptInputs
    cache: Any
    tiles: DeviceTiles
    tile: int
    budget: int | None = None
    report: Callable[[int, int], None] | None = None
    # (batch, tokens, width) of all tokens; the calls of all layers, by tile, and the
    # tokens of a tile that each layer is given.
    _hidden: Any = None
    _calls: list[list[LayerCall]] = field(default_factory=list)
    _counts: list[list[int]] = field(default_factory=list)
    # Memory for rows of one layer, used again by the next layer with the same shapes.
    _memory: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._spans = spans_of(self.inputs.n_tokens, self.tile)
        self._tile_cache = TileCache(self.cache)

    def run(self) -> Any:
        """Fill the cache, and return what the model's forward of the prompt returns.

        Raises:
            NotImplementedError: a layer has no attention that can be replaced.
            OutOfMemoryError: the device has no room for the logits.
        """
        n_layers = len(self.model.layers)
        for span in self._spans:
            self._record(span)
        self.tiles.finish()
        for number in range(n_layers):
            with weights_on_device(self.model.weights, number):
                queries = self._queries_of(number)
                call, heads = self._run_to_attention(number)
                _, key, value = heads
                with _memory_of_next_layer(self.cache, number, key, value):
                    outputs = self._attend(call, queries, *heads)
                self._run_from_attention(number, queries, outputs)
            if self.report is not None:
                self.report(number + 1, n_layers)
        self._memory.clear()
        return self._run_head_in_memory()

    def _record(self, span: Interval) -> None:
        """Compute a tile's embeddings, and record what each layer is given beside
        them."""
        recorder = _Recorder(self.model, self.tiles)
        with suppress(_RecordedError):
            self._run_model(recorder, self._recorded_inputs(), span)
        embeddings = recorder.hidden
        if embeddings is None or len(recorder.calls) != len(self.model.layers):
            raise NotImplementedError("the model does not run each of its layers once")
        if self._hidden is None:
            self._hidden = self.tiles.empty(embeddings, self.inputs.n_tokens)
        self.tiles.store(span, [self._hidden], [embeddings])
        self._calls.append(recorder.calls)
        self._counts.append(recorder.counts)

    def _recorded_inputs(self) -> PromptInputs:
        """The prompt, with the logits that layers are computed for. Gemma 4 leaves
        tokens out of its last layers if their logits are not asked for: that is taken
        where the last tile has others, too, whose mask is then cut."""
        if self.inputs.logits_to_keep < self._spans[-1].length:
            return self.inputs
        return self.inputs.of_all_logits()

    def _spans_of(self, number: int) -> list[Interval]:
        """The last tokens of each tile that a layer is given; mostly all of them."""
        spans = []
        for span, counts in zip(self._spans, self._counts, strict=True):
            spans.append(Interval(span.stop - counts[number], span.stop))
        return spans

    def _queries_of(self, number: int) -> Interval:
        """The tokens that a layer has to compute: all, or the last ones if the model
        leaves others out."""
        spans = self._spans_of(number)
        return Interval(0, self.inputs.n_tokens) if spans == self._spans else spans[-1]

    def _run_model(
        self,
        function: Callable[[int, LayerCall], Any],
        inputs: PromptInputs,
        span: Interval,
    ) -> Any:
        """Run the model's forward on a tile, with ``function`` in place of its layers.

        Args:
            function: called with a layer's number and its call.
            inputs: the prompt, with the logits that are asked for.
            span: the tokens of the tile.
        """
        self._tile_cache.past = span.start
        arguments = inputs.of_tile(span)
        run_model = self.model.run_model
        arguments[cache_name(run_model)] = self._tile_cache
        with substituting(prompt=self.inputs, layer=function):
            return run_model(self.model.model, **arguments)

    def _run_to_attention(self, number: int) -> tuple[Any, list[torch.Tensor]]:
        """Run a layer up to its attention.

        Returns:
            The attention call, and query, key and value of all tokens.
        """
        call: Any = None
        rows: list[torch.Tensor] = []
        self._tile_cache.is_storing = True
        loaded = self.tiles.load(self._spans_of(number), self._hidden)
        for index, (span, (hidden,)) in enumerate(loaded):
            run = partial(self._run_layer, number=number, index=index, hidden=hidden)
            reached = reach_attention(run)
            # The last tile's mask knows the whole prompt's padding.
            call = reached.call
            if not rows:
                self._take_device_memory(number, *reached.heads)
                names = ("query", "key", "value")
                rows = [
                    self._rows_like(*pair)
                    for pair in zip(names, reached.heads, strict=True)
                ]
            self._store_heads(span, self._spans[index], rows, reached.heads)
        self._tile_cache.is_storing = False
        self.tiles.finish()
        return call, rows

    def _store_heads(
        self,
        queries: Interval,
        keys: Interval,
        rows: list[torch.Tensor],
        heads: Sequence[torch.Tensor],
    ) -> None:
        """Store query, key and value of a tile.

        Args:
            queries, keys: the tokens of the query, and of key and value.
            rows: of all tokens.
            heads: of the tile.
        """
        if queries == keys:
            self.tiles.store(keys, rows, heads)
            return
        self.tiles.store(queries, rows[:1], heads[:1])
        self.tiles.store(keys, rows[1:], heads[1:])

    def _take_device_memory(
        self, number: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Let a cache in segments take its part of the device before attention takes
        memory: later its layers would leave gaps that attention's results do not fit
        into. So would layers in memory that the allocator kept of the first tile."""
        prepare = getattr(self.cache, "prepare_device", None)
        if prepare is not None:
            if number == 0:
                backend_of(self.tiles.device).give_back_cached()
            prepare(query, key, value)

    def _run_layer(
        self,
        function: Any,
        number: int,
        index: int,
        hidden: torch.Tensor,
    ) -> Any:
        """Run a layer on a tile, with ``function`` in place of its attention."""
        self._tile_cache.past = self._spans[index].start
        layer = self.model.layers[number]
        stashed = self._calls[index][number]
        call = stashed.map_tensors(self.tiles.unstash)
        with substituting(attention=function):
            return call.with_hidden(hidden).run(layer)

    def _rows_like(self, name: str, tile: torch.Tensor) -> torch.Tensor:
        """Memory for rows like those of ``tile``, of all tokens."""
        key = (name, tile.shape[:-2], tile.shape[-1], tile.dtype)
        memory = self._memory.get(key)
        if memory is None:
            memory = self.tiles.empty(tile, self.inputs.n_tokens)
            self._memory[key] = memory
        return memory

    def _attend(
        self,
        call: Any,
        queries: Interval,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Compute attention of the tokens ``queries`` over all tokens.

        Returns:
            (batch, heads, tokens, value_dim) of all tokens.
        """
        like_output = query[..., :1, :1].expand(*query.shape[:-2], 1, value.shape[-1])
        outputs = self._rows_like("output", like_output)
        target = rows_of(outputs, queries)
        # A kernel writes to whole rows alone.
        out = outputs if target.shape == outputs.shape else None
        compute = partial(_attention_into, out, self.budget)
        device = self.tiles.device
        heads = (rows_of(query, queries), key, value)
        with backend_of(device).current(device):
            computed = attend_where_heads_are(call, heads, compute=compute)
        if computed.data_ptr() != target.data_ptr():
            target.copy_(computed)
        return outputs

    def _run_from_attention(
        self, number: int, queries: Interval, outputs: torch.Tensor
    ) -> None:
        """Run a layer from its attention on: its results become the hidden states of
        the tokens ``queries``."""
        spans = self._spans_of(number)
        n_skipped = sum(span.start < queries.start for span in spans)
        loaded = self.tiles.load(spans[n_skipped:], self._hidden, outputs)
        for index, (span, (hidden, rows)) in enumerate(loaded, start=n_skipped):
            replay = partial(_return_rows, rows)
            with substituting(attention_rows=rows):
                result = self._run_layer(replay, number, index, hidden)
            hidden_after = self.model.hidden_of(number, result)
            self.tiles.store(span, [self._hidden], [hidden_after])
        self.tiles.finish()

    def _run_head_in_memory(self) -> Any:
        """Run the model from its last layer on; smaller tiles have logits of as many
        tokens, so running out is final.

        Raises:
            OutOfMemoryError: the device has no room for the logits.
        """
        try:
            return self._run_head()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = first_line(error)
        n_kept = self.inputs.logits_to_keep or self.inputs.n_tokens
        raise OutOfMemoryError(
            f"{self.tiles.device} has no room for the logits of "
            f"{counted(n_kept, 'token')}; logits_to_keep=1 computes those of the last "
            f"one alone: {reason}"
        )

    def _run_head(self) -> Any:
        """Run the model from its last layer on, for the tokens whose logits are asked
        for."""
        spans = [span for span in self._spans if self.inputs.has_logits(span)]
        results = []
        for span, (hidden,) in self.tiles.load(spans, self._hidden):
            replay = partial(self._replay, hidden)
            results.append(self._run_model(replay, self.inputs, span))
        result = joined_results(results)
        for name in CACHE_NAMES:
            if name in result:
                result[name] = self.cache
        return result

    def _replay(self, hidden: torch.Tensor, number: int, call: LayerCall) -> Any:
        """The last layer's results are ``hidden``; earlier ones are not looked at."""
        is_last = number + 1 == len(self.model.layers)
        return self.model.result_of(number, hidden if is_last else call.hidden)


@contextmanager
def _memory_of_next_layer(
    cache: Any, number: int, key: torch.Tensor, value: torch.Tensor
) -> Iterator[None]:
    """Let a cache in segments take the memory of the next layer while this one's
    attention runs.

    Args:
        cache: of the prompt.
        number: of this layer.
        key, value: of this layer. The next layer's are probably like them.
    """
    prepare = getattr(cache, "prepare_host", None)
    if prepare is None:
        yield
        return
    thread = threading.Thread(target=prepare, args=(number + 1, key, value))
    is_started = try_start(thread)
    try:
        yield
    finally:
        if is_started:
            thread.join()


def _attention_into(
    output: torch.Tensor | None, budget: int | None, /, *args: Any, **named: Any
) -> Any:
    """Attention whose result is written to ``output``, or to new memory (None)."""
    return attention(*args, **{**named, "budget": budget, "out": output})


def _return_rows(rows: torch.Tensor, *_: Any) -> torch.Tensor:
    """In place of attention: its rows, which are computed already."""
    return rows


def joined_results(results: Sequence[Any]) -> Any:
    """The last of a model's results for consecutive tiles, with the logits of all of
    them."""
    result = results[-1]
    if len(results) > 1:
        result.logits = torch.cat([part.logits for part in results], dim=1)
    return result
