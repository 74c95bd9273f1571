"""What torch has no public name for: modes, traces, derivatives of backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_memory import FailingAllocations
from helpers_processes import run_python
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from quorum_attention.kernels import get_kernel
from quorum_attention.kernels.masked.functions import depends_on_batch_head
from quorum_attention.kernels.protocol import Call, Saved
from quorum_attention.kernels.torch_private import (
    first_derivative,
    tracing,
)

CPU = torch.device("cpu")
TRIED = {
    "entries and heads of a mask": lambda: depends_on_batch_head(
        lambda b, h, q, k: q >= k * h, CPU
    ),
    "entries of scores": lambda: depends_on_batch_head(
        lambda s, b, h, q, k: s + b, CPU, scored=True
    ),
}


@pytest.mark.parametrize("what", list(TRIED))
def test_nothing_that_is_tried_runs_in_a_mode_of_the_callers(what: str) -> None:
    usual = TRIED[what]()
    with FailingAllocations(1, 10_000), torch.inference_mode():
        assert TRIED[what]() == usual
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert TRIED[what]() == usual
    finally:
        torch.set_default_dtype(torch.float32)


def test_traces_are_told_by_name() -> None:
    assert tracing() is None
    said = []

    def ask(x: torch.Tensor) -> torch.Tensor:
        said.append(tracing())
        return x + 1

    torch.jit.trace(ask, torch.ones(2), check_trace=False)
    make_fx(ask)(torch.ones(2))
    with FakeTensorMode():
        ask(torch.ones(2))
    assert said == ["torch.jit.trace", "make_fx or torch.export", "a FakeTensorMode"]


SCRIPT = """
import sys
import torch
from quorum_attention.kernels.torch_private import uncompiled

calls = []

@uncompiled
def twice(x, *, more=0):
    "Doubles."
    calls.append(torch.compiler.is_compiling())
    return 2 * x + more

before = torch.ones(3)
assert twice(before, more=1).tolist() == [3.0, 3.0, 3.0]
assert twice.__name__ == "twice" and twice.__doc__ == "Doubles."
LOADED = "torch._dynamo" in sys.modules
if sys.argv[1] == "plain":
    # Some builds of torch load it themselves.
    import subprocess
    own = "import torch, sys; print('torch._dynamo' in sys.modules)"
    own = subprocess.run([sys.executable, "-c", own], capture_output=True, text=True, check=True)
    assert str(LOADED) == own.stdout.strip()
else:
    graphs = []
    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward
    @torch.compile(backend=count)
    def user(x):
        return twice(x + 1).sin() + 1
    expected = (2 * (before + 1)).sin() + 1
    for _ in range(2):
        assert torch.equal(user(before), expected)
    assert len(graphs) == 2, graphs  # before it and after it
    assert calls == [False] * 3, calls
print("done")
"""


@pytest.mark.parametrize("how", ["plain", "compiled"])
def test_in_a_process_of_its_own(how: str) -> None:
    done = run_python(SCRIPT, how)
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout


@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (40, 80), (20, 12)])
def test_meta_calls(name: str, masked: bool, head_dim: int, value_dim: int) -> None:
    if (name == "flash" and (masked or head_dim != value_dim)) or (
        name == "cudnn" and head_dim % 8
    ):
        pytest.skip("refused")
    kernel = get_kernel(name)
    key_heads = 2 if kernel.grouped else 4

    def slot(heads: int, rows: int, width: int) -> torch.Tensor:
        shape = (2, heads, rows + 9, width)
        return torch.empty(shape, dtype=torch.float16, device="meta")[:, :, 1 : rows + 1]

    q, k, v = slot(4, 50, head_dim), slot(key_heads, 70, head_dim), slot(key_heads, 70, value_dim)
    do, o = slot(4, 50, value_dim), slot(4, 50, value_dim)
    bias = torch.empty(1, 1, 50, 1, dtype=torch.float16, device="meta") if masked else None
    call = Call(q, k, v, False, 0.5, bias)
    out, lse = kernel.rectangle_forward(call)
    assert out.shape == do.shape
    assert lse.shape == q.shape[:3]
    assert lse.dtype == torch.float32
    grads = kernel.rectangle_backward(call, Saved(do, o, lse))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shift: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3 + shift

    @staticmethod
    @first_derivative("cube")
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad_out * 3 * x**2, None


def test_a_penalty_on_gradients_does_not_lose_its_part() -> None:
    x = torch.randn(5, requires_grad=True)
    for upstream in (torch.ones(5), torch.ones(5, requires_grad=True)):
        (grad,) = torch.autograd.grad(_Cube.apply(x, 1.0), x, upstream, create_graph=True)
        assert torch.allclose(grad, 3 * x.detach() ** 2)
        with pytest.raises(NotImplementedError, match="second derivatives of cube"):
            (x.sum() + grad.square().sum()).backward()


def test_first_derivatives_are_as_ever() -> None:
    x = torch.randn(5, requires_grad=True)
    _Cube.apply(x, 1.0).sum().backward()
    assert x.grad is not None
    assert not x.grad.requires_grad
    assert torch.allclose(x.grad, 3 * x.detach() ** 2)
