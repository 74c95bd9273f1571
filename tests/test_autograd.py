"""Gradients through autograd, and without it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_attention import (
    GRADIENT_TOLERANCE,
    Inputs,
    assert_close,
    exact,
    inputs,
)

import quorum_attention as qa

pytestmark = pytest.mark.usefixtures("one_thread")


def leaves(given: Inputs, needed: tuple[bool, bool, bool] = (True, True, True)) -> Inputs:
    three = (t.clone().requires_grad_(n) for t, n in zip(given.three, needed, strict=True))
    return Inputs(*three, given.grad_out)


def balanced(n: int, levels: tuple[int, ...], **more) -> qa.Plan:
    sizes = {"heads": 2, "head_dim": 8, "dtype": torch.float64, **more}
    return qa.plan(n, levels=levels, layout="balanced", **sizes)


@pytest.mark.parametrize("levels", [(), (7,)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradcheck(levels: tuple[int, ...], is_causal: bool) -> None:
    """Against finite differences, which know no formula."""
    given = leaves(inputs(9, heads=1, head_dim=3, dtype=torch.float64))
    plan = balanced(9, levels, heads=1, head_dim=3, is_causal=is_causal)
    assert torch.autograd.gradcheck(
        lambda q, k, v: qa.attention(q, k, v, is_causal=is_causal, plan=plan), given.three
    )


@pytest.mark.parametrize("dtype", list(GRADIENT_TOLERANCE))
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("accumulator", ["device", "host"])
def test_gradients_against_float64(dtype, depth, is_causal, accumulator) -> None:
    plain = inputs(333, heads=4, kv_heads=2, head_dim=16, value_dim=24, batch=(2,), dtype=dtype)
    given = leaves(plain)
    report = qa.Report()
    out = qa.attention(
        *given.three, is_causal=is_causal, enable_gqa=True, depth=depth, report=report,
        accumulator=accumulator,
    )  # fmt: skip
    out.backward(plain.grad_out)
    reference = exact(plain, is_causal=is_causal, gradients=True)
    for leaf, expected in zip(given.three, reference.grads, strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == dtype
        assert_close(leaf.grad, expected, GRADIENT_TOLERANCE[dtype])
    assert report.backward is not None
    assert len(report.backward.levels) == depth


@pytest.mark.parametrize("kind", ["boolean", "additive", "padding", "heads"])
@pytest.mark.parametrize("depth", [0, 1])
def test_gradients_under_a_mask(kind: str, depth: int) -> None:
    n = 300
    plain = inputs(n, heads=3)
    mask = {
        "boolean": torch.rand(n, n) > 0.4,
        "additive": torch.randn(n, n),
        "padding": (torch.arange(n) < 200).reshape(1, 1, 1, n),
        "heads": torch.randn(3, 1, n),
    }[kind]
    given = leaves(plain)
    out = qa.attention(*given.three, mask, depth=depth)
    out.backward(plain.grad_out)
    reference = exact(plain, mask=mask, gradients=True)
    for leaf, expected in zip(given.three, reference.grads, strict=True):
        assert_close(leaf.grad, expected, 5e-5)


@pytest.mark.parametrize("needed", list(product([True, False], repeat=3))[:-1])
def test_only_the_gradients_asked_for(needed: tuple[bool, bool, bool]) -> None:
    plain = inputs(50)
    given = leaves(plain, needed)
    qa.attention(*given.three, depth=1).backward(plain.grad_out)
    reference = exact(plain, gradients=True)
    for leaf, expected, wanted in zip(given.three, reference.grads, needed, strict=True):
        assert (leaf.grad is not None) == wanted
        if wanted:
            assert_close(leaf.grad, expected, 5e-5)


def test_no_graph_without_a_need() -> None:
    assert not qa.attention(*inputs(50).three).requires_grad
    with torch.no_grad():
        assert not qa.attention(*leaves(inputs(50)).three).requires_grad


@pytest.mark.parametrize("depth", [0, 1])
def test_an_expanded_gradient(depth: int) -> None:
    """The gradient of a sum has stride 0."""
    plain = inputs(300)
    given = leaves(plain)
    qa.attention(*given.three, depth=depth).sum().backward()
    plain.grad_out = torch.ones_like(plain.grad_out)
    for leaf, expected in zip(given.three, exact(plain, gradients=True).grads, strict=True):
        assert_close(leaf.grad, expected, 5e-5)


@pytest.mark.parametrize("depth", [0, 1])
def test_an_unrounded_output_of_16_bit_inputs(depth: int) -> None:
    plain = inputs(300, dtype=torch.bfloat16)
    given = leaves(plain)
    out = qa.attention(*given.three, depth=depth, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    out.backward(plain.grad_out.float())
    reference = exact(plain, gradients=True)
    for leaf, expected in zip(given.three, reference.grads, strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.bfloat16
        assert_close(leaf.grad, expected, GRADIENT_TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("kind", ["boolean", "additive", "additive-half"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_mask_changed_before_the_backward_is_torchs_error(kind: str, depth: int) -> None:
    """All that the backward reads is a saved tensor: the mask as well as the inputs."""
    plain = inputs(60)
    mask = {
        "boolean": torch.rand(60, 60) > 0.4,
        "additive": torch.randn(60, 60),
        "additive-half": torch.randn(60, 60).half(),
    }[kind]
    out = qa.attention(*leaves(plain).three, mask, depth=depth)
    mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(plain.grad_out)


@pytest.mark.skipif(torch.cuda.is_available(), reason="no such call goes to torch's operator")
@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_so_it_is_in_a_small_call_or_has_no_effect(kind: str) -> None:
    """There torch's own operator is recorded, which keeps what it made of the mask, or the mask."""
    plain = inputs(60)
    mask = torch.rand(60, 60) > 0.4 if kind == "boolean" else torch.randn(60, 60)
    wanted = exact(plain, mask=mask.clone(), gradients=True).grads
    three = leaves(plain).three
    out = qa.attention(*three, mask)
    mask.copy_(~mask if kind == "boolean" else -mask)
    try:
        found = torch.autograd.grad(out, three, plain.grad_out)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
        return
    assert wanted is not None
    for mine, right in zip(found, wanted, strict=True):
        assert_close(mine, right, GRADIENT_TOLERANCE[torch.float32])


