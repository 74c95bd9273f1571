"""The methods to compare: ours, and torch's kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from quorum_attention.api import attention_backward, attention_with_lse
from quorum_attention.kernels.kit import LongNetKernel

if TYPE_CHECKING:
    from quorum_attention.execution.report import Report

RESULTS = ("out", "grad_query", "grad_key", "grad_value")


@dataclass
class Call:
    """The tensors of a call.

    Attributes:
        inputs, grad: query, key, value; the upstream gradient, None without a backward.
        results: where our method writes; by name, empty where it makes them.
    """

    device: torch.device
    is_causal: bool
    budget_bytes: int | None
    inputs: list[torch.Tensor]
    grad: torch.Tensor | None
    results: dict[str, torch.Tensor] = field(default_factory=dict)
    report: Report | None = None
    progress: Callable[[int, int, str], None] | None = None

    def make_results(self) -> None:
        """Allocate results in (page-locked) host memory, as in a program that streams."""
        query, _, value = self.inputs
        rows, pin = query.shape[:-1], self.device.type != "cpu"
        state = torch.promote_types(query.dtype, torch.float32)
        out = torch.empty((*rows, value.shape[-1]), dtype=query.dtype, pin_memory=pin)
        self.results = {"out": out, "lse": torch.empty(rows, dtype=state, pin_memory=pin)}
        if self.grad is not None:
            grads = [torch.empty_like(t, pin_memory=pin) for t in self.inputs]
            self.results |= dict(zip(RESULTS[1:], grads, strict=True))


class Method:
    """One way to compute a call: torch's function, with its gradient by autograd.

    Attributes:
        on_device: whether inputs are on the device, or else in (page-locked) host memory.
        writes: whether it writes into results that are given, and fills a report.
    """

    on_device, writes = True, False

    def __init__(self, backend: SDPBackend | None = None) -> None:
        self._backend = backend

    def forward(self, call: Call) -> Any:
        """What ``backward`` needs; its first element is the output."""
        if call.device.type == "cpu" and self._backend is not None:
            raise NotImplementedError("measured on CUDA only")
        leaves = [t.detach().requires_grad_(call.grad is not None) for t in call.inputs]
        query, key, value = leaves
        grouped = query.shape[-3] != key.shape[-3]
        kernel = nullcontext() if self._backend is None else sdpa_kernel(self._backend)
        with kernel, torch.set_grad_enabled(call.grad is not None):
            out = scaled_dot_product_attention(
                query, key, value, is_causal=call.is_causal, enable_gqa=grouped
            )
        return out, leaves

    def backward(self, call: Call, state: Any) -> list[torch.Tensor]:
        """The gradients of query, key and value."""
        assert call.grad is not None
        out, leaves = state
        grad = call.grad.to(device=out.device, dtype=out.dtype)
        return list(torch.autograd.grad(out, leaves, grad))

    def results(self, call: Call) -> list[torch.Tensor]:
        """Output and gradients."""
        state = self.forward(call)
        grads = [] if call.grad is None else self.backward(call, state)
        return [state[0].detach(), *grads]


class Quorum(Method):
    """Ours."""

    writes = True

    def __init__(self, on_device: bool = False, **options: Any) -> None:
        super().__init__()
        self.on_device, self._options = on_device, options

    def _arguments(self, call: Call) -> dict[str, Any]:
        return {
            "is_causal": call.is_causal, "enable_gqa": True, "devices": call.device,
            "report": call.report, "progress": call.progress, "budget": call.budget_bytes,
            **self._options,
        }  # fmt: skip

    def forward(self, call: Call) -> Any:
        """See ``Method``."""
        query, key, value = call.inputs
        out = call.results.get("out")
        return attention_with_lse(query, key, value, out=out, **self._arguments(call))

    def backward(self, call: Call, state: Any) -> list[torch.Tensor]:
        """See ``Method``."""
        assert call.grad is not None
        query, key, value = call.inputs
        grads: Any = tuple(call.results[n] for n in RESULTS[1:]) if call.results else None
        given = self._arguments(call)
        return list(attention_backward(call.grad, query, key, value, *state, grads=grads, **given))


METHODS: dict[str, Method] = {
    "sdpa": Method(),
    "flash": Method(SDPBackend.FLASH_ATTENTION),
    "cudnn": Method(SDPBackend.CUDNN_ATTENTION),
    "efficient": Method(SDPBackend.EFFICIENT_ATTENTION),
    "quorum": Quorum(),
    "quorum-device": Quorum(on_device=True),
    "quorum-depth-1": Quorum(depth=1, accumulator="device"),
    "quorum-depth-2": Quorum(depth=2, accumulator="device"),
}
# Those worth comparing on a device. Ratios are against the first: on GPUs FlashAttention-2, as in
# the paper.
USUAL = {
    "cpu": ["sdpa", "quorum", "quorum-depth-1", "quorum-depth-2"],
    "cuda": [name for name in METHODS if name != "sdpa"],
}
QUICK = {"cpu": ["sdpa", "quorum"], "cuda": ["flash", "cudnn", "quorum"]}
# The paper's appendix: kernels that are compared with themselves, recovered.
ITSELF: dict[str, Any] = {
    "dense": "dense",
    "LongNet": LongNetKernel([(512, 1), (1024, 2), (2048, 4)], full_precision=True),
}


def exact(call: Call) -> list[torch.Tensor]:
    """Output and gradients in float64, head by head, on the call's device."""
    query, key, value = leaves = [
        t.detach().to(call.device).double().requires_grad_() for t in call.inputs
    ]
    shared = query.shape[1] // key.shape[1]
    outs = []
    with sdpa_kernel(SDPBackend.MATH):
        for head in range(query.shape[1]):
            q, k, v = query[:, head], key[:, head // shared], value[:, head // shared]
            out = scaled_dot_product_attention(q, k, v, is_causal=call.is_causal)
            if call.grad is not None:
                out.backward(call.grad[:, head].to(out))
            outs.append(out.detach())
    grads = [t.grad for t in leaves if t.grad is not None]
    return [torch.stack(outs, 1), *grads]
