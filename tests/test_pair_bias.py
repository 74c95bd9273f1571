"""Masks of tokens that become a bias, as they do on a GPU: right on the CPU, where the
code is the same."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.entries import masked_call
from helpers.memory import usage
from helpers.plans import shape_of

import quorum_attention as qa
from quorum_attention import dispatch
from quorum_attention.kernels.masked import pair_bias, ways
from quorum_attention.kernels.masked.choose import kernel_for_mask
from quorum_attention.kernels.masked.packing import Packing
from quorum_attention.kernels.masked.resolve import ResolvedMask

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The biases of calls; every mask of tokens that can become one does, on the CPU
    too."""
    monkeypatch.setattr(ways, "DEVICES_FOR_BIAS", ("cpu", "cuda"))
    monkeypatch.setattr(ways, "LITTLE", 1 << 62)
    monkeypatch.setattr(dispatch, "short_mask_tensor", lambda *_: None)
    biases: list[torch.Tensor] = []
    make = pair_bias.PairBias.bias_of

    def counted(self: Any, *arguments: Any) -> torch.Tensor:
        biases.append(make(self, *arguments))
        return biases[-1]

    monkeypatch.setattr(pair_bias.PairBias, "bias_of", counted)
    return biases


def test_random_masks_become_a_bias(
    made: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one call or by several; with learned biases, sinks, soft caps and budgets
    beside them."""
    for number in range(60):
        size = random.Random(number).choice([8, 12, 26])
        monkeypatch.setattr(pair_bias, "_MOST_BYTES", 1 << size)
        masked_call(70_000 + number)
    assert len(made) > 120


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tensors of short calls; every mask of tokens that can become one does, on the
    CPU too."""
    monkeypatch.setattr(ways, "DEVICES_FOR_BIAS", ("cpu", "cuda"))
    made: list[torch.Tensor] = []
    make = dispatch.short_mask_tensor

    def counted(*arguments: Any) -> Any:
        mask_tensor = make(*arguments)
        if mask_tensor is not None:
            made.append(mask_tensor.bias)
        return mask_tensor

    monkeypatch.setattr(dispatch, "short_mask_tensor", counted)
    return made


def test_random_masks_become_a_tensor(tensors: list[torch.Tensor]) -> None:
    """In calls that ask for attention and nothing more."""
    for number in range(80):
        masked_call(80_000 + number)
    assert len(tensors) > 15


def test_the_tensor_of_a_mask(tensors: list[torch.Tensor]) -> None:
    """It has the dimensions that kept pairs depend on; later calls like the first one
    are looked up; errors are those of other calls."""
    three, mask = lengths_of(7)
    ids = torch.randint(0, 5, (12,))
    padding = qa.Mask(key_padding=ids > 2)
    for given, shape in (
        (mask, (7, 1, 1, 12)),
        (padding, (1, 1, 1, 12)),
        (qa.Mask(causal=True, key_padding=ids > 2), (1, 1, 1, 12)),
        (qa.Mask(documents=ids), (1, 1, 12, 12)),
        (qa.Mask(window=(2, 3), key_lengths=mask.key_lengths), (7, 1, 12, 12)),
    ):
        tensors.clear()
        qa.attention(*three, attn_mask=given)
        assert [tuple(tensor.shape) for tensor in tensors] == [shape]
    tensors.clear()
    for given in (
        qa.Mask(documents=ids, softcap=2.0),
        qa.Mask(causal="lower_right", documents=ids),
        padding | qa.Mask(causal=True),
        qa.Mask(causal=True, window=3),
    ):
        qa.attention(*three, attn_mask=given)
    qa.attention(*three, attn_mask=mask, kernel="cpu")
    qa.attention(*three, attn_mask=mask, dropout_p=0.1)
    for lengths in (
        torch.full((7,), 13),
        torch.full((7,), -1),
        torch.ones(6, dtype=torch.int64),
    ):
        with pytest.raises(ValueError, match="key_lengths"):
            qa.attention(*three, attn_mask=qa.Mask(key_lengths=lengths))
    with pytest.raises(ValueError, match="documents"):
        qa.attention(*three, attn_mask=qa.Mask(documents=ids[:11]))
    assert not tensors


def lengths_of(n_entries: int, n: int = 12) -> tuple[list[torch.Tensor], qa.Mask]:
    """Query, key and value, and a mask of lengths."""
    three = [torch.randn(n_entries, 2, n, 8, requires_grad=True) for _ in range(3)]
    return three, qa.Mask(key_lengths=torch.randint(0, n + 1, (n_entries,)))


def test_one_bias_for_many_entries(made: list[torch.Tensor]) -> None:
    """Of one row where all queries keep the same keys, and of one entry where all
    entries do."""
    three, mask = lengths_of(3000)
    ids = torch.randint(0, 5, (12,))
    for given, shape in (
        (mask, (3000, 1, 1, 12)),
        (qa.Mask(key_padding=ids > 2), (1, 1, 1, 12)),
        (qa.Mask(causal=True, key_padding=ids > 2), (1, 1, 1, 12)),
        (qa.Mask(documents=ids), (1, 1, 12, 12)),
        (qa.Mask(window=(2, 3), key_padding=ids > 2), (1, 1, 12, 12)),
        (qa.Mask(window=(2, 3), key_lengths=mask.key_lengths), (3000, 1, 12, 12)),
    ):
        made.clear()
        qa.attention(*three, attn_mask=given).sum().backward()
        assert [tuple(bias.shape) for bias in made] == [shape, shape]


@pytest.mark.parametrize("way", ["made", "tensors"])
@pytest.mark.parametrize("field", ["key_lengths", "key_padding"])
def test_the_backward_keeps_what_the_forward_kept(
    way: str, field: str, request: pytest.FixtureRequest
) -> None:
    """The caller may write to a mask in between."""
    made = request.getfixturevalue(way)
    three, lengths = lengths_of(5)
    given = torch.rand(5, 12) < 0.5 if field == "key_padding" else lengths.key_lengths
    grads = []
    for writes in (False, True):
        out = qa.attention(*three, attn_mask=qa.Mask(**{field: given}))
        if writes:
            given.fill_(1)
        grads.append(torch.autograd.grad(out.square().sum(), three))
    assert len(made) == (4 if way == "made" else 2)
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


@pytest.mark.parametrize("most", [1 << 16, 1 << 26])
@pytest.mark.parametrize("window", [None, (7, 3)])
def test_a_call_with_a_bias_stays_within_its_bytes(
    most: int,
    window: tuple[int, int] | None,
    made: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bias is counted, whether it is that of one call or of several."""
    monkeypatch.setattr(pair_bias, "_MOST_BYTES", most)
    three, lengths = lengths_of(200, 60)
    mask = qa.Mask(window=window, key_lengths=lengths.key_lengths)
    report = qa.Report()

    def forward() -> torch.Tensor:
        out = qa.attention(*three, attn_mask=mask, report=report)
        made.clear()  # they would be counted
        return out

    def backward() -> None:
        torch.autograd.grad(out, three, torch.ones_like(out))
        made.clear()

    with torch.no_grad():
        used = usage(forward)
    assert report.forward is not None
    assert used.peak <= report.forward.planned_peak_bytes
    out = forward()
    used = usage(backward)
    assert report.backward is not None
    assert used.peak <= report.backward.planned_peak_bytes


def test_what_takes_no_bias_goes_the_other_ways(made: list[torch.Tensor]) -> None:
    """Dropout, kernels that take no bias, calls that are cut into tasks, and other
    masks."""
    three, mask = lengths_of(5)
    qa.attention(*three, attn_mask=mask, dropout_p=0.1).sum().backward()
    qa.attention(*three, attn_mask=mask, kernel="dense")
    qa.attention(*three, attn_mask=mask, depth=1).sum().backward()
    qa.attention(*three, attn_mask=mask | qa.Mask(causal=True))
    qa.attention(*three, attn_mask=qa.Mask(causal=True, window=3))
    assert not made
    qa.attention(*three, attn_mask=mask, kernel="cpu")
    assert len(made) == 1


@pytest.mark.parametrize("size", [1 << 62, 2**63 - 5, 2**63 - 1, 2**64])
@pytest.mark.parametrize("becomes_bias", [False, True])
def test_a_window_without_end(
    size: int, becomes_bias: bool, request: pytest.FixtureRequest
) -> None:
    """As users write "no limit": ``sys.maxsize``, whose sum with a position has 64 bits
    no more."""
    if becomes_bias:
        request.getfixturevalue("made")
    three, _ = lengths_of(5)
    ids = torch.arange(12) % 2
    results = []
    for sides in ((size, 1), (-1, 1), (1, size), (1, -1)):
        mask = qa.Mask(window=sides, documents=ids)
        results.append(qa.attention(*three, attn_mask=mask))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[2], results[3])


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.uint16, torch.uint32], ids=str
)
def test_numbers_of_any_integer_dtype(
    dtype: torch.dtype, made: list[torch.Tensor]
) -> None:
    three, mask = lengths_of(5)
    assert mask.key_lengths is not None
    ids = torch.arange(12) // 5
    for narrow, wide in (
        (qa.Mask(key_lengths=mask.key_lengths.to(dtype)), mask),
        (qa.Mask(documents=(ids.to(dtype), ids)), qa.Mask(documents=ids)),
    ):
        narrow_out, wide_out = (
            qa.attention(*three, attn_mask=m) for m in (narrow, wide)
        )
        assert torch.equal(narrow_out, wide_out)
    assert len(made) == 4


def test_a_mask_of_calls_with_other_sizes_chooses_kernels_for_each() -> None:
    """A kernel by blocks that was chosen for a call without gradients may refuse one
    with them."""
    mask = qa.Mask(key_lengths=torch.tensor([3, 300, 20, 100]))
    device = torch.device("cuda", 0)
    for head_dim, needs_grad in ((64, False), (512, False), (512, True)):
        shape = replace(
            shape_of((4,), 8, 8, 300, 300),
            head_dim=head_dim,
            value_dim=head_dim,
            dtype=torch.float32,
        )
        _, kernel = kernel_for_mask(
            mask, "auto", shape, device, needs_grad=needs_grad, tried=False
        )
        by_blocks = kernel._by_blocks()
        assert by_blocks.refusal(replace(shape, needs_grad=needs_grad)) is None


@pytest.mark.parametrize("tokens", [4096, 1 << 15])
def test_the_cheapest_way_on_a_gpu(tokens: int) -> None:
    """A bias in short calls; gathered rows, or blocks, in long ones."""
    heads = 32
    shape = shape_of((1,), heads, heads, tokens, tokens)
    scattered = ResolvedMask(qa.Mask(documents=torch.randint(0, 400, (tokens,))), shape)
    in_order = ResolvedMask(qa.Mask(documents=torch.arange(tokens) // 512), shape)
    is_long = tokens > 4096
    assert isinstance(scattered.way, Packing) == is_long
    assert isinstance(scattered.way, pair_bias.PairBias) != is_long
    assert not in_order.is_whole
    small = shape_of((20_000,), 4, 4, 12, 12)
    lengths = ResolvedMask(qa.Mask(key_lengths=torch.randint(1, 13, (20_000,))), small)
    assert isinstance(lengths.way, pair_bias.PairBias)
