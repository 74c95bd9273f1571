"""All kernels by name; which one a call gets; and the test, once a process, whether it works."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from quorum_attention.argument_checks import shown
from quorum_attention.errors import is_out_of_memory
from quorum_attention.kernels.cache import load, remembered, store
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.fa4 import Fa4Kernel
from quorum_attention.kernels.merge import warm_up
from quorum_attention.kernels.native import NativeKernel
from quorum_attention.kernels.protocol import (
    Call,
    CallShape,
    InnerKernel,
    Kernel,
    Saved,
    refusal,
    state_dtype,
)
from quorum_attention.kernels.rectangles import RectangleKernel
from quorum_attention.kernels.reference import DenseKernel
from quorum_attention.kernels.tensors import Pick
from quorum_attention.kernels.torch_private import capturing, flash_implementation, outside
from quorum_attention.kernels.vendors import CpuKernel, CudnnKernel, EfficientKernel, FlashKernel
from quorum_attention.units import format_error

_KERNELS: dict[str, Kernel] = {}
_registered = 0

# The reference: it comes after all others.
_LAST = "dense"


def register_kernel(kernel: Kernel) -> None:
    """Make a kernel known under its name, replacing one of the same name.

    Raises:
        TypeError: it is no ``InnerKernel``, or has no hash.
        ValueError: its name is empty or "auto".

    Examples:
        >>> def mine(query, key, value, *, is_causal, scale):
        ...     scores = scale * (query @ key.mT)
        ...     if is_causal:
        ...         scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        ...     lse = torch.logsumexp(scores, -1)
        ...     return torch.exp(scores - lse.unsqueeze(-1)) @ value, lse
        >>> qa.register_kernel(qa.from_lse_function(mine, name="mine"))
        >>> q = torch.randn(1, 2, 300, 16)
        >>> out = qa.attention(q, q, q, kernel="mine", depth=1)
    """
    _check(kernel)
    if not isinstance(kernel.name, str):
        raise TypeError(f"a kernel's name must be a str, got {shown(kernel.name)}")
    if not kernel.name or kernel.name == "auto":
        raise ValueError(f"a kernel cannot be named {kernel.name!r}")
    global _registered
    _registered += 1
    _KERNELS[kernel.name] = kernel


def registrations() -> tuple[object, ...]:
    """A key that changes whenever a kernel is registered, or torch's operators are replaced."""
    return (_registered, flash_implementation(), *map(id, _KERNELS.values()))


def _check(kernel: object) -> None:
    """Raises TypeError for what is no kernel."""
    if not isinstance(kernel, Kernel):
        kind = kernel if isinstance(kernel, type) else type(kernel)
        given = "the class " * (kind is kernel) + kind.__name__
        raise TypeError(
            f"kernel must be a name or an InnerKernel, not {given}: make one of a class derived "
            "from quorum_attention.InnerKernel, or pass a function to from_lse_function"
        )
    if type(kernel).__hash__ is None:
        raise TypeError(
            f"kernel {kernel.name!r} lacks __hash__ (a dataclass keeps it with eq=False)"
        )


def kernels() -> dict[str, Kernel]:
    """Every registered kernel by name, the preferred ones first (a copy).

    Examples:
        >>> "dense" in qa.kernels()
        True
    """
    return {**{name: k for name, k in _KERNELS.items() if name != _LAST}, _LAST: _KERNELS[_LAST]}


def get_kernel(kernel: str | Kernel) -> Kernel:
    """The kernel of that name, or the kernel given.

    Raises:
        ValueError: no kernel has that name.
        TypeError: neither a name nor a kernel.
    """
    if isinstance(kernel, str):
        if kernel not in _KERNELS:
            known = ", ".join(kernels())
            raise ValueError(f"no kernel is named {kernel!r}; there are: {known}")
        return _KERNELS[kernel]
    _check(kernel)
    return kernel


def why_not(kernel: Kernel, shape: CallShape, device: torch.device | None = None) -> str | None:
    """Why a kernel cannot run the call: its own refusal or a failed test on ``device``; or None."""
    reason = refusal(kernel, shape)
    # The reference cannot be tested against itself, nor a kernel that computes other attention
    # (check_kernel is for those).
    if reason is not None or kernel.name == _LAST or kernel.own_attention:
        return reason
    # A kernel whose options change the scores is tested without them.
    return probe(kernel.plain_variant or kernel, shape, device)


