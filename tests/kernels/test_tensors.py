"""Views, layouts, padded forms, copies and blocks of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from quorum_attention.decomposition.rectangles import Batch, Rectangle
from quorum_attention.kernels import vendors
from quorum_attention.kernels.protocol import Call, Saved
from quorum_attention.kernels.tensors import (
    BLOCK_BYTES,
    bias_for_padding,
    copy_on_device,
    dense,
    in_layout_of,
    in_words,
    jth_of_group,
    key_rows,
    pad_last,
    pad_rows,
    query_rows,
    repeat_last,
    row_blocks,
    runs_as_batch,
    token_major,
    zero_unit_strides,
)
from quorum_attention.kernels.vendors import CudnnKernel

STORED = {
    "dense": lambda: torch.arange(240.0).view(1, 2, 30, 4),
    "token major": lambda: torch.arange(240.0).view(1, 30, 2, 4).transpose(1, 2),
    "a part": lambda: torch.arange(960.0).view(2, 4, 30, 4)[1:, 1:3],
}


@pytest.mark.parametrize("stored", list(STORED))
def test_regular_runs_are_batch_entries(stored: str) -> None:
    tensor = STORED[stored]()
    batch = Batch(Rectangle(2, 5, 1, 7, False), 4, query_step=7, key_step=6)
    rows, columns = query_rows(tensor, batch), key_rows(tensor, batch)
    assert rows.shape == (4, 2, 3, 4)
    assert columns.shape == (4, 2, 6, 4)
    for number, r in enumerate(batch.rectangles()):
        assert torch.equal(rows[number], tensor[0, :, r.query_start : r.query_stop])
        assert torch.equal(columns[number], tensor[0, :, r.key_start : r.key_stop])
    rows.zero_()
    assert tensor[0, :, 2:5].eq(0).all()


def test_one_run_keeps_its_batch() -> None:
    tensor = torch.arange(480.0).view(2, 2, 30, 4)
    one = Batch(Rectangle(3, 9, 0, 4, False))
    assert query_rows(tensor, one).data_ptr() == tensor[:, :, 3:].data_ptr()
    assert torch.equal(query_rows(tensor, one), tensor[:, :, 3:9])
    assert torch.equal(key_rows(tensor, one), tensor[:, :, :4])
    # Statistics have no last dimension.
    assert torch.equal(query_rows(tensor[..., 0], one), tensor[:, :, 3:9, 0])


def test_heads_of_a_group() -> None:
    tensor = torch.arange(6).view(1, 6, 1).expand(2, 6, 5)
    for j in range(3):
        found = jth_of_group(2, j, tensor)
        assert found[0, :, 0].tolist() == [j, 3 + j]


def test_parts_of_a_run_as_a_batch() -> None:
    tensor = torch.arange(24).view(1, 2, 12)
    found = runs_as_batch(3, tensor)
    assert found.shape == (3, 2, 4)
    for part in range(3):
        assert torch.equal(found[part], tensor[0, :, 4 * part : 4 * part + 4])
    assert found.data_ptr() == tensor.data_ptr()


def test_dimensions_nested_as_the_models() -> None:
    query = torch.randn(2, 5, 3, 4).transpose(1, 2)  # token-major (b, h, n, d)
    other = torch.randn(2, 3, 5, 6)
    copy = in_layout_of(other, query)
    assert torch.equal(copy, other)
    assert copy.stride() == torch.randn(2, 5, 3, 6).transpose(1, 2).stride()
    assert in_layout_of(copy, query) is copy
    assert in_layout_of(other, other) is other
    # What torch allocates for an output of that query.
    assert in_layout_of(query[..., :1], query).stride()[:3] == (15, 1, 3)


def test_token_major() -> None:
    other = torch.randn(2, 3, 5, 6)
    found = token_major(other)
    assert found.stride() == (90, 6, 18, 1)
    assert torch.equal(found, other)
    assert token_major(found).data_ptr() == found.data_ptr()


def test_strides_of_single_elements_are_none() -> None:
    unit = torch.randn(1, 3, 1, 4)
    assert zero_unit_strides(unit).stride() == (0, 4, 0, 1)
    assert torch.equal(zero_unit_strides(unit), unit)


def test_what_is_long_enough_is_not_copied() -> None:
    tensor = torch.randn(1, 2, 5, 8)
    assert pad_last(tensor, 8) is tensor
    assert pad_rows(tensor, 5) is tensor
    assert repeat_last(tensor, 4) is tensor
    assert pad_last(tensor, 3) is tensor


def test_what_is_behind() -> None:
    tensor = torch.randn(1, 2, 5, 6)
    wide, long, repeated = pad_last(tensor, 8), pad_rows(tensor, 7), repeat_last(tensor, 7)
    assert torch.equal(wide[..., :6], tensor)
    assert wide[..., 6:].eq(0).all()
    for one in (long, repeated):
        assert torch.equal(one[:, :, :5], tensor)
    assert long[:, :, 5:].eq(0).all()
    assert repeated[:, :, 5:].eq(tensor[:, :, 4:]).all()
    rows = tensor[..., 0]
    assert torch.equal(
        repeat_last(rows, 9, -1), torch.cat((rows, rows[..., 4:].expand(1, 2, 4)), -1)
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [None, (1, 2, 5, 7), (1, 1, 1, 7), (1, 2, 5, 1)])
@pytest.mark.parametrize("least", [(5, 7), (16, 7), (5, 16), (16, 16)])
def test_a_padded_call_is_the_call(causal: bool, shape, least: tuple[int, int]) -> None:  # type: ignore[no-untyped-def]
    """Computed with the padding and cut off again, rows come out as without."""
    n_queries, n_keys = (5, 5) if causal else (5, 7)
    query = torch.randn(1, 2, n_queries, 4, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, n_keys, 4, dtype=torch.float64)
    bias = None if shape is None else torch.randn(shape, dtype=torch.float64)[..., :n_keys]
    if causal:
        least = (max(least), max(least))
    mask = bias_for_padding(bias, query, n_keys, least, causal)

    def attended(q, k, v, mask):  # type: ignore[no-untyped-def]
        scores = q @ k.mT
        if mask is not None:
            scores = scores + mask
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -torch.inf)
        return scores.softmax(-1) @ v

    padded = attended(
        repeat_last(query, least[0]), repeat_last(key, least[1]), pad_rows(value, least[1]), mask
    )
    torch.testing.assert_close(padded[:, :, :n_queries], attended(query, key, value, bias))


def _scores(query, key, scale, bias, causal):  # type: ignore[no-untyped-def]
    scores = scale * (query @ key.mT)
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -torch.inf)
    return scores


def _forward(query, key, value, bias, _lse, _p, causal, _debug, *, scale):  # type: ignore[no-untyped-def]
    scores = _scores(query, key, scale, bias, causal)
    lse = scores.logsumexp(-1)
    out = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)) @ value
    return (out, lse, *[torch.zeros(())] * 7)


def _backward(grad_out, query, key, value, out, lse, *rest, scale):  # type: ignore[no-untyped-def]
    bias, causal = rest[2], rest[-1]
    p = torch.exp(_scores(query, key, scale, bias, causal) - lse.unsqueeze(-1))
    ds = p * (grad_out @ value.mT - (grad_out * out).sum(-1, keepdim=True))
    return scale * (ds @ key), scale * (ds.mT @ query), p.mT @ grad_out


@pytest.fixture
def made_up_cudnn(monkeypatch: pytest.MonkeyPatch) -> CudnnKernel:
    """The kernel of cuDNN, its operators written out in torch."""
    prefix = "_scaled_dot_product_cudnn_attention"
    monkeypatch.setattr(torch.ops.aten, prefix, _forward, raising=False)
    monkeypatch.setattr(torch.ops.aten, f"{prefix}_backward", _backward, raising=False)
    monkeypatch.setattr(vendors, "_TEMPLATES", [(3, torch.int64)])
    return CudnnKernel()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [None, "of keys", "of rows"])
@pytest.mark.parametrize("sizes", [(5, 7), (5, 100), (100, 7)])
def test_a_padded_rectangle_has_no_nan_of_its_own(
    causal: bool, bias: str | None, sizes: tuple[int, int], made_up_cudnn: CudnnKernel
) -> None:
    """A key that no query gives any weight, because its scores are -inf, has gradients of 0; and
    rows of scores far below 0 have the weights that they have without the padding."""
    n, m = (sizes[0], sizes[0]) if causal else sizes
    query, grad_out = torch.randn(2, 1, 2, n, 8, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, m, 8, dtype=torch.float64)
    query[..., 0] = query[..., 0].abs() + 0.1
    key[:, :, 3, 0] = -torch.inf
    mask = None
    if bias is not None:
        mask = torch.randn(1, 2, n if bias == "of rows" else 1, m, dtype=torch.float64) - 2000.0
    out, lse = made_up_cudnn.rectangle_forward(Call(query, key, value, causal, 0.5, mask))
    wanted = _forward(query, key, value, mask, True, 0.0, causal, False, scale=0.5)
    for one, other in zip((out, lse), wanted, strict=False):
        torch.testing.assert_close(one, other)
    given = (grad_out, query, key, value, out, lse)
    grads = made_up_cudnn.rectangle_backward(
        Call(query, key, value, causal, 0.5, mask), Saved(grad_out, out, lse)
    )
    exact = _backward(*given, 0, 0, mask, causal, scale=0.5)
    assert bool(exact[1].isfinite().all() and exact[2].isfinite().all())
    for one, other in zip(grads, exact, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_of_scores_of_minus_infinity_stays_one(
    causal: bool, made_up_cudnn: CudnnKernel
) -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64)
    key[..., 0] = key[..., 0].abs() + 0.1
    query[:, :, 3, 0] = -torch.inf
    lse = made_up_cudnn.rectangle_forward(Call(query, key, value, causal, 0.5))[1]
    assert bool((lse[:, :, 3] == -torch.inf).all())
    assert bool(lse[:, :, [0, 1, 2, 4]].isfinite().all())


BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def bits(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Any bits, NaN and infinities among them."""
    whole = torch.iinfo(BITS[dtype])
    return torch.randint(whole.min, whole.max, shape, dtype=BITS[dtype]).view(dtype)


