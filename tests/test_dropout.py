"""Dropout: the same pairs however a call is cut, wherever it runs, forward and
backward; seeds are drawn once in a call, from torch's generator."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers.attention import assert_close, inputs
from helpers.masks import exact as textbook
from helpers.passes import both_passes
from torch.func import grad, jacrev, vmap

import quorum_attention as qa
from quorum_attention.decomposition.intervals import Rows
from quorum_attention.kernels.dropout import Dropout, dropped

pytestmark = pytest.mark.usefixtures("one_thread")

KERNELS = ["dense", "cpu"]
SEED = 2**40 + 17


def shows(*batch: int) -> tuple[torch.Tensor, ...]:
    """Inputs whose output shows which pairs are kept: all weigh the same, and values
    are columns of the identity."""
    same = torch.zeros(*batch, 2, 20, 4)
    return same, same, torch.eye(20).expand(*batch, 2, 20, 20)


def kept_by(three: tuple[torch.Tensor, ...], **call: Any) -> torch.Tensor:
    """Which pairs a forward keeps."""
    return qa.attention(*three, enable_gqa=True, **{"dropout_p": 0.5, **call}) != 0


CUTS: dict[str, dict[str, Any]] = {
    "head groups": {"levels": (), "heads_per_group": 2},
    "two slots": {"levels": (7,), "over_inputs": False, "n_cap": 2},
    "together": {"levels": (7,), "over_inputs": True},
    "depth 2": {"levels": (3, 3)},
    "mixed": {"levels": (1, 7), "heads_per_group": 2, "layout": "balanced"},
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_same_pairs_however_a_call_is_cut(kernel: str, cut: str) -> None:
    """Those of the definition, forward and backward."""
    sizes = {
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 4,
        "batch": (2,),
        "dtype": torch.float64,
    }
    given = inputs(45, 38, **sizes)
    sizes |= {
        "n_keys": 38,
        "batch": 2,
        "kernel": kernel,
        "dropout_p": 0.4,
        "tile": 3,
        **CUTS[cut],
    }
    plans = [{"plan": qa.plan(45, backward=way, **sizes)} for way in (False, True)]
    call = {
        "enable_gqa": True,
        "dropout_p": 0.4,
        "dropout_seed": SEED,
        "kernel": kernel,
    }
    found = both_passes(given, plans, **call)
    wanted = textbook(
        *given.three, given.grad_out, qa.Mask(), 0.5, dropout=Dropout(0.4, SEED)
    )
    assert_close(found, (wanted.out, wanted.lse, *wanted.grads[:3]), 1e-11)


@pytest.mark.parametrize("kernel", ["auto", *KERNELS])
@pytest.mark.parametrize("depth", [0, 1])
def test_none_and_all(kernel: str, depth: int) -> None:
    """Nothing dropped is the call without dropout; all dropped is 0, as torch has
    it."""
    given = inputs(60)
    plain = qa.attention_with_lse(*given.three, kernel=kernel, depth=depth)
    same = qa.attention_with_lse(*given.three, kernel=kernel, depth=depth, dropout_p=0)
    assert all(map(torch.equal, plain, same))
    leaves = [t.clone().requires_grad_() for t in given.three]
    out, lse = qa.attention_with_lse(*leaves, kernel=kernel, depth=depth, dropout_p=1.0)
    assert_close(lse, plain[1], 1e-6)
    assert not any(
        t.any() for t in (out, *torch.autograd.grad(out, leaves, given.grad_out))
    )


def test_a_backward_needs_the_seed() -> None:
    given = inputs(20)
    report = qa.Report()
    out, lse = qa.attention_with_lse(*given.three, dropout_p=0.25, report=report)
    with pytest.raises(ValueError, match="dropout_seed must be given with dropout_p"):
        qa.attention_backward(given.grad_out, *given.three, out, lse, dropout_p=0.25)
    seed = report.forward.dropout_seed
    assert str(seed) in str(report)
    grads = qa.attention_backward(
        given.grad_out, *given.three, out, lse, dropout_p=0.25, dropout_seed=seed
    )
    leaves = [t.clone().requires_grad_() for t in given.three]
    again = qa.attention(*leaves, dropout_p=0.25, dropout_seed=seed)
    assert all(
        map(torch.equal, grads, torch.autograd.grad(again, leaves, given.grad_out))
    )


def test_a_kernel_without_dropout_never_leaves_it_out() -> None:
    """Neither one asked for by name, nor a user's, nor for "auto"."""

    def function(query, key, value, *, is_causal, scale):
        scores = scale * query @ key.mT
        return scores.softmax(-1) @ value, scores.logsumexp(-1)

    three = inputs(20).three
    with pytest.raises(NotImplementedError, match="it has no dropout by the position"):
        qa.attention(*three, dropout_p=0.5, kernel=qa.from_lse_function(function))
    with pytest.raises(NotImplementedError, match="it has no dropout by the position"):
        qa.plan(1000, dropout_p=0.5, device="cuda", kernel="cudnn")