# Fastest first (measured on an H200). Kernels that users register come after these, in order.
for _kernel in (
    Fa4Kernel(), CudnnKernel(), FlashKernel(), EfficientKernel(), CpuKernel(), NativeKernel(),
    DenseKernel(),
):  # fmt: skip
    register_kernel(_kernel)


# --- The kernel of a call -----------------------------------------------------------------------

_UNROUNDED, _LONG = "native", "fa4"
LONG_FLOPS = 1e12
"""Operations of a forward from which on "auto" takes FlashAttention-4: 2 ms of an H200."""


def select_kernel(
    wanted: str | InnerKernel,
    shape: CallShape,
    device: torch.device,
    *,
    tried: bool = True,
    flops: float = 0.0,
) -> InnerKernel:
    """The kernel for ``shape`` on ``device``.

    A kernel asked for by name is never replaced by another. "auto" takes the first in order of
    preference that can run the call.

    Args:
        tried: a kernel also has to pass a small test on the device; planning does without, because
            it may plan for a device that is not here.
        flops: operations of a forward. FlashAttention-4 takes the host longer to launch than
            others, and is compiled first: "auto" takes it for long calls alone.

    Raises:
        NotImplementedError: no kernel, or not the one asked for, can run the call; says why.
        ValueError, TypeError: there is no such kernel.
    """
    present = tried and (device.type != "cuda" or torch.cuda.is_available())
    if present and device.type == "cuda" and flops >= LONG_FLOPS:
        warm_up()
    why = partial(why_not, shape=shape, device=device) if present else partial(refusal, shape=shape)
    if wanted != "auto":
        kernel = get_kernel(wanted)
        if (reason := why(kernel)) is not None:
            raise NotImplementedError(f"kernel {kernel.name!r} cannot run this call: {reason}")
        return kernel
    found = []
    for kernel in kernels().values():
        if kernel.name == _LONG and not (flops >= LONG_FLOPS and _is_hopper(device)):
            found.append(f"{kernel.name}: {refusal(kernel, shape) or 'it is for longer calls'}")
            continue
        # One after the other: a test may have to build the kernel.
        if (reason := why(kernel)) is None:
            return kernel
        found.append(f"{kernel.name}: {reason}")
    raise NotImplementedError(f"no kernel can run this call ({'; '.join(found)})")


def unrounded_kernel(
    wanted: str | InnerKernel, shape: CallShape, device: torch.device, result: torch.dtype
) -> str | InnerKernel:
    """The kernel for a result that is wider than its 16-bit inputs.

    For "auto" that is the kernel that does not round results to 16 bits, if it can run the call;
    otherwise, and in all other cases, ``wanted``.
    """
    wider = result.itemsize > shape.dtype.itemsize and shape.head_dim == shape.value_dim
    if wanted != "auto" or not wider or device.type != "cuda":
        return wanted
    return _UNROUNDED if why_not(get_kernel(_UNROUNDED), shape, device) is None else wanted


def rivals(
    preferred: InnerKernel, shape: CallShape, device: torch.device
) -> tuple[InnerKernel, ...]:
    """Kernels that a planner may choose for "auto" instead of ``preferred``: the native one, if its
    rates for such calls have been measured."""
    native, plain = _KERNELS[_UNROUNDED], shape.bias is None and not shape.dropout
    widths = {shape.head_dim, shape.value_dim}
    measured = plain and shape.dtype.itemsize == 2 and widths in ({64}, {128})
    if not measured or device.type != "cuda" or not _is_hopper(device):
        return ()
    able = (
        native is not preferred and native.plain_variant is None and refusal(native, shape) is None
    )
    return (native,) if able else ()