@pytest.mark.parametrize("dtype", BITS)
def test_words_are_the_same_bits(dtype: torch.dtype) -> None:
    source, target = bits(2, 3, 50, 16, dtype=dtype), torch.zeros(2, 3, 70, 16, dtype=dtype)
    a, b = in_words(target[:, :, 7:47], source[:, :, 5:45])
    assert a.dtype == b.dtype == torch.complex128
    a.copy_(b)
    kind = BITS[dtype]
    assert torch.equal(target[:, :, 7:47].view(kind), source[:, :, 5:45].view(kind))
    assert not target[:, :, :7].any()
    assert not target[:, :, 47:].any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: bits(2, 3, 50, 12)[:, :, 5:45],
        lambda: bits(2, 3, 50, 32)[:, :, 5:45, 1:17],
        lambda: bits(2, 3, 16, 40).mT,
        lambda: bits(2, 3, 40, 16).float(),
        lambda: bits(4 + 2 * 3 * 40 * 16)[4:].view(2, 3, 40, 16),
    ],
)
def test_what_is_no_whole_words_stays_as_it_is(make) -> None:  # type: ignore[no-untyped-def]
    source = make()
    target = torch.zeros(source.shape, dtype=torch.float16)
    assert in_words(target, source)[0] is target


def test_a_copy_into_host_memory_is_waited_for() -> None:
    """Results may be in page-locked memory, into which a copy would only have begun."""
    seen: list[bool] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            if func is torch.ops.aten.copy_.default:
                seen.append(bool(args[2]) if len(args) > 2 else False)
            return func(*args, **(kwargs or {}))

    with Watching():
        copy_on_device(torch.zeros(3), torch.ones(3))
    assert seen == [False]