@pytest.mark.parametrize("which", ["query", "key", "value", "out", "lse"])
def test_anything_else_that_the_backward_reads_is_watched_too(which: str) -> None:
    plain = inputs(60)
    given = leaves(plain)
    out, lse = qa.attention_with_lse(*given.three)
    changed = {"out": out, "lse": lse}.get(which, getattr(given, which, None))
    with torch.no_grad():
        changed.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(plain.grad_out)


def _lse_function(bias: torch.Tensor):  # type: ignore[no-untyped-def]
    def biased(query, key, value, *, is_causal, scale, key_positions):  # type: ignore[no-untyped-def]
        scores = scale * query @ key.mT + bias[key_positions]
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -torch.inf)
        return scores.softmax(-1) @ value, scores.logsumexp(-1)

    return qa.from_lse_function(biased)


@pytest.mark.parametrize(
    "make",
    [
        _lse_function,
        lambda bias: qa.from_score_mod(lambda s, b, h, q, k: s + bias[k], compiled=False),
        lambda bias: qa.from_score_mod(
            mask_mod=lambda b, h, q, k: (bias[k] > 0) | (q == k), compiled=False
        ),
    ],
    ids=["function", "score", "mask"],
)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_tensor_that_a_kernel_closes_over_is_watched_too(make, depth) -> None:
    plain = inputs(60)
    bias = torch.randn(60)
    kernel = make(bias)
    given = leaves(plain)
    qa.attention(*given.three, kernel=kernel, depth=depth).backward(plain.grad_out)
    out = qa.attention(*given.three, kernel=kernel, depth=depth)
    bias.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(plain.grad_out)


