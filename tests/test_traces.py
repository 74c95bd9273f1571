"""Invariant 8: what fails under a trace, or comes of a mode, is never remembered.

Every first call is made in a process of its own, inside a checkpoint, under hooks, or
in any mode of torch's. An ordinary call after it has to run on the kernel that it would
have run on anyway, and come out right.
"""

from __future__ import annotations

import os
import shutil
import textwrap
from pathlib import Path

import pytest
import torch
from helpers.attention import Inputs, attention, inputs
from helpers.first_calls import MODES, Watching, setting
from helpers.passes import both_passes, pass_of
from helpers.plans import passing
from helpers.processes import run_python

import quorum_attention as qa
from quorum_attention.kernels.kit.masks import document, sliding_window

# That Inductor looks for.
COMPILERS = (os.environ.get("CXX", "g++"), "g++", "clang++")
_BEGIN = """
import torch
import quorum_attention as qa
torch.set_num_threads(1)
q, k, v = (torch.randn(1, 2, 300, 16) for _ in range(3))

def refused(call, *says, by=NotImplementedError):
    try:
        call()
    except by as error:
        assert all(word in str(error) for word in says), error
    else:
        raise AssertionError("not refused")
"""

_AFTER = """
report, results = qa.Report(), []
for attention, more in ((qa.attention, {"report": report}),
                        (torch.nn.functional.scaled_dot_product_attention, {})):
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = attention(*leaves, is_causal=True, **more)
    results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
kernel = "cpu" if not torch.cuda.is_available() else report.forward.kernel
assert report.forward.kernel == kernel != "dense", report.forward.kernel
assert report.backward.kernel == kernel, report.backward.kernel
"""

_CALLS = """
import sys
sys.path.insert(0, sys.argv[1])
import helpers.first_calls
helpers.first_calls.main(*sys.argv[2:4], "cpu", sys.argv[4], 300, 16)
"""

FIRST = {
    "fake tensors": """
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode() as mode:
            fakes = [torch.randn(1, 2, 300, 16, requires_grad=True) for _ in range(3)]
            out, lse = qa.attention_with_lse(*fakes)
            out.sum().backward()
            assert fakes[0].grad.shape == out.shape and lse.shape == (1, 2, 300)
            refused(lambda: qa.attention(*fakes, out=out.detach()), "cannot be traced")
            qa.estimate(300, heads=2, head_dim=16, dtype=torch.float32)
        assert type(qa.attention(*fakes)) is type(fakes[0])
        refused(lambda: qa.attention(*fakes, out=out.detach()), "cannot be traced")
        refused(lambda: qa.attention_backward(out, *fakes, out, lse), "cannot be traced")
    """,
    "make_fx": """
        from torch.fx.experimental.proxy_tensor import make_fx
        def call(q, k, v):
            return qa.attention(q, k, v)
        graphs = [make_fx(call, tracing_mode=kind) for kind in ("real", "fake", "symbolic")]
        for graph in (*graphs, make_fx(call, pre_dispatch=True)):
            made = graph(q, k, v)
            assert "quorum_attention.flash_attn" in made.code
            torch.testing.assert_close(
                made(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v)
            )
    """,
    "a traced module": """
        from functools import partial
        from torch.utils import checkpoint as of
        how = {"context_fn": partial(of.create_selective_checkpoint_contexts, lambda *a, **n: 1)}
        for more in ({}, how):
            def call(*three):
                return of.checkpoint(qa.attention, *three, use_reentrant=False, **more)
            trace = partial(torch.jit.trace, call, (q, k, v), check_trace=False)
            refused(trace, "torch.jit.trace")
    """,
    "one graph of all": """
        for call in (lambda q, k, v: qa.attention(q, k, v, out=torch.empty_like(q)),
                     lambda q, k, v: qa.attention_backward(q, q, k, v, q, q[..., 0].float())):
            made = torch.compile(call, fullgraph=True, backend="eager")
            refused(lambda: made(q, k, v), "quorum_attention", by=torch._dynamo.exc.Unsupported)
    """,
    "compiled autograd": """
        # It looks into the backward of every function; ours is one break there.
        from torch._dynamo.utils import counters
        torch._dynamo.config.compiled_autograd = True
        leaf, wanted = (q.clone().requires_grad_() for _ in range(2))
        @torch.compile(backend="eager")
        def step(leaf):
            qa.attention(leaf * 2, k, v).sum().backward()
        step(leaf)
        torch._dynamo.config.compiled_autograd = False
        torch.nn.functional.scaled_dot_product_attention(wanted * 2, k, v).sum().backward()
        torch.testing.assert_close(leaf.grad, wanted.grad, rtol=1e-4, atol=1e-5)
        ours = [why for why in counters["graph_break"] if "Tensor.backward()" not in why]
        assert all("disable" in why for why in ours), ours
    """,
    "a function mode that refuses": """
        from torch.overrides import TorchFunctionMode
        class Picky(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                if "randn" in str(func):
                    raise RuntimeError("not under me")
                return func(*args, **(kwargs or {}))
        with Picky():
            qa.attention(q, k, v)
    """,
}


