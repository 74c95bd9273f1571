"""Attention as one operator of torch's: what a trace sees instead of Python that plans and runs.

``torch.ops.quorum_attention.attention`` is the forward, ``attention_backward`` the gradients. Both
know the shapes of their results (for fake tensors), the forward its derivative, and both how to be
mapped. They are used where a call is traced (torch.compile, torch.export, make_fx, fake tensors) or
where selective checkpoints choose among operators. All else calls ``autograd`` directly, which is
quicker. (``torch.library.custom_op`` would be shorter, but has no derivative under torch.func.)

Operators take tensors and plain values only. So options and a ``Mask`` are encoded as one string of
literals; whole numbers and tensors, which may differ from call to call in one graph, are arguments
of their own. Objects (a kernel, a plan, a report, a function) cannot be said: such a call is no
operator. They are checked, planned and run when the graph runs: a budget holds then, and settings
(``using``) are those of then. The forward returns what its backward has to know of that as a
tensor: which settings.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from itertools import count
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import torch
from torch import library
from torch._functorch.utils import enable_single_level_autograd_function
from torch.utils._pytree import tree_leaves

from quorum_attention.autograd import (
    Attention,
    Gradients,
    Read,
    mapped_gradients,
    mapped_inputs,
)
from quorum_attention.call.gradients import BackwardInputs
from quorum_attention.call.options import Arguments, CallOptions
from quorum_attention.call.request import Request, Tensors, request_of
from quorum_attention.call.settings import Layer, current, fill
from quorum_attention.call.transforms import records, refuse_mapped
from quorum_attention.call.validation import as_mask, broadcast_inputs
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.mask import Mask
from quorum_attention.passes import beside, run_backward, run_forward

NAME = "quorum_attention"
_Result = TypeVar("_Result")
# The last three: whether gradients were recorded where the call was written, and whether those of
# mask and sinks are asked for.
_CALL = (
    "float dropout_p, float? scale, bool is_causal, bool enable_gqa, ScalarType? out_dtype, "
    "str options, SymInt[] numbers, bool recorded, bool of_mask, bool of_sinks"
)
# The host plans, and may wait for the device: a CUDA graph of inductor's goes around it.
_TAGS = tuple(
    getattr(torch.Tag, name)
    for name in ("pt2_compliant_tag", "cudagraph_unsafe")
    if hasattr(torch.Tag, name)
)
_SCHEMAS = {
    "attention": (
        f"(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? sinks, Tensor? seed, "
        f"Tensor[] parts, {_CALL}) -> (Tensor out, Tensor lse, Tensor known)"
    ),
    "attention_backward": (
        f"(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
        f"Tensor? attn_mask, Tensor? sinks, Tensor? grad_lse, Tensor known, Tensor? seed, "
        f"Tensor[] parts, {_CALL}) -> Tensor[]"
    ),
}


def as_operator(
    query: Any, key: Any, value: Any, call: Arguments
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(out, lse) of a call by the operator; None where it cannot be said to an operator."""
    attn_mask, dropout_p, dropout_seed, is_causal, scale, enable_gqa, out, out_dtype, written = call
    if out is not None:
        return None
    attn_mask = as_mask(attn_mask, query, key)
    if not (
        isinstance(query, torch.Tensor)
        and isinstance(key, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and (attn_mask is None or isinstance(attn_mask, (torch.Tensor, Mask)))
        and isinstance(dropout_p, (int, float))
        and isinstance(is_causal, bool)
        and isinstance(enable_gqa, bool)
        and (scale is None or isinstance(scale, (int, float)))
    ):
        return None
    described = attn_mask if isinstance(attn_mask, Mask) else None
    mask = attn_mask if described is None else described.bias
    sinks = None if described is None else described.sinks
    numbers: list[int] = []
    parts: list[torch.Tensor] = []
    options = ""
    if described is not None or not written.says_nothing:
        try:
            options = _text(_encode((*written[:-1], described), numbers, parts))
        except NotImplementedError:
            return None
    seed = None
    if dropout_p > 0.0:
        # An operator of its own, so that whoever recomputes a graph takes care of it as of any
        # other random numbers; the same seed goes to the backward.
        seed = torch.randint(0, 1 << 62, (), dtype=torch.int64, device="cpu")
        if dropout_seed is not None:
            seed = torch.full((), dropout_seed, dtype=torch.int64, device="cpu")
    query, key, value, grouped, without_heads, _ = broadcast_inputs(query, key, value, enable_gqa)
    # Whether gradients are asked for is seen where autograd sees the operator.
    out, lse, _ = torch.ops.quorum_attention.attention(
        query, key, value, mask, sinks, seed, parts, float(dropout_p), scale, is_causal,
        grouped, out_dtype, options, numbers, False, False, False,
    )  # fmt: skip
    return (out.squeeze(0), lse.squeeze(0)) if without_heads else (out, lse)


# --- Options and masks as a string --------------------------------------------------------------

# Fields of a Mask that are encoded; its bias and its sinks are arguments of their own.
_FIELDS = (
    "causal", "offset", "window", "chunk", "documents", "key_lengths", "key_padding", "keeps",
    "either", "every", "softcap",
)  # fmt: skip


def _encode(value: Any, numbers: list[int], tensors: list[torch.Tensor]) -> Any:
    """``value`` in literals: whole numbers and tensors are taken out of it, and replaced by their
    places in these lists. (torch's compiler traces this.)

    Raises:
        NotImplementedError: it has another object in it.
    """
    if value is None or isinstance(value, (str, bool, float)):
        return value
    if isinstance(value, int):
        numbers.append(value)
        return ("number", len(numbers) - 1)
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ("tensor", len(tensors) - 1)
    if isinstance(value, torch.device):
        return ("device", (value.type, value.index))
    items = value
    if isinstance(value, Mask):
        items = [getattr(value, name) for name in _FIELDS]
    elif type(value) is not tuple and type(value) is not list:
        raise NotImplementedError(f"a {type(value).__name__} cannot be said to an operator")
    kind = "mask" if isinstance(value, Mask) else type(value).__name__
    return (kind, tuple([_encode(item, numbers, tensors) for item in items]))


def _text(form: tuple[Any, ...]) -> str:
    """A form of literals as a string."""
    return repr(form)


# What torch.compiler.assume_constant_result does, which would load the compiler.
_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Any:
    return ast.literal_eval(text)


def _decode(form: Any, numbers: list[int], tensors: list[torch.Tensor]) -> Any:
    """The value that was encoded."""
    if not isinstance(form, tuple):
        return form
    kind, found = form
    if kind == "number":
        return int(numbers[found])
    if kind == "tensor":
        return tensors[found]
    if kind == "device":
        return torch.device(found[0]) if found[1] is None else torch.device(*found)
    items = [_decode(item, numbers, tensors) for item in found]
    if kind == "mask":
        return Mask(**dict(zip(_FIELDS, items, strict=True)))
    return items if kind == "list" else tuple(items)


# --- What they compute ------------------------------------------------------------------------


def _forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    settings, query = current(), args[0]
    with _mapping_dispatched():
        tensors, request = _request(settings, *args)
        out, lse = _beside_copies(request, lambda left: run_forward(tensors, left))
    known = torch.tensor(_keep(settings), dtype=torch.int64, device="cpu")
    # As ``_fake_forward`` promises: in one piece, lse beside the output.
    return out.contiguous(), lse.to(query.device).contiguous(), known


def _backward(*args: Any) -> list[torch.Tensor]:
    grad_out, *inputs, out, lse, mask, sinks, grad_lse, known = args[:10]
    of_mask, of_sinks = args[-2:]
    given = BackwardInputs(
        grad_out, out, lse, grad_mask=of_mask, grad_sinks=of_sinks, grad_lse=grad_lse
    )
    number = int(known)
    settings = _kept.get(number, current()) if number else None
    with _mapping_dispatched():
        tensors, request = _request(settings, *inputs, mask, sinks, *args[10:])
        grads = list(_beside_copies(request, lambda left: run_backward(tensors, left, given)))
    for at, grad in enumerate(grads):  # one after the other, so that one copy is held beside them
        grads[at] = grad.contiguous()
    return grads


# Settings of forwards, for their backwards. A graph that is kept longer than so many have come and
# gone gets those of the moment.
_MOST = 1024
_kept: dict[int, Layer] = {}
_numbers = count(1)
_lock = Lock()


def _keep(settings: Layer | None) -> int:
    """A number by which the backward finds them; 0 where there are none."""
    if settings is None:
        return 0
    with _lock:
        for number, others in reversed(_kept.items()):
            # By identity: equal reports are others.
            if settings.keys() == others.keys() and all(settings[n] is others[n] for n in others):
                return number
        number = next(_numbers)
        _kept[number] = settings
        while len(_kept) > _MOST:
            del _kept[next(iter(_kept))]
    return number


_OF_MAPPING = tuple(
    getattr(torch._C.DispatchKey, name)
    for name in (
        "FuncTorchDynamicLayerBackMode", "FuncTorchDynamicLayerFrontMode", "FuncTorchBatched",
        "FuncTorchVmapMode", "FuncTorchGradWrapper", "BatchedNestedTensor", "PythonTLSSnapshot",
    )
    if hasattr(torch._C.DispatchKey, name)
)  # fmt: skip


@contextmanager
def _mapping_dispatched() -> Iterator[None]:
    """Has operators dispatched to torch.vmap again, by which masks are evaluated. Where an operator
    is called below autograd, or by a dispatch mode (the first run of every graph is), torch passes
    it by."""
    off = torch._C._dispatch_tls_local_exclude_set()
    if not any(off.has(key) for key in _OF_MAPPING):
        yield
        return
    for key in _OF_MAPPING:
        off = off.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), off):
        yield


