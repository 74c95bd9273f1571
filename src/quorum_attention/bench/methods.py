"""The methods to compare: ours, torch's kernels, FlexAttention, and the authors' package."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from typing import Any

import torch

from quorum_attention.api import attention_backward, attention_with_lse
from quorum_attention.bench.spec import Spec
from quorum_attention.execution.report import Report
from quorum_attention.kernels import CallShape, kernels, why_not
from quorum_attention.kernels.kit import LongNetKernel
from quorum_attention.kernels.protocol import Call, InnerKernel, Saved

Tensors = list[torch.Tensor]


class Method(ABC):
    """One way to compute a call.

    Attributes:
        name: its name in tables.
        on_device: whether inputs are on the device, or else in (page-locked) host memory.
        begins_small: whether a tiny call is made first. What only a first call takes (threads, the
            probe of a kernel) is then not counted against a budget.
    """

    name: str
    on_device: bool = True
    begins_small: bool = True

    def refusal(self, spec: Spec) -> str | None:
        """Why the call cannot be measured here; None if it can."""
        return None

    @abstractmethod
    def forward(self, spec: Spec, inputs: Tensors) -> Any:
        """Run the forward on [query, key, value, grad_out].

        Returns what ``backward`` needs; its first element is the output.
        """

    @abstractmethod
    def backward(self, spec: Spec, inputs: Tensors, state: Any) -> Tensors:
        """[grad_query, grad_key, grad_value]."""

    def report(self) -> dict[str, Any]:
        """The method's own report of its last run."""
        return {}

    def forget(self) -> None:
        """Free what is cached for the sizes so far."""
        return


def _scale(spec: Spec) -> float:
    return float(spec.head_dim**-0.5)


class Monolithic(Method):
    """One of torch's attention operators, called as it is."""

    def __init__(self, name: str, kernel: str) -> None:
        self.name, self._kernel = name, kernel

    def _operator(self) -> InnerKernel:
        return kernels()[self._kernel]

    def refusal(self, spec: Spec) -> str | None:
        """The kernel's own refusal, or a failed probe of the operator."""
        if self._kernel not in kernels():
            return "this torch does not have it"
        dtype = getattr(torch, spec.dtype)
        call = CallShape(
            spec.device, dtype, spec.heads, spec.kv_heads, spec.head_dim, spec.head_dim,
            spec.is_causal, spec.backward,
        )  # fmt: skip
        if spec.heads != spec.kv_heads and not self._operator().grouped:
            return "it takes no grouped heads"
        return why_not(self._operator(), call, torch.device(spec.device))

    def forward(self, spec: Spec, inputs: Tensors) -> Any:
        """See ``Method.forward``."""
        query, key, value, _ = inputs
        call = Call(query, key, value, spec.is_causal, _scale(spec))
        return self._operator().rectangle_forward(call)

    def backward(self, spec: Spec, inputs: Tensors, state: Any) -> Tensors:
        """See ``Method.backward``."""
        query, key, value, grad = inputs
        call = Call(query, key, value, spec.is_causal, _scale(spec))
        return list(self._operator().rectangle_backward(call, Saved(grad, *state)))


class Quorum(Method):
    """Ours."""

    def __init__(self, name: str, *, on_device: bool, **options: Any) -> None:
        self.name, self.on_device, self._options = name, on_device, options
        self._report = Report()
        self._results: Tensors | None = None

    def _arguments(self, spec: Spec) -> dict[str, Any]:
        budget = spec.budget_bytes
        if budget is not None:
            # The limit also counts memory that the allocator holds but cannot use.
            budget = budget * (9 if spec.device == "cuda" else 6) // 10
        return {
            "is_causal": spec.is_causal, "enable_gqa": True, "devices": spec.device,
            "report": self._report, "budget": budget, **self._options,
        }  # fmt: skip

    def forward(self, spec: Spec, inputs: Tensors) -> Any:
        """See ``Method.forward``."""
        self._report = Report()
        out = None
        if spec.device == "cuda" and not self.on_device:
            # Results go to page-locked memory, as in a program that streams.
            if self._results is None:
                like = (inputs[0], *inputs[:3])
                self._results = [torch.empty_like(t, pin_memory=True) for t in like]
            out = self._results[0]
        query, key, value, _ = inputs
        return attention_with_lse(query, key, value, out=out, **self._arguments(spec))

    def backward(self, spec: Spec, inputs: Tensors, state: Any) -> Tensors:
        """See ``Method.backward``."""
        query, key, value, grad = inputs
        grads = None if self._results is None else tuple(self._results[1:])
        return list(
            attention_backward(
                grad, query, key, value, *state, grads=grads,  # type: ignore[arg-type]
                **self._arguments(spec),
            )
        )  # fmt: skip

    def report(self) -> dict[str, Any]:
        """The report of the last run."""
        return self._report.to_dict()

    def forget(self) -> None:
        """Free the results' memory."""
        self._results = None