def _is_hopper(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU; without a GPU, plans are made for one."""
    if not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device) == (9, 0)


# --- Whether a kernel really works on a device ----------------------------------------------------
#
# An operator may run and return wrong numbers. So a small rectangle and a small causal square are
# compared with the float64 reference: the forward and, if gradients are needed, the backward. That
# takes half a second, once a process.

# Odd, as lengths may be: rows of a mask begin at addresses that vector loads do not take.
_QUERIES = 249
_KEYS = 367
# What is added to a wide mask in the test: the inputs' dtype would round it by half a unit or more.
_WIDE_MASK = 1000.0
# The most query rows of all heads, and elements of a tensor, so that a test takes tens of MiB at
# most. Groups of up to 16 query heads and 128 dimensions, or 8 and 256, have all the rows above.
_MOST_ROWS = 1 << 13
_MOST_ELEMENTS = 1 << 21
# The largest error that is accepted, as a share of the largest element. It is wide: the probe is to
# find wrong results, not imprecise ones (fp32 operators may use TF32).
_TOLERANCES = {
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
    torch.float32: 2e-2,
    torch.float64: 1e-9,
}


# Answers remembered for each kernel, and tests in the file of those that were passed.
_ANSWERS, _PASSED = 1024, "passed.json"


def probe(kernel: Kernel, shape: CallShape, device: torch.device | None = None) -> str | None:
    """Why ``kernel`` does not work for such calls on ``device``, or None; tested only once.

    Args:
        kernel: a kernel that does not refuse the call.
        shape: the kind of call.
        device: default the current device of the call's type.

    Raises:
        torch.OutOfMemoryError: the device does not have the few MiB that the test takes.
        RuntimeError: a CUDA graph is being captured, and no such call has been tested before.
    """
    if device is None:
        device = torch.device(shape.device_type)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    # Compiled kernels may depend on how many query heads share a key head. Causal calls and others
    # are tested together.
    group = max(1, shape.heads // max(1, shape.kv_heads))
    shape = replace(
        shape, heads=2 * group, kv_heads=2, is_causal=False, exact_scale=True, batch_shape=(),
        n_queries=0, n_keys=0, sinks=False, columns=0,
    )  # fmt: skip
    return _answer(kernel, shape, device, torch.are_deterministic_algorithms_enabled())


@remembered(_ANSWERS)
def _answer(
    kernel: Kernel, shape: CallShape, device: torch.device, deterministic: bool
) -> str | None:
    if capturing(device):
        raise RuntimeError(
            f"kernel {kernel.name!r} has to be tried out before a CUDA graph is captured: make one "
            f"such call first, as warm-up"
        )
    # torch's own operators on a GPU are tested by one process for all others.
    kept = device.type == "cuda" and type(kernel).__module__ == CudnnKernel.__module__
    name = _test_name(kernel, shape, device, deterministic) if kept else ""
    if kept and name in _as_list(load(_PASSED)):
        return None
    with outside():
        reason = _tried_with_memory(kernel, shape, device)
    if kept and reason is None:
        with suppress(OSError):
            store(_PASSED, lambda known: [*_as_list(known), name][-_ANSWERS:])
    return reason


def _test_name(kernel: Kernel, shape: CallShape, device: torch.device, deterministic: bool) -> str:
    """Of a test of an operator of torch's, in all that may change its result."""
    versions = torch.__version__, torch.backends.cudnn.version(), flash_implementation()
    where = torch.cuda.get_device_name(device), deterministic
    return repr((*versions, *where, kernel.name, shape))


def _as_list(known: object) -> list[str]:
    """What the file of passed tests says; nothing if it is damaged."""
    return known if isinstance(known, list) else []


def _tried_with_memory(kernel: Kernel, shape: CallShape, device: torch.device) -> str | None:
    """``_tried``; where memory runs out, once more with all that torch's allocator held back:
    libraries and Triton do not ask it for that when they take memory themselves."""
    try:
        return _tried(kernel, shape, device)
    except RuntimeError as error:
        if device.type != "cuda" or not is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    return _tried(kernel, shape, device)


def _tried(kernel: Kernel, shape: CallShape, device: torch.device) -> str | None:
    usual = 1.0 / math.sqrt(max(1, shape.head_dim))
    scales = (usual,) if shape.positive_scale else (-usual, 0.0)
    for is_causal, scale in product((False, True), scales):
        try:
            wrong = _compare(kernel, shape, device, is_causal, scale)
        except (RuntimeError, AttributeError, TypeError) as error:
            # Another torch may lack an operator, or have other arguments for it.
            if is_out_of_memory(error):
                raise
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return f"it failed a test on {device}: {lines[0]}"
        if wrong is not None:
            kind = "causal" if is_causal else "plain"
            return f"it returned {wrong} for a {kind} test of scale {scale:.3g} on {device}"
    return None


def _compare(
    kernel: Kernel, shape: CallShape, device: torch.device, is_causal: bool, scale: float
) -> str | None:
    """Compare the kernel with the reference: what is wrong with its results, or None."""
    one, grad_out = _random_call(shape, is_causal, scale)
    exact = _run(DenseKernel(), shape, one, grad_out, torch.Tensor.double)
    found = _run(kernel, shape, one, grad_out, lambda tensor: tensor.to(device))
    tolerance = _TOLERANCES.get(shape.dtype, 1e-1)
    for name, reference in exact.items():
        result = found[name].to("cpu", torch.float64)
        if result.isnan().any():
            return f"NaN in {name}"
        # Equal infinities (the lse of rows without keys) are no difference.
        difference = torch.where(result == reference, 0.0, (result - reference).abs())
        size = reference[reference.isfinite()].abs().max()
        error = (difference.max() / size.clamp_min(1e-6)).item()
        if not error <= tolerance:
            return f"{name} off by {format_error(error)} of its size"
    return None


def _random_call(shape: CallShape, is_causal: bool, scale: float) -> tuple[Call, torch.Tensor]:
    """A small call of a kind, and its upstream gradient."""
    generator = torch.Generator().manual_seed(0)
    heads = shape.heads
    n_queries, n_keys = _probe_lengths(shape)
    if is_causal:
        n_keys = n_queries

    def random(*sizes: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device="cpu").to(dtype)

    mask = None
    if shape.bias is not None:
        # Some of it is -inf, and one row entirely.
        sizes = (1, heads if shape.bias.heads else 1, n_queries if shape.bias.rows else 1)
        mask = random(*sizes, n_keys if shape.bias.columns else 1, dtype=shape.bias_dtype)
        if shape.bias.wide:
            mask.add_(_WIDE_MASK)
        if shape.bias.columns:
            mask[torch.rand(mask.shape, generator=generator, device="cpu") < 0.2] = -torch.inf
        if shape.bias.rows and n_queries > 1:
            mask[:, :, n_queries // 3] = -torch.inf
    inputs = Call(
        random(1, heads, n_queries, shape.head_dim),
        random(1, 2, n_keys, shape.head_dim),
        random(1, 2, n_keys, shape.value_dim),
        is_causal,
        scale,
        mask,
        dropout=Dropout(0.5, 0) if shape.dropout else None,
    )
    return inputs, random(1, heads, n_queries, shape.value_dim)


def _probe_lengths(shape: CallShape) -> tuple[int, int]:
    """Return how many queries and keys the test of a kind of call has."""
    # Kernels without grouped heads get keys for each query head.
    most_rows = _MOST_ELEMENTS // (shape.heads * max(shape.head_dim, shape.value_dim, 1))
    n_queries = min(most_rows, _MOST_ROWS // shape.heads, _QUERIES)
    n_keys = min(most_rows, _KEYS)
    return max(1, n_queries), max(1, n_keys)


def _run(
    kernel: Kernel, shape: CallShape, call: Call, grad_out: torch.Tensor, to: Pick
) -> dict[str, torch.Tensor]:
    """The kernel's statistics, and gradients if needed, of one task that is the whole call.

    Args:
        to: brings a tensor to the device and the dtype to compute in.
    """
    call = call.mapped(to, to, bias=None if call.bias is None else to(call.bias))
    # Results as they are computed, not rounded to what the inputs are.
    call = replace(call, stored=state_dtype(call.query.dtype))
    # By one call of an operator, if it takes that: Triton would have to compile what merges.
    whole = isinstance(kernel, RectangleKernel) and kernel.takes_whole(shape, _KEYS, every=True)
    how = type(kernel) if whole else Kernel
    out, lse = how.whole_forward(kernel, call)
    results = {"out": out, "lse": lse}
    if shape.needs_grad:
        rows = lse.masked_fill(torch.isneginf(lse), 0.0) if whole else lse
        saved = Saved(to(grad_out), out.to(call.query.dtype), rows)
        names = ("the gradient of query", "the gradient of key", "the gradient of value")
        results |= dict(zip(names, how.whole_backward(kernel, call, saved), strict=True))
    return results
