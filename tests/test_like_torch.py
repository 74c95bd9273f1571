"""What torch's own function takes besides the usual: autocast, two dimensions,
broadcasting. (What does not broadcast is refused: tests/test_nonsense.py.)"""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from helpers.attention import TOLERANCE, Inputs, assert_close, exact, inputs
from helpers.passes import both_passes, pass_of, smallest_budget
from torch.nn.functional import scaled_dot_product_attention as sdpa

import quorum_attention as qa

pytestmark = pytest.mark.usefixtures("one_thread")

N, M, D = 5, 7, 4


def both(shapes, mask=None, **call):
    """Ours and torch's: results, and gradients of all inputs."""
    made = [torch.randn(s, dtype=torch.float64) for s in shapes]
    found = []
    for attention in (qa.attention, sdpa):
        leaves = [t.clone().requires_grad_() for t in made]
        named = {
            k: v for k, v in call.items() if attention is qa.attention or k in _TORCHS
        }
        out = attention(*leaves, mask, **named)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
        (out * weight).sum().backward()
        found.append((out, *(t.grad for t in leaves)))
    return found


_TORCHS = ("is_causal", "scale", "enable_gqa")


def check(shapes, mask=None, **call) -> None:
    for mine, torchs in zip(*both(shapes, mask, **call), strict=True):
        assert mine.shape == torchs.shape, shapes
        assert_close(mine, torchs.detach(), 1e-12)


SHAPES = {
    ((N, D), (M, D), (M, 3)): {"is_causal": True},
    ((2, 1, N, D), (1, 4, M, D), (1, 1, M, D)): {"depth": 1},
    ((5, 1, 2, N, D), (3, 1, M, D), (1, 1, M, 2)): {"kernel": "dense"},
    ((2, 4, N, D), (1, 2, M, D), (2, 2, M, D)): {"enable_gqa": True},
    ((2, 4, N, D), (2, M, D), (2, M, D)): {"enable_gqa": True},
    ((2, 4, N, D), (2, 2, M, D), (2, 1, M, D)): {"enable_gqa": True},
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("shapes", "call"), SHAPES.items(), ids=str)
def test_dimensions_that_broadcast(shapes, call) -> None:
    """Shapes of the result as torch's; gradients are summed over what was broadcast."""
    check(shapes, **call)


@pytest.mark.slow
def test_dimensions_that_broadcast_in_every_combination() -> None:
    """Every way of leaving out or shrinking a batch dimension or the heads of each
    input."""
    kinds = [(), (1,), (3,), (1, 1), (2, 1), (1, 3), (2, 3)]
    for q, k, v in itertools.product(kinds, repeat=3):
        check(((*q, N, D), (*k, M, D), (*v, M, D)))


@pytest.mark.parametrize("shape", [(N, M), (M,), (1, M), (N, 1), (1, 1)], ids=str)
def test_two_dimensions_under_a_mask(shape) -> None:
    mask = torch.randn(shape, dtype=torch.float64)
    for one in (
        mask,
        mask > mask.max(-1, keepdim=True).values - 1,
    ):  # every row keeps a key
        check(((N, D), (M, D), (M, D)), one)


def test_two_dimensions_everywhere() -> None:
    """Results, lse, a given output, and the backward as a function."""
    given = Inputs(
        torch.randn(N, D), torch.randn(M, D), torch.randn(M, 3), torch.ones(N, 3)
    )
    out, lse, *grads = both_passes(given)
    assert (out.shape, lse.shape) == ((N, 3), (N,))
    assert_close(out, sdpa(*given.three), 1e-5)
    assert [g.shape for g in grads] == [t.shape for t in given.three]
    room, leaf = torch.empty(N, 3), given.query.clone().requires_grad_()
    assert qa.attention(*given.three, out=room) is room
    assert torch.equal(room, out)
    found = qa.attention(leaf, *given.three[1:], out=room)
    assert found.data_ptr() == room.data_ptr()
    found.sum().backward()
    assert torch.equal(grads[0], leaf.grad)
    with pytest.raises(ValueError, match=r"out must have shape"):
        qa.attention(*given.three, out=torch.empty(N, 4))
    with pytest.raises(
        NotImplementedError, match="grads cannot be given for inputs that are"
    ):
        pass_of(
            given, True, (out, lse), grads=tuple(map(torch.empty_like, given.three))
        )()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "given",
    [(torch.float32,) * 3, (torch.float32, torch.bfloat16, torch.float16)],
    ids=str,
)
@pytest.mark.parametrize("call", [{}, {"depth": 1}, {"kernel": "dense"}])
def test_autocast(dtype, given, call) -> None:
    """Inputs are cast as torch casts them; gradients come back in their own dtypes."""
    plain = inputs(60)
    made = [t.to(kind) for t, kind in zip(plain.three, given, strict=True)]
    found = []
    for attention in (partial(qa.attention, **call), sdpa):
        leaves = [t.clone().requires_grad_() for t in made]
        with torch.autocast("cpu", dtype=dtype):
            out = attention(*leaves)
        grads = torch.autograd.grad(out, leaves, plain.grad_out.to(dtype))
        assert out.dtype == dtype
        assert [t.dtype for t in grads] == list(given)
        found.append((out, grads))
    (out, grads), (wanted, wanted_grads) = found
    assert_close(out, wanted, TOLERANCE[dtype])
    assert_close(grads, wanted_grads, 2 * TOLERANCE[torch.bfloat16])


def test_autocast_is_of_a_device_and_spares_float64() -> None:
    wide = inputs(60, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = qa.attention(*wide.three)
        assert out.dtype == torch.float64
        assert_close(out, exact(wide).out, 1e-12)
    with torch.autocast("cpu", enabled=False):
        assert qa.attention(*inputs(60).three).dtype == torch.float32
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(TypeError, match="dtype"),
    ):
        qa.attention(wide.query, wide.key.float(), wide.value)


@pytest.mark.parametrize("kernel", ["cpu", "dense"])
def test_nothing_is_cast_on_the_way(kernel: str) -> None:
    """An output asked for in fp32 is as exact as without autocast: statistics stay in
    fp32."""
    plain = inputs(300, dtype=torch.bfloat16)
    plan = qa.plan(
        300, heads=2, head_dim=8, dtype=torch.bfloat16, levels=(7,), kernel=kernel
    )
    each = {"plan": plan, "out_dtype": torch.float32}, {}
    usual = both_passes(plain, each)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, usual, both_passes(plain, each)))


@pytest.mark.parametrize("depth", ["auto", 1])
@pytest.mark.parametrize("backward", [False, True])
def test_casts_are_within_the_budget(depth, backward) -> None:
    """What autocast makes of the inputs is memory that the call takes."""
    wide = inputs(1000, heads=4, head_dim=64)
    half = Inputs(*(t.bfloat16() for t in wide.three), wide.grad_out)
    results = qa.attention_with_lse(*half.three)
    wide.grad_out = half.grad_out = results[0]
    smallest = []
    for given, autocast in ((half, False), (wide, True)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            call = pass_of(given, backward, results, depth=depth)
            smallest.append(smallest_budget(lambda most, call=call: call(budget=most)))
    assert smallest[1] == smallest[0] + sum(t.nbytes for t in half.three)
