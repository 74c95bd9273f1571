"""One decoder layer's call for the next token, recorded as two graphs of its device.

Between them the layer appends keys and values to its cache and attends over it, which
takes other kernels for each token. All else takes the same ones in the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

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
        weights: the layer's parameters and buffers.

    Attributes:
        refusal: why the call cannot be recorded; None: it can.
        result: what the forward returned.
        appended: what it appended to its cache.
        cached: keys and values that the cache returned for it.
        query: (b, h_q, 1, d).
        attend_cached: computed its attention of query, keys, values and mask.
        out: (b, h_q, 1, d_v), its attention.
        read: ids of the tensors that operators have read.
    """

    appended: Appended
    cached: tuple[torch.Tensor, torch.Tensor]
    query: torch.Tensor
    attend_cached: partial[torch.Tensor]
    out: torch.Tensor

    def __init__(self, call: LayerCall, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusal: str | None = None
        self.read: set[int] = set()
        self._mask = call.named.get(MASK)
        # Memory that the layer may read, and memory that it may write to.
        self._readable = set(map(_memory_of, (*tensors_of(call), *weights)))
        self._writable: set[int] = set()
        self._device = call.hidden.device
        # The next thing that a layer must do: "append", "attend", or nothing.
        self._next = "append"
        self._is_ours = False
        with (
            self,
            substituting(append=self._append, attention=self._attend),
            _noting_reads(cache_of(call), self._note_read),
        ):
            self.result = call.run_own()
        if self._next:
            self._refuse(f"it did not {self._next}")

    def _refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason

    def _note_read(self, name: str) -> None:
        """Refuse a layer that asks its cache for anything: a number of tokens would
        stay as it was when it was recorded."""
        if not self._is_ours:
            self._refuse(f"it asks its cache for {name}")

    def _append(
        self,
        update: Callable[..., Any],
        key: Any,
        value: Any,
        layer_idx: int,
        *args: Any,
        **named: Any,
    ) -> Any:
        """Append to the cache."""
        if self._next != "append":
            self._refuse("it appends twice")
        if args or named:
            self._refuse("it appends more than keys and values")
        self._is_ours = True
        self.appended = Appended(key, value, layer_idx)
        self.cached = update(*self.appended, *args, **named)
        self._is_ours = False
        self._next = "attend"
        return self.cached

    def _attend(
        self,
        attend: partial[torch.Tensor],
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
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
        self.attend_cached = attend
        self.out = attend(query, key, value, mask)
        self._readable.add(_memory_of(self.out))
        self._writable.add(_memory_of(self.out))
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
            elif not self._is_within_layer(operator, args, kwargs, result):
                self._refuse(f"{operator} uses a tensor that is not the layer's")
        return result

    def _is_repeatable(
        self, operator: Any, args: Any, tensors: list[torch.Tensor]
    ) -> bool:
        """Whether an operator does the same for each token, on the device alone."""
        if operator.namespace != "aten":
            return False
        for tensor in tensors:
            if tensor.device != self._device:
                return False
        if operator.overloadpacket in _INDEXING:
            # The host counts what a boolean index keeps.
            indices = _tensors_in(args[1])
            return all(index.dtype.is_signed for index in indices)
        return all(tag not in operator.tags for tag in _OTHER_EACH_TIME)

    def _is_within_layer(
        self, operator: Any, args: Any, kwargs: Any, result: Any
    ) -> bool:
        """Whether an operator reads the layer's arguments, weights and results alone,
        and writes to none but results.

        A state that lies in the cache would be another one for another text, and be
        advanced twice when graphs are compared.
        """
        arguments = _tensors_in((args, kwargs))
        is_within = self._readable.issuperset(map(_memory_of, arguments))
        for tensor in _outputs_of(operator, args, kwargs):
            is_within = is_within and _memory_of(tensor) in self._writable
        results = {_memory_of(tensor) for tensor in _tensors_in(result)}
        # Results may be views of weights, and arguments.
        self._writable |= results - self._readable
        self._readable |= results
        return is_within


class LayerRecording:
    """The graphs of a layer's call.

    Args:
        call: its arguments; of later calls only values of tensors are others.
        watched: the same call, computed.
        new_graph: makes an empty graph.
    """

    _appended: Appended
    _query: torch.Tensor
    _attend_cached: partial[torch.Tensor]

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
        self, attend: partial[torch.Tensor], query: Any, *tensors: Any
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
        expected = [watched.query, watched.appended.key, watched.appended.value]
        if not all(map(torch.equal, computed, expected)):
            return False
        if not _are_same_attention(self._attend_cached, watched):
            return False
        ours, structure = tree_flatten(self._result_of(watched.out))
        theirs, expected_structure = tree_flatten(watched.result)
        return structure == expected_structure and all(map(_are_equal, ours, theirs))

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


class _NotingCache(PromptCache):
    """A cache that says what it is asked for, but for ``update``."""

    def __getattribute__(self, name: str) -> Any:
        if name != "update" and not name.startswith("__"):
            object.__getattribute__(self, "__dict__")[_NOTE](name)
        return super().__getattribute__(name)


_NOTE = "_note_read"


@contextmanager
def _noting_reads(cache: PromptCache, note: Callable[[str], None]) -> Iterator[None]:
    """Call ``note(name)`` for each attribute that a cache is asked for."""
    cache.__dict__[_NOTE] = note
    cache.__class__ = _NotingCache
    try:
        yield
    finally:
        cache.__class__ = PromptCache
        del cache.__dict__[_NOTE]


def _outputs_of(operator: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operator writes to."""
    outputs = []
    for index, parameter in enumerate(operator._schema.arguments):
        alias = parameter.alias_info
        if alias is None or not alias.is_write:
            continue
        if index < len(args):
            outputs.append(args[index])
        else:
            outputs.append(kwargs.get(parameter.name))
    return _tensors_in(outputs)


def _memory_of(tensor: torch.Tensor) -> int:
    """A number of the memory that a tensor and its views lie in; 0 for a sparse one."""
    if tensor.layout is not torch.strided:
        return 0
    number: int = tensor.untyped_storage()._cdata
    return number


def _are_equal(ours: Any, theirs: Any) -> bool:
    """Whether parts of two results are the same. A recording has tensors alone."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs)
    return ours is None and theirs is None


def _are_same_attention(recorded: partial[torch.Tensor], watched: WatchedCall) -> bool:
    """Whether a watched call's attention has the arguments that were recorded, beside
    query, keys, values and mask: its scale, for example, is in no graph."""
    attend = watched.attend_cached
    if recorded.func is not attend.func or recorded.args != attend.args:
        return False
    if recorded.keywords.keys() != attend.keywords.keys():
        return False
    for name, ours in recorded.keywords.items():
        theirs = attend.keywords[name]
        if not isinstance(theirs, torch.Tensor):
            if type(ours) is not type(theirs) or ours != theirs:
                return False
        elif id(theirs) in watched.read and not _are_equal(ours, theirs):
            return False
    return True


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
