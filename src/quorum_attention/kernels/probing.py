"""Whether a kernel really works on a device: tested once a process for each kind of
call.

An operator may run and return wrong numbers. So a small rectangle and a small causal
square are compared with the float64 reference: the forward and, if gradients are
needed, the backward. That takes half a second.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from itertools import product

import numpy as np
import torch

from quorum_attention.errors import is_out_of_memory
from quorum_attention.kernels.cache import remembered
from quorum_attention.kernels.cache_files import load, store
from quorum_attention.kernels.call_shape import CallShape, state_dtype
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.fa4 import versions as fa4_versions
from quorum_attention.kernels.operator_call import Call, Saved
from quorum_attention.kernels.protocol import Kernel
from quorum_attention.kernels.rectangles import RectangleKernel
from quorum_attention.kernels.reference import DenseKernel
from quorum_attention.kernels.tensors import NamedTensors, Pick
from quorum_attention.kernels.torch_private import (
    capturing,
    flash_implementation,
    no_torch_modes,
)
from quorum_attention.units import format_error

# Odd, as lengths may be: rows of a bias begin at addresses that vector loads do not
# take.
_QUERIES = 249
_KEYS = 367
# The test adds this to a wide bias: the inputs' dtype would round it by half a unit or
# more.
_WIDE_BIAS = 1000.0
# The most query rows of all heads, and elements of a tensor, so that a test takes tens
# of MiB at most. Groups of up to 16 query heads and 128 dimensions, or 8 and 256, have
# all the rows above.
_MOST_ROWS = 1 << 13
_MOST_ELEMENTS = 1 << 21
# The largest error that is accepted, as a share of the largest element. It is wide: the
# probe is to find wrong results, not imprecise ones (fp32 operators may use TF32).
_TOLERANCES = {
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
    torch.float32: 2e-2,
    torch.float64: 1e-9,
}
# Answers that are cached for each kernel, and names in the file of tests that were
# passed.
_MOST_ANSWERS = 1024
_PASSED_FILE = "passed.json"
# Operators of other packages on a GPU are tested by one process for all others.
_KERNELS_OF_PACKAGES = ("cudnn", "flash", "efficient", "unfused", "fa4")


def probe(
    kernel: Kernel, shape: CallShape, device: torch.device | None = None
) -> str | None:
    """Return why ``kernel`` does not work for such calls on ``device``, or None; tested
    only once.

    Args:
        kernel: a kernel that does not refuse the call.
        shape: the kind of call.
        device: default the current device of the call's type.

    Raises:
        torch.OutOfMemoryError: the device does not have the few MiB that the test
            takes.
        RuntimeError: a CUDA graph is being captured, and no such call has been tested
            before.
    """
    if device is None:
        device = torch.device(shape.device_type)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    # Compiled kernels may depend on how many query heads share a key head. Causal calls
    # and others are tested together.
    group = max(1, shape.queries_per_key_head)
    bias = shape.bias
    if bias is not None:
        bias = replace(bias, needs_grad=False)
    kind = replace(
        shape,
        bias=bias,
        heads=2 * group,
        kv_heads=2,
        is_causal=False,
        exact_scale=True,
        batch_shape=(),
        n_queries=0,
        n_keys=0,
        sinks=False,
        columns=0,
    )
    return _answer(kernel, kind, device, torch.are_deterministic_algorithms_enabled())


@remembered(_MOST_ANSWERS)
def _answer(
    kernel: Kernel, shape: CallShape, device: torch.device, deterministic: bool
) -> str | None:
    """Return the answer of ``probe``: from the file of tests that were passed, or by a
    test."""
    if capturing(device):
        raise RuntimeError(
            f"kernel {kernel.name!r} has to be tried out before a CUDA graph is "
            "captured: make one such call first, as warm-up"
        )
    if device.type != "cuda" or not _is_of_a_package(kernel):
        with no_torch_modes():
            return _tested_with_memory(kernel, shape, device)
    test_name = _test_name(kernel, shape, device, deterministic)
    if test_name in _as_list(load(_PASSED_FILE)):
        return None
    with no_torch_modes():
        reason = _tested_with_memory(kernel, shape, device)
    if reason is None:
        with suppress(OSError):  # the next process tests again
            store(
                _PASSED_FILE,
                lambda names: [*_as_list(names), test_name][-_MOST_ANSWERS:],
            )
    return reason


def _is_of_a_package(kernel: Kernel) -> bool:
    """Whether a kernel is one of ours that calls an operator of torch's or of
    FlashAttention-4."""
    package, _, module = type(kernel).__module__.rpartition(".")
    return package == __package__ and module in _KERNELS_OF_PACKAGES


def _test_name(
    kernel: Kernel, shape: CallShape, device: torch.device, deterministic: bool
) -> str:
    """Return a name of a test of an operator, with all that may change its result."""
    return repr(
        (
            torch.__version__,
            torch.backends.cudnn.version(),
            flash_implementation(),
            fa4_versions(),
            torch.cuda.get_device_name(device),
            deterministic,
            kernel.name,
            shape,
        )
    )


def _as_list(content: object) -> list[str]:
    """Return the names in the file of passed tests; none if it is damaged."""
    return content if isinstance(content, list) else []


def _tested_with_memory(
    kernel: Kernel, shape: CallShape, device: torch.device
) -> str | None:
    """Test a kernel; where memory runs out, once more with all that torch's allocator
    held back: libraries and Triton do not ask it for that when they take memory
    themselves."""
    try:
        return _tested(kernel, shape, device)
    except RuntimeError as error:
        if device.type != "cuda" or not is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    return _tested(kernel, shape, device)


def _tested(kernel: Kernel, shape: CallShape, device: torch.device) -> str | None:
    """Return what is wrong with a kernel by small tests of a kind of call, or None."""
    usual_scale = 1.0 / math.sqrt(max(1, shape.head_dim))
    scales = (usual_scale,) if shape.positive_scale else (-usual_scale, 0.0)
    for is_causal, scale in product((False, True), scales):
        try:
            mistake = _compare(kernel, shape, device, is_causal, scale)
        except (RuntimeError, AttributeError, TypeError) as error:
            # Another torch may lack an operator, or have other arguments for it.
            if is_out_of_memory(error):
                raise
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return f"it failed a test on {device}: {lines[0]}"
        if mistake is not None:
            kind = "causal" if is_causal else "plain"
            return (
                f"it returned {mistake} for a {kind} test of scale {scale:.3g} on "
                f"{device}"
            )
    return None


def _compare(
    kernel: Kernel,
    shape: CallShape,
    device: torch.device,
    is_causal: bool,
    scale: float,
) -> str | None:
    """Compare a kernel with the reference; return what is wrong with its results, or
    None."""
    call, grad_out = _random_call(shape, is_causal, scale)
    references = _results(
        DenseKernel(),
        shape,
        call,
        grad_out,
        torch.Tensor.double,
    )
    results = _results(
        kernel,
        shape,
        call,
        grad_out,
        lambda tensor: tensor.to(device),
    )
    tolerance = _TOLERANCES.get(shape.dtype, 1e-1)
    for name, reference in references.items():
        # NumPy computes in this thread alone. Threads of torch's would wait for each
        # other at each of these short steps: seconds where the cores are busy.
        result = results[name].to("cpu", torch.float64).numpy()
        expected = reference.numpy()
        if np.isnan(result).any():
            return f"NaN in {name}"
        # Equal infinities (the lse of rows without keys) are no difference.
        is_different = result != expected
        difference = result[is_different] - expected[is_different]
        size = np.abs(expected[np.isfinite(expected)]).max(initial=1e-6)
        error = np.abs(difference).max(initial=0.0) / size
        if not error <= tolerance:
            return f"{name} off by {format_error(error)} of its size"
    return None


def _random_call(
    shape: CallShape, is_causal: bool, scale: float
) -> tuple[Call, torch.Tensor]:
    """Return a small call of a kind, and its upstream gradient."""
    generator = torch.Generator().manual_seed(0)
    heads = shape.heads
    n_queries, n_keys = _probe_lengths(shape)
    if is_causal:
        n_keys = n_queries

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device="cpu").to(shape.dtype)

    bias = None
    if shape.bias is not None:
        bias = _random_bias(shape, n_queries, n_keys, generator)
    call = Call(
        random(1, heads, n_queries, shape.head_dim),
        random(1, 2, n_keys, shape.head_dim),
        random(1, 2, n_keys, shape.value_dim),
        is_causal,
        scale,
        bias,
        dropout=Dropout(0.5, 0) if shape.dropout else None,
    )
    return call, random(1, heads, n_queries, shape.value_dim)


def _random_bias(
    shape: CallShape, n_queries: int, n_keys: int, generator: torch.Generator
) -> torch.Tensor:
    """Return a bias of a kind of call. Some of it is -inf, and one row entirely."""
    spans = shape.bias
    assert spans is not None
    heads = shape.heads if spans.heads else 1
    rows = n_queries if spans.rows else 1
    columns = n_keys if spans.columns else 1
    numbers = torch.randn((1, heads, rows, columns), generator=generator, device="cpu")
    bias = numbers.to(shape.bias_dtype)
    if spans.wide:
        bias.add_(_WIDE_BIAS)
    if spans.columns:
        bias[
            torch.rand(bias.shape, generator=generator, device="cpu") < 0.2
        ] = -torch.inf
    if spans.rows and n_queries > 1:
        bias[:, :, n_queries // 3] = -torch.inf
    return bias


def _probe_lengths(shape: CallShape) -> tuple[int, int]:
    """Return how many queries and keys the test of a kind of call has."""
    # Kernels without grouped heads get keys for each query head.
    width = max(1, shape.width)
    rows_by_elements = _MOST_ELEMENTS // (shape.heads * width)
    rows_by_heads = _MOST_ROWS // shape.heads
    n_queries = min(rows_by_elements, rows_by_heads, _QUERIES)
    n_keys = min(rows_by_elements, _KEYS)
    return max(1, n_queries), max(1, n_keys)


def _results(
    kernel: Kernel, shape: CallShape, call: Call, grad_out: torch.Tensor, to: Pick
) -> NamedTensors:
    """Return a kernel's statistics, and gradients if needed, of one task that is the
    whole call.

    Args:
        to: brings a tensor to the device and the dtype to compute in.
    """
    call = call.mapped(
        to,
        to,
        bias=None if call.bias is None else to(call.bias),
    )
    # Results as they are computed, not rounded to what the inputs are.
    call = replace(call, stored=state_dtype(call.query.dtype))
    # By one call of an operator, if it takes that: Triton would have to compile what
    # merges.
    is_whole = isinstance(kernel, RectangleKernel) and kernel.takes_whole(
        shape, _KEYS, all_heads=True
    )
    method = type(kernel) if is_whole else Kernel
    out, lse = method.whole_forward(kernel, call)
    results = {"out": out, "lse": lse}
    if not shape.needs_grad:
        return results
    rows = lse.masked_fill(torch.isneginf(lse), 0.0) if is_whole else lse
    saved = Saved(
        to(grad_out),
        out.to(call.query.dtype),
        rows,
    )
    grad_query, grad_key, grad_value = method.whole_backward(kernel, call, saved)
    results["the gradient of query"] = grad_query
    results["the gradient of key"] = grad_key
    results["the gradient of value"] = grad_value
    return results