def test_another_seed_in_every_call_and_the_same_again_after_the_same_manual_seed() -> (
    None
):
    torch.manual_seed(3)
    first, second = kept_by(shows(1)), kept_by(shows(1))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(first, kept_by(shows(1)))
    assert torch.equal(second, kept_by(shows(1)))


@pytest.mark.parametrize(
    "call",
    [{}, {"dropout_p": 0}, {"dropout_p": 0.5, "dropout_seed": 4}, {"depth": 1}],
    ids=str,
)
def test_nothing_is_drawn_where_no_seed_is_needed(call: dict[str, Any]) -> None:
    torch.manual_seed(5)
    qa.attention(*shows(1), **call)
    with pytest.raises(ValueError, match="attn_mask must broadcast"):
        qa.attention(*shows(1), torch.ones(3, 3), 0.5)
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))


def test_vmap_with_a_seed_drops_the_same_in_every_entry_and_asks_how_random_it_is_else() -> (
    None
):
    found = vmap(lambda *t: kept_by(t, dropout_seed=SEED))(*shows(3, 2))
    drops = dropped(Dropout(0.5, SEED), 2, 2, torch.arange(20), [Rows(0, 20, 0)])
    assert all(torch.equal(one, ~drops) for one in found)
    with pytest.raises(RuntimeError, match="in randomness error mode"):
        vmap(lambda *t: kept_by(t))(*shows(3, 2))
    different = partial(vmap, randomness="different")
    same = partial(vmap, randomness="same")
    found = different(lambda *t: kept_by(t))(*shows(3, 2))
    assert len({tuple(one.flatten().tolist()) for one in found.flatten(0, 1)}) == 6
    again = same(lambda *t: kept_by(t))(*shows(3, 2))
    assert all(torch.equal(one, again[0]) for one in again)
    nested = different(same(lambda *t: kept_by(t)))(*shows(3, 2, 1))
    assert torch.equal(nested[:, 0], nested[:, 1])
    assert not torch.equal(nested[0], nested[1])
    three = shows(2)
    unmapped = different(lambda x: kept_by(three).float() + x)(torch.zeros(3))
    assert not torch.equal(unmapped[0], unmapped[1])


def test_gradients_under_vmap_are_of_the_pairs_of_the_forward() -> None:
    """Of both orders, and of a Jacobian, whose rows all belong to one forward."""
    given = inputs(20, batch=(3, 2), dtype=torch.float64)

    def mine(*three: torch.Tensor) -> torch.Tensor:
        return qa.attention(*three, dropout_p=0.5, dropout_seed=SEED)

    def each(*three: torch.Tensor) -> torch.Tensor:
        return torch.stack([loss(*entry) for entry in zip(*three, strict=True)]).sum()

    def loss(*three: torch.Tensor) -> torch.Tensor:
        return mine(*three).square().sum()

    leaves = [t.clone().requires_grad_() for t in given.three]
    wanted = torch.autograd.grad(each(*leaves), leaves)
    for found in (
        vmap(grad(loss, (0, 1, 2)))(*given.three),
        grad(lambda *t: vmap(loss)(*t).sum(), (0, 1, 2))(*given.three),
    ):
        torch.testing.assert_close(found, wanted)
    few = [t[0, 0, :, :5] for t in given.three]
    jacobian = jacrev(mine)(*few)
    by_hand = torch.autograd.functional.jacobian(lambda q: mine(q, *few[1:]), few[0])
    torch.testing.assert_close(jacobian, by_hand)


def test_compiled_functions_draw_outside_the_graph() -> None:
    compiled = torch.compile(
        lambda *t: qa.attention(*t, dropout_p=0.5) * 1.0, backend="eager"
    )
    torch.manual_seed(9)
    found = [compiled(*shows(1)) for _ in range(2)]
    torch.manual_seed(9)
    wanted = [qa.attention(*shows(1), dropout_p=0.5) for _ in range(2)]
    assert torch.equal(torch.stack(found), torch.stack(wanted))
    assert not torch.equal(*found)
