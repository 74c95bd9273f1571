"""Seeds: drawn once in a call, from torch's generator, and as reproducible as it is."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers_attention import inputs
from torch.func import grad, jacrev, vmap
from torch.utils.checkpoint import checkpoint

import quorum_attention as qa
from quorum_attention.decomposition.intervals import Rows
from quorum_attention.kernels.dropout import Dropout, dropped

pytestmark = pytest.mark.usefixtures("one_thread")
N, SEED = 20, 77


def kept(batch: int, heads: int = 2, p: float = 0.5) -> torch.Tensor:
    return ~dropped(Dropout(p, SEED), batch, heads, torch.arange(N), [Rows(0, N, 0)])


def zeros(*batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs whose output shows which pairs are kept."""
    one = torch.zeros(*batch, 2, N, 4)
    return one, one, torch.eye(N).expand(*batch, 2, N, N)


def kept_by(three: tuple[torch.Tensor, ...], **call: Any) -> torch.Tensor:
    return qa.attention(*three, dropout_p=0.5, **call) != 0


def test_another_seed_in_every_call_and_the_same_again_after_the_same_manual_seed() -> None:
    torch.manual_seed(3)
    first, second = kept_by(zeros(1)), kept_by(zeros(1))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(first, kept_by(zeros(1)))
    assert torch.equal(second, kept_by(zeros(1)))


@pytest.mark.parametrize(
    "call", [{}, {"dropout_p": 0}, {"dropout_p": 0.5, "dropout_seed": 4}, {"depth": 1}], ids=str
)
def test_nothing_is_drawn_where_no_seed_is_needed(call: dict[str, Any]) -> None:
    torch.manual_seed(5)
    qa.attention(*zeros(1), **call)
    with pytest.raises(ValueError, match="attn_mask must broadcast"):
        qa.attention(*zeros(1), torch.ones(3, 3), 0.5)
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_drops_the_same_pairs_again(reentrant: bool) -> None:
    given = inputs(N, dtype=torch.float64)
    found = []
    for again in (False, True):
        leaves = [t.clone().requires_grad_() for t in given.three]
        torch.manual_seed(8)

        def call(*three: torch.Tensor) -> torch.Tensor:
            return qa.attention(*three, dropout_p=0.5).square()

        out = checkpoint(call, *leaves, use_reentrant=reentrant) if again else call(*leaves)
        out.sum().backward()
        found.append((out, *(t.grad for t in leaves)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


# --- torch.func -------------------------------------------------------------------------------


def test_vmap_with_a_seed_drops_the_same_in_every_entry() -> None:
    found = vmap(lambda *t: kept_by(t, dropout_seed=SEED))(*zeros(3, 2))
    assert all(torch.equal(one, kept(2)) for one in found)


def test_vmap_asks_how_random_it_is_to_be() -> None:
    with pytest.raises(RuntimeError, match="in randomness error mode"):
        vmap(lambda *t: kept_by(t))(*zeros(3, 2))
    different = partial(vmap, randomness="different")
    same = partial(vmap, randomness="same")
    found = different(lambda *t: kept_by(t))(*zeros(3, 2))
    assert len({tuple(one.flatten().tolist()) for one in found.flatten(0, 1)}) == 6
    again = same(lambda *t: kept_by(t))(*zeros(3, 2))
    assert all(torch.equal(one, again[0]) for one in again)
    nested = different(same(lambda *t: kept_by(t)))(*zeros(3, 2, 1))
    assert torch.equal(nested[:, 0], nested[:, 1])
    assert not torch.equal(nested[0], nested[1])
    three = zeros(2)
    unmapped = different(lambda x: kept_by(three).float() + x)(torch.zeros(3))
    assert not torch.equal(unmapped[0], unmapped[1])


def test_gradients_under_vmap_are_of_the_pairs_of_the_forward() -> None:
    """Of both orders, and of a Jacobian, whose rows all belong to one forward."""
    given = inputs(N, batch=(3, 2), dtype=torch.float64)

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
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
    few = [t[0, 0, :, :5] for t in given.three]
    jacobian = jacrev(mine)(*few)
    by_hand = torch.autograd.functional.jacobian(lambda q: mine(q, *few[1:]), few[0])
    torch.testing.assert_close(jacobian, by_hand)


def test_compiled_functions_draw_outside_the_graph() -> None:
    compiled = torch.compile(lambda *t: qa.attention(*t, dropout_p=0.5) * 1.0, backend="eager")
    torch.manual_seed(9)
    found = [compiled(*zeros(1)) for _ in range(2)]
    torch.manual_seed(9)
    wanted = [qa.attention(*zeros(1), dropout_p=0.5) for _ in range(2)]
    assert torch.equal(torch.stack(found), torch.stack(wanted))
    assert not torch.equal(*found)
