"""What the two operators compute when a graph runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from quorum_attention.autograd import reserving_out
from quorum_attention.call.backward_inputs import BackwardInputs
from quorum_attention.call.options import Arguments
from quorum_attention.call.request import Request, request_of
from quorum_attention.call.settings import Settings, current_settings, with_settings
from quorum_attention.call.validation import Tensors
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.result_layout import laid_out_like
from quorum_attention.kernels.torch_private import restores_grad_and_autocast
from quorum_attention.operator.codec import decode_call
from quorum_attention.passes.run import run_backward, run_forward

# Settings of the last forwards that had some, for their backwards, by number. A graph
# that is kept longer gets the settings of its moment.
_MAX_SETTINGS = 4096
_settings_by_number: dict[int, Settings] = {}
_numbers = count(1)


@restores_grad_and_autocast
def compute_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    parts: list[torch.Tensor] | None,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute (out, lse, the number of the settings); the arguments are those of the
    schema."""
    *constants, recorded, of_mask = rest
    settings = current_settings()
    arguments = _arguments(attn_mask, sinks, seed, parts, constants, settings)
    tensors, request = _request(query, key, value, arguments, recorded, of_mask)
    out, lse = run_forward(tensors, _reserving_a_copy(request))
    number = _keep_settings(settings)
    settings_number = torch.tensor(number, dtype=torch.int64, device="cpu")
    # As ``fake_forward`` promises: as the query lies, lse beside the output.
    out = laid_out_like(out, query)
    lse = lse.to(query.device).contiguous()
    return out, lse, settings_number


@restores_grad_and_autocast
def compute_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    attn_mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    settings_number: torch.Tensor,
    seed: torch.Tensor | None,
    parts: list[torch.Tensor] | None,
    *rest: Any,
) -> list[torch.Tensor]:
    """Compute the gradients of query, key and value, then those of mask and sinks if
    wanted."""
    *constants, of_mask, of_sinks = rest
    settings = None
    if settings_number:
        settings = _settings_by_number.get(int(settings_number), current_settings())
    arguments = _arguments(attn_mask, sinks, seed, parts, constants, settings)
    tensors, request = _request(query, key, value, arguments, True, of_mask)
    if request.splits_out:
        out = _unrounded_output(tensors, request)
        request = reserving_out(request, out.device, "the unrounded output")
    backward_inputs = BackwardInputs(
        grad_out, out, lse, grad_mask=of_mask, grad_sinks=of_sinks, grad_lse=grad_lse
    )
    grads = list(run_backward(tensors, _reserving_a_copy(request), backward_inputs))
    # One after the other, so that one copy is held beside them.
    for index, tensor in enumerate((query, key, value)):
        grads[index] = laid_out_like(grads[index], tensor)
    for index in range(3, len(grads)):
        grads[index] = grads[index].contiguous()
    return grads


def _arguments(
    attn_mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    parts: list[torch.Tensor] | None,
    constants: Sequence[Any],
    settings: Settings | None,
) -> Arguments:
    """Return the arguments of the call, with the options and the ``Mask`` that were
    encoded, and with settings.

    Args:
        constants: the arguments of an operator from ``dropout_p`` to ``numbers``.
    """
    dropout_p, scale, is_causal, enable_gqa, out_dtype, options, numbers = constants
    call_options, mask = decode_call(options, numbers or [], parts or [])
    kernel = call_options.kernel
    if kernel != "auto" and get_kernel(kernel).called_back():
        raise NotImplementedError(
            f"kernel {kernel!r} computes by a function of the program, which a graph "
            "cannot hold: give attention the kernel itself, and torch.compile breaks "
            "its graph there"
        )
    return Arguments(
        attn_mask if mask is None else replace(mask, bias=attn_mask, sinks=sinks),
        dropout_p,
        None if seed is None else int(seed),
        is_causal,
        scale,
        enable_gqa,
        out_dtype=out_dtype,
        options=with_settings(settings, call_options),
    )


def _request(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: Arguments,
    recorded: bool,
    mask_grad: bool,
) -> tuple[Tensors, Request]:
    """Return the tensors of a call, and its request.

    Args:
        recorded: whether gradients are recorded where the call is written.
        mask_grad: whether the gradient of the mask is asked for.
    """
    # A forward that is recorded takes kernels that have gradients, as a backward does.
    function = "attention_backward" if recorded else "attention"
    with torch.no_grad():  # ``recorded`` says whether these tensors get gradients
        tensors, request = request_of(
            function, query, key, value, arguments, records=recorded
        )
    return tensors, replace(request, mask_grad=mask_grad)


def _unrounded_output(tensors: Tensors, request: Request) -> torch.Tensor:
    """Compute the output of a call in fp32.

    Settings of the moment may ask for ``exact_delta``, where the graph has a place for
    the rounded output alone.
    """
    out, _ = run_forward(tensors, replace(request, out_dtype=torch.float32))
    return out


def _keep_settings(settings: Settings | None) -> int:
    """Return a number by which the backward finds the settings; 0 where there are
    none."""
    if settings is None:
        return 0
    number = next(_numbers)
    _settings_by_number[number] = settings
    _settings_by_number.pop(number - _MAX_SETTINGS, None)
    return number


def _reserving_a_copy(request: Request) -> Request:
    """Reserve a copy of one result.

    A graph knows beforehand how results lie, and kernels choose for themselves.
    """
    shape = request.shape
    query_rows = shape.heads * shape.n_queries
    key_rows = shape.kv_heads * shape.n_keys
    n_rows = shape.batch * max(query_rows, key_rows)
    row_bytes = max(shape.head_dim, shape.value_dim) * request.out_dtype.itemsize
    n_bytes = n_rows * row_bytes
    return request.reserving(n_bytes, "a copy of a result")
