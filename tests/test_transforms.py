"""torch.func, and derivatives that are none of ours: right, or refused in words."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.attention import assert_close, inputs
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import quorum_attention as qa
from quorum_attention.autograd import refuse_forward_mode
from quorum_attention.kernels.torch_private import register_derivative

pytestmark = pytest.mark.usefixtures("one_thread")
Attention = Callable[..., torch.Tensor]


def three(n: int = 20) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return inputs(n, batch=(3, 2), dtype=torch.float64).three


def loss(attention: Attention, **call) -> Attention:
    return lambda *tensors: attention(*tensors, **call).square().sum()


@pytest.mark.parametrize(
    ("call", "in_dims"),
    [({}, (0, 0, 0)), ({"depth": 1}, (0, None, 1)), ({"is_causal": True}, (None, 1, 0)),
     ({"kernel": "dense"}, (1, 0, None))],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    "mask", [None, (20, 20), (2, 1, 20), (2, 2, 1, 20), (1,)], ids=str
)
def test_vmap(
    call: dict[str, object], in_dims: tuple[int | None, ...], mask: Any
) -> None:
    """One more batch dimension, wherever it is; what has none is shared. A mask may
    have it."""
    whole, dims, wide = three(), in_dims, None
    given = [
        t[0] if dim is None else t.movedim(0, dim)
        for t, dim in zip(whole, in_dims, strict=True)
    ]
    shared = [
        t[:1].expand_as(t) if dim is None else t
        for t, dim in zip(whole, in_dims, strict=True)
    ]
    if mask is not None:
        given.append(torch.randn(3, *mask, dtype=torch.float64))
        dims, wide = (*in_dims, 0), given[3].reshape(3, *(1,) * (4 - len(mask)), *mask)
        if call.get("is_causal"):
            wide = wide.masked_fill(torch.ones(20, 20).triu(1) > 0, -torch.inf)
    found = vmap(lambda *t: qa.attention(*t, **call), dims)(*given)
    plain = (
        {"is_causal": bool(call.get("is_causal"))}
        if mask is None
        else {"attn_mask": wide}
    )
    assert_close(found, sdpa(*shared, **plain), 1e-12)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("shape", [(20, 20), (2, 1, 20)], ids=str)
def test_gradients_of_each_and_of_all(depth: int, shape: tuple[int, ...]) -> None:
    """Through both orders of vmap and grad, twice nested too; shared inputs get sums. A
    mask that is shared gets a gradient of each where each is asked for, else the
    sum."""
    q, k, v = three()
    mine, torchs = loss(qa.attention, depth=depth), loss(sdpa)
    mask, masks = (
        torch.randn(shape, dtype=q.dtype),
        torch.randn(3, *shape, dtype=q.dtype),
    )
    for transform, given in (
        (lambda f: grad(f, (0, 1, 2)), (q, k, v)),
        (lambda f: vmap(grad(f, (0, 1, 2)), (0, None, 0)), (q, k[0], v)),
        (lambda f: vmap(vmap(grad(f, (0, 1, 2)))), (q, k, v)),
        (
            lambda f: grad(lambda *t: vmap(f, (0, None, 0))(*t).sum(), (0, 1, 2)),
            (q, k[0], v),
        ),
        (lambda f: grad(f, (0, 3)), (q, k, v, mask)),
        (lambda f: vmap(grad(f, (1, 3)), (0, 0, 0, None)), (q, k, v, mask)),
        (lambda f: vmap(grad(f, (2, 3))), (q, k, v, masks)),
        (
            lambda f: vmap(grad(f, (3,)), (None, None, None, 0)),
            (q[0], k[0], v[0], masks),
        ),
        (
            lambda f: grad(lambda *t: vmap(f, (0, 0, 0, None))(*t).sum(), (0, 3)),
            (q, k, v, mask),
        ),
    ):
        assert_close(transform(mine)(*given), transform(torchs)(*given), 1e-11)


def test_jacobians_backwards() -> None:
    q, k, v = (t[0, 0, :, :5, :3] for t in three())
    found, wanted = (jacrev(f, (0, 1, 2))(q, k, v) for f in (qa.attention, sdpa))
    assert_close(found, wanted, 1e-12)
    out, back = vjp(qa.attention, q, k, v)
    assert_close(back(out)[1], vjp(sdpa, q, k, v)[1](out)[1], 1e-12)


@pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["query", "key", "value", "mask"])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("attention", [qa.attention, qa.attention_with_lse])
def test_dual_tensors_are_refused(
    which: int, needs_grad: bool, attention: Attention
) -> None:
    """A tangent of zero would be a wrong one."""
    given = [t.clone().requires_grad_(needs_grad) for t in three()]
    given.append(torch.zeros(20, 20, dtype=given[0].dtype))
    with forward_ad.dual_level():
        given[which] = forward_ad.make_dual(given[which], torch.ones_like(given[which]))
        with pytest.raises(NotImplementedError, match=r"forward-mode .* not supported"):
            attention(*given)


def one(t: torch.Tensor) -> torch.Tensor:
    return qa.attention(t, t.detach() + 1, t)


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "forward-mode: jvp": lambda t: jvp(one, (t,), (t,)),
    "forward-mode: jacfwd": lambda t: jacfwd(one)(t),
    "forward-mode: vmap": lambda t: vmap(lambda x: jvp(one, (x,), (x,))[1])(t),
    "forward-mode: hessian": lambda t: hessian(loss(one))(t),
    "second derivatives: grad": lambda t: grad(lambda x: grad(loss(one))(x).sum())(t),
    "second derivatives: jacrev": lambda t: jacrev(jacrev(loss(one)))(t),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_derivatives_are_refused_whatever_asks_for_them(what: str) -> None:
    with pytest.raises(NotImplementedError, match=what.partition(":")[0]):
        REFUSED[what](three()[0])


def test_a_dual_upstream_gradient_is_refused_and_an_open_level_alone_changes_nothing() -> (
    None
):
    """Forward over reverse, as of Hessian-vector products."""
    q, k, v = (t.clone().requires_grad_() for t in three())
    with forward_ad.dual_level():
        out = qa.attention(q, k, v)
        assert_close(out, sdpa(q, k, v), 1e-12)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            torch.autograd.grad(
                out, q, forward_ad.make_dual(torch.ones_like(out), out.detach())
            )


def selective(function: Attention) -> Attention:
    """``function`` in a checkpoint that chooses among operators."""
    policy = functools.partial(
        create_selective_checkpoint_contexts,
        lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE,
    )
    return lambda t: checkpoint(function, t, use_reentrant=False, context_fn=policy)


def compiled(function: Attention) -> Attention:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager")


def exported(function: Attention) -> Attention:
    class Model(torch.nn.Module):
        def forward(self, t: torch.Tensor) -> torch.Tensor:
            return function(t)

    return torch.export.export(Model(), (three()[0],)).module()


def of_its_operator(t: torch.Tensor) -> torch.Tensor:
    key = t.detach() + 1
    rest = [], 0.0, None, False, False, None, "", [], True, False
    return torch.ops.quorum_attention.attention(t, key, t, None, None, None, *rest)[0]


# Ways in which a call becomes an operator, or is in a graph as one.
AS_OPERATOR: dict[str, Callable[[], Attention]] = {
    "the operator itself": lambda: of_its_operator,
    "in a selective checkpoint": lambda: selective(one),
    "traced before": lambda: make_fx(one)(three()[0]),
    "compiled": lambda: compiled(one),
    "exported": lambda: exported(one),
}


def tangent_of(function: Attention, t: torch.Tensor) -> torch.Tensor | None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(t, torch.ones_like(t))
        return forward_ad.unpack_dual(function(dual)).tangent


def hessian_product(function: Attention, t: torch.Tensor) -> torch.Tensor | None:
    """The derivative of a gradient, forward over reverse, with a dual upstream
    gradient."""
    t = t.clone().requires_grad_()
    with forward_ad.dual_level():
        out = function(t)
        upstream = forward_ad.make_dual(torch.ones_like(out), out.detach())
        return forward_ad.unpack_dual(torch.autograd.grad(out, t, upstream)[0]).tangent


DERIVATIVES: dict[str, Callable[[Attention, torch.Tensor], object]] = {
    "dual": tangent_of,
    "dual that requires a gradient": lambda f, t: tangent_of(
        f, t.clone().requires_grad_()
    ),
    "jvp": lambda f, t: jvp(f, (t,), (t,)),
    "upstream": hessian_product,
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("way", AS_OPERATOR)
def test_no_operator_drops_a_tangent(way: str, derivative: str) -> None:
    """Torch's own registration of a derivative drops tangents: derivatives were exactly
    0."""
    with pytest.raises(NotImplementedError, match=r"forward-mode .* not supported"):
        DERIVATIVES[derivative](AS_OPERATOR[way](), three()[0])


TRACED: dict[str, Callable[[torch.Tensor], object]] = {
    "linearize": lambda t: linearize(one, t),
    "linearize the log-sum-exp": lambda t: linearize(
        lambda x: qa.attention_with_lse(x, t, t)[1], t
    ),
    "make_fx": lambda t: make_fx(lambda x: tangent_of(one, x))(t),
    "make_fx of fakes": lambda t: make_fx(
        lambda x: tangent_of(one, x), tracing_mode="fake"
    )(t),
    "compiled": lambda t: compiled(lambda x: tangent_of(one, x))(t),
    "compiled jvp": lambda t: compiled(lambda x: jvp(one, (x,), (x,))[1])(t),
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("what", TRACED)
def test_no_trace_of_a_derivative_drops_a_tangent(what: str) -> None:
    with pytest.raises(NotImplementedError, match=r"forward-mode .* not supported"):
        TRACED[what](three()[0])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("way", AS_OPERATOR)
def test_an_open_level_without_tangents_changes_no_operator(way: str) -> None:
    function, t = AS_OPERATOR[way](), three()[0].requires_grad_()
    with forward_ad.dual_level():
        out = function(t)
        grad_query = torch.autograd.grad(out.square().sum(), t)[0]
    wanted = sdpa(t, t.detach() + 1, t)
    assert_close(out, wanted, 1e-12)
    assert_close(grad_query, torch.autograd.grad(wanted.square().sum(), t)[0], 1e-11)


def test_a_torch_that_moved_what_is_used_is_said_and_keeps_derivatives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "torch._library.autograd"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    library = torch.library.Library("quorum_attention_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")

    def derivative(ctx: object, upstream: torch.Tensor) -> torch.Tensor:
        return 2 * upstream

    with pytest.warns(UserWarning, match="drop forward-mode tangents"):
        register_derivative(
            library, "twice", derivative, None, refuse_forward_mode, before=lambda: None
        )
    x = torch.ones(3, requires_grad=True)
    torch.ops.quorum_attention_test.twice(x).sum().backward()
    assert_close(x.grad, torch.full((3,), 2.0), 0)


def test_a_compiled_call_of_the_patched_function_is_torchs_own_in_forward_mode() -> (
    None
):
    """Of five dimensions, so torch takes its math backend, which has these
    derivatives."""

    def function(t: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(t, t, t)

    t = three()[0]
    with qa.patched_sdpa(min_tokens=1):
        tangent = tangent_of(compiled(function), t)
    assert tangent is not None
    assert_close(tangent, jvp(function, (t,), (torch.ones_like(t),))[1], 1e-12)


def test_neither_the_backward_as_a_function_nor_given_results_can_be_transformed() -> (
    None
):
    q, k, v = three()
    out, lse = qa.attention_with_lse(q, k, v)
    instead = pytest.raises(
        NotImplementedError, match="take the gradients of attention instead"
    )
    with instead:
        vmap(qa.attention_backward)(q, q, k, v, out, lse)
    mask = torch.zeros(20, 20, dtype=q.dtype)
    given = [q, q, k, v, out, lse, mask]
    for number, tensor in enumerate(given):
        with forward_ad.dual_level(), instead:
            dual = forward_ad.make_dual(tensor, torch.ones_like(tensor))
            qa.attention_backward(
                *given[:number], dual, *given[number + 1 :], kernel="dense"
            )
    with pytest.raises(
        NotImplementedError, match=r"out cannot be given under torch.func"
    ):
        vmap(lambda *t: qa.attention(*t, out=torch.empty_like(q[0])))(q, k, v)
    with (
        forward_ad.dual_level(),
        pytest.raises(ValueError, match="out must not have a forward-mode tangent"),
    ):
        qa.attention(q, k, v, out=forward_ad.make_dual(torch.empty_like(q), q))


def test_sinks_and_plans_may_be_mapped_over() -> None:
    """Each entry is a call of its own."""
    q, k, v = three()
    sinks = torch.randn(3, 2, dtype=q.dtype)
    plan = qa.plan(20, heads=2, head_dim=8, batch=2, dtype=q.dtype, levels=(3,))

    def mine(sinks: torch.Tensor, *t: torch.Tensor) -> torch.Tensor:
        return (
            qa.attention(*t, attn_mask=qa.Mask(sinks=sinks), plan=plan).square().sum()
        )

    def wanted(
        sinks: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        scores = torch.cat(
            [q @ k.mT * 8**-0.5, sinks[:, None, None].expand(2, 2, 20, 1)], -1
        )
        return (scores.softmax(-1)[..., :-1] @ v).square().sum()

    found, right = (vmap(grad(f, (0, 1, 3)))(sinks, q, k, v) for f in (mine, wanted))
    assert_close(found, right, 1e-11)


def test_tensors_of_a_mask_cannot_be_mapped() -> None:
    """They are read before the call is planned, for all entries at once."""
    q, k, v = (t[:, None] for t in three())
    ids, plain = torch.arange(20).expand(3, 20) // 4, qa.Mask(window=3)
    masks: dict[str, Callable[[torch.Tensor], qa.Mask]] = {
        "Mask.documents": lambda ids: qa.Mask(documents=ids),
        "Mask.documents of two": lambda ids: qa.Mask(documents=(ids, ids)) | plain,
        "Mask.key_padding": lambda ids: plain & (plain | qa.Mask(key_padding=ids < 2)),
        "Mask.key_lengths": lambda ids: qa.Mask(key_lengths=ids[:1]),
    }
    for name, mask in masks.items():
        name = name.removesuffix(" of two")
        with pytest.raises(
            NotImplementedError, match=f"torch.vmap cannot map over {name}"
        ):
            vmap(lambda i, *t, mask=mask: qa.attention(*t, attn_mask=mask(i)))(
                ids, q, k, v
            )
    for call in ({}, {"depth": 1}):
        with pytest.raises(NotImplementedError, match="or one of a torch"):
            vmap(
                lambda i, *t, call=call: qa.attention(
                    *t, attn_mask=qa.Mask(keeps=lambda b, h, x, y: i[x] == i[y]), **call
                )
            )(ids, q, k, v)


@pytest.mark.parametrize("depth", [0, 1])
def test_tensors_of_a_mask_may_come_from_what_is_derived(depth: int) -> None:
    """They have no gradient, so the wrappers that torch.func.grad puts around them say
    nothing."""
    q, k, v = (t.flatten(0, 1) for t in three())
    lower = torch.ones(20, 20, dtype=torch.bool).tril()

    def mine(q: torch.Tensor) -> torch.Tensor:
        ids = (q[0, 0, :, 0] * 0).long() + torch.arange(20) // 7
        of_keys = (q[0, 0, :, 0] ** 2 >= 0) & (torch.arange(20) != 5)
        lengths = torch.full((6,), 20) + (q[:, 0, 0, 0] * 0).long()
        mask = qa.Mask(causal=True, documents=ids, key_lengths=lengths)
        mask &= qa.Mask(key_padding=of_keys) | qa.Mask(window=0)
        return qa.attention(q, k, v, attn_mask=mask, depth=depth).square().sum()

    def torchs(q: torch.Tensor) -> torch.Tensor:
        ids, at = torch.arange(20) // 7, torch.arange(20)
        kept = lower & (ids[:, None] == ids) & ((at != 5) | (at[:, None] == at))
        return sdpa(q, k, v, kept).square().sum()

    assert_close(grad(mine)(q), grad(torchs)(q), 1e-11)


def _second_causal(
    batch: object, head: object, query: object, key: object
) -> torch.Tensor:
    """Causal in the second entry of a batch."""
    return (batch != 1) | (query >= key)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("call", [{}, {"depth": 1}, {"kernel": "dense"}], ids=str)
def test_functions_of_a_mask_know_the_entries_of_their_own_batch(
    call: dict[str, object],
) -> None:
    """Whatever vmap adds to it: the numbers of entries that they get are those of one
    call."""
    q, k, v = three()
    lengths = torch.tensor([20, 13])
    kept = (torch.arange(20) < lengths[:, None])[:, None, None].repeat(1, 1, 20, 1)
    kept[1].tril_()

    def ours(*given: torch.Tensor) -> torch.Tensor:
        mask = qa.Mask(keeps=_second_causal, key_lengths=lengths)
        return qa.attention(*given, attn_mask=mask, **call)

    def wanted(*given: torch.Tensor) -> torch.Tensor:
        return sdpa(*given, kept)

    assert_close(vmap(ours)(q, k, v), wanted(q, k, v), 1e-12)
    assert_close(
        vmap(vmap(ours))(q[None], k[None], v[None]), wanted(q, k, v)[None], 1e-12
    )
    own, right = (
        torch.stack(vmap(grad(loss(f), (0, 1, 2)))(q, k, v)) for f in (ours, wanted)
    )
    assert_close(own, right, 1e-11)


def test_a_tensor_of_a_transformation_that_is_over_is_an_ordinary_one() -> None:
    """Its wrapper claims to require a gradient: a result would have a graph to it, and
    a backward would compute what nobody can get."""
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x.sum()

    query = torch.randn(1, 2, 8, 64)
    grad(keep)(query)
    out = qa.attention(kept[0], kept[0], kept[0])
    assert not out.requires_grad
    assert torch.equal(out, qa.attention(query, query, query))
    leaf = query.clone().requires_grad_()
    qa.attention(kept[0], leaf, leaf).sum().backward()
    assert leaf.grad is not None