def run(code: str, *arguments: object) -> None:
    done = run_python(code, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("mode", list(FIRST))
def test_a_first_call_under_a_mode_leaves_the_next_as_it_would_have_been(
    mode: str,
) -> None:
    run(_BEGIN + textwrap.dedent(FIRST[mode]) + _AFTER)


# Each mode once; inside checkpoints and hooks autograd, or what records it, takes part.
MADE_BY = {
    "checkpoint": ("keeps", "float32"), "reentrant checkpoint": ("dense", "bfloat16"),
    "hooks that count": ("score_mod", "float32"), "save_on_cpu": ("function", "float32"),
    "a default device": ("window", "float32"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_first_call_and_the_next_are_right(mode: str) -> None:
    run(_CALLS, Path(__file__).parent, mode, *MADE_BY.get(mode, ("auto", "float32")))


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason="there is no C++ compiler here"
)
def test_inductor_compiles_a_step_in_one_graph_and_says_nothing() -> None:
    """torch.compile as users call it: the graph that it makes code of, forward and
    backward, has the attention as an operator. What it compiled is kept for the next
    run."""
    done = run_python(
        "import os\nos.environ['TORCHINDUCTOR_COMPILE_THREADS'] = '1'\n"
        + _BEGIN
        + textwrap.dedent("""
        from torch._dynamo.utils import counters

        def grads(attention):
            def model(q, k, v):
                return attention(q * 2, k, v, is_causal=True) + q
            call = torch.compile(model, fullgraph=True) if attention is qa.attention else model
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            out = call(*leaves)
            return out, *torch.autograd.grad(out.square().sum(), leaves)

        wanted = grads(torch.nn.functional.scaled_dot_product_attention)
        torch.testing.assert_close(grads(qa.attention), wanted, rtol=1e-4, atol=1e-4)
        assert not counters["graph_break"], counters["graph_break"]
        assert counters["stats"]["unique_graphs"] == 1, counters["stats"]
        made = counters["inductor"]
        both = made["fxgraph_cache_hit"] + made["fxgraph_cache_miss"]
        both += counters["aot_autograd"]["autograd_cache_hit"]
        assert both >= 1, (made, counters["aot_autograd"])
        print("right")
        """)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "right"
    assert done.stderr == ""


def _function(query, key, value, *, is_causal, scale, key_positions):
    bias = -0.01 * key_positions.to(query.dtype)
    return attention(query, key, value, is_causal=is_causal, scale=scale, bias=bias)


IDS = torch.arange(150) // 40


def _documents():
    return qa.from_score_mod(
        mask_mod=document(IDS) & sliding_window(33), compiled=False
    )


PLACES = {
    "meta": lambda: torch.device("meta"), "dispatch": Watching, "inference": torch.inference_mode,
    "float64": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
}  # fmt: skip
KERNELS = {
    "cpu": lambda: "cpu",
    "dense": lambda: "dense",
    "function": lambda: qa.from_lse_function(_function),
    "score": lambda: qa.from_score_mod(
        lambda s, b, h, q, k: s - 0.1 * k, compiled=False
    ),
    "documents": _documents,
    "longnet": lambda: qa.LongNetKernel([(30, 1), (60, 2)]),
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("place", PLACES)
def test_work_goes_where_the_inputs_are_under_any_mode(place: str) -> None:
    """No tensor that is made on the way takes its device, its dtype or its kind from a
    mode."""
    q, mask = torch.randn(1, 2, 150, 16), torch.rand(150, 150) > 0.3
    for name, make in KERNELS.items():
        own = mask if name in ("cpu", "dense") else None
        for depth, tensor in ((0, q.mT.contiguous().mT), (1, q)):
            given, call = Inputs(*[tensor] * 3, q), {"is_causal": True, "depth": depth}
            with PLACES[place]():
                kernel = make()
                found = both_passes(given, kernel=kernel, attn_mask=own, **call)
            # With the same kernel and all that it kept, and with another.
            for other in (kernel, make()):
                wanted = both_passes(given, kernel=other, attn_mask=own, **call)
                torch.testing.assert_close(
                    [t.clone() for t in found], list(wanted), msg=name
                )
            leaf = tensor.clone().requires_grad_()
            qa.attention(leaf, leaf, leaf, kernel=kernel, depth=depth).sum().backward()


@pytest.mark.parametrize("route", ["slots", "passing", "sinks"])
def test_a_backward_under_a_default_device(route: str) -> None:
    """In 16 bits it asks the host whether a gradient overflowed."""
    given = inputs(101, dtype=torch.float16)
    call, mask = {}, qa.Mask(sinks=torch.zeros(2)) if route == "sinks" else None
    if route == "sinks":
        call = {"attn_mask": mask, "grad_sinks": True}
    else:
        plan = qa.plan(
            101, heads=2, head_dim=8, dtype=torch.float16, levels=(7,), layout="balanced",
            over_inputs=False, kernel="cpu", backward=True, device="cpu",
        )  # fmt: skip
        call = {"plan": passing(plan, 32, 20) if route == "passing" else plan}
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            saved = qa.attention_with_lse(*given.three, mask)
            found.append(pass_of(given, True, saved, **call)())
    assert all(map(torch.equal, *found))
