"""Calls in captured CUDA graphs: a replay follows what the device reads; the rest is
refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import quorum_attention as qa

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
N = 300


def inputs() -> list[torch.Tensor]:
    return [torch.randn(3, 2, N, 64, device="cuda").bfloat16() for _ in range(3)]


def captured(
    call: Callable[[], torch.Tensor],
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of a call that has been made before, and its result."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one.float() - other.float()).norm() < 1e-2 * other.float().norm())


@pytest.mark.parametrize("kernel", ["auto", "cudnn", "flash", "efficient", "native"])
def test_a_replay_follows_the_inputs(kernel: str) -> None:
    three = inputs()
    graph, out = captured(lambda: qa.attention(*three, is_causal=True, kernel=kernel))
    for tensor in three:
        tensor.normal_()
    graph.replay()
    assert close(out, qa.attention(*three, is_causal=True, kernel=kernel))


def test_a_replay_follows_masks_on_the_device() -> None:
    three, bias = inputs(), torch.randn(2, N, N, device="cuda")
    sinks = torch.randn(2, device="cuda")
    mask = qa.Mask(window=40, bias=bias, sinks=sinks)
    graph, out = captured(lambda: qa.attention(*three, mask))
    for tensor in (*three, bias, sinks):
        tensor.normal_()
    graph.replay()
    assert close(out, qa.attention(*three, mask))


@pytest.mark.parametrize("kernel", ["auto", "native"])
def test_a_backward_under_a_mask_with_grouped_heads(kernel: str) -> None:
    """It is captured, or refused by name, and the program goes on."""
    query, key, value = (t.requires_grad_() for t in inputs())
    shared = [key[:, :1], value[:, :1]]
    kept = torch.rand(3, 1, 1, N, device="cuda") < 0.7

    def call() -> torch.Tensor:
        out = qa.attention(query, *shared, kept, enable_gqa=True, kernel=kernel)
        (grad_query,) = torch.autograd.grad(out, query, torch.ones_like(out))
        return grad_query

    try:
        graph, grad_query = captured(call)
    except NotImplementedError as error:
        assert kernel == "auto"
        assert "goes through slots" in str(error)  # noqa: PT017
        torch.randn(3, device="cuda")
        return
    kept.logical_not_()
    graph.replay()
    assert close(grad_query, call())


@pytest.mark.parametrize("decomposed", [False, True])
def test_a_replay_after_a_mask_has_gone(decomposed: bool) -> None:
    """Its tables are read from page-locked memory at every replay."""
    three = inputs()

    def call() -> torch.Tensor:
        depth: Any = 1 if decomposed else "auto"
        return qa.attention(
            *three, qa.Mask(causal=True, window=37), kernel="native", depth=depth
        )

    graph, out = captured(call)
    graph.replay()
    right = out.clone()
    for window in range(1, 80):
        qa.attention(*three, qa.Mask(causal=True, window=window), kernel="native")
    gc.collect()
    torch.cuda.synchronize()
    pinned = [
        torch.full((n,), 7, dtype=torch.int32).pin_memory() for n in range(64, 4096, 64)
    ]
    graph.replay()
    assert torch.equal(out, right)
    del pinned


LENGTHS = torch.tensor([7, 100, N])


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"key_lengths": LENGTHS}, "Mask.key_lengths"),
        ({"documents": torch.arange(N) // 50}, "Mask.documents"),
        ({"key_padding": torch.arange(N) < LENGTHS[:, None]}, "Mask.key_padding"),
    ],
    ids=str,
)
def test_what_the_host_has_read_is_refused(
    fields: dict[str, torch.Tensor], name: str
) -> None:
    """A graph replayed the lengths of its capture, whatever was written to them
    since."""
    three = inputs()
    for where in ("cuda", "cpu"):
        mask = qa.Mask(**{field: tensor.to(where) for field, tensor in fields.items()})
        qa.attention(*three, mask)
        with (
            pytest.raises(
                NotImplementedError, match=f"{name} cannot be given while a CUDA graph"
            ),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            qa.attention(*three, mask)


def test_host_memory_is_refused() -> None:
    three, bias = inputs(), torch.zeros(N, N)
    qa.attention(*three, bias)
    with (
        pytest.raises(NotImplementedError, match="attn_mask cannot be on cpu while"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        qa.attention(*three, bias)
    on_host = [t.cpu() for t in three]
    qa.attention(*on_host, devices="cuda")
    with (
        pytest.raises(
            NotImplementedError, match="query, key and value cannot be on cpu while"
        ),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        qa.attention(*on_host, devices="cuda")


def test_a_function_is_called_at_every_replay() -> None:
    """In blocks that it keeps in part; as FlexAttention calls it."""
    three, reach = inputs(), torch.tensor(20, device="cuda")
    mask = qa.Mask(keeps=lambda b, h, q, k: (q - k).abs() <= reach)
    graph, out = captured(lambda: qa.attention(*three, mask))
    reach.fill_(10)
    graph.replay()
    near = (torch.arange(N)[:, None] - torch.arange(N)).abs() <= 10
    assert close(
        out, torch.nn.functional.scaled_dot_product_attention(*three, near.cuda())
    )
    fresh = qa.Mask(keeps=lambda b, h, q, k: (q - k).abs() <= reach + 1)
    with (
        pytest.raises(
            RuntimeError, match="has to be evaluated before a CUDA graph is captured"
        ),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        qa.attention(*three, fresh)


def test_scaled_gradients_in_a_graph() -> None:
    """The host cannot ask whether they overflowed."""
    three = [t.half().requires_grad_() for t in inputs()]
    grad_out = torch.randn(3, 2, N, 64, device="cuda").half()

    def call() -> torch.Tensor:
        out = qa.attention(*three, kernel="cudnn", depth=1)
        return torch.cat(
            [g.flatten() for g in torch.autograd.grad(out, three, grad_out)]
        )

    graph, grads = captured(call)
    grad_out.normal_()
    graph.replay()
    assert close(grads, call())
