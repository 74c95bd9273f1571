"""``attention()`` against torch's own and the float64 textbook, whatever comes in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_attention import GRADIENT_TOLERANCE, TOLERANCE, Inputs, assert_close, exact, inputs
from helpers_memory import usage
from torch.nn.functional import scaled_dot_product_attention as sdpa

import quorum_attention as qa

pytestmark = pytest.mark.usefixtures("one_thread")
FP32 = TOLERANCE[torch.float32]


@pytest.mark.parametrize("n", [1, 6, 7, 8, 48, 49, 50, 1000, 1021])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_any_length_at_any_depth_equals_torchs(n: int, depth: int, is_causal: bool) -> None:
    """Lengths below, at and above the chunk counts included."""
    given = inputs(n)
    out, lse = qa.attention_with_lse(*given.three, is_causal=is_causal, depth=depth)
    assert_close(out, sdpa(*given.three, is_causal=is_causal), FP32)
    assert_close(lse, exact(given, is_causal=is_causal).lse, FP32)


@pytest.mark.parametrize("levels", [(), (3,), (7,), (13,), (7, 3), (3, 7), (3, 3, 3)])
@pytest.mark.parametrize("layout", ["aligned", "balanced"])
@pytest.mark.parametrize("n", [5, 200])
def test_given_levels_and_layouts(levels, layout, n) -> None:
    given = inputs(n, dtype=torch.float64)
    plan = qa.plan(
        n, heads=2, head_dim=8, dtype=torch.float64, levels=levels, layout=layout, tile=16,
        is_causal=True,
    )  # fmt: skip
    report = qa.Report()
    out = qa.attention(*given.three, is_causal=True, plan=plan, report=report)
    assert_close(out, exact(given, is_causal=True).out, 1e-12)
    assert report.forward is not None
    assert report.forward.levels == levels


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (1, 1, 2)])
@pytest.mark.parametrize("depth", [0, 1])
def test_any_number_of_batch_dimensions(batch: tuple[int, ...], depth: int) -> None:
    given = inputs(60, batch=batch, heads=4, kv_heads=2, value_dim=12)
    out = qa.attention(*given.three, depth=depth, enable_gqa=True)
    assert_close(out, exact(given).out, FP32)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 3)])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 8), (8, 24), (24, 8), (1, 1), (7, 5)])
@pytest.mark.parametrize("depth", [0, 1])
def test_heads_and_widths(heads, kv_heads, head_dim, value_dim, depth) -> None:
    given = inputs(
        150, heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, batch=(2,)
    )
    out = qa.attention(*given.three, depth=depth, enable_gqa=True, is_causal=True)
    assert_close(out, exact(given, is_causal=True).out, FP32)
    assert_close(out, sdpa(*given.three, enable_gqa=True, is_causal=True), FP32)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16])
def test_dtypes(dtype, depth, out_dtype) -> None:
    given = inputs(400, dtype=dtype)
    out, lse = qa.attention_with_lse(*given.three, depth=depth, out_dtype=out_dtype)
    assert out.dtype == (out_dtype or dtype)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(out, exact(given).out, max(TOLERANCE[dtype], TOLERANCE[out.dtype]))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["boolean", "additive", "additive-half"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    "shape",
    [(70, 90), (1, 90), (70, 1), (1, 1), (90,), (3, 70, 90), (3, 1, 90), (1, 70, 90),
     (2, 1, 1, 90), (2, 3, 70, 90), (2, 1, 70, 1), (1, 3, 1, 1)],
    ids=str,
)  # fmt: skip
def test_masks_of_every_broadcast_shape(shape, depth, kind, is_causal) -> None:
    given = inputs(70, 90, batch=(2,), heads=3)
    mask = torch.randn(shape)
    if kind == "boolean":
        mask = mask > -0.5
    elif kind == "additive-half":
        mask = mask.half()
    out, lse = qa.attention_with_lse(*given.three, mask, is_causal=is_causal, depth=depth)
    reference = exact(given, mask=mask, is_causal=is_causal)
    assert_close(out, reference.out, FP32)
    assert_close(lse, reference.lse, FP32)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_key_padding_and_rows_without_keys(depth: int) -> None:
    """A row whose keys are all masked is 0, as in torch, and its lse -inf."""
    n = 300
    given = inputs(n, batch=(2,))
    padding = torch.arange(n).reshape(1, 1, 1, n) < torch.tensor([0, 170]).reshape(2, 1, 1, 1)
    out, lse = qa.attention_with_lse(*given.three, padding, depth=depth)
    assert_close(out, exact(given, mask=padding).out, FP32)
    assert not out[0].any()
    assert bool((lse[0] == -torch.inf).all())
    rows = (torch.arange(n) % 3 > 0).unsqueeze(-1)
    out, lse = qa.attention_with_lse(*given.three, rows, depth=depth)
    assert not out[:, :, ::3].any()
    assert bool((lse[:, :, ::3] == -torch.inf).all())
    assert bool(lse[:, :, 1::3].isfinite().all())


def strided(kind: str, n: int = 200) -> Inputs:
    given = inputs(n, heads=4, head_dim=16)
    q, k, v = given.three
    if kind == "token-major":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    elif kind == "packed":
        packed = torch.stack([t.transpose(1, 2) for t in (q, k, v)], dim=2).contiguous()
        q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    elif kind == "expanded":
        q, k, v = (t[:, :1].expand(3, 4, n, 16) for t in (q, k, v))
    elif kind == "every-other-row":
        q, k, v = (t.repeat_interleave(2, dim=2)[:, :, ::2] for t in (q, k, v))
    elif kind == "width-strided":
        q, k, v = (t.mT.contiguous().mT for t in (q, k, v))
    elif kind == "one-row-repeated":
        q, k, v = (t[:, :, :1].expand(1, 4, n, 16) for t in (q, k, v))
    return Inputs(q, k, v, given.grad_out.expand(q.shape[0], -1, -1, -1))


KINDS = ("token-major", "packed", "expanded", "every-other-row", "width-strided",
         "one-row-repeated")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_inputs_that_are_not_contiguous(kind: str, depth: int) -> None:
    given = strided(kind)
    assert not given.query.is_contiguous()
    out, lse = qa.attention_with_lse(*given.three, is_causal=True, depth=depth)
    reference = exact(given, is_causal=True, gradients=True)
    assert_close(out, reference.out, FP32)
    grads = qa.attention_backward(
        given.grad_out, *given.three, out, lse, is_causal=True, depth=depth
    )
    for actual, expected in zip(grads, reference.grads, strict=True):
        assert_close(actual, expected, 5e-5)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_empty_sequences(n_queries, n_keys, depth, is_causal) -> None:
    given = inputs(n_queries, n_keys)
    for tensor in given.three:
        tensor.requires_grad_()
    out, lse = qa.attention_with_lse(*given.three, depth=depth, is_causal=is_causal)
    assert out.shape == (1, 2, n_queries, 8)
    assert not out.any()
    assert bool((lse == -torch.inf).all())
    out.sum().backward()
    assert not any(t.grad.any() for t in given.three)
    for batch, heads in (((0,), 2), ((1,), 0), ((2, 0), 3), ((), 0)):
        given = inputs(20, batch=batch, heads=heads)
        assert qa.attention(*given.three, depth=depth).shape == given.query.shape


@pytest.mark.parametrize("scale", [0.5, 2.0, -1.0, 0.0])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_scale(scale: float, depth: int, is_causal: bool, masked: bool) -> None:
    given = inputs(300)
    call = {"scale": scale, "is_causal": is_causal}
    mask = torch.rand(300, 300) < 0.8 if masked else None
    out, lse = qa.attention_with_lse(*given.three, mask, depth=depth, **call)
    grads = qa.attention_backward(given.grad_out, *given.three, out, lse, mask, depth=depth, **call)
    reference = exact(given, mask=mask, gradients=True, **call)
    for found, expected in zip(
        (out, lse, *grads), (reference.out, reference.lse, *reference.grads), strict=True
    ):
        assert_close(found, expected, GRADIENT_TOLERANCE[torch.float32])


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("mask", [None, "rows"])
def test_a_negative_scale_stays_within_what_is_planned(depth: int, mask: str | None) -> None:
    """Its sign goes to a copy of the queries: of a call of the operator, and counted."""
    given = inputs(900, heads=4, head_dim=64)
    call = {"scale": -0.1, "depth": depth, "is_causal": True}
    call["attn_mask"] = None if mask is None else torch.randn(900, 900)
    report = qa.Report()
    out, lse = qa.attention_with_lse(*given.three, **call)  # the kernel is tried out once
    qa.attention_backward(given.grad_out, *given.three, out, lse, **call)
    found = usage(lambda: qa.attention(*given.three, **call, report=report))
    assert found.peak <= report.forward.planned_peak_bytes
    found = usage(
        lambda: qa.attention_backward(given.grad_out, *given.three, out, lse, **call, report=report)
    )
    assert found.peak <= report.backward.planned_peak_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("kind", ["tensor", "strided", "memmap", "tensor-of-memmap"])
def test_preallocated_outputs(tmp_path: Path, dtype, depth, out_dtype, kind) -> None:
    given = inputs(300, dtype=dtype, heads=3)
    shape = tuple(given.grad_out.shape)
    if kind in ("tensor", "strided"):
        out = torch.full(shape, torch.nan, dtype=out_dtype)
        out = out.mT.contiguous().mT if kind == "strided" else out
    else:
        width = {torch.float32: "f4", torch.float64: "f8", torch.float16: "f2"}[out_dtype]
        out = np.memmap(tmp_path / "out", width, "w+", shape=shape)
        out = torch.from_numpy(out) if kind == "tensor-of-memmap" else out
    returned = qa.attention(*given.three, depth=depth, out=out)
    address = out.ctypes.data if isinstance(out, np.ndarray) else out.data_ptr()
    assert returned.data_ptr() == address
    assert returned.dtype == out_dtype
    limit = max(TOLERANCE[dtype], TOLERANCE[out_dtype])
    assert_close(returned, exact(given).out, limit)


@pytest.mark.parametrize("depth", [0, 1])
def test_read_only_memory_mapped_inputs(tmp_path: Path, depth: int) -> None:
    given = inputs(300)
    maps = []
    for i, tensor in enumerate(given.three):
        path = tmp_path / str(i)
        tensor.numpy().tofile(path)
        maps.append(np.memmap(path, np.float32, "r", shape=tuple(tensor.shape)))
    assert_close(qa.attention(*maps, depth=depth), exact(given).out, FP32)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Bit for bit: NaN equals itself, 0 and -0 differ."""
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_inputs_are_left_as_they_were(depth: int, dtype: torch.dtype) -> None:
    given = inputs(300, dtype=dtype)
    mask = torch.rand(300, 300) > 0.2
    out, lse = qa.attention_with_lse(*given.three, mask, depth=depth)
    tensors = (*given.three, given.grad_out, mask, out, lse)
    copies = [t.clone() for t in tensors]
    qa.attention_backward(given.grad_out, *given.three, out, lse, mask, depth=depth)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(bytes_of(tensor), bytes_of(copy))


