"""attention() on a GPU against float64; the yardstick is the same kernel's undivided call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_attention import Inputs, exact, inputs
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


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", list(TINY))
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_kernels_and_dtypes(kernel, dtype, is_causal, depth) -> None:
    compare(cuda_inputs(1000, dtype=dtype), kernel, depth, is_causal=is_causal)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "sizes",
    [
        {"kv_heads": 2},
        {"kv_heads": 1, "batch": (2,)},
        {"value_dim": 32},
        {"head_dim": 80},
        {"head_dim": 128},
        {"head_dim": 256},
    ],
    ids=str,
)
def test_heads_and_widths(kernel, sizes) -> None:
    compare(cuda_inputs(1000, dtype=torch.float16, **sizes), kernel, 1, is_causal=True)


@pytest.mark.parametrize("kernel", ["cudnn", "efficient", "native", "dense"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["boolean", "additive", "padding", "heads"])
@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_masks(kernel, kind, is_causal, where) -> None:
    n = 1000
    given = cuda_inputs(n, dtype=torch.float16)
    mask = {
        "boolean": torch.rand(n, n) > 0.3,
        "additive": torch.randn(n, n),
        "padding": (torch.arange(n) < 700).reshape(1, 1, 1, n),
        "heads": torch.randn(1, 4, n, n),
    }[kind].to("cuda")
    if where == "cuda":
        compare(given, kernel, 1, mask=mask, is_causal=is_causal)
        return
    skip_unless(kernel, given, mask=mask, is_causal=is_causal)
    reference = exact(given, mask=mask, is_causal=is_causal).out
    out = qa.attention(*given.three, mask.cpu(), is_causal=is_causal, depth=1, kernel=kernel)
    assert (out.double() - reference).abs().max() < 5e-3


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(300, 1000), (1000, 300), (1, 1000), (3, 5)])
def test_queries_and_keys_of_different_lengths(kernel, depth, n_queries, n_keys) -> None:
    """Causal is top-left, whatever the operator's own opinion."""
    given = cuda_inputs(n_queries, n_keys=n_keys, dtype=torch.float16)
    assert off(given, kernel, depth, is_causal=True) < 3e-3


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


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel != "flash"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("n", [300, 2000])
def test_a_key_that_is_nan_reaches_every_gradient_of_values(kernel, depth, number, n) -> None:
    """Whatever the row's largest score is taken for: its sum is NaN, and all probabilities.

    Also where the operator splits keys and merges the parts, those of NaN left out. Not on
    ``flash``: torch's own call loses the NaN, and so does ours (docs/kernels.md).
    """
    given = cuda_inputs(n, dtype=torch.float16)
    given.key.data[:, :, 7] = number  # infinite: of both signs in each score
    skip_unless(kernel, given)
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


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("n", [300, 2000])
def test_a_value_that_is_nan_reaches_no_lse(kernel, number, n) -> None:
    given = cuda_inputs(n, dtype=torch.float16)
    given.value.data[:, :, 7] = number
    skip_unless(kernel, given)
    out, lse = qa.attention_with_lse(*given.three, kernel=kernel, devices="cuda", depth=0)
    assert not bool(out.isfinite().any())
    assert bool(lse.isfinite().all())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_without_keys_are_zero(kernel, depth, is_causal) -> None:
    n = 600
    given = cuda_inputs(n, dtype=torch.float16)
    mask = (torch.rand(n, n, device="cuda") > 0.3).index_fill(
        0, torch.arange(0, n, 3, device="cuda"), False
    )
    skip_unless(kernel, given, mask=mask, is_causal=is_causal)
    results = both(given, kernel=kernel, mask=mask, is_causal=is_causal, depth=depth)
    assert not results["out"][:, :, ::3].any()
    assert not results["query"][:, :, ::3].any()
    assert max(errors(results, given, mask=mask, is_causal=is_causal).values()) < 5e-3


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_masks_of_the_lowest_number(kernel: str, dtype: torch.dtype, depth: int) -> None:
    """As models write them. Whole rectangles of a row are such numbers: they weigh nothing."""
    n = 600
    given = cuda_inputs(n, dtype=dtype)
    mask = torch.zeros(n, n, dtype=dtype, device="cuda")
    mask[:, n // 3 :] = torch.finfo(dtype).min
    mask[::2, 5:] = torch.finfo(dtype).min
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-4
    assert off(given, kernel, depth, mask=mask) < limit


def between_words(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, rows apart by an odd count and from an odd address."""
    wide = tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] + 3))
    wide[..., 1:-2] = tensor
    return wide[..., 1:-2]


FOUR = ("query", "key", "value", "grad_out")
# Operators may refuse rows that begin between words, or fail at their addresses; the gradient of a
# sum has stride 0, which they do not take, or take wrong.
LAYOUTS = {
    "all between words": dict.fromkeys(FOUR, between_words),
    **{f"{name} between words": {name: between_words} for name in FOUR},
    "a sum's gradient": {"grad_out": lambda t: torch.ones_like(t[:1, :1, :1, :1]).expand_as(t)},
    "transposed": dict.fromkeys(FOUR[:3], lambda t: t.mT.contiguous().mT),
}


@pytest.mark.parametrize("kernel", [*KERNELS, "auto"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("depth", [0, 1])
def test_any_layout_of_inputs(kernel: str, layout: str, depth: int) -> None:
    given = cuda_inputs(500, dtype=torch.float16)
    for name, change in LAYOUTS[layout].items():
        setattr(given, name, change(getattr(given, name)))
    assert off(given, kernel, depth) < 3e-3


def placed(given: Inputs, kind: str, folder: Path) -> Inputs:
    if kind == "device":
        return given
    four = [t.cpu() for t in (*given.three, given.grad_out)]
    if kind == "pinned":
        return Inputs(*(t.pin_memory() for t in four))
    if kind == "mapped":
        for i, tensor in enumerate(four):
            tensor.numpy().tofile(folder / str(i))
        return Inputs(*(
            torch.from_numpy(np.memmap(folder / str(i), np.float16, "r+", shape=tuple(t.shape)))
            for i, t in enumerate(four)
        ))  # fmt: skip
    if kind == "token-major":
        return Inputs(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in four))
    return Inputs(*four)


@pytest.mark.parametrize("kind", ["device", "pinned", "pageable", "mapped", "token-major"])
@pytest.mark.parametrize("accumulator", ["device", "host"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_residencies(kind, accumulator, depth, tmp_path) -> None:
    on_device = cuda_inputs(2000, dtype=torch.float16, kv_heads=2)
    given = placed(on_device, kind, tmp_path)
    results = both(given, is_causal=True, depth=depth, accumulator=accumulator)
    assert all(one.device.type == given.query.device.type for one in results.values())
    assert max(errors(results, on_device, is_causal=True).values()) < 2e-3


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
