"""Attention as one operator of torch's: what a trace sees instead of Python that plans and runs.

``torch.ops.quorum_attention.attention`` is the forward, ``attention_backward`` the gradients. Both
know the shapes of their results (for fake tensors) and how many operations torch counts for them,
the forward its derivative. They are used where a call is traced (torch.compile, torch.export,
make_fx, fake tensors), where selective checkpoints choose among operators, or where operations are
counted. All else calls ``autograd`` directly, which is quicker and knows torch.func.

Operators take tensors and plain values only. So options and a ``Mask`` are encoded as one string of
literals; whole numbers and tensors, which may differ from call to call in one graph, are arguments
of their own. Objects (a kernel, a plan, a report, a function) cannot be encoded: such a call is no
operator. Calls are planned and run when the graph runs: a budget holds then, and settings
(``using``) are those of then. The forward returns which settings those were, as a tensor, for its
backward.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch import library

from quorum_attention.autograd import (
    by_input,
    grad_or_zeros,
    refuse_forward_mode,
    refuse_second,
)
from quorum_attention.call.backward_inputs import BackwardInputs
from quorum_attention.call.broadcast import broadcast_inputs
from quorum_attention.call.options import Arguments, CallOptions, names_several
from quorum_attention.call.request import Request, request_of
from quorum_attention.call.settings import Settings, current_settings, with_settings
from quorum_attention.call.validation import Tensors, as_mask, shape_of_inputs
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.result_layout import empty_like_input, laid_out_like
from quorum_attention.kernels.torch_private import (
    add_flop_formulas,
    has_transforms,
    is_tracing,
    refuse_real_among_fake,
    register_derivative,
    restores_grad_and_autocast,
)
from quorum_attention.mask import FIELDS, Mask
from quorum_attention.passes.run import run_backward, run_forward

NAME = "quorum_attention"
# None in place of an empty list: packages of AOTInductor pass no empty lists on.
_CALL = (
    "Tensor? seed, Tensor[]? parts, float dropout_p, float? scale, bool is_causal, "
    "bool enable_gqa, ScalarType? out_dtype, str options, SymInt[]? numbers"
)
# The host plans, and may wait for the device: a CUDA graph of inductor's goes around it.
_TAGS = [torch.Tag.pt2_compliant_tag]
if hasattr(torch.Tag, "cudagraph_unsafe"):
    _TAGS.append(torch.Tag.cudagraph_unsafe)
# ``recorded``: whether gradients are recorded where the call is written; ``of_mask`` and
# ``of_sinks``: whether those of mask and sinks are asked for.
_SCHEMAS = {
    "attention": (
        f"(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? sinks, {_CALL}, "
        "bool recorded, bool of_mask) -> (Tensor out, Tensor lse, Tensor known)"
    ),
    "attention_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
        f"Tensor? attn_mask, Tensor? sinks, Tensor? grad_lse, Tensor known, {_CALL}, "
        "bool of_mask, bool of_sinks) -> Tensor[]"
    ),
}


def as_operator(
    query: Any, key: Any, value: Any, arguments: Arguments
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(out, lse) of a call by the operator; None if it cannot make it: the graph of torch's
    compiler has to break there, and other traces refuse the call.

    Raises:
        TypeError, ValueError: query, key and value do not fit each other.
    """
    encoded = _arguments(query, key, value, arguments)
    if encoded is None:
        return None
    mask, sinks, options, numbers, parts = encoded
    seed = None
    if arguments.dropout_p > 0.0:
        # Drawn by an operator of its own, so that whoever recomputes a graph takes care of it as of
        # any other random numbers; the same seed goes to the backward.
        kind: Any = {"dtype": torch.int64, "device": "cpu"}
        if arguments.dropout_seed is None:
            seed = torch.randint(1 << 62, (), **kind)
        else:
            seed = torch.full((), arguments.dropout_seed, **kind)
    query, key, value, grouped, without_heads, _ = broadcast_inputs(
        query, key, value, arguments.enable_gqa
    )
    shape_of_inputs(query, key, value, grouped)
    for tensor in (mask, sinks, *parts):
        # torch would call the fake kernel, and take its results for real.
        if tensor is not None and tensor.is_meta and not query.is_meta:
            raise ValueError(f"attn_mask must be in host memory or on {query.device}, got meta")
    if not torch.compiler.is_dynamo_compiling():
        names = ["query", "key", "value", "attn_mask", "Mask.sinks"]
        names += ["a tensor of the Mask (documents, key_padding, ...)"] * len(parts)
        refuse_real_among_fake(names, [query, key, value, mask, sinks, *parts])
        _count_flops()  # also in inference mode, which goes around derivatives
    recorded, of_mask = torch.is_grad_enabled(), mask is not None and mask.requires_grad
    recorded = recorded and any(
        t is not None and t.requires_grad for t in (query, key, value, mask, sinks)
    )
    out, lse, _ = torch.ops.quorum_attention.attention(
        query,
        key,
        value,
        mask,
        sinks,
        seed,
        parts or None,
        float(arguments.dropout_p),
        arguments.scale,
        arguments.is_causal,
        grouped,
        arguments.out_dtype,
        options,
        numbers or None,
        recorded,
        recorded and of_mask,
    )
    return (out.squeeze(0), lse.squeeze(0)) if without_heads else (out, lse)


