"""Gradients through autograd, and without it."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from helpers.attention import Inputs, assert_close, attention, exact, inputs
from helpers.passes import pass_of

import quorum_attention as qa
from quorum_attention.execution.device.mover import Mover

pytestmark = pytest.mark.usefixtures("one_thread")


def leaves(
    given: Inputs, needed: tuple[bool, bool, bool] = (True, True, True)
) -> Inputs:
    three = (
        t.clone().requires_grad_(n) for t, n in zip(given.three, needed, strict=True)
    )
    return Inputs(*three, given.grad_out)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("levels", [(), (7,)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradcheck(levels: tuple[int, ...], is_causal: bool) -> None:
    """Against finite differences, which know no formula."""
    given = leaves(inputs(9, heads=1, head_dim=3, dtype=torch.float64))
    plan = qa.plan(
        9, levels=levels, layout="balanced", heads=1, head_dim=3, dtype=torch.float64,
        is_causal=is_causal,
    )  # fmt: skip
    assert torch.autograd.gradcheck(
        lambda q, k, v: qa.attention(q, k, v, is_causal=is_causal, plan=plan),
        given.three,
    )


def biased(bias: torch.Tensor):
    def function(query, key, value, *, is_causal, scale, key_positions):
        call = {"is_causal": is_causal, "scale": scale}
        return attention(query, key, value, bias=bias[key_positions], **call)

    return function


CALLS = {
    "a boolean mask": lambda t: {"attn_mask": t > 0},
    "an additive mask": lambda t: {"attn_mask": t},
    "a mask in 16 bits": lambda t: {"attn_mask": t.half()},
    "a function": lambda t: {"kernel": qa.from_lse_function(biased(t[0]))},
    "a score": lambda t: {
        "kernel": qa.from_score_mod(lambda s, b, h, q, k: s + t[0][k], compiled=False)
    },
    "a rule": lambda t: {
        "kernel": qa.from_score_mod(
            mask_mod=lambda b, h, q, k: (t[0][k] > 0) | (q == k), compiled=False
        )
    },
}


@pytest.mark.parametrize("which", ["query", "key", "value", "out", "lse", *CALLS])
@pytest.mark.parametrize("depth", [0, 1])
def test_what_the_backward_reads_and_is_changed_before_is_torchs_error(
    which, depth
) -> None:
    """All of it are saved tensors: inputs, results, masks, and what a kernel closes
    over."""
    plain, tensor = inputs(60), torch.randn(60, 60)
    given, call = leaves(plain), CALLS.get(which, lambda t: {})(tensor)
    qa.attention(*given.three, **call, depth=depth).backward(plain.grad_out)
    out, lse = qa.attention_with_lse(*given.three, **call, depth=depth)
    changed = call.get("attn_mask", tensor)
    changed = {"out": out, "lse": lse}.get(which, getattr(given, which, changed))
    with torch.no_grad():
        changed.zero_()
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
    assert_close((leaf.grad for leaf in given.three), reference.grads, 5e-5)


def columns_first(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, columns by columns where there are such."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


@pytest.mark.parametrize("how", ["hooks", "data"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_backward_like_an_earlier_one_reads_inputs_as_they_lie_now(
    how: str, masked: bool
) -> None:
    """Inputs that a hook hands back, or whose ``.data`` was replaced, may lie in another
    way. A cached backward read them as those of the forward, and was wrong."""
    plain = inputs(60)
    mask = torch.randn(60, 60) if masked else None
    reference = exact(plain, mask=mask, gradients=True)
    hooks = (columns_first, lambda tensor: tensor)
    for is_changed in (False, True, True, False):
        given = leaves(plain)
        in_hooks = torch.autograd.graph.saved_tensors_hooks(*hooks)
        with in_hooks if is_changed and how == "hooks" else nullcontext():
            out = qa.attention(*given.three, mask)
        if is_changed and how == "data":
            for leaf in given.three:
                leaf.data = columns_first(leaf.data)
        out.backward(plain.grad_out)
        assert_close((leaf.grad for leaf in given.three), reference.grads, 5e-5)


@pytest.mark.parametrize("what", ["out", "mask", "lse"])
def test_create_graph_works_and_a_second_derivative_is_refused_in_words(
    what: str,
) -> None:
    plain, mask = inputs(20), torch.randn(20, 20, requires_grad=True)
    given = leaves(plain)
    out, lse = qa.attention_with_lse(*given.three, mask if what == "mask" else None)
    grads = torch.autograd.grad(out, given.three, plain.grad_out, create_graph=True)
    wanted = exact(
        plain, mask=mask.detach() if what == "mask" else None, gradients=True
    )
    assert_close(grads, wanted.grads, 5e-5)
    result, leaf = (
        (lse if what == "lse" else out),
        (mask if what == "mask" else given.query),
    )
    first = torch.autograd.grad(result.square().sum(), leaf, create_graph=True)[0]
    with pytest.raises(
        NotImplementedError, match=r"second derivatives .* not supported"
    ):
        first.sum().backward()


@pytest.mark.parametrize("call", [{}, {"depth": 1}])
def test_gradients_in_batches_are_right_or_refused(call: dict[str, int]) -> None:
    given = torch.randn(1, 2, 20, 8, dtype=torch.float64, requires_grad=True)
    out, lse = qa.attention_with_lse(given, given, given, **call)
    for result in (out, lse, qa.attention(given, given, given, **call)):
        grad = partial(torch.autograd.grad, result, given, retain_graph=True)
        many = torch.randn(3, *result.shape, dtype=result.dtype)
        try:
            found = grad(many, is_grads_batched=True)[0]
        except RuntimeError:
            continue
        torch.testing.assert_close(found, torch.stack([grad(one)[0] for one in many]))


def test_a_preallocated_output_serves_step_after_step() -> None:
    """The graph is the returned tensor's; the one that was given stays as it was."""
    room = torch.empty(1, 2, 300, 8)
    for _ in range(3):
        plain = inputs(300)
        given, wanted = leaves(plain), exact(plain, gradients=True)
        assert qa.attention(*plain.three, out=room) is room
        with torch.no_grad():
            assert qa.attention(*given.three, out=room) is room
        out = qa.attention(*given.three, depth=1, out=room)
        assert out.data_ptr() == room.data_ptr()
        assert not room.requires_grad
        assert room.is_leaf
        out.backward(plain.grad_out)
        grads = (leaf.grad for leaf in given.three)
        assert_close((room, *grads), (wanted.out, *wanted.grads), 5e-5)


