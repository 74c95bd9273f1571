"""What is refused names the argument, and what to give instead."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.attention.flex_attention import create_block_mask

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention.kernels.kit import sliding_window
from quorum_attention.kernels.registry import get_kernel


def refused(words: str, *args: Any, **options: Any) -> None:
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=words):
        qa.attention(*args, **options)


def test_a_block_mask() -> None:
    query = torch.randn(1, 2, 20, 8)
    causal = create_block_mask(
        lambda b, h, q, k: q >= k, None, None, 20, 20, device="cpu"
    )
    refused(r"attn_mask .* BlockMask: give Mask\(keeps=", query, query, query, causal)
    out = qa.attention(query, query, query, Mask(keeps=causal.mask_mod))
    torch.testing.assert_close(out, qa.attention(query, query, query, is_causal=True))


def test_nested_and_sparse_tensors() -> None:
    texts = [torch.randn(2, n, 8) for n in (5, 7)]
    for layout in (torch.strided, torch.jagged):
        if layout == torch.jagged:
            texts = [text.transpose(0, 1) for text in texts]
        nested = torch.nested.nested_tensor(texts, layout=layout)
        nested = nested.transpose(1, 2) if layout == torch.jagged else nested
        refused(r"query .* Mask\(documents=ids\)", nested, nested, nested)
    sparse = torch.eye(8).expand(1, 2, 8, 8).to_sparse()
    refused(r"query .* give tensor.to_dense\(\)", sparse, sparse, sparse)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_tensors_of_several_ranks() -> None:
    """A DTensor is refused by name wherever it is given, and its part is taken."""
    part = torch.randn(1, 2, 20, 8)
    mesh = init_device_mesh("cpu", (1,))
    sharded = DTensor.from_local(part, mesh, [Replicate()])
    bias = DTensor.from_local(torch.zeros(20, 20), mesh, [Replicate()])
    refused(r"query .* DTensor.* tensor.to_local\(\)", sharded, part, part)
    refused(r"value .* DTensor.* tensor.to_local\(\)", part, part, sharded)
    refused(r"attn_mask .* DTensor.* tensor.to_local\(\)", part, part, part, bias)
    local = sharded.to_local()
    expected = qa.attention(part, part, part)
    torch.testing.assert_close(qa.attention(local, local, local), expected)


@pytest.mark.usefixtures("one_rank")
def test_cross_attention_over_ranks() -> None:
    query = torch.randn(1, 2, 20, 8)
    key = torch.randn(1, 2, 30, 8)
    with pytest.raises(ValueError, match="for cross attention over ranks gather the"):
        qa.distributed.attention(query, key, key)


def test_a_scale_that_is_learned() -> None:
    query = torch.randn(1, 2, 20, 8)
    scale = torch.nn.Parameter(torch.tensor(0.3))
    refused(
        r"scale .* give query \* scale with scale=1.0", query, query, query, scale=scale
    )
    out = qa.attention(query * scale, query, query, scale=1.0)
    torch.testing.assert_close(out, qa.attention(query, query, query, scale=0.3))
    assert torch.autograd.grad(out.sum(), scale)[0].isfinite()


def test_masks_of_several_batch_dimensions() -> None:
    query = torch.randn(2, 3, 2, 20, 8)
    kept, lengths = torch.rand(2, 3, 20) < 0.7, torch.randint(1, 20, (2, 3))
    for make in (
        lambda: Mask(key_padding=kept),
        lambda: Mask(documents=kept.long()),
        lambda: Mask(key_lengths=lengths),
    ):
        with pytest.raises(
            ValueError, match=r"batch dimensions count as one, tensor.flatten\(0"
        ):
            make()
    refused(
        "all batch dimensions as one", query, query, query, Mask(key_padding=kept[0])
    )
    mask = Mask(key_padding=kept.flatten(0, -2), key_lengths=lengths.flatten(0, -1))
    assert qa.attention(query, query, query, mask).shape == query.shape


def near(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - 0.1 * (q - k).abs()


def test_kernels_pickle_and_copy() -> None:
    """``Cache.<lambda>`` did not: what is remembered stays behind."""
    query = torch.randn(1, 2, 40, 8)
    kernel = qa.from_score_mod(near, sliding_window(9))
    out = qa.attention(query, query, query, kernel=kernel)
    for another in (pickle.loads(pickle.dumps(kernel)), copy.deepcopy(kernel)):
        assert torch.equal(qa.attention(query, query, query, kernel=another), out)
    native = qa.NativeKernel(window=(5, 0), softcap=3.0, alibi_slopes=torch.ones(2))
    again = pickle.loads(pickle.dumps(native))
    assert (again.softcap, again.geometry.band) == (
        native.softcap,
        native.geometry.band,
    )
    for name in ("cpu", "dense", "cudnn", "fa4", "native"):
        assert pickle.loads(pickle.dumps(get_kernel(name))).name == name
