"""Registers the two operators: their schemas, what they compute, shapes and the
derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import library

from quorum_attention.autograd import (
    by_input,
    grad_or_zeros,
    refuse_forward_mode,
    refuse_second,
)
from quorum_attention.kernels.torch_private import (
    add_flop_formulas,
    register_derivative,
)
from quorum_attention.operator.compute import compute_backward, compute_forward
from quorum_attention.operator.shapes import (
    backward_flops,
    fake_backward,
    fake_forward,
    forward_flops,
)

_NAMESPACE = "quorum_attention"
# Selective checkpoints of TRL and Axolotl keep the results of operators with these
# words in their name, and compute all others again.
_FORWARD = "flash_attn"
# None in place of an empty list: packages of AOTInductor pass no empty lists on.
_CALL = (
    "Tensor? seed, Tensor[]? parts, float dropout_p, float? scale, bool is_causal, "
    "bool enable_gqa, ScalarType? out_dtype, str options, SymInt[]? numbers"
)
# ``recorded``: whether gradients are recorded where the call is written; ``of_mask``
# and
# ``of_sinks``: whether those of mask and sinks are asked for.
_FORWARD_SCHEMA = (
    f"{_FORWARD}(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? "
    f"sinks, {_CALL}, bool recorded, bool of_mask) -> (Tensor out, Tensor lse, Tensor "
    "settings_number)"
)
_BACKWARD_SCHEMA = (
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    "Tensor out, Tensor lse, Tensor? attn_mask, Tensor? sinks, Tensor? grad_lse, "
    f"Tensor settings_number, {_CALL}, bool of_mask, bool of_sinks) -> Tensor[]"
)
# The host plans, and may wait for the device: a CUDA graph of inductor's goes around
# it.
_TAGS = [torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe]


def _save_for_backward(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]
) -> None:
    """Save what the derivative reads: tensors by autograd, the other arguments in
    ``ctx``."""
    query, key, value, attn_mask, sinks, seed, parts, *constants, _, _ = inputs
    ctx.save_for_backward(
        query, key, value, attn_mask, sinks, seed, *output, *(parts or ())
    )
    ctx.has_parts = parts is not None
    ctx.constants = constants
    ctx.set_materialize_grads(False)


def _derivative(ctx: Any, *upstream: Any) -> tuple[Any, ...]:
    """Return the gradients of all arguments of the forward, None for those that have
    none."""
    query, key, value, attn_mask, sinks, seed, out, lse, number, *parts = (
        ctx.saved_tensors
    )
    grad_out, grad_lse, _ = upstream
    of_mask, of_sinks = ctx.needs_input_grad[3:5]
    grads = torch.ops.quorum_attention.attention_backward(
        grad_or_zeros(out, grad_out),
        query,
        key,
        value,
        out,
        lse,
        attn_mask,
        sinks,
        grad_lse,
        number,
        seed,
        parts or None,
        *ctx.constants,
        of_mask,
        of_sinks,
    )
    # Gradients have the structure of the inputs; an empty list counts as one of
    # tensors.
    grad_seed = None
    grad_parts = [None] * len(parts) if ctx.has_parts else None
    *constants, numbers = ctx.constants
    grad_constants = [None] * len(constants)
    grad_numbers: list[int] | None = [] if numbers == [] else None
    grad_recorded = None
    grad_of_mask = None
    return (
        *by_input(grads, of_mask, of_sinks),
        grad_seed,
        grad_parts,
        *grad_constants,
        grad_numbers,
        grad_recorded,
        grad_of_mask,
    )


def count_flops() -> None:
    """Let active counters of operations know those of the operators."""
    operators = torch.ops.quorum_attention
    add_flop_formulas(
        {
            operators.attention: forward_flops,
            operators.attention_backward: backward_flops,
        }
    )


def _register() -> library.Library:
    """Define both operators, and register what is known of them."""
    operators = library.Library(_NAMESPACE, "DEF")
    _define(operators, _FORWARD_SCHEMA, compute_forward, fake_forward)
    _define(operators, _BACKWARD_SCHEMA, compute_backward, fake_backward)
    register_derivative(
        operators,
        _FORWARD,
        _derivative,
        _save_for_backward,
        refuse_forward_mode,
        count_flops,
    )
    register_derivative(
        operators,
        "attention_backward",
        refuse_second,
        None,
        refuse_forward_mode,
        count_flops,
    )
    # The name that calls, policies and exported programs have for it.
    namespace = getattr(torch.ops, _NAMESPACE)
    namespace.attention = getattr(namespace, _FORWARD)
    return operators


def _define(
    operators: library.Library,
    schema: str,
    compute: Callable[..., Any],
    fake: Callable[..., Any],
) -> None:
    """Define an operator: its schema, what it computes, and shapes of its results."""
    name = schema.partition("(")[0]
    operators.define(schema, tags=_TAGS)
    operators.impl(name, compute, "CompositeExplicitAutograd")
    library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=operators)


# torch registers an operator once in a process, and this module may be imported anew.
if not hasattr(getattr(torch.ops, _NAMESPACE), _FORWARD):
    _library = _register()