def _arguments(
    query: Any, key: Any, value: Any, arguments: Arguments
) -> tuple[Any, Any, str, list[int], list[torch.Tensor]] | None:
    """Mask, sinks, options, numbers and parts of a call as an operator takes them; None if it takes
    only others."""
    attn_mask, call_options = as_mask(arguments.attn_mask, query, key), arguments.options
    # A graph of torch's compiler may drop tangents. Where it breaks, the call refuses them.
    if torch.compiler.is_dynamo_compiling() and torch.autograd.forward_ad._current_level >= 0:
        return None
    # torch.jit.trace would keep what one call did.
    if (
        arguments.out is not None
        or names_several(call_options.devices)
        or has_transforms()
        or is_tracing()
    ):
        return None
    kinds = (
        ((query, key, value), torch.Tensor),
        ((attn_mask,), (torch.Tensor, Mask, type(None))),
        ((arguments.is_causal, arguments.enable_gqa), bool),
        ((arguments.dropout_p, 0.0 if arguments.scale is None else arguments.scale), (int, float)),
    )
    if not all(isinstance(value, kind) for values, kind in kinds for value in values):
        return None
    described = attn_mask if isinstance(attn_mask, Mask) else None
    numbers: list[int] = []
    parts: list[torch.Tensor] = []
    options = ""
    if described is not None or not call_options.is_default:
        try:
            options = _text(_encode((*call_options[:-1], described), numbers, parts))
        except NotImplementedError:
            return None
    if described is None:
        return attn_mask, None, options, numbers, parts
    return described.bias, described.sinks, options, numbers, parts


# --- Options and masks as a string --------------------------------------------------------------

# Fields of a Mask that are encoded; its bias and its sinks are arguments of their own.
_FIELDS = tuple([name for name in FIELDS if name not in ("bias", "sinks")])


def _encode(value: Any, numbers: list[int], tensors: list[torch.Tensor]) -> Any:
    """``value`` in literals: whole numbers and tensors are taken out of it, and replaced by their
    places in these lists. (torch's compiler traces this.)

    Raises:
        NotImplementedError: it has another object in it.
    """
    if value is None or isinstance(value, (str, bool, float)):
        # A key is a constant, also where torch's compiler would let a float vary.
        return next(iter({value: None}))
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


@restores_grad_and_autocast
def _forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    settings, query = current_settings(), args[0]
    tensors, request = _request(settings, *args)
    out, lse = run_forward(tensors, _reserving_a_copy(request))
    known = torch.tensor(_keep(settings), dtype=torch.int64, device="cpu")
    # As ``_fake_forward`` promises: as the query lies, lse beside the output.
    return laid_out_like(out, query), lse.to(query.device).contiguous(), known


@restores_grad_and_autocast
def _backward(*args: Any) -> list[torch.Tensor]:
    grad_out, *inputs, out, lse, mask, sinks, grad_lse, known = args[:10]
    of_mask, of_sinks = args[-2:]
    backward_inputs = BackwardInputs(
        grad_out, out, lse, grad_mask=of_mask, grad_sinks=of_sinks, grad_lse=grad_lse
    )
    settings = _kept.get(int(known), current_settings()) if known else None
    tensors, request = _request(settings, *inputs, mask, sinks, *args[10:-2], True, of_mask)
    grads = list(run_backward(tensors, _reserving_a_copy(request), backward_inputs))
    # One after the other, so that one copy is held beside them.
    for at, like in enumerate(inputs):
        grads[at] = laid_out_like(grads[at], like)
    for at in range(len(inputs), len(grads)):
        grads[at] = grads[at].contiguous()
    return grads


# Settings of the last forwards that had some, for their backwards: a graph that is kept longer gets
# those of the moment.
_MOST = 4096
_kept: dict[int, Settings] = {}
_numbers = count(1)


def _keep(settings: Settings | None) -> int:
    """A number by which the backward finds them; 0 where there are none."""
    if settings is None:
        return 0
    number = next(_numbers)
    _kept[number] = settings
    _kept.pop(number - _MOST, None)
    return number


