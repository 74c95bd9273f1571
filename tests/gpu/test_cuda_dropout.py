"""Dropout on a GPU: the pairs of the definition, whatever computes and however a call is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_attention import assert_close, inputs
from torch.utils.checkpoint import checkpoint

import quorum_attention as qa
from quorum_attention.decomposition import Rows
from quorum_attention.kernels.dropout import Dropout, dropped

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SEED = 2**41 + 3
CUTS: dict[str, dict[str, Any]] = {
    "uncut": {"levels": ()},
    "head groups": {"levels": (), "heads_per_group": 2},
    "through slots": {"levels": (7,), "over_inputs": False, "n_cap": 2},
    "together": {"levels": (7,), "over_inputs": True, "inputs": "device"},
    "depth 2": {"levels": (7, 3), "tile": 16},
    "balanced": {"levels": (13,), "layout": "balanced"},
}


def kept(p: float, batch: int, heads: int, n: int, m: int, device: str = "cpu") -> torch.Tensor:
    rows = torch.arange(n, device=device)
    return ~dropped(Dropout(p, SEED), batch, heads, rows, [Rows(0, m, 0)])


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_definition_is_the_same_on_both_devices(p: float) -> None:
    assert torch.equal(kept(p, 2, 3, 300, 500, "cuda").cpu(), kept(p, 2, 3, 300, 500))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kernel", ["native", "dense"])
@pytest.mark.parametrize("home", ["cuda", "cpu"])
def test_the_same_pairs_however_a_call_is_cut(kernel: str, cut: str, home: str) -> None:
    n, m, heads = 500, 128, 4
    if home == "cpu" and cut == "together":
        pytest.skip("only over inputs on the device")
    query = torch.zeros(2, heads, n, 64, dtype=torch.float16, device=home)
    key = torch.zeros(2, 2, m, 64, dtype=torch.float16, device=home)
    value = torch.eye(m, dtype=torch.float16, device=home).expand(2, 2, m, m)
    named: dict[str, Any] = {"inputs": "device" if home == "cuda" else "host", **CUTS[cut]}
    plan = qa.plan(
        n, n_keys=m, heads=heads, kv_heads=2, head_dim=64, value_dim=m, batch=2, dropout_p=0.4,
        kernel=kernel, device="cuda", **named,
    )  # fmt: skip
    out = qa.attention(
        query, key, value, dropout_p=0.4, dropout_seed=SEED, enable_gqa=True, plan=plan,
        kernel=kernel, devices="cuda",
    )  # fmt: skip
    assert torch.equal((out != 0).cpu(), kept(0.4, 2, heads, n, m))


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_values_and_gradients(
    dtype: torch.dtype, head_dim: int, is_causal: bool, depth: int
) -> None:
    """Of the textbook in float64; lengths that are no multiple of anything."""
    n, p = 777, 0.25
    given = inputs(n, heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype, device="cuda")
    leaves = [t.clone().requires_grad_() for t in given.three]
    report = qa.Report()
    out = qa.attention(
        *leaves, dropout_p=p, dropout_seed=SEED, is_causal=is_causal, enable_gqa=True, depth=depth,
        report=report,
    )  # fmt: skip
    grads = torch.autograd.grad(out, leaves, given.grad_out)
    assert report.forward.kernel == report.backward.kernel == "native"
    q, k, v = (t.double().requires_grad_() for t in given.three)
    wide = [t.repeat_interleave(2, 1) for t in (k, v)]
    s = q @ wide[0].mT * head_dim**-0.5
    if is_causal:
        s = s.masked_fill(torch.ones(n, n, device="cuda", dtype=torch.bool).triu(1), -torch.inf)
    z = kept(p, 1, 4, n, n, "cuda").double() / (1 - p)
    wanted = (s.softmax(-1) * z) @ wide[1]
    limit = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}[dtype]
    assert_close(out, wanted, limit)
    exact = torch.autograd.grad(wanted, (q, k, v), given.grad_out.double())
    for one, other in zip(grads, exact, strict=True):
        assert_close(one, other, 3 * limit)


def test_runs_that_begin_anywhere() -> None:
    """A window, and a balanced layout, whose chunks do not begin at multiples of four."""
    n = 1001
    three = [torch.randn(1, 2, n, 64, dtype=torch.float16, device="cuda") for _ in range(3)]
    for kernel in (qa.NativeKernel(window=(300, 0)), qa.NativeKernel()):
        found = [
            qa.attention(*three, dropout_p=0.3, dropout_seed=SEED, is_causal=True, kernel=kernel,
                         plan=plan)
            for plan in (
                None,
                qa.plan(n, heads=2, is_causal=True, levels=(7,), layout="balanced", kernel=kernel,
                        device="cuda", inputs="device", dropout_p=0.3),
            )
        ]  # fmt: skip
        assert_close(found[0], found[1].double(), 4e-3)


@pytest.mark.parametrize(("budget", "trains"), [("24 MiB", False), ("64 MiB", True)])
def test_a_budget_holds(budget: str, trains: bool) -> None:
    sizes: dict[str, Any] = {"dtype": torch.float16, "device": "cuda"}
    three = [torch.randn(1, 8, 16_384, 64, **sizes).requires_grad_(trains) for _ in range(3)]
    call: dict[str, Any] = {"dropout_p": 0.1, "dropout_seed": SEED, "is_causal": True}
    report, room = qa.Report(), torch.empty(1, 8, 16_384, 64, **sizes)
    out = qa.attention(*three, **call, budget=budget, out=room, report=report)
    assert report.forward.peak_bytes <= report.forward.budget_bytes
    whole = qa.attention(*(t.detach() for t in three), **call)
    assert_close(out, whole.double(), 4e-3)


def test_seeds_come_from_the_generator_of_the_cpu() -> None:
    """The same as on a CPU; checkpointing draws it again; a graph has to be given one."""
    seeds = []
    for device in ("cuda", "cpu"):
        torch.manual_seed(4)
        report = qa.Report()
        three = [torch.randn(1, 2, 64, 64, dtype=torch.float32, device="cpu") for _ in range(3)]
        torch.manual_seed(4)
        qa.attention(*(t.to(device) for t in three), dropout_p=0.5, report=report, devices=device)
        seeds.append(report.forward.dropout_seed)
    assert seeds[0] == seeds[1]
    leaves = [
        torch.randn(1, 2, 300, 64, dtype=torch.float16, device="cuda", requires_grad=True)
        for _ in range(3)
    ]

    def call(*given: torch.Tensor) -> torch.Tensor:
        return qa.attention(*given, dropout_p=0.5)

    found = []
    for again in (False, True):
        torch.manual_seed(6)
        out = checkpoint(call, *leaves, use_reentrant=False) if again else call(*leaves)
        found.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    three = [t.detach() for t in leaves]
    qa.attention(*three, dropout_p=0.5, dropout_seed=1)  # warm-up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = qa.attention(*three, dropout_p=0.5, dropout_seed=1)
    graph.replay()
    assert torch.equal(captured, qa.attention(*three, dropout_p=0.5, dropout_seed=1))
    with (
        pytest.raises(NotImplementedError, match="dropout_p in a CUDA graph needs dropout_seed"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        qa.attention(*three, dropout_p=0.5)
