"""Kernels from functions: exact where the function is right, and told apart where it is not."""

from __future__ import annotations

import math

import pytest
import torch
from helpers_attention import fresh_generator

import quorum_attention as qa
from quorum_attention.checking import causes
from quorum_attention.kernels import merge_
from quorum_attention.kernels.kit import from_lse_function

SLOPE = 0.05


def softmax_attention(query, key, value, *, is_causal, scale):
    """A page-long example's function: plain attention."""
    scores = scale * (query @ key.mT)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - lse.unsqueeze(-1)) @ value, lse


def alibi(query, key, value, *, is_causal, scale, query_positions, key_positions):
    apart = query_positions[:, None] - key_positions[None]
    scores = scale * (query @ key.mT) - (SLOPE * apart.abs()).to(query.dtype)
    if is_causal:
        scores = scores.masked_fill(apart < 0, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - lse.unsqueeze(-1)) @ value, lse


def by_head(query, key, value, *, is_causal, scale, head_indices, **rest):
    out, lse = softmax_attention(
        query * (1 + head_indices.to(query.dtype)[None, :, None, None]), key, value,
        is_causal=is_causal, scale=scale,
    )  # fmt: skip
    return out, lse


def explicit(grad_out, query, key, value, out, lse, *, is_causal, scale):
    scores = scale * (query @ key.mT)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1),
                                    -torch.inf)  # fmt: skip
    p = torch.exp(scores - lse.unsqueeze(-1))
    delta = (grad_out * out).sum(-1, keepdim=True)
    ds = p * (grad_out @ value.mT - delta)
    return scale * (ds @ key), scale * (ds.mT @ query), p.mT @ grad_out


@pytest.mark.parametrize("function", [softmax_attention, alibi, by_head])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_right_functions_are_exact(function, dtype) -> None:
    found = qa.check_kernel(from_lse_function(function), dtype=dtype, device="cpu")
    assert found.exact, str(found)
    assert len(found.cases) == 24
    assert found.cause is None


def test_an_explicit_backward() -> None:
    kernel = from_lse_function(softmax_attention, backward=explicit)
    assert qa.check_kernel(kernel, device="cpu").exact


def test_shared_key_heads() -> None:
    found = qa.check_kernel(from_lse_function(softmax_attention), heads=4, kv_heads=2, device="cpu")
    assert found.exact, str(found)


def test_against_torch_with_gradients() -> None:
    g = fresh_generator()
    q, k, v = (torch.randn(2, 3, 150, 8, generator=g, requires_grad=True) for _ in range(3))
    kernel = from_lse_function(softmax_attention)
    out = qa.attention(q, k, v, is_causal=True, kernel=kernel, depth=1, devices="cpu")
    grad = torch.randn(out.shape, generator=g)
    mine = torch.autograd.grad(out, (q, k, v), grad)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    theirs = torch.autograd.grad(wanted, (q, k, v), grad)
    torch.testing.assert_close(out, wanted, atol=2e-6, rtol=1e-5)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-5)


# What is wrong, and the name it should be given.


def local_positions(query, key, value, *, is_causal, scale):
    """ALiBi by the positions within what it is handed."""
    rows = torch.arange(query.shape[2])[:, None]
    return alibi(query, key, value, is_causal=is_causal, scale=scale,
                 query_positions=rows[:, 0], key_positions=torch.arange(key.shape[2]))  # fmt: skip


def no_lse(query, key, value, *, is_causal, scale):
    out, lse = softmax_attention(query, key, value, is_causal=is_causal, scale=scale)
    return out, lse * 0


def lse_in_bits(query, key, value, *, is_causal, scale):
    out, lse = softmax_attention(query, key, value, is_causal=is_causal, scale=scale)
    return out, lse / math.log(2)