def _request(settings: Layer | None, *args: Any) -> tuple[Tensors, Request]:
    """The tensors of a call, and its request."""
    query, key, value, mask, sinks, seed, parts, *call, recorded, of_mask, _ = args
    dropout_p, scale, is_causal, enable_gqa, out_dtype, options, numbers = call
    written, described = CallOptions(), None
    if options:
        *fields, described = _decode(_parsed(options), numbers, parts)
        written = CallOptions(*fields)
    named = written.kernel
    if named != "auto" and get_kernel(named).called_back():
        raise NotImplementedError(
            f"kernel {named!r} computes by a function of the program, which a graph cannot hold: "
            "give attention the kernel itself, and torch.compile breaks its graph there"
        )
    if described is not None:
        mask = replace(described, bias=mask, sinks=sinks)
    # A forward that is recorded takes kernels that have gradients, as a backward does.
    function = "attention_backward" if recorded else "attention"
    said = Arguments(
        mask, dropout_p, None if seed is None else int(seed), is_causal, scale, enable_gqa, None,
        out_dtype, fill(settings, written),
    )  # fmt: skip
    with torch.no_grad():  # ``recorded`` says whether these tensors get gradients
        tensors, request = request_of(function, query, key, value, said)
    return tensors, replace(request, records=recorded, mask_grad=of_mask)