@pytest.mark.parametrize("how", ["the next call", "its owner", "the returned one"])
def test_a_preallocated_output_overwritten_before_the_backward_is_torchs_error(
    how: str,
) -> None:
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


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("call", "kv_heads", "value_dim"),
    [({}, 4, 8), ({}, 2, 24), ({"depth": 1}, 2, 8), ({"kernel": "dense"}, 4, 24)],
)
def test_results_can_be_written_to(call, kv_heads, value_dim) -> None:
    """As torch's: a step further in the graph, or torch's error where the backward
    needs them."""
    plain = inputs(60, heads=4, kv_heads=kv_heads, value_dim=value_dim)
    given, call = leaves(plain), {"enable_gqa": True, **call}
    out = qa.attention(*given.three, **call)
    before = out.detach().clone()
    out.mul_(2.0)
    assert torch.equal(out, 2 * before)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(plain.grad_out)
    out = qa.attention(*given.three, **call)
    out[:, :, ::2].zero_()
    out[0][1, 3] = 1.0
    assert out.grad_fn is not None
    more = torch.ones((), requires_grad=True)
    results = pass_of(plain, False, **call)()
    for made in (
        *results,
        *pass_of(plain, True, tuple(t.clone() for t in results), **call)(),
    ):
        made += more
        made.sum().backward()
    assert more.grad is not None


@pytest.mark.parametrize("backward", [False, True])
def test_results_used_again(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows leave a slot as with pinned results of a GPU: by copies that torch never
    sees."""

    def store(self, slot, far, pieces) -> None:
        for piece in pieces:
            rows = slot[..., piece.local : piece.local + piece.length, :]
            far.numpy()[..., piece.start : piece.stop, :] = rows.numpy()

    monkeypatch.setattr(Mover, "store", store)
    plan = qa.plan(
        64, heads=2, head_dim=8, dtype=torch.float32, levels=(3,), tile=8, over_inputs=False,
        backward=backward,
    )  # fmt: skip
    given, weight = inputs(64), torch.randn(8, 8, requires_grad=True)
    results = tuple(torch.empty(t.shape) for t in given.three[: 3 if backward else 1])
    room = {"grads": results} if backward else {"out": results[0]}
    call = pass_of(given, backward, plan=plan, **room)
    call()
    losses = [(result @ weight).sum() for result in results]
    call()
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
