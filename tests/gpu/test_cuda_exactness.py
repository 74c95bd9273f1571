"""attention() on a GPU against float64; the yardstick is the same kernel's undivided call."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers_attention import Inputs, inputs
from helpers_cuda import both, errors
from helpers_fa4 import FA4

import quorum_attention as qa
from quorum_attention.execution.call import mask_shape
from quorum_attention.kernels import CallShape, get_kernel, why_not

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
KERNELS = (FA4, "cudnn", "flash", "efficient", "native", "dense")
# What is added to 1.5 times the undivided call's error: a few last places of the dtype.
TINY = {torch.float16: 2e-4, torch.bfloat16: 2e-3, torch.float32: 2e-6}


def cuda_inputs(n: int, **sizes) -> Inputs:  # type: ignore[no-untyped-def]
    return inputs(n, device="cuda", **{"heads": 4, "head_dim": 64, **sizes})


def skip_unless(kernel: str, given: Inputs, *, mask=None, is_causal: bool = False) -> None:  # type: ignore[no-untyped-def]
    q, k, v = given.three
    widths = (q.shape[1], k.shape[1], q.shape[-1], v.shape[-1])
    shape = CallShape("cuda", q.dtype, *widths, is_causal, True)
    if mask is not None:
        shape = replace(shape, mask=mask_shape(mask, q.dim() - 3))
    reason = None if kernel == "auto" else why_not(get_kernel(kernel), shape)
    if reason is not None:
        pytest.skip(f"{kernel}: {reason}")


def off(given: Inputs, kernel: str, depth: int, **call) -> float:  # type: ignore[no-untyped-def]
    """The largest error of a result."""
    skip_unless(kernel, given, **call)
    return max(errors(both(given, kernel=kernel, depth=depth, **call), given, **call).values())


def compare(given: Inputs, kernel: str, depth: int, **call) -> None:  # type: ignore[no-untyped-def]
    skip_unless(kernel, given, **call)
    whole, cut = (
        errors(both(given, kernel=kernel, depth=d, **call), given, **call) for d in (0, depth)
    )
    for name, error in cut.items():
        limit = 1.5 * whole[name] + TINY[given.query.dtype]
        assert error <= limit, f"{name}: {error:.2e}, undivided {whole[name]:.2e}"


WIDTHS = ({"kv_heads": 1, "batch": (2,)}, {"value_dim": 32}, {"head_dim": 80}, {"head_dim": 256})


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("sizes", "is_causal", "depth"),
    [
        *product([{"dtype": dtype} for dtype in TINY], [False, True], [1, 2]),
        *product(WIDTHS, [True], [1]),
    ],
    ids=str,
)
def test_cut_is_as_exact_as_uncut(kernel, sizes, is_causal, depth) -> None:
    given = cuda_inputs(1000, **{"dtype": torch.float16, **sizes})
    compare(given, kernel, depth, is_causal=is_causal)


def between_words(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, rows apart by an odd count and from an odd address."""
    wide = tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] + 3))
    wide[..., 1:-2] = tensor
    return wide[..., 1:-2]


MASKS = {
    "boolean": lambda: torch.rand(1000, 1000, device="cuda") > 0.3,
    "heads": lambda: torch.randn(1, 4, 1000, 1000, device="cuda"),
    "between words": lambda: between_words(torch.randn(1000, 1000, device="cuda").half()),
    "a row between words": lambda: between_words(torch.randn(1, 1000, device="cuda").half()),
    "transposed": lambda: torch.randn(1000, 1000, device="cuda").mT,
}