class Flex(Method):
    """torch's FlexAttention, compiled, with a causal block mask."""

    name = "flex"
    begins_small = False  # it compiles for each shape

    def __init__(self) -> None:
        self._compiled: Any = None

    def refusal(self, spec: Spec) -> str | None:
        """It is measured on CUDA only; elsewhere it has no backward."""
        if spec.device != "cuda":
            return "measured on CUDA only"
        if importlib.util.find_spec("torch.nn.attention.flex_attention") is None:
            return "this torch does not have it"
        return None

    def forward(self, spec: Spec, inputs: Tensors) -> Any:
        """See ``Method.forward``."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if self._compiled is None:
            self._compiled = torch.compile(flex_attention, dynamic=False)
        mask = None
        if spec.is_causal:
            mask = create_block_mask(
                lambda b, h, q, k: q >= k, None, None, spec.tokens, spec.tokens, spec.device
            )
        query, key, value = (t.detach().requires_grad_(spec.backward) for t in inputs[:3])
        with torch.set_grad_enabled(spec.backward):
            out = self._compiled(
                query, key, value, block_mask=mask, enable_gqa=spec.heads != spec.kv_heads
            )
        return out, (query, key, value)

    def backward(self, spec: Spec, inputs: Tensors, state: Any) -> Tensors:
        """See ``Method.backward``."""
        out, leaves = state
        return list(torch.autograd.grad(out, leaves, inputs[3]))


class StreamCQSA(Method):
    """The authors' package, version 2.2.3 (the extra ``rivals``), streaming from host memory."""

    on_device = False
    begins_small = False

    def __init__(self, name: str, **overrides: Any) -> None:
        self.name, self._overrides = name, overrides

    def refusal(self, spec: Spec) -> str | None:
        """It is optional, and takes equal heads in 16 bits on CUDA only."""
        if importlib.util.find_spec("stream_cqsa") is None:
            return 'not installed (pip install "quorum-attention[rivals]")'
        if spec.device != "cuda":
            return "measured on CUDA only"
        if spec.heads != spec.kv_heads or spec.dtype not in ("float16", "bfloat16"):
            return "it takes equal heads in 16 bits"
        return None

    def forward(self, spec: Spec, inputs: Tensors) -> Any:
        """See ``Method.forward``."""
        import stream_cqsa

        query, key, value = (t.detach().requires_grad_(spec.backward) for t in inputs[:3])
        with torch.set_grad_enabled(spec.backward):
            out = stream_cqsa.attention(
                query, key, value, is_causal=spec.is_causal, verbose=False, **self._overrides
            )
        return out, (query, key, value)

    def backward(self, spec: Spec, inputs: Tensors, state: Any) -> Tensors:
        """See ``Method.backward``."""
        out, leaves = state
        grad = inputs[3].to(device=out.device, dtype=out.dtype)
        return list(torch.autograd.grad(out, leaves, grad))


_EVERY: tuple[Method, ...] = (
    Monolithic("sdpa", "cpu"),
    Monolithic("flash", "flash"),
    Monolithic("cudnn", "cudnn"),
    Monolithic("efficient", "efficient"),
    Flex(),
    Quorum("quorum", on_device=False),
    Quorum("quorum-device", on_device=True),
    Quorum("quorum-depth-1", on_device=False, depth=1, accumulator="device"),
    Quorum("quorum-depth-2", on_device=False, depth=2, accumulator="device"),
    StreamCQSA("stream-cqsa"),
    StreamCQSA("stream-cqsa-host", itr=1, stream_from_host=True, accumulate_on_gpu=False),
)
_LONGNET = LongNetKernel([(2048, 1), (4096, 2), (8192, 4)])
# The paper's appendix: kernels as they are (one task, not cut), and recovered.
WRAPPED: tuple[Method, ...] = (
    Quorum("dense", on_device=True, kernel="dense", depth=0),
    Quorum("recovered-dense", on_device=True, kernel="dense"),
    Quorum("longnet", on_device=True, kernel=_LONGNET, depth=0),
    Quorum("recovered-longnet", on_device=True, kernel=_LONGNET),
)
METHODS = {method.name: method for method in (*_EVERY, *WRAPPED)}


def usual(device: str, quick: bool = False) -> list[str]:
    """The methods worth comparing on a device, the reference first."""
    if quick:
        return ["sdpa", "quorum"] if device == "cpu" else ["flash", "cudnn", "quorum"]
    if device == "cpu":
        return ["sdpa", "quorum", "quorum-depth-1", "quorum-depth-2"]
    return [method.name for method in _EVERY if method.name != "sdpa"]


def reference(device: str) -> str:
    """What ratios are taken against: FlashAttention-2, as in the paper."""
    return "sdpa" if device == "cpu" else "flash"