def _beside_copies(request: Request, run: Callable[[Request], _Result]) -> _Result:
    """``run`` with the budget that leaves room for a copy of one result: a graph knows beforehand
    how results lie, and kernels choose for themselves."""
    work = request.work
    rows = work.batch * max(work.heads * work.n_queries, work.kv_heads * work.n_keys)
    held = rows * max(work.head_dim, work.value_dim) * request.out_dtype.itemsize
    return beside(request, held, "a copy of a result", run)


# --- What they would compute: shapes, and derivatives -------------------------------------------


def _fake_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out_dtype = rest[-6]
    _refuse_meta(query, (key, value, *rest))
    state = torch.float64 if query.dtype == torch.float64 else torch.float32
    return (
        query.new_empty((*query.shape[:-1], value.shape[-1]), dtype=out_dtype or query.dtype),
        query.new_empty(query.shape[:-1], dtype=state),
        torch.empty((), dtype=torch.int64, device="cpu"),
    )


def _refuse_meta(query: torch.Tensor, others: Iterable[Any]) -> None:
    """Refuse a tensor without numbers beside others: torch calls the fake kernel then, whose
    results would be taken for real.

    Raises:
        ValueError: one of ``others`` is on "meta", and the query is not.
    """
    for tensor in tree_leaves(others):
        if isinstance(tensor, torch.Tensor) and tensor.is_meta and not query.is_meta:
            raise ValueError(
                "key, value and all else that is given must be in host memory or on the query's "
                f"device {query.device}, got a tensor of shape {tuple(tensor.shape)} on meta"
            )


def _fake_backward(*args: Any) -> list[torch.Tensor]:
    _, query, key, value, _, _, mask, sinks = args[:8]
    _refuse_meta(query, args)
    learned = [t for t, wanted in zip((mask, sinks), args[-2:], strict=True) if wanted]
    return [like.new_empty(like.shape) for like in (query, key, value, *learned)]


