"""The ways to compute a call that are compared: torch's function with its kernels, and
ours."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from quorum_attention.api import attention_backward, attention_with_lse
from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.plain_types import Keywords

GRADIENTS = ("grad_query", "grad_key", "grad_value")
RESULTS = ("out", *GRADIENTS)


@dataclass
class CallTensors:
    """The tensors of a call.

    Attributes:
        inputs, grad: query, key, value; the upstream gradient, None without a backward.
        options: of our functions.
        results: where our method writes; by name, empty where it makes them.
    """

    device: torch.device
    inputs: list[torch.Tensor]
    grad: torch.Tensor | None
    options: Keywords = field(default_factory=dict)
    results: NamedTensors = field(default_factory=dict)

    def allocate_results(self) -> None:
        """Allocate results in (page-locked) host memory, as in a program that
        streams."""
        query, _, value = self.inputs
        rows = query.shape[:-1]
        is_pinned = self.device.type != "cpu"
        state_dtype = torch.promote_types(query.dtype, torch.float32)
        out_shape = (*rows, value.shape[-1])
        self.results = {
            "out": torch.empty(out_shape, dtype=query.dtype, pin_memory=is_pinned),
            "lse": torch.empty(rows, dtype=state_dtype, pin_memory=is_pinned),
        }
        if self.grad is None:
            return
        for name, tensor in zip(GRADIENTS, self.inputs, strict=True):
            self.results[name] = torch.empty_like(tensor, pin_memory=is_pinned)


class ForwardResult(NamedTuple):
    """The output of a forward, and what its backward reads.

    Attributes:
        out: the output.
        lse: the log-sum-exp, of our method.
        leaves: query, key and value whose gradients autograd computes, of torch's.
    """

    out: torch.Tensor
    lse: torch.Tensor | None = None
    leaves: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class Method:
    """One way to compute a call: torch's function, with its gradient by autograd, or
    ours.

    Attributes:
        on_device: whether inputs are on the device, or else in (page-locked) host
            memory.
        backend: torch's kernel; None is torch's choice.
        options: of our functions; None is torch's function.
    """

    on_device: bool = True
    backend: SDPBackend | None = None
    options: Keywords | None = None

    @property
    def is_ours(self) -> bool:
        """Whether our functions compute the call."""
        return self.options is not None

    def forward(self, call: CallTensors) -> ForwardResult:
        """Compute the output."""
        if self.options is None:
            return self._torch_forward(call)
        query, key, value = call.inputs
        options = {**call.options, **self.options}
        out, lse = attention_with_lse(
            query, key, value, out=call.results.get("out"), **options
        )
        return ForwardResult(out, lse)

    def backward(
        self, call: CallTensors, result: ForwardResult
    ) -> tuple[torch.Tensor, ...]:
        """Compute the gradients of query, key and value."""
        assert call.grad is not None
        out = result.out
        if self.options is None:
            grad = call.grad.to(device=out.device, dtype=out.dtype)
            return torch.autograd.grad(out, result.leaves, grad)
        assert result.lse is not None
        query, key, value = call.inputs
        options = {**call.options, **self.options}
        if call.results:
            options["grads"] = tuple(call.results[name] for name in GRADIENTS)
        return attention_backward(
            call.grad, query, key, value, out, result.lse, **options
        )

    def _torch_forward(self, call: CallTensors) -> ForwardResult:
        if call.device.type == "cpu" and self.backend is not None:
            raise NotImplementedError("measured on CUDA only")
        has_backward = call.grad is not None
        leaves = tuple(t.detach().requires_grad_(has_backward) for t in call.inputs)
        query, key, value = leaves
        kernel = nullcontext() if self.backend is None else sdpa_kernel(self.backend)
        with kernel, torch.set_grad_enabled(has_backward):
            out = scaled_dot_product_attention(
                query,
                key,
                value,
                is_causal=call.options["is_causal"],
                enable_gqa=query.shape[-3] != key.shape[-3],
            )
        return ForwardResult(out, leaves=leaves)


METHODS = {
    "sdpa": Method(),
    "flash": Method(backend=SDPBackend.FLASH_ATTENTION),
    "cudnn": Method(backend=SDPBackend.CUDNN_ATTENTION),
    "efficient": Method(backend=SDPBackend.EFFICIENT_ATTENTION),
    "quorum": Method(on_device=False, options={}),
    "quorum-device": Method(options={}),
    "quorum-depth-1": Method(
        on_device=False, options={"depth": 1, "accumulator": "device"}
    ),
    "quorum-depth-2": Method(
        on_device=False, options={"depth": 2, "accumulator": "device"}
    ),
}


def exact_results(call: CallTensors) -> list[torch.Tensor]:
    """Output and gradients in float64, head by head, on the call's device."""
    assert call.grad is not None
    leaves = [t.detach().to(call.device).double().requires_grad_() for t in call.inputs]
    query, key, value = leaves
    group = query.shape[1] // key.shape[1]
    outs = []
    with sdpa_kernel(SDPBackend.MATH):
        for head in range(query.shape[1]):
            key_head = head // group
            out = scaled_dot_product_attention(
                query[:, head],
                key[:, key_head],
                value[:, key_head],
                is_causal=call.options["is_causal"],
            )
            out.backward(call.grad[:, head].to(out))
            outs.append(out.detach())
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [torch.stack(outs, 1), *grads]