@pytest.mark.parametrize("kernel", ["auto", "cudnn", "efficient", "native", "dense"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("depth", [0, 1])
def test_masks(kernel, kind, depth) -> None:
    """torch's vector loads of rows between words may end the context ("misaligned address"), or
    read wrongly: ours may not."""
    given = cuda_inputs(1000, dtype=torch.float16)
    assert off(given, kernel, depth, mask=MASKS[kind](), is_causal=True) < 5e-3


# Operators may refuse rows that begin between words, or fail at their addresses; the gradient of a
# sum has stride 0, which they do not take, or take wrong.
LAYOUTS = {
    "as they are": {},
    "between words": dict.fromkeys(("query", "key", "value", "grad_out"), between_words),
    "a sum's gradient": {"grad_out": lambda t: torch.ones_like(t[:1, :1, :1, :1]).expand_as(t)},
    "transposed": dict.fromkeys(("query", "key", "value"), lambda t: t.mT.contiguous().mT),
}


@pytest.mark.parametrize("kernel", [*KERNELS, "auto"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("layout", "n_queries", "n_keys"),
    [
        *((layout, 500, 500) for layout in LAYOUTS),
        *(("as they are", *ns) for ns in ((300, 1000), (1000, 300), (1, 1000), (3, 5))),
    ],
)
def test_any_layout_and_length(kernel, depth, layout, n_queries, n_keys) -> None:
    """Causal is top-left, whatever the operator's own opinion."""
    given = cuda_inputs(n_queries, n_keys=n_keys, dtype=torch.float16)
    for name, change in LAYOUTS[layout].items():
        setattr(given, name, change(getattr(given, name)))
    assert off(given, kernel, depth, is_causal=n_queries != n_keys) < 3e-3


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("depth", [0, 2])
def test_masks_of_the_lowest_number(kernel: str, depth: int) -> None:
    """As models write them. Whole rectangles of a row are such numbers: they weigh nothing."""
    given = cuda_inputs(600, dtype=torch.bfloat16)
    mask = torch.zeros(600, 600, dtype=torch.bfloat16, device="cuda")
    mask[:, 200:] = torch.finfo(mask.dtype).min
    mask[::2, 5:] = torch.finfo(mask.dtype).min
    assert off(given, kernel, depth, mask=mask) < 2e-2


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n_keys", [1, 4, 63, 64, 65, 100, 130])
def test_scores_far_below_zero(kernel, dtype, is_causal, n_keys) -> None:
    """What a kernel makes of keys beyond the end must not outweigh the keys that there are."""
    given = cuda_inputs(130, n_keys=n_keys, dtype=dtype)
    given.query.data[..., 0] = 8.0
    given.key.data[..., 0] = -300.0
    # Scores of 16-bit products of these sizes are some per cent off, and so is all else.
    assert off(given, kernel, 0, is_causal=is_causal) < 0.5


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("n", [300, 2000])
def test_what_is_not_finite_goes_where_it_should(kernel, depth, number, n) -> None:
    """A key's reaches every gradient of values: its rows' sums are NaN, and all probabilities.
    Also where the operator splits keys and merges the parts, those of NaN left out. Not on
    ``flash``: torch's own call loses the NaN, and so does ours (docs/kernels.md).

    A value's reaches no lse.
    """
    given = cuda_inputs(n, dtype=torch.float16)
    skip_unless(kernel, given)
    bad = given.value.clone()
    bad[:, :, 7] = number
    out, lse = qa.attention_with_lse(
        given.query, given.key, bad, kernel=kernel, devices="cuda", depth=0
    )
    assert not bool(out.isfinite().any())
    assert bool(lse.isfinite().all())
    given.key.data[:, :, 7] = number  # infinite: of both signs in each score
    if kernel != "flash":
        assert bool(both(given, kernel=kernel, depth=depth)["value"].isnan().all())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("scale", [1e-6, -1e-6, 1e-4])
def test_small_factors_in_fp16(kernel, depth, scale) -> None:
    """Products of scores' gradients with such factors are no normal numbers of fp16."""
    given = cuda_inputs(300, dtype=torch.float16)
    skip_unless(kernel, given)
    call = {"kernel": kernel, "devices": "cuda", "depth": depth, "scale": scale}
    out, lse = qa.attention_with_lse(*given.three, **call)
    if kernel in ("cudnn", "efficient"):
        with pytest.raises(NotImplementedError, match="lose their digits"):
            qa.attention_backward(given.grad_out, *given.three, out, lse, **call)
        return
    found = qa.attention_backward(given.grad_out, *given.three, out, lse, **call)
    leaves = [t.detach().double().requires_grad_() for t in given.three]
    right = (leaves[0] @ leaves[1].mT * scale).softmax(-1) @ leaves[2]
    wanted = torch.autograd.grad(right, leaves, given.grad_out.double())
    for mine, theirs in zip(found, wanted, strict=True):
        # fp16's smallest number is 2**-24; a cut call rounds several times.
        most = 4e-3 * float(theirs.abs().max()) + 2.0**-22
        assert float((mine.double() - theirs).abs().max()) < most


@pytest.mark.parametrize("kernel", ["flash", "dense"])
@pytest.mark.parametrize("accumulator", ["device", "host"])
def test_the_number_of_slots_changes_nothing(kernel, accumulator) -> None:
    """Bit for bit: streams and events keep the order of one slot. Inputs on the host, several
    head groups, so that everything that can overlap does."""
    given = Inputs(*(t.cpu() for t in (*cuda_inputs(3000, dtype=torch.float16).three,
                                       torch.zeros(1))))  # fmt: skip
    results = []
    for n_cap in (1, 2, 3):
        plan = qa.plan(
            3000, heads=4, levels=(13,), n_cap=n_cap, accumulator=accumulator, kernel=kernel,
            heads_per_group=2, is_causal=True, device="cuda", inputs="host",
        )  # fmt: skip
        for _ in range(2):
            results.append(qa.attention(*given.three, is_causal=True, plan=plan, devices="cuda"))
    for other in results[1:]:
        assert torch.equal(results[0], other)
