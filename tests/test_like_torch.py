"""What torch's own function takes besides the usual: autocast, two dimensions, broadcasting."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers_attention import TOLERANCE, assert_close, exact, inputs
from torch.nn.functional import scaled_dot_product_attention as sdpa

import quorum_attention as qa
from quorum_attention.kernels import DenseKernel

pytestmark = pytest.mark.usefixtures("one_thread")

N, M, D = 5, 7, 4


def both(shapes, mask=None, **call):
    """Ours and torch's: results, and gradients of all inputs."""
    made = [torch.randn(s, dtype=torch.float64) for s in shapes]
    found = []
    for attention in (qa.attention, sdpa):
        leaves = [t.clone().requires_grad_() for t in made]
        named = {k: v for k, v in call.items() if attention is qa.attention or k in _TORCHS}
        out = attention(*leaves, mask, **named)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
        (out * weight).sum().backward()
        found.append((out, *(t.grad for t in leaves)))
    return found


_TORCHS = ("is_causal", "scale", "enable_gqa")

SHAPES = [
    ((N, D), (M, D), (M, 3)),
    ((2, 3, N, D), (1, 3, M, D), (2, 3, M, D)),
    ((2, 1, N, D), (1, 4, M, D), (1, 1, M, D)),
    ((5, 1, 2, N, D), (3, 1, M, D), (1, 1, M, 2)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("call", [{"is_causal": True}, {"depth": 1}, {"kernel": "dense"}])
def test_dimensions_that_broadcast(shapes, call) -> None:
    """Shapes of the result as torch's; gradients are summed over what was broadcast."""
    for mine, torchs in zip(*both(shapes, **call), strict=True):
        assert mine.shape == torchs.shape
        assert_close(mine, torchs.detach(), 1e-12)


def test_dimensions_that_broadcast_in_every_combination() -> None:
    """Every way of leaving out or shrinking a batch dimension or the heads of each input."""
    kinds = [(), (1,), (3,), (1, 1), (2, 1), (1, 3), (2, 3)]
    for q, k, v in itertools.product(kinds, repeat=3):
        shapes = ((*q, N, D), (*k, M, D), (*v, M, D))
        for one, other in zip(*both(shapes), strict=True):
            assert one.shape == other.shape, shapes
            assert_close(one, other.detach(), 1e-12)


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 4, N, D), (1, 2, M, D), (2, 2, M, D)),
        ((2, 4, N, D), (2, M, D), (2, M, D)),
        ((2, 4, N, D), (2, 2, M, D), (2, 1, M, D)),
        ((2, 4, N, D), (M, D), (M, D)),
    ],
    ids=str,
)
def test_heads_that_are_shared_and_broadcast(shapes) -> None:
    if len(shapes[1]) == 2:  # torch wants heads there
        mine, _ = both(shapes, enable_gqa=False)
        other, _ = both((shapes[0], (1, *shapes[1]), (1, *shapes[2])), enable_gqa=True)
        assert mine[0].shape == other[0].shape
        return
    for mine, torchs in zip(*both(shapes, enable_gqa=True), strict=True):
        assert mine.shape == torchs.shape
        assert_close(mine, torchs.detach(), 1e-12)