def test_dense() -> None:
    whole = bits(2, 3, 50, 16)
    assert dense(whole) is whole
    part = dense(whole[:, :, 5:45])
    assert part.is_contiguous()
    assert part.storage_offset() == 0
    assert torch.equal(part.view(torch.int16), whole[:, :, 5:45].view(torch.int16))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 30)),
    row_bytes=st.sampled_from([0, 1, BLOCK_BYTES // 9, BLOCK_BYTES // 2, BLOCK_BYTES, 1 << 30]),
)
def test_every_row_once(sizes: tuple[int, int, int], row_bytes: int) -> None:
    seen = torch.zeros(sizes, dtype=torch.int32)
    for block in row_blocks(*sizes, row_bytes):
        seen[block] += 1
        n_rows = seen[block].numel()
        assert n_rows >= 1
        assert n_rows == 1 or n_rows * row_bytes <= BLOCK_BYTES
    assert (seen == 1).all()


def test_what_fits_is_one_block() -> None:
    assert list(row_blocks(2, 3, 4, 8)) == [(slice(0, 2), slice(0, 3), slice(0, 4))]


def test_rows_of_a_head_stay_together() -> None:
    """Several heads at a time only where all their rows fit."""
    blocks = list(row_blocks(2, 4, 10, BLOCK_BYTES // 25))
    assert blocks[0] == (slice(0, 1), slice(0, 2), slice(0, 10))
    assert len(blocks) == 4
