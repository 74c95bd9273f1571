"""Tests once whether a kernel really works on a device.

An operator may run and return wrong numbers. So a small rectangle and a small causal square are
compared with the float64 reference: the forward and, if gradients are needed, the backward. That
takes half a second in a new process, so what passed is remembered in a file of this user's. The
answer depends on the device, on the versions of everything below and on this package's own code, so
all of that is in an entry's name. A failure may be the machine's of that moment: it is not kept.

What merges is not what is tested: that is left to torch, because Triton may still be compiling it.
"""

from __future__ import annotations

import functools
import hashlib
import math
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from quorum_attention.cache_files import load, store
from quorum_attention.decomposition import Decomposition, Rectangle
from quorum_attention.errors import is_out_of_memory
from quorum_attention.kernels.cache import remembered
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.merge import by_torch, empty_
from quorum_attention.kernels.protocol import (
    CallShape,
    Gradients,
    InnerKernel,
    MaskShape,
    Statistics,
    TaskTensors,
    is_bare,
)
from quorum_attention.kernels.reference import DenseKernel
from quorum_attention.kernels.scaling import Scaling
from quorum_attention.kernels.torch_private import capturing, outside

# Odd, as lengths may be: rows of a mask begin at addresses that vector loads do not take.
_QUERIES = 249
_KEYS = 367
# The largest error that is accepted, as a share of the largest element. It is wide: the probe is to
# find wrong results, not imprecise ones (fp32 operators may use TF32).
_TOLERANCES = {
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
    torch.float32: 2e-2,
    torch.float64: 1e-9,
}