def test_hooks_on_saved_tensors_see_all_that_is_read() -> None:
    """As offloading and checkpointing do: what they hand back is what is used."""
    plain = inputs(60)
    mask = torch.rand(60, 60) > 0.4
    given = leaves(plain)
    seen: list[torch.Tensor] = []

    def away(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(away, lambda tensor: tensor):
        out, lse = qa.attention_with_lse(*given.three, mask)
    addresses = {tensor.data_ptr() for tensor in seen}
    assert addresses >= {t.data_ptr() for t in (*given.three, mask, out, lse)}
    reference = exact(plain, mask=mask.clone(), gradients=True)
    mask.zero_()
    out.backward(plain.grad_out)  # of the copies
    for leaf, expected in zip(given.three, reference.grads, strict=True):
        assert_close(leaf.grad, expected, 5e-5)


def test_a_parameter_as_a_mask_where_nothing_is_recorded() -> None:
    """Without a graph nobody asks for its gradient."""
    plain = inputs(60)
    mask = torch.nn.Parameter(torch.randn(60, 60))
    with torch.no_grad():
        out = qa.attention(*leaves(plain).three, mask)
        found = qa.attention_with_lse(*plain.three, mask)
        qa.attention_backward(plain.grad_out, *plain.three, *found, mask)
    with torch.inference_mode():
        qa.attention(*plain.three, mask)
    assert_close(out, exact(plain, mask=mask.detach()).out, 5e-5)
    assert not out.requires_grad


def test_a_second_derivative_is_refused_in_words() -> None:
    given = leaves(inputs(20))
    out = qa.attention(*given.three)
    first = torch.autograd.grad(out.square().sum(), given.query, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match=r"second derivatives .* not supported"):
        first.sum().backward()


def test_a_second_derivative_with_a_mask_is_refused_in_words() -> None:
    given, mask = inputs(20), torch.randn(20, 20, requires_grad=True)
    out = qa.attention(*given.three, mask)
    first = torch.autograd.grad(out.square().sum(), mask, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match=r"second derivatives .* not supported"):
        first.sum().backward()


@pytest.mark.parametrize("call", [{}, {"depth": 1}])
def test_gradients_in_batches_are_refused_in_words(call: dict[str, int]) -> None:
    given = torch.randn(1, 2, 20, 8, dtype=torch.float64, requires_grad=True)
    out, lse = qa.attention_with_lse(given, given, given, **call)
    for result in (out, lse):
        many = torch.stack([torch.ones_like(result)] * 3)
        with pytest.raises(NotImplementedError, match="is_grads_batched"):
            torch.autograd.grad(result, given, many, is_grads_batched=True, retain_graph=True)


def test_create_graph_alone_works() -> None:
    plain = inputs(20)
    given = leaves(plain)
    out = qa.attention(*given.three)
    grads = torch.autograd.grad(out, given.three, plain.grad_out, create_graph=True)
    for actual, expected in zip(grads, exact(plain, gradients=True).grads, strict=True):
        assert_close(actual, expected, 5e-5)


def test_a_graph_that_is_kept_can_be_run_twice() -> None:
    plain = inputs(300)
    given = leaves(plain)
    out = qa.attention(*given.three, depth=1)
    first = torch.autograd.grad(out, given.three, plain.grad_out, retain_graph=True)
    second = torch.autograd.grad(out, given.three, plain.grad_out)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, given.three, plain.grad_out)


def test_gradients_flow_through_the_lse() -> None:
    given = leaves(inputs(20))
    out, lse = qa.attention_with_lse(*given.three)
    assert out.requires_grad
    assert lse.requires_grad
    first = torch.autograd.grad(lse.square().sum(), given.query, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match=r"second derivatives .* not supported"):
        first.sum().backward()


def test_a_preallocated_output_takes_part_in_autograd() -> None:
    plain = inputs(300)
    given = leaves(plain)
    room = torch.empty_like(plain.grad_out)
    out = qa.attention(*given.three, depth=1, out=room)
    assert out.data_ptr() == room.data_ptr()
    assert out.requires_grad
    out.backward(plain.grad_out)
    assert_close(given.query.grad, exact(plain, gradients=True).grads[0], 5e-5)


def test_a_preallocated_output_serves_step_after_step() -> None:
    """The graph is the returned tensor's; the one that was given stays as it was."""
    room = torch.empty(1, 2, 300, 8)
    for _ in range(3):
        plain = inputs(300)
        given = leaves(plain)
        out = qa.attention(*given.three, depth=1, out=room)
        assert not room.requires_grad
        assert room.is_leaf
        out.backward(plain.grad_out)
        assert_close(room, exact(plain).out, 5e-5)
        for leaf, expected in zip(given.three, exact(plain, gradients=True).grads, strict=True):
            assert_close(leaf.grad, expected, 5e-5)


