"""The methods to compare: ours, torch's kernels, FlexAttention, and the authors' package."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from quorum_attention.api import attention_backward, attention_with_lse
from quorum_attention.kernels.kit import LongNetKernel

if TYPE_CHECKING:
    from quorum_attention.bench.child import Spec
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
    results: dict[str, torch.Tensor]
    report: Report | None = None
    progress: Callable[[int, int, str], None] | None = None

    def show(self, progress: Any, prefix: str, report: Report | None) -> None:
        """Where our method shows its progress, and what report it fills."""
        self.report = report
        shown = progress and (lambda done, total, label: progress(done, total, prefix + label))
        self.progress = shown

    def small(self, tokens: int, on_device: bool) -> Call:
        """A call of the same kind on the first few tokens, in memory."""

        def cut(tensor: torch.Tensor, dim: int = -2) -> torch.Tensor:
            first = tensor.narrow(dim, 0, min(tokens, tensor.shape[dim])).clone()
            return first.to(self.device) if on_device else first

        results = {n: cut(t, -1 if n == "lse" else -2) for n, t in self.results.items()}
        grad = None if self.grad is None else cut(self.grad)
        inputs = [cut(t) for t in self.inputs]
        return Call(self.device, self.is_causal, self.budget_bytes, inputs, grad, results)


class Method:
    """One way to compute a call: torch's function, with its gradient by autograd.

    Attributes:
        on_device: whether inputs are on the device, or else in (page-locked) host memory.
        begins_small: whether a small call is made first: what only a first call takes (threads, the
            probe of a kernel) is then not counted against a limit.
        writes: whether it writes into results that are given, and fills a report.
    """

    on_device, begins_small, writes = True, True, False

    def __init__(self, backend: SDPBackend | None = None) -> None:
        self._backend = backend

    def refusal(self, spec: Spec) -> str | None:
        """Why the call cannot be measured here; None if it can."""
        on_cpu = spec.device == "cpu" and self._backend is not None
        return "measured on CUDA only" if on_cpu else None

    def attend(self, call: Call, inputs: list[torch.Tensor]) -> torch.Tensor:
        """The output, recorded by autograd."""
        query, key, value = inputs
        grouped = query.shape[-3] != key.shape[-3]
        with nullcontext() if self._backend is None else sdpa_kernel(self._backend):
            return scaled_dot_product_attention(
                query, key, value, is_causal=call.is_causal, enable_gqa=grouped
            )

    def forward(self, call: Call) -> Any:
        """What ``backward`` needs; its first element is the output."""
        leaves = [t.detach().requires_grad_(call.grad is not None) for t in call.inputs]
        with torch.set_grad_enabled(call.grad is not None):
            return self.attend(call, leaves), leaves

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


class Flex(Method):
    """torch's FlexAttention, compiled, with a causal block mask."""

    begins_small = False  # it compiles for each shape

    def refusal(self, spec: Spec) -> str | None:
        """On a CPU it has no backward."""
        return "measured on CUDA only" if spec.device == "cpu" else None

    def attend(self, call: Call, inputs: list[torch.Tensor]) -> torch.Tensor:
        """See ``Method``."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        query, key, value = inputs
        n, mask = query.shape[-2], None
        if call.is_causal:
            mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, n, n, str(call.device))
        grouped = query.shape[-3] != key.shape[-3]
        run = torch.compile(flex_attention, dynamic=False)
        out: torch.Tensor = run(query, key, value, block_mask=mask, enable_gqa=grouped)
        return out


class StreamCQSA(Method):
    """The authors' package, version 2.2.3 (the extra ``rivals``), streaming from host memory."""

    on_device, begins_small = False, False

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options

    def refusal(self, spec: Spec) -> str | None:
        """It is optional, and takes equal heads in 16 bits on CUDA only."""
        if importlib.util.find_spec("stream_cqsa") is None:
            return 'not installed (pip install "quorum-attention[rivals]")'
        if spec.device == "cpu":
            return "measured on CUDA only"
        if spec.heads != spec.kv_heads or spec.dtype not in ("float16", "bfloat16"):
            return "it takes equal heads in 16 bits"
        return None

    def attend(self, call: Call, inputs: list[torch.Tensor]) -> torch.Tensor:
        """See ``Method``."""
        import stream_cqsa

        out: torch.Tensor = stream_cqsa.attention(
            *inputs, is_causal=call.is_causal, verbose=False, **self._options
        )
        return out


METHODS: dict[str, Method] = {
    "sdpa": Method(),
    "flash": Method(SDPBackend.FLASH_ATTENTION),
    "cudnn": Method(SDPBackend.CUDNN_ATTENTION),
    "efficient": Method(SDPBackend.EFFICIENT_ATTENTION),
    "flex": Flex(),
    "quorum": Quorum(),
    "quorum-device": Quorum(on_device=True),
    "quorum-depth-1": Quorum(depth=1, accumulator="device"),
    "quorum-depth-2": Quorum(depth=2, accumulator="device"),
    "stream-cqsa": StreamCQSA(),
    "stream-cqsa-host": StreamCQSA(itr=1, stream_from_host=True, accumulate_on_gpu=False),
}
# The paper's appendix: kernels that are compared with themselves, recovered.
ITSELF: dict[str, Any] = {
    "dense": "dense",
    "LongNet": LongNetKernel([(512, 1), (1024, 2), (2048, 4)], full_precision=True),
}


def default_methods(device: str, quick: bool = False) -> list[str]:
    """The methods worth comparing on a device, the reference first."""
    if quick:
        return ["sdpa", "quorum"] if device == "cpu" else ["flash", "cudnn", "quorum"]
    if device == "cpu":
        return ["sdpa", "quorum", "quorum-depth-1", "quorum-depth-2"]
    return [name for name in METHODS if name != "sdpa"]


def reference(device: str) -> str:
    """What ratios are taken against: FlashAttention-2, as in the paper."""
    return "sdpa" if device == "cpu" else "flash"


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


def differences(kernel: str, calls: Iterable[Call]) -> dict[str, list[tuple[float, float]]]:
    """By result, the largest and the mean absolute difference between a kernel and itself recovered
    at depths 1 and 2, for every call."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in RESULTS}
    depths = [Quorum(on_device=True, kernel=ITSELF[kernel], depth=depth) for depth in (0, 1, 2)]
    for call in calls:
        whole, *cut = (method.results(call) for method in depths)
        for results in cut:
            for name, mine, wanted in zip(RESULTS, results, whole, strict=True):
                apart = (mine.double() - wanted.double()).abs()
                found[name].append((float(apart.max()), float(apart.mean())))
    return found
