"""fp16 with factors of 1e-6, by an operator that rounds as vendors' do.

It multiplies the gradients of the scores by the factor, and rounds them to fp16 after that. With
small factors these are no normal numbers.
"""

from __future__ import annotations

import pytest
import torch

import quorum_attention as qa
from quorum_attention.kernels import CallShape
from quorum_attention.kernels.protocol import Call, Saved
from quorum_attention.kernels.rectangles import RectangleKernel, lift_of

half = torch.float16


class Rounding(RectangleKernel):
    """A made-up vendor's operator, in fp32 but for what it multiplies by keys, queries and dO."""

    name = "rounding"
    grouped = False
    narrow_factor = True

    def refusal(self, call: CallShape) -> str | None:
        return None if call.device_type == "cpu" else "it is of the CPU"

    def rectangle_forward(self, call):  # type: ignore[no-untyped-def]
        scores = _scores(call)
        out = scores.softmax(-1) @ call.value.float()
        return out.to(call.query.dtype), scores.logsumexp(-1)

    def rectangle_backward(self, call, saved):  # type: ignore[no-untyped-def]
        query, key, value = call.inputs
        dtype = query.dtype
        p = (_scores(call) - saved.lse.unsqueeze(-1)).exp()
        given = saved.grad_out.float()
        delta = (given * saved.out.float()).sum(-1, keepdim=True)
        ds = (p * (given @ value.float().mT - delta) * call.scale).to(dtype).float()
        grads = (ds @ key.float(), ds.mT @ query.float(), p.to(dtype).float().mT @ given)
        return tuple(g.to(dtype) for g in grads)

    def forward_workspace_bytes(self, call, extent):  # type: ignore[no-untyped-def]
        return 1 << 20

    backward_workspace_bytes = forward_workspace_bytes


def _scores(call: Call) -> torch.Tensor:
    scores = call.query.float() @ call.key.float().mT * call.scale
    if call.causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores


KERNEL = Rounding()


@pytest.mark.parametrize("scale", [1e-6, -1e-6, 3e-5, -1e-3, 1e-9, 0.125])
@pytest.mark.parametrize("levels", [(), (3,)])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("large", [1.0, 1e3])
def test_gradients(scale: float, levels: tuple[int, ...], wide: bool, large: float) -> None:
    """``large``: queries, with which scores are, too."""
    n, g = 70, torch.Generator().manual_seed(3)
    q, k, v, grad = (torch.randn(1, 2, n, 16, generator=g).to(half) for _ in range(4))
    q = q * (1.0 if scale == 0.125 else large)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    # Inputs in host memory would be computed on a GPU, where there is one.
    call = {"is_causal": True, "scale": scale, "kernel": KERNEL, "devices": "cpu"}
    if levels:
        call["plan"] = qa.plan(
            n, heads=2, head_dim=16, dtype=half, levels=levels, tile=8, is_causal=True
        )
    else:
        call["depth"] = 0
    with torch.no_grad():
        out, lse = qa.attention_with_lse(*leaves, **call)
    into = tuple(torch.empty(t.shape, dtype=torch.float32 if wide else half) for t in leaves)
    found = qa.attention_backward(grad, *leaves, out, lse, grads=into, **call)
    right = [t.detach().double().requires_grad_() for t in leaves]
    scores = right[0] @ right[1].mT * scale
    scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    wanted = torch.autograd.grad(scores.softmax(-1) @ right[2], right, grad.double())
    for mine, exact in zip(found, wanted, strict=True):
        # A last place of the largest number, or what fp16 has as its smallest.
        most = max(2e-3 * float(exact.abs().max()), 0.0 if wide else 2.0**-24)
        assert float((mine.double() - exact).abs().max()) < most


def test_usual_factors_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for width in range(1, 1025):
        assert lift_of(width**-0.5) == 0
    seen: list[float] = []
    monkeypatch.setattr(
        Rounding, "rectangle_backward", lambda self, call, _: seen.append(call.scale) or call.inputs
    )
    rows = [torch.ones(1, 1, 2, 16, dtype=dtype) for dtype in (half, torch.bfloat16)]
    for one in rows:
        for scale in (1e-6, 0.01):
            KERNEL.whole_backward(Call(one, one, one, False, scale), Saved(one, one, one[..., 0]))
    assert seen == [1e-6 * 2**16, 0.01, 1e-6, 0.01]
    assert 2**-4 <= seen[0] < 2**-3
