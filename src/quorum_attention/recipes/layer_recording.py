"""One decoder layer's call for the next token, recorded as two graphs of its device.

Between them the layer appends keys and values to its cache and attends over it, which
takes other kernels for each token. All else takes the same ones in the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from quorum_attention.integrations.substitutes import substituting
from quorum_attention.integrations.transformers.prompt_cache import PromptCache
from quorum_attention.recipes.layer_calls import LayerCall

MASK = "attention_mask"
_OTHER_EACH_TIME = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)
_INDEXING = (
    torch.ops.aten.index,
    torch.ops.aten.index_put,
    torch.ops.aten.index_put_,
)


class Appended(NamedTuple):
    """A token's part of a layer's cache: (b, h_kv, 1, d), and the layer's number."""

    key: torch.Tensor
    value: torch.Tensor
    layer_idx: int


class WatchedCall(TorchDispatchMode):
    """Runs a layer's call, and notes what it does.

    Args:
        call: the arguments, with a cache among them.

    Attributes:
        refusal: why the call cannot be recorded; None: it can.
        result: what the forward returned.
        appended: what it appended to its cache.
        cached: keys and values that the cache returned for it.
        query: (b, h_q, 1, d).
        out: (b, h_q, 1, d_v), its attention.
        read: ids of the tensors that operators have read.
    """

    appended: Appended
    cached: tuple[torch.Tensor, torch.Tensor]
    query: torch.Tensor
    out: torch.Tensor

    def __init__(self, call: LayerCall) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusal: str | None = None
        self.read: set[int] = set()
        self._mask = call.named.get(MASK)
        self._device = call.hidden.device
        # The next thing that a layer must do: "append", "attend", or nothing.
        self._next = "append"
        self._is_ours = False
        with self, substituting(append=self._append, attention=self._attend):
            self.result = call.run_own()
        if self._next:
            self._refuse(f"it did not {self._next}")

    def _refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason

    def _append(
        self, update: Callable[..., Any], key: Any, value: Any, layer_idx: int
    ) -> Any:
        """Append to the cache."""
        if self._next != "append":
            self._refuse("it appends twice")
        self._is_ours = True
        self.appended = Appended(key, value, layer_idx)
        self.cached = update(*self.appended)
        self._is_ours = False
        self._next = "attend"
        return self.cached

    def _attend(
        self, attend: Callable[..., Any], query: Any, key: Any, value: Any, mask: Any
    ) -> torch.Tensor:
        """Attend over the cache."""
        if self._next != "attend":
            self._refuse("it attends twice, or before it appends")
        elif key is not self.cached[0] or value is not self.cached[1]:
            self._refuse("it attends over other keys")
        elif mask is not self._mask:
            self._refuse("it attends by another mask")
        self._is_ours = True
        self.query = query
        self.out = attend(query, key, value, mask)
        self._is_ours = False
        self._next = ""
        return self.out

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and judge whether it can be recorded."""
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        tensors = _tensors_in((args, kwargs))
        self.read.update(map(id, tensors))
        if not self._is_ours:
            tensors += _tensors_in(result)
            if self._next == "attend":
                self._refuse(f"it runs {operator} between its cache and its attention")
            elif not self._is_repeatable(operator, args, tensors):
                self._refuse(f"it runs {operator}")
        return result

    def _is_repeatable(
        self, operator: Any, args: Any, tensors: list[torch.Tensor]
    ) -> bool:
        """Whether an operator does the same for each token, on the device alone."""
        if operator.namespace != "aten":
            return False
        for tensor in tensors:
            if tensor.device != self._device or tensor is self._mask:
                return False
        if operator.overloadpacket in _INDEXING:
            # The host counts what a boolean index keeps.
            indices = _tensors_in(args[1])
            return all(index.dtype.is_signed for index in indices)
        return all(tag not in operator.tags for tag in _OTHER_EACH_TIME)


class LayerRecording:
    """The graphs of a layer's call.

    Args:
        call: its arguments; of later calls only values of tensors are others.
        watched: the same call, computed.
        new_graph: makes an empty graph.
    """

    _appended: Appended
    _query: torch.Tensor
    _attend_cached: Callable[..., torch.Tensor]

    def __init__(
        self, call: LayerCall, watched: WatchedCall, new_graph: Callable[[], Any]
    ) -> None:
        own_call = _with_own_tensors(call)
        # Each token's tensors are copied to these places. Others are not read.
        self._places: list[torch.Tensor | None] = []
        pairs = zip(tensors_of(own_call), tensors_of(call), strict=True)
        for place, tensor in pairs:
            is_read = id(tensor) in watched.read
            self._places.append(place if is_read else None)
        self._cached = watched.cached
        self._out = watched.out.clone()
        self._before = new_graph()
        self._behind = new_graph()
        with ExitStack() as self._open:
            self._open.enter_context(self._before.recording())
            with substituting(append=self._append, attention=self._attend):
                self._result = own_call.run_own()
        del self._cached

    def _append(self, update: Any, key: Any, value: Any, layer_idx: int) -> Any:
        """End the first graph: keys and values have been appended already."""
        self._open.close()
        self._appended = Appended(key, value, layer_idx)
        return self._cached

    def _attend(
        self, attend: Callable[..., Any], query: Any, *tensors: Any
    ) -> torch.Tensor:
        """Begin the second graph, with the attention as it was computed."""
        self._attend_cached = attend
        self._query = query
        self._open.enter_context(self._behind.recording())
        return self._out

    def agrees(self, call: LayerCall, watched: WatchedCall) -> bool:
        """Whether the graphs compute a watched call bit by bit. Nothing is appended."""
        self._compute_query(call)
        computed = [self._query, self._appended.key, self._appended.value]
        computed += _tensors_in(self._result_of(watched.out))
        expected = [watched.query, watched.appended.key, watched.appended.value]
        expected += _tensors_in(watched.result)
        pairs = zip(computed, expected, strict=True)
        return all(torch.equal(ours, theirs) for ours, theirs in pairs)

    def replay(self, call: LayerCall) -> Any:
        """Return what the layer's forward returns for other values of its tensors."""
        self._compute_query(call)
        cached = cache_of(call).update(*self._appended)
        out = self._attend_cached(self._query, *cached, call.named.get(MASK))
        return self._result_of(out)

    def _compute_query(self, call: LayerCall) -> None:
        """Compute query, keys and values in the memory that was recorded."""
        pairs = zip(self._places, tensors_of(call), strict=True)
        for place, tensor in pairs:
            if place is not None:
                place.copy_(tensor)
        self._before.replay()

    def _result_of(self, out: torch.Tensor) -> Any:
        """The layer's result for the output of its attention, (b, h_q, 1, d_v)."""
        self._out.copy_(out)
        self._behind.replay()
        if isinstance(self._result, torch.Tensor):
            return self._result.clone()
        return tree_map_only(torch.Tensor, torch.clone, self._result)


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def leaves_of(call: LayerCall) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a call with their names, those in tuples one by one."""
    yield "", call.hidden
    for argument in call.args:
        yield from _leaves_in("", argument)
    for name, argument in call.named.items():
        yield from _leaves_in(name, argument)


def _leaves_in(name: str, argument: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(argument, tuple):
        for part in argument:
            yield name, part
    else:
        yield name, argument


def tensors_of(call: LayerCall) -> Iterator[torch.Tensor]:
    """Yield the tensors that a layer computes with, without its mask."""
    for name, leaf in leaves_of(call):
        if isinstance(leaf, torch.Tensor) and name != MASK:
            yield leaf


def cache_of(call: LayerCall) -> PromptCache:
    """Return the cache among a call's arguments."""
    return next(leaf for _, leaf in leaves_of(call) if isinstance(leaf, PromptCache))


def _with_own_tensors(call: LayerCall) -> LayerCall:
    """The call with copies of its tensors, but for its mask."""
    copied = call.map_tensors(torch.clone).with_hidden(call.hidden.clone())
    if MASK in call.named:
        copied.named[MASK] = call.named[MASK]
    return copied