@pytest.mark.parametrize("how", ["the next call", "its owner", "the returned one"])
def test_a_preallocated_output_overwritten_before_the_backward_is_torchs_error(how: str) -> None:
    plain = inputs(60)
    room = torch.empty_like(plain.grad_out)
    out = qa.attention(*leaves(plain).three, out=room)
    if how == "the next call":
        qa.attention(*leaves(inputs(60)).three, out=room)
    else:
        with torch.no_grad():
            (room if how == "its owner" else out).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(plain.grad_out)


def test_without_gradients_the_given_output_is_what_is_returned() -> None:
    plain = inputs(60)
    room = torch.empty_like(plain.grad_out)
    assert qa.attention(*plain.three, out=room) is room
    with torch.no_grad():
        assert qa.attention(*leaves(plain).three, out=room) is room


@pytest.mark.parametrize("call", [{}, {"depth": 1}, {"kernel": "dense"}])
@pytest.mark.parametrize(("kv_heads", "value_dim"), [(4, 8), (2, 8), (4, 5), (2, 24)])
def test_results_can_be_written_to(call, kv_heads, value_dim) -> None:
    """As torch's: a step further in the graph, or torch's error where the backward needs them."""
    plain = inputs(60, heads=4, kv_heads=kv_heads, value_dim=value_dim)
    given = leaves(plain)
    out = qa.attention(*given.three, enable_gqa=True, **call)
    before = out.detach().clone()
    out.mul_(2.0)
    assert torch.equal(out, 2 * before)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(plain.grad_out)
    more = torch.ones((), requires_grad=True)
    for made in qa.attention_with_lse(*plain.three, enable_gqa=True, **call):
        made += more
        made.sum().backward()
    found = qa.attention_with_lse(*plain.three, enable_gqa=True, **call)
    for grad in qa.attention_backward(
        plain.grad_out, *plain.three, *found, enable_gqa=True, **call
    ):
        grad += more
    assert more.grad is not None


def test_views_of_results_can_be_written_to() -> None:
    plain = inputs(60, value_dim=5)
    out = qa.attention(*leaves(plain).three)
    out[:, :, ::2].zero_()
    out[0][1, 3] = 1.0
    assert out.grad_fn is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("depth", [0, 1])
def test_gradients_into_memory_mapped_files(tmp_path: Path, dtype, depth) -> None:
    plain = inputs(300, heads=4, kv_heads=2, value_dim=12, dtype=dtype)
    out, lse = qa.attention_with_lse(*plain.three, enable_gqa=True, depth=depth)
    files = [
        np.memmap(tmp_path / str(i), np.float32, "w+", shape=tuple(t.shape))
        for i, t in enumerate(plain.three)
    ]
    returned = qa.attention_backward(
        plain.grad_out, *plain.three, out, lse, enable_gqa=True, depth=depth, grads=tuple(files)
    )
    reference = exact(plain, gradients=True)
    for file, tensor, expected in zip(files, returned, reference.grads, strict=True):
        assert tensor.data_ptr() == file.ctypes.data
        assert_close(torch.from_numpy(np.array(file)), expected, GRADIENT_TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"grad_out": torch.zeros(1, 2, 49, 8)}, ValueError, r"grad_out must have shape"),
        ({"out": torch.zeros(1, 2, 50, 9)}, ValueError, r"out must have shape"),
        ({"lse": torch.zeros(1, 2, 50, 1)}, ValueError, r"lse must have shape \(1, 2, 50\)"),
        ({"grads": (torch.zeros(1),)}, TypeError, "grads must be three tensors"),
        (
            {"grads": tuple(torch.zeros(1, 2, n, 8) for n in (50, 50, 49))},
            ValueError,
            r"grads\[2\] must have shape",
        ),
        (
            {"grads": tuple(torch.zeros(1, 2, 50, 8, dtype=t) for t in
                            (torch.float32, torch.float64, torch.float32))},
            TypeError,
            r"grads\[1\] must be torch.float32, got torch.float64",
        ),
        ({"lse": [1]}, TypeError, "lse must be a torch.Tensor"),
    ],
)  # fmt: skip
def test_arguments_of_the_backward_are_checked(change, kind, says) -> None:
    plain = inputs(50)
    out, lse = qa.attention_with_lse(*plain.three)
    given = {"grad_out": plain.grad_out, "out": out, "lse": lse, **change}
    with pytest.raises(kind, match=says):
        qa.attention_backward(query=plain.query, key=plain.key, value=plain.value, **given)