def test_results_of_both_homes_are_the_same() -> None:
    given = inputs(300, dtype=torch.float16)
    first, second = (
        qa.attention(*given.three, depth=1, accumulator=home) for home in ("device", "host")
    )
    assert torch.equal(first, second)


def test_progress_callable_and_bar(capsys) -> None:
    given, seen = inputs(300), []
    heads, head_dim = given.query.shape[1], given.query.shape[3]
    plan = qa.plan(
        300, heads=heads, head_dim=head_dim, dtype=given.query.dtype, levels=(7,), over_inputs=False
    )
    qa.attention(*given.three, plan=plan, progress=lambda *now: seen.append(now))
    assert seen == [(i + 1, 7, "forward") for i in range(7)]
    seen.clear()
    qa.attention(*given.three, depth=1, progress=lambda *now: seen.append(now))
    assert seen[-1] == (7, 7, "forward")
    seen.clear()
    qa.attention(*given.three, depth=0, progress=lambda *now: seen.append(now))
    assert seen == [(1, 1, "forward")]
    qa.attention(*given.three, depth=1, progress=True)
    assert not capsys.readouterr().out.count("forward"), "the bar is drawn on stderr"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_report_says_what_happened(depth: int) -> None:
    given = inputs(300, heads=4, kv_heads=2)
    report = qa.Report()
    assert str(report) == "nothing has run yet"
    three = [t.requires_grad_() for t in given.three]
    levels = (7,) * depth
    qa.attention(*three, depth=depth, enable_gqa=True, report=report).sum().backward()
    for part in (report.forward, report.backward):
        assert part is not None
        assert (part.kernel, part.levels, part.planned_levels) == ("cpu", levels, levels)
        assert part.units == 7**depth * part.n_groups
        assert part.n_groups * part.heads_per_group == 4
        # At depth 1 all tasks run at once where the inputs are; nothing is moved.
        assert (part.loaded_bytes > 0) == (part.stored_bytes > 0) == (depth == 2)
        assert set(part.stages) == {"gather", "h2d", "compute", "merge", "d2h", "scatter"}
        assert part.stages["compute"] > 0
        assert part.seconds > 0
        assert part.planned_peak_bytes > 0
        assert part.recoveries == []
    assert report.to_dict()["forward"]["kernel"] == "cpu"
    assert "kernel: cpu" in str(report)


Q = torch.zeros(1, 2, 50, 8)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n_tokens": 49}, "plan was made for n_queries = 49, the call has 50"),
        ({"heads": 4}, "plan was made for heads = 4, the call has 2"),
        ({"head_dim": 16}, "head_dim = 16, the call has 8"),
        ({"dtype": torch.float16}, "dtype = torch.float16"),
        ({"is_causal": True}, "is_causal = True, the call has False"),
        ({"batch": 2}, "batch = 2, the call has 1"),
        ({"n_keys": 51}, "n_keys = 51, the call has 50"),
        ({"value_dim": 4}, "value_dim = 4, the call has 8"),
        ({"kv_heads": 1}, "kv_heads = 1, the call has 2"),
    ],
)
def test_a_plan_of_another_call_is_refused(change, says) -> None:
    sizes = {"n_tokens": 50, "heads": 2, "head_dim": 8, "dtype": torch.float32, **change}
    plan = qa.plan(sizes.pop("n_tokens"), **sizes)
    with pytest.raises(ValueError, match=says):
        qa.attention(Q, Q, Q, plan=plan)