class WholeTask:
    """A full inner kernel that makes its own mask of a task, and gets it wrong."""

    name = "whole-task"
    own_attention = True

    def __init__(self, mask) -> None:
        self.mask = mask

    def refusal(self, call):
        return None

    def forward_workspace_bytes(self, call, extent):
        return 1 << 20

    backward_workspace_bytes = forward_workspace_bytes

    def forward(self, task, state):
        keep = self.mask(task)
        scores = task.scale * (task.query @ task.key.mT).masked_fill(~keep, -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        safe = lse.masked_fill(lse == -torch.inf, 0.0)
        merge_(state.out, state.lse, torch.exp(scores - safe.unsqueeze(-1)) @ task.value, lse)

    def backward(self, task, grads):
        raise AssertionError("only the forward is checked")


def cqs(task):
    keep = torch.from_numpy(task.task.mask())
    return keep.tril() if task.is_causal else keep


def with_every_diagonal(task):
    keep = cqs(task)
    positions = torch.cat([torch.full((s.stop - s.start,), i)
                           for i, s in enumerate(task.task.spans)])  # fmt: skip
    own = positions[:, None] == positions[None]
    keep = keep | own
    return keep.tril() if task.is_causal else keep


def without_a_corner(task):
    keep = cqs(task).clone()
    if len(task.task.spans) > 1:
        keep[-20:, :20] = False
    return keep


def task_positions(task):
    """A sliding window by local positions."""
    rows = torch.arange(task.query.shape[2])
    return cqs(task) & ((rows[:, None] - rows[None]).abs() < 90)


def test_a_right_whole_task_kernel_is_exact() -> None:
    assert qa.check_kernel(WholeTask(cqs), backward=False, device="cpu").exact


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("kernel", "cause"),
    [
        (from_lse_function(no_lse), causes.LSE),
        (from_lse_function(lse_in_bits), causes.LSE),
        (from_lse_function(local_positions), causes.POSITIONS),
        (WholeTask(with_every_diagonal), causes.TWICE),
        (WholeTask(without_a_corner), causes.MISSING),
        (WholeTask(task_positions), causes.POSITIONS),
    ],
    ids=["no lse", "lse in bits", "local positions", "diagonal twice", "pairs missing",
         "local window"],
)  # fmt: skip
def test_planted_errors_are_named(kernel, cause, is_causal) -> None:
    found = qa.check_kernel(kernel, backward=False, is_causal=is_causal, device="cpu")
    assert not found.exact
    assert found.cause == cause, str(found)
    worst = next(c for c in found.cases if c.verdict == "not exact")
    assert worst.rows
    assert cause in str(found)


def test_a_wrong_backward_is_named() -> None:
    def halved(grad_out, query, key, value, out, lse, *, is_causal, scale):
        found = explicit(grad_out, query, key, value, out, lse, is_causal=is_causal, scale=scale)
        return tuple(g / 2 for g in found)

    def local(grad_out, query, key, value, out, lse, *, is_causal, scale):
        """With the rectangle's own statistics, as if it were everything."""
        own_out, own_lse = softmax_attention(query, key, value, is_causal=is_causal, scale=scale)
        return explicit(grad_out, query, key, value, own_out, own_lse, is_causal=is_causal,
                        scale=scale)  # fmt: skip

    # Wrong everywhere alike is exact relative to itself ...
    assert qa.check_kernel(
        from_lse_function(softmax_attention, backward=halved), device="cpu"
    ).exact
    # ... but a backward by local statistics is not.
    found = qa.check_kernel(from_lse_function(softmax_attention, backward=local), device="cpu")
    assert not found.exact
    assert found.cause == causes.BACKWARD


def test_what_a_function_must_be() -> None:
    with pytest.raises(TypeError, match="function must be callable"):
        from_lse_function(3)
    with pytest.raises(TypeError, match="must have a parameter 'is_causal'"):
        from_lse_function(lambda query, key, value: None)
    q = torch.randn(1, 1, 20, 4)

    def one_result(query, key, value, *, is_causal, scale):
        return value

    with pytest.raises(TypeError, match=r"must return \(out, lse\)"):
        qa.attention(q, q, q, kernel=from_lse_function(one_result), devices="cpu")

    def wrong_shape(query, key, value, *, is_causal, scale):
        return value, value

    with pytest.raises(ValueError, match="must return out"):
        qa.attention(q, q, q, kernel=from_lse_function(wrong_shape), devices="cpu")

    def dead_lse(query, key, value, *, is_causal, scale):
        out, lse = softmax_attention(query, key, value, is_causal=is_causal, scale=scale)
        return out, lse.detach()

    leaf = q.clone().requires_grad_()
    out = qa.attention(leaf, q, q, kernel=from_lse_function(dead_lse), devices="cpu")
    with pytest.raises(TypeError, match="an lse without a gradient"):
        out.sum().backward()
    with pytest.raises(NotImplementedError, match="takes no attention mask"):
        qa.attention(q, q, q, attn_mask=torch.ones(20, 20, dtype=torch.bool),
                     kernel=from_lse_function(softmax_attention), devices="cpu")  # fmt: skip
