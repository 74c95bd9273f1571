"""Masks, sinks and dropout on a farm: as on one device, however heads are cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention.farm import Farm
from quorum_attention.farm import compute as farm_compute
from quorum_attention.farm.crew import Alone
from quorum_attention.farm.processes import Processes


def every_third(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """A rule of all four positions, that can be sent."""
    return (query * 2 + key * 5 + head + batch) % 3 != 0


def near(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return abs(query - key) < 40


def drawn(draw: random.Random, batch: int, heads: int, n: int, m: int) -> Mask:
    """A mask of a few fields."""
    fields: dict[str, Any] = {}

    def some(name: str, make: Any, chance: float = 0.25) -> None:
        if draw.random() < chance:
            fields[name] = make()

    some("causal", lambda: draw.choice([True, "lower_right"]))
    some("offset", lambda: draw.randint(-m, m), 0.2)
    some("window", lambda: (draw.randint(-1, m), draw.randint(-1, m)))
    some("chunk", lambda: draw.randint(1, m))
    ids = [torch.randint(0, 3, (batch, size)).sort().values for size in (n, m)]
    some("documents", lambda: (ids[0], ids[1][: draw.choice([1, batch])]))
    some("key_lengths", lambda: torch.randint(0, m + 1, (batch,)))
    some("key_padding", lambda: torch.rand(m) < 0.7)
    some("keeps", lambda: draw.choice([every_third, near]))
    some("softcap", lambda: 2.0)
    some("either", lambda: (Mask(causal=True), Mask(keeps=near)), 0.15)
    some("sinks", lambda: torch.randn(heads), 0.4)
    shape = [draw.choice([1, size]) for size in (batch, heads, n, m)]
    some("bias", lambda: torch.randn(shape) if draw.random() < 0.5 else torch.rand(shape) < 0.8)
    return Mask(**fields)


def compare(farm: Farm, seed: int) -> None:
    """A random call and its gradients on a farm and on one device, in fp64."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch, kv, share = draw.randint(1, 2), draw.randint(1, 2), draw.choice([1, 2])
    n = draw.choice([1, 5, 60, 150])
    m = n if draw.random() < 0.4 else draw.choice([1, 33, 170])
    shapes = (batch, kv * share, n, 8), (batch, kv, m, 8), (batch, kv, m, 16)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    mask = drawn(draw, batch, kv * share, n, m)
    grad = torch.randn(batch, kv * share, n, 16, dtype=torch.float64)
    options: dict[str, Any] = {
        "is_causal": draw.random() < 0.3, "enable_gqa": True, "scale": draw.choice([None, 0.3])
    }  # fmt: skip
    chunks = draw.choice([None, 1, 3, 7, 7, 13])
    if draw.random() < 0.2:
        chunks = draw.choice([None, 1])
        options |= {"dropout_p": 0.4, "dropout_seed": draw.randrange(1 << 40)}
    found = []
    for one, more in ((qa.attention, {}), (farm.attention, {"chunks": chunks})):
        leaves = [t.clone().requires_grad_() for t in inputs]
        learned = mask
        if mask.sinks is not None:
            sinks = mask.sinks.double().requires_grad_()
            learned = qa.Mask(**{**vars(mask), "sinks": sinks})
            leaves.append(sinks)
        out = one(*leaves[:3], learned, **options, **more)
        out.backward(grad)
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    with torch.no_grad():
        found[0].append(qa.attention_with_lse(*inputs, mask, **options)[1])
        found[1].append(farm.attention_with_lse(*inputs, mask, chunks=chunks, **options)[1])
    for wanted, got in zip(*found, strict=True):
        assert torch.allclose(got, wanted, atol=1e-9, rtol=1e-9), (seed, mask, chunks)


@pytest.mark.parametrize("seed", range(25))
def test_as_on_one_device(seed: int) -> None:
    compare(Farm.of(Alone("cpu")), seed)


def test_in_other_processes() -> None:
    """What is sent arrives."""
    with Farm.of(Processes(["cpu"], threads=1)) as farm:
        for seed in range(100, 106):
            compare(farm, seed)


def test_what_a_mask_leaves_out_is_neither_read_nor_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 13 chunks, a window of half a chunk keeps pairs of neighbours alone."""
    q = torch.randn(1, 1, 13 * 20, 8)
    calls = []
    inner = farm_compute.attention_with_lse

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args[0].shape[2] * args[1].shape[2])
        return inner(*args, **options)

    monkeypatch.setattr(farm_compute, "attention_with_lse", counted)
    mask = Mask(causal=True, window=(10, 0))
    got = Farm.of(Alone("cpu")).attention(q, q, q, mask, chunks=13)
    assert torch.allclose(got, qa.attention(q, q, q, mask), atol=1e-5)
    assert len(calls) == 13 + 12
    assert set(calls) == {400}


def test_masks_with_several_batch_dimensions() -> None:
    q, farm = torch.randn(2, 3, 2, 30, 8), Farm.of(Alone("cpu"))
    for shape in ((2, 3, 2, 30, 30), (3, 1, 1, 30), (2, 1, 1, 30, 1)):
        mask = torch.randn(shape)
        for chunks in (1, 3):
            got = farm.attention(q, q, q, mask, chunks=chunks)
            assert torch.allclose(got, qa.attention(q, q, q, mask), atol=1e-5)


def test_sinks_without_keys() -> None:
    q, k, sinks = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 0, 8), torch.tensor([0.5, -1.0])
    out, lse = Farm.of(Alone("cpu")).attention_with_lse(q, k, k, Mask(sinks=sinks))
    assert torch.equal(out, torch.zeros(1, 2, 5, 8))
    assert torch.equal(lse, sinks[None, :, None].expand(1, 2, 5))