@dataclass(frozen=True, slots=True)
class _Question:
    """Everything but the kernel that the answer depends on.

    Attributes:
        group: query heads that share a key/value head; compiled kernels may depend on it.
        deterministic: whether torch has been told to refuse nondeterministic operators.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    group: int
    mask: MaskShape | None
    needs_grad: bool
    positive_scale: bool
    deterministic: bool
    dropout: bool = False

    @property
    def scales(self) -> tuple[float, ...]:
        """The factors of the scores to test."""
        usual = 1.0 / math.sqrt(max(1, self.head_dim))
        return (usual,) if self.positive_scale else (-usual, 0.0)


# Answers remembered for each kernel.
_ANSWERS = 1024


def probe(kernel: InnerKernel, call: CallShape, device: torch.device | None = None) -> str | None:
    """Why ``kernel`` does not work for such calls on ``device``, or None; tested only once.

    Args:
        kernel: a kernel that does not refuse the call.
        call: the kind of call.
        device: default the current device of the call's type.

    Raises:
        torch.OutOfMemoryError: the device does not have the few MiB that the test takes.
        RuntimeError: a CUDA graph is being captured, and no such call has been tested before.
    """
    return _answer(kernel, _question(call, device))


def _question(call: CallShape, device: torch.device | None) -> _Question:
    if device is None:
        device = torch.device(call.device_type)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _Question(
        device,
        call.dtype,
        call.head_dim,
        call.value_dim,
        call.query_heads // max(1, call.key_heads),
        call.mask,
        call.needs_grad,
        call.positive_scale,
        torch.are_deterministic_algorithms_enabled(),
        call.dropout,
    )


@remembered(_ANSWERS)
def _answer(kernel: InnerKernel, question: _Question) -> str | None:
    if capturing(question.device):
        raise RuntimeError(
            f"kernel {kernel.name!r} has to be tried out before a CUDA graph is captured: make one "
            f"such call first, as warm-up"
        )
    entry = _entry(kernel, question)
    if entry is not None and entry in _memo():
        return None
    with outside(), by_torch():
        wrong = _tried_with_memory(kernel, question)
    if wrong is None:
        _note([] if entry is None else [entry])
    return wrong


def _tried_with_memory(kernel: InnerKernel, question: _Question) -> str | None:
    """``_tried``; where memory runs out, once more with all that torch's allocator held back:
    libraries and Triton do not ask it for that when they take memory themselves."""
    try:
        return _tried(kernel, question)
    except RuntimeError as error:
        if question.device.type != "cuda" or not is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    return _tried(kernel, question)


def _tried(kernel: InnerKernel, question: _Question) -> str | None:
    for is_causal, scale in product((False, True), question.scales):
        try:
            wrong = _compare(kernel, question, is_causal, scale)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return f"it failed a test on {question.device}: {lines[0]}"
        if wrong is not None:
            kind = "causal" if is_causal else "plain"
            dtype = str(question.dtype).removeprefix("torch.")
            sign = "" if question.positive_scale else f", scale {scale:.3g}"
            return f"it returned {wrong} for a {kind} {dtype} test on {question.device}{sign}"
    return None


def _compare(kernel: InnerKernel, question: _Question, is_causal: bool, scale: float) -> str | None:
    """Compare the kernel with the reference: what is wrong with its results, or None."""
    n_keys = _QUERIES if is_causal else _KEYS
    inputs = _Inputs.random(question, n_keys)
    how = (is_causal, scale, question.needs_grad, Dropout(0.5, 0) if question.dropout else None)
    exact = _run(DenseKernel(), inputs.to(dtype=torch.float64), *how)
    found = _run(kernel, inputs.to(device=question.device), *how)
    tolerance = _TOLERANCES.get(question.dtype, 1e-1)
    for name, reference in exact.items():
        result = found[name].to("cpu", torch.float64)
        if result.isnan().any():
            return f"NaN in {name}"
        # Equal infinities (the lse of rows without keys) are no difference.
        difference = torch.where(result == reference, 0.0, (result - reference).abs())
        size = reference[reference.isfinite()].abs().max()
        error = (difference.max() / size.clamp_min(1e-6)).item()
        if not error <= tolerance:
            return f"{name} off by {error:.1e} of its size"
    return None


@dataclass(frozen=True, slots=True)
class _Inputs:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_out: torch.Tensor
    mask: torch.Tensor | None

    @classmethod
    def random(cls, question: _Question, n_keys: int) -> _Inputs:
        generator = torch.Generator().manual_seed(0)
        heads = 2 * question.group

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cpu").to(question.dtype)

        mask = _random_mask(question.mask, heads, n_keys, generator)
        return cls(
            query=random(1, heads, _QUERIES, question.head_dim),
            key=random(1, 2, n_keys, question.head_dim),
            value=random(1, 2, n_keys, question.value_dim),
            grad_out=random(1, heads, _QUERIES, question.value_dim),
            mask=None if mask is None else mask.to(question.dtype),
        )

    def to(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> _Inputs:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device=device or tensor.device, dtype=dtype or tensor.dtype)

        return _Inputs(
            move(self.query),
            move(self.key),
            move(self.value),
            move(self.grad_out),
            None if self.mask is None else move(self.mask),
        )

    def bias(self, r: Rectangle) -> torch.Tensor | None:
        """The mask of a rectangle; dimensions it broadcasts over keep size 1."""
        if self.mask is None:
            return None
        rows = slice(r.query_start, r.query_stop) if self.mask.shape[2] > 1 else slice(None)
        columns = slice(r.key_start, r.key_stop) if self.mask.shape[3] > 1 else slice(None)
        return self.mask[:, :, rows, columns]


def _run(
    kernel: InnerKernel,
    inputs: _Inputs,
    is_causal: bool,
    scale: float,
    needs_grad: bool,
    dropout: Dropout | None,
) -> dict[str, torch.Tensor]:
    """The kernel's statistics, and gradients if needed, of one task that is the whole call."""
    query, key, value, grad_out = inputs.query, inputs.key, inputs.value, inputs.grad_out
    n_queries, n_keys = query.shape[2], key.shape[2]
    whole = next(iter(Decomposition(max(n_queries, n_keys), ()).tasks()))
    task = TaskTensors(
        task=whole,
        rectangles=tuple(whole.rectangles(is_causal, n_queries=n_queries, n_keys=n_keys)),
        query=query,
        key=key,
        value=value,
        scale=scale,
        is_causal=is_causal,
        bias=inputs.bias,
        dropout=dropout,
    )
    work = torch.float64 if query.dtype == torch.float64 else torch.float32

    def full_precision(like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=work, device=like.device)

    out = full_precision(grad_out)
    state = Statistics(out, out[..., 0].clone())
    empty_(state.out, state.lse)
    kernel.forward(task, state)
    results = {"out": state.out, "lse": state.lse}
    if needs_grad:
        grads = Gradients(
            grad_out=grad_out,
            out=state.out.to(query.dtype),
            lse=state.lse,
            grad_query=full_precision(query),
            grad_key=full_precision(key),
            grad_value=full_precision(value),
            scaling=_scaling(kernel, value),
        )
        kernel.backward(task, grads)
        results |= {
            "the gradient of query": grads.grad_query,
            "the gradient of key": grads.grad_key,
            "the gradient of value": grads.grad_value,
        }
    return results