class _OperatorCall(NamedTuple):
    """A call as autograd records it (``autograd.EagerCall``): by the operators below autograd.

    Attributes:
        call: the arguments that are no tensors.
    """

    call: tuple[Any, ...]

    def captured(self) -> tuple[()]:
        return ()

    def forward(self, tensors: Tensors, more: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        seed, *parts = more
        with _below():
            return tuple(torch.ops.quorum_attention.attention(*tensors, seed, parts, *self.call))

    def gradients(
        self, read: Read, learned: Sequence[bool], more: Sequence[Any]
    ) -> list[torch.Tensor]:
        known, seed, *parts = more
        grads: list[torch.Tensor] = torch.ops.quorum_attention.attention_backward(
            *read, known, seed, parts, *self.call[:-2], *learned
        )
        return grads

    def backward(self, read: Read, learned: Sequence[bool]) -> list[torch.Tensor]:
        with _below():
            grads: list[torch.Tensor] = torch.ops.quorum_attention.attention_backward(
                *read[:11], list(read[11:]), *self.call
            )
        return grads


@contextmanager
def _below() -> Iterator[None]:
    """For operators called below autograd. Where transformations are nested, the next of them may
    record again (torch has turned that off for the function it is in)."""
    again = torch._C._are_functorch_transforms_active()
    with (
        torch.enable_grad() if again else nullcontext(),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        yield


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """A function of autograd's, where torch dispatches to autograd: transformations of torch.func
    are dealt with already, and torch's own ``apply`` would begin them again."""
    transformed = torch._C._are_functorch_transforms_active()
    with enable_single_level_autograd_function() if transformed else nullcontext():
        return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def _recorded_forward(*args: Any) -> Any:
    *six, parts = args[:7]
    if records(*six, *parts):
        learned = [t is not None and t.requires_grad for t in six[3:5]]
        call = _OperatorCall((*args[7:-3], True, *learned))
        return _apply(Attention, *six[:5], call, six[5], *parts)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.quorum_attention.attention(*args)


def _recorded_backward(*args: Any) -> Any:
    *tensors, parts = args[:12]
    if not records(*tensors, *parts):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.quorum_attention.attention_backward(*args)

    return list(_apply(Gradients, *tensors, *parts, _OperatorCall(args[12:]), ()))


def _map_forward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    """One more batch dimension; what is not mapped is expanded."""
    _refuse_others(args[7], *in_dims[5:7])
    five = mapped_inputs(info.batch_size, in_dims, *args[:5])
    return torch.ops.quorum_attention.attention(*five, *args[5:]), (0, 0, None)


def _map_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    _refuse_others(args[12], *in_dims[10:12])

    def compute(*nine: Any) -> Any:
        return torch.ops.quorum_attention.attention_backward(*nine, *args[9:])

    grads = mapped_gradients(info.batch_size, in_dims, args[:9], args[-2:], compute)
    return grads, [0] * len(grads)


def _refuse_others(dropout_p: float, seed: int | None, parts: list[int | None]) -> None:
    """Refuse to map a seed or a tensor of a mask; and dropout, because a seed would drop other
    pairs than without the mapping."""
    dropout = seed if dropout_p == 0.0 else 0
    refuse_mapped("dropout in a graph, nor over tensors of a Mask", dropout, *parts)


def _register() -> library.Library:
    made = library.Library(NAME, "DEF")
    functions: list[tuple[Callable[..., Any], ...]] = [
        (_forward, _recorded_forward, _fake_forward, _map_forward),
        (_backward, _recorded_backward, _fake_backward, _map_backward),
    ]
    for name, (compute, recorded, fake, mapped) in zip(_SCHEMAS, functions, strict=True):
        made.define(name + _SCHEMAS[name], tags=_TAGS)
        made.impl(name, compute, "CompositeExplicitAutograd")
        made.impl(name, recorded, "Autograd")
        library.register_fake(f"{NAME}::{name}", fake, lib=made)
        library.register_vmap(f"{NAME}::{name}", mapped, lib=made)
    return made


# torch registers an operator once in a process, and this module may be imported anew.
if not hasattr(getattr(torch.ops, NAME), "attention"):
    _library = _register()