@pytest.mark.parametrize("shape", [(N, M), (M,), (1, M), (N, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("boolean", [False, True])
def test_two_dimensions_under_a_mask(shape, boolean) -> None:
    mask = torch.randn(shape, dtype=torch.float64)
    mask = mask > -1.0 if boolean else mask
    for mine, torchs in zip(*both(((N, D), (M, D), (M, D)), mask), strict=True):
        assert mine.shape == torchs.shape
        if not (boolean and not mask.any(-1).all()):
            assert_close(mine, torchs.detach(), 1e-12)


def test_two_dimensions_everywhere() -> None:
    """Results, lse, a given output, and the backward as a function."""
    q, k, v = torch.randn(N, D), torch.randn(M, D), torch.randn(M, 3)
    out, lse = qa.attention_with_lse(q, k, v)
    assert out.shape == (N, 3)
    assert lse.shape == (N,)
    assert_close(out, sdpa(q, k, v), 1e-5)
    room = torch.empty(N, 3)
    assert qa.attention(q, k, v, out=room) is room
    assert torch.equal(room, out)
    leaf = q.clone().requires_grad_()
    found = qa.attention(leaf, k, v, out=room)
    assert found.shape == (N, 3)
    assert found.data_ptr() == room.data_ptr()
    found.sum().backward()
    grads = qa.attention_backward(torch.ones(N, 3), q, k, v, out, lse)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    assert torch.equal(grads[0], leaf.grad)
    with pytest.raises(ValueError, match=r"out must have shape"):
        qa.attention(q, k, v, out=torch.empty(N, 4))
    with pytest.raises(NotImplementedError, match="grads cannot be given for inputs that are"):
        qa.attention_backward(
            torch.ones(N, 3), q, k, v, out, lse, grads=tuple(map(torch.empty_like, (q, k, v)))
        )


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (((N,), (M, D), (M, D)), r"query must have at least 2 dimensions"),
        (((2, 3, N, D), (3, 3, M, D), (2, 3, M, D)), "key and value must have batch dimensions"),
        (((2, 3, N, D), (2, 2, M, D), (2, 2, M, D)), r"key has 2 heads and query 3"),
        (((2, 4, N, D), (2, 2, M, D), (2, 4, M, D)), r"value must have the key's heads"),
    ],
    ids=str,
)
def test_what_does_not_broadcast_is_refused_by_name(shapes, says) -> None:
    with pytest.raises(ValueError, match=says):
        qa.attention(*(torch.randn(s) for s in shapes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "given",
    [
        (torch.float32,) * 3,
        (torch.float32, torch.bfloat16, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("call", [{}, {"depth": 1}, {"kernel": "dense"}])
def test_autocast(dtype, given, call) -> None:
    """Inputs are cast as torch casts them; gradients come back in their own dtypes."""
    plain = inputs(60)
    made = [t.to(kind) for t, kind in zip(plain.three, given, strict=True)]
    mine = [t.clone().requires_grad_() for t in made]
    other = [t.clone().requires_grad_() for t in made]
    with torch.autocast("cpu", dtype=dtype):
        out = qa.attention(*mine, **call)
        wanted = sdpa(*other)
    assert out.dtype == wanted.dtype == dtype
    assert_close(out, wanted, TOLERANCE[dtype])
    out.backward(plain.grad_out.to(dtype))
    wanted.backward(plain.grad_out.to(dtype))
    for one, two in zip(mine, other, strict=True):
        assert one.grad.dtype == one.dtype
        assert_close(one.grad, two.grad, 2 * TOLERANCE[torch.bfloat16])


def test_autocast_is_of_a_device_and_spares_float64() -> None:
    wide = inputs(60, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = qa.attention(*wide.three)
        assert out.dtype == torch.float64
        assert_close(out, exact(wide).out, 1e-12)
    with torch.autocast("cpu", enabled=False):
        assert qa.attention(*inputs(60).three).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match="dtype"):
        qa.attention(wide.query, wide.key.float(), wide.value)


@pytest.mark.parametrize("kernel", ["cpu", "dense"])
def test_nothing_is_cast_on_the_way(kernel: str) -> None:
    """An output asked for in fp32 is as exact as without autocast: statistics stay in fp32."""
    plain = inputs(300, dtype=torch.bfloat16)
    plan = qa.plan(300, heads=2, head_dim=8, dtype=torch.bfloat16, levels=(7,), kernel=kernel)
    usual = qa.attention_with_lse(*plain.three, plan=plan, out_dtype=torch.float32)
    back = qa.attention_backward(plain.grad_out, *plain.three, *usual)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = qa.attention_with_lse(*plain.three, plan=plan, out_dtype=torch.float32)
        again = qa.attention_backward(plain.grad_out, *plain.three, *found)
    for one, other in zip((*usual, *back), (*found, *again), strict=True):
        assert torch.equal(one, other)


def test_kernels_see_no_autocast() -> None:
    seen = []

    class Looking(DenseKernel):
        name = "looking"

        def forward(self, task, state):
            seen.append(torch.is_autocast_enabled("cpu"))
            super().forward(task, state)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        qa.attention(*inputs(60).three, kernel=Looking())
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("depth", ["auto", 1])
@pytest.mark.parametrize("backward", [False, True])
def test_casts_are_within_the_budget(depth, backward) -> None:
    """What autocast makes of the inputs is memory that the call takes."""
    wide = inputs(1000, heads=4, head_dim=64)
    half = [t.bfloat16() for t in wide.three]
    made = qa.attention_with_lse(*half)

    def call(three, budget: int, autocast: bool) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            if backward:
                qa.attention_backward(made[0], *three, *made, budget=budget, depth=depth)
            else:
                qa.attention(*three, budget=budget, depth=depth)

    smallest = []
    for three, autocast in ((half, False), (wide.three, True)):
        with pytest.raises(qa.BudgetError) as caught:
            call(three, 100_000, autocast)
        smallest.append(caught.value.smallest_bytes)
        call(three, smallest[-1], autocast)
        with pytest.raises(qa.BudgetError):
            call(three, smallest[-1] - 1, autocast)
    assert smallest[1] == smallest[0] + sum(t.nbytes for t in half)