def _scaling(kernel: InnerKernel, value: torch.Tensor) -> Scaling:
    """A scaling that changes nothing, for a kernel whose backwards are scaled in this dtype: what
    adds up their gradients is then what a call of this dtype takes, and is compiled once."""
    if value.dtype not in kernel.scaled_backward:
        return Scaling()
    by_head = value.shape[:2]
    return Scaling(
        unscale=torch.ones(by_head, dtype=torch.float32, device=value.device),
        overflow=torch.zeros(by_head, dtype=torch.int32, device=value.device),
    )


def _random_mask(
    mask: MaskShape | None, heads: int, n_keys: int, generator: torch.Generator
) -> torch.Tensor | None:
    """A random mask of that shape, some of it -inf, one row entirely -inf."""
    if mask is None:
        return None
    shape = (1, heads if mask.heads else 1, _QUERIES if mask.rows else 1, n_keys)
    shape = shape if mask.columns else (*shape[:3], 1)
    values = torch.randn(shape, generator=generator, device="cpu")
    if mask.columns:
        values.masked_fill_(torch.rand(shape, generator=generator, device="cpu") < 0.2, -torch.inf)
    if mask.rows:
        values[:, :, _QUERIES // 3] = -torch.inf
    return values


# --- What earlier processes found out ---------------------------------------------------------

_FILE = "kernels.json"
# Most entries of the file: the oldest go first.
_MOST = 400


def read_memo() -> None:
    """Read what is remembered, and the files that its names depend on."""
    _sources()
    _memo()


@functools.cache
def _memo() -> list[str]:
    return _entries(load(_FILE))


def _entries(said: Any) -> list[str]:
    return [e for e in said if isinstance(e, str)] if isinstance(said, list) else []


def _note(entries: list[str]) -> None:
    """Remember entries. What cannot be written is not remembered."""
    new = [entry for entry in entries if entry not in _memo()]
    if not new:
        return
    _memo().extend(new)
    del _memo()[:-_MOST]
    with suppress(OSError):
        # Another process may have added to it.
        store(_FILE, lambda said: list(dict.fromkeys([*_entries(said), *_memo()]))[-_MOST:])


def _entry(kernel: InnerKernel, question: _Question) -> str | None:
    """The name of an entry; None for what is not remembered: users' kernels, other devices, and
    kernels with options, which are more than their names."""
    module, package = type(kernel).__module__, __name__.rpartition(".")[0]
    if question.device.type != "cuda" or not module.startswith(package):
        return None
    if not is_bare(kernel):
        return None
    found = torch.cuda.get_device_properties(question.device)
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: None)()
    versions = (
        found.name, found.major, found.minor, torch.__version__, torch.version.cuda,
        torch.backends.cudnn.version(), driver, _sources(),
    )  # fmt: skip
    return f"{type(kernel).__qualname__} | {question} | {versions}"


@functools.cache
def _sources() -> str:
    """A hash of the code that a test runs."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]