def _request(settings: Settings | None, *args: Any) -> tuple[Tensors, Request]:
    """The tensors of a call, and its request."""
    query, key, value, mask, sinks, seed, parts, *call, recorded, of_mask = args
    dropout_p, scale, is_causal, enable_gqa, out_dtype, options, numbers = call
    call_options, described = CallOptions(), None
    if options:
        *fields, described = _decode(_parsed(options), numbers or [], parts or [])
        call_options = CallOptions(*fields)
    named = call_options.kernel
    if named != "auto" and get_kernel(named).called_back():
        raise NotImplementedError(
            f"kernel {named!r} computes by a function of the program, which a graph cannot hold: "
            "give attention the kernel itself, and torch.compile breaks its graph there"
        )
    if described is not None:
        mask = replace(described, bias=mask, sinks=sinks)
    # A forward that is recorded takes kernels that have gradients, as a backward does.
    function = "attention_backward" if recorded else "attention"
    arguments = Arguments(
        mask, dropout_p, None if seed is None else int(seed), is_causal, scale, enable_gqa, None,
        out_dtype, with_settings(settings, call_options),
    )  # fmt: skip
    with torch.no_grad():  # ``recorded`` says whether these tensors get gradients
        tensors, request = request_of(function, query, key, value, arguments)
    return tensors, replace(request, records=recorded, mask_grad=of_mask)


def _reserving_a_copy(request: Request) -> Request:
    """Reserve a copy of one result: a graph knows beforehand how results lie, and kernels choose
    for themselves."""
    shape = request.shape
    rows = shape.batch * max(shape.heads * shape.n_queries, shape.kv_heads * shape.n_keys)
    n_bytes = rows * max(shape.head_dim, shape.value_dim) * request.out_dtype.itemsize
    return request.reserving(n_bytes, "a copy of a result")


# --- What they would compute: shapes, and derivatives -------------------------------------------


def _fake_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out_dtype = rest[-5]
    state = torch.float64 if query.dtype == torch.float64 else torch.float32
    return (
        empty_like_input(query, (*query.shape[:-1], value.shape[-1]), out_dtype or query.dtype),
        query.new_empty(query.shape[:-1], dtype=state),
        torch.empty((), dtype=torch.int64, device="cpu"),
    )


def _fake_backward(*args: Any) -> list[torch.Tensor]:
    _, query, key, value, _, _, mask, sinks = args[:8]
    learned = [t for t, wanted in zip((mask, sinks), args[-2:], strict=True) if wanted]
    grads = [empty_like_input(like, like.shape, like.dtype) for like in (query, key, value)]
    return [*grads, *(like.new_empty(like.shape) for like in learned)]


def _forward_flops(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
) -> int:
    """Operations of the two products of a forward, as torch counts those of its own attention: all
    pairs, whatever is masked."""
    pairs = query.shape[:-1].numel() * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


def _backward_flops(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *rest: Any, **named: Any
) -> int:
    """Operations of the five products of a backward: scores and the gradients of query and key by
    the head dimension, those of values and probabilities by the value's."""
    pairs = query.shape[:-1].numel() * key.shape[-2]
    return 2 * pairs * (3 * query.shape[-1] + 2 * grad_out.shape[-1])


def _count_flops() -> None:
    """Let counters that are active know what the operators take."""
    operators = torch.ops.quorum_attention
    add_flop_formulas(
        {operators.attention: _forward_flops, operators.attention_backward: _backward_flops}
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *six, parts = inputs[:7]
    ctx.call = inputs[7:14]
    ctx.has_parts = parts is not None
    ctx.save_for_backward(*six, *output, *(parts or ()))
    ctx.set_materialize_grads(False)


def _derivative(ctx: Any, *upstream: Any) -> tuple[Any, ...]:
    query, key, value, mask, sinks, seed, out, lse, known, *parts = ctx.saved_tensors
    grad_out, grad_lse = grad_or_zeros(out, upstream[0]), upstream[1]
    needed = ctx.needs_input_grad
    grads = torch.ops.quorum_attention.attention_backward(
        grad_out,
        query,
        key,
        value,
        out,
        lse,
        mask,
        sinks,
        grad_lse,
        known,
        seed,
        parts or None,
        *ctx.call,
        *needed[3:5],
    )
    # Gradients have the structure of the inputs; an empty list counts as one of tensors.
    of_parts = [None] * len(parts) if ctx.has_parts else None
    numbers = ctx.call[-1]
    of_numbers: list[Any] | None = None if numbers or numbers is None else []
    of_others = [None] * 6
    return (
        *by_input(grads, *needed[3:5]),
        None,
        of_parts,
        *of_others,
        of_numbers,
        None,
        None,
    )


def _register() -> library.Library:
    made = library.Library(NAME, "DEF")
    functions: list[tuple[Any, ...]] = [
        (_forward, _fake_forward, _derivative, _save),
        (_backward, _fake_backward, refuse_second, None),
    ]
    for name, (compute, fake, derivative, save) in zip(_SCHEMAS, functions, strict=True):
        made.define(name + _SCHEMAS[name], tags=_TAGS)
        made.impl(name, compute, "CompositeExplicitAutograd")
        library.register_fake(f"{NAME}::{name}", fake, lib=made)
        register_derivative(made, name, derivative, save, refuse_forward_mode, _count_flops)
    return made


# torch registers an operator once in a process, and this module may be imported anew.
if not hasattr(getattr(torch.ops, NAME), "attention"):
    _library = _register()
