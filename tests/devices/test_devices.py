"""``devices=`` of a call names several: what comes out is what one device gives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from multiprocessing import resource_sharer

import pytest
import torch

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention import devices as pools
from quorum_attention.devices import Pool
from quorum_attention.kernels.registry import get_kernel

TWO = ["cpu", "cpu"]
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(scope="module", autouse=True)
def pool() -> Iterator[Pool]:
    # The workers that ``devices=`` keeps have as many threads as this process.
    torch.set_num_threads(1)
    with Pool(TWO, threads=1) as made:
        yield made
    resource_sharer.stop(timeout=5)  # type: ignore[attr-defined]


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    bound = BOUND[wanted.dtype] * wanted.nan_to_num(neginf=0.0).abs().max().clamp_min(1.0)
    assert torch.equal(got.isneginf(), wanted.isneginf())
    assert (got.nan_to_num(neginf=0.0) - wanted.nan_to_num(neginf=0.0)).abs().max() <= bound


def drawn(draw: random.Random, dtype: torch.dtype, square: bool) -> list[torch.Tensor]:
    batch = draw.choice([(1,), (2,), (), (2, 2)])
    kv_heads, share = draw.randint(1, 3), draw.choice([1, 1, 3])
    n = draw.choice([1, 65, 300, 700])
    m = n if square else draw.choice([1, 200, 650])
    shapes = (kv_heads * share, n, 8), (kv_heads, m, 8), (kv_heads, m, 16)
    return [torch.randn(*batch, *shape).to(dtype) for shape in shapes]


def both(tensors: list[torch.Tensor], devices: object, **options: object) -> qa.Report:
    """A call with its lse and all gradients, on ``devices`` and on one."""
    report = qa.Report()
    found = []
    upstream: list[torch.Tensor] = []
    for more in ({"devices": devices, "report": report}, {}):
        three = [t.detach().clone().requires_grad_() for t in tensors]
        out, lse = qa.attention_with_lse(*three, enable_gqa=True, **options, **more)  # type: ignore[arg-type]
        if not upstream:
            upstream = [torch.randn_like(out), torch.randn_like(lse)]
        kept = ~lse.isneginf()
        (out * upstream[0]).sum().add((lse * upstream[1])[kept].sum()).backward()
        found.append([out.detach(), lse.detach(), *(t.grad for t in three)])
    for got, wanted in zip(*found, strict=True):
        near(got, wanted)
    return report


def later_by_head(b: object, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """A rule that knows its head and positions."""
    return (q + 2 * h) % 5 != k % 5


def a_mask(draw: random.Random, tensors: list[torch.Tensor]) -> Mask:
    query, key = tensors[:2]
    batch, heads = query[..., 0, 0, 0].numel(), query.shape[-3]
    n, m = query.shape[-2], key.shape[-2]
    kinds = [
        Mask(causal="lower_right"),
        Mask(causal=True, offset=draw.randint(-5, 40)),
        Mask(window=(draw.randint(0, 90), draw.randint(0, 9))),
        Mask(chunk=draw.randint(1, 99), causal=True),
        Mask(documents=(torch.randint(3, (batch, n)), torch.randint(3, (m,)))),
        Mask(key_lengths=torch.randint(m + 1, (batch,))),
        Mask(key_padding=torch.rand(batch, m) < 0.7),
        Mask(keeps=later_by_head),
        Mask(sinks=torch.randn(heads).to(query.dtype)),
        Mask(softcap=2.0),
        Mask(bias=torch.randn(heads, 1, m).to(query.dtype)),
        Mask(window=20) | Mask(keeps=later_by_head),
        Mask(documents=torch.randint(4, (n,)) if n == m else None) & Mask(window=50),
    ]
    return draw.choice(kinds)


@pytest.mark.parametrize("seed", range(12))
def test_random_calls(pool: Pool, seed: int) -> None:
    """The public call with a pool of its own: plain, causal, masks, dropout, batch dimensions."""
    draw = random.Random(seed)
    kind = draw.choice(["plain", "causal", "mask", "mask", "tensor", "dropout"])
    dtype = draw.choice([torch.float64, torch.float32])
    tensors = drawn(draw, dtype, square=kind == "causal" and draw.random() < 0.7)
    options: dict[str, object] = {}
    if kind == "causal":
        options["is_causal"] = True
    elif kind == "mask":
        options["attn_mask"] = a_mask(draw, tensors)
        options["is_causal"] = draw.random() < 0.3
    elif kind == "tensor":
        n, m = tensors[0].shape[-2], tensors[1].shape[-2]
        options["attn_mask"] = torch.rand(n, m) < 0.5
    elif kind == "dropout":
        options |= {"dropout_p": 0.3, "dropout_seed": draw.randint(0, 99)}
    report = both(tensors, pool, **options)
    assert report.pool.forward.parts == sum(one.parts for one in report.pool.forward.ran)
    assert {one.device for one in report.pool.forward.ran} <= {0, 1}


def test_by_their_names() -> None:
    """The workers are started once, and kept until they are closed."""
    q = torch.randn(1, 4, 200, 8).share_memory_()
    report = qa.Report()
    out = qa.attention(
        q, q, q, is_causal=True, devices=TWO, budget=["8MiB", "16MiB"], report=report
    )
    near(out, qa.attention(q, q, q, is_causal=True))
    kept = [w.process.pid for p in pools.pool._pools.values() for w in p.workers]
    grads = qa.attention_backward(out, q, q, q, *qa.attention_with_lse(q, q, q), devices=TWO)
    wanted = qa.attention_backward(out, q, q, q, *qa.attention_with_lse(q, q, q))
    for one, other in zip(grads, wanted, strict=True):
        near(one, other)
    assert kept == [w.process.pid for p in pools.pool._pools.values() for w in p.workers]
    assert report.forward is not None
    assert report.forward.n_groups == 4 == report.pool.forward.parts
    assert report.pool.forward.copied_bytes == 0
    assert {name.split()[0] for name in report.pool.forward.devices} == {"cpu"}
    said = str(report)
    assert "parts on 2 devices" in said
    assert report.to_dict()["pool"]["forward"]["parts"] == 4
    assert report.total.forwards == 1
    leaf = q.clone().requires_grad_()
    out = qa.attention(leaf, q, q, is_causal=True, devices=TWO)
    pools.close()
    assert not pools.pool._pools
    out.sum().backward()  # by other workers
    alone = q.clone().requires_grad_()
    qa.attention(alone, q, q, is_causal=True).sum().backward()
    assert leaf.grad is not None
    assert alone.grad is not None
    near(leaf.grad, alone.grad)
    pools.close()


def test_given_results_and_progress(pool: Pool) -> None:
    q, k = torch.randn(1, 2, 300, 8), torch.randn(1, 1, 300, 8)
    out = torch.empty(1, 2, 300, 8, dtype=torch.float64)
    told: list[tuple[int, int, str]] = []
    got = qa.attention(
        q, k, k, enable_gqa=True, devices=pool, out=out,
        progress=lambda *said: told.append(said),
    )  # fmt: skip
    assert got is out
    wanted, lse = qa.attention_with_lse(q, k, k, enable_gqa=True)
    near(out.float(), wanted)
    assert [total for _, total, _ in told] == [2] * len(told)
    assert told[-1][0] == 2
    told.clear()
    many = torch.randn(1, 9, 50, 8)
    qa.attention(many, many, many, devices=pool, progress=lambda *said: told.append(said))
    assert sorted(told) == told
    assert told[-1][0] == told[-1][1]
    grads = tuple(torch.empty_like(t) for t in (q, k, k))
    made = qa.attention_backward(
        wanted, q, k, k, wanted, lse, enable_gqa=True, devices=pool, grads=grads
    )
    assert all(a is b for a, b in zip(made, grads, strict=True))
    for one, other in zip(
        grads, qa.attention_backward(wanted, q, k, k, wanted, lse, enable_gqa=True), strict=True
    ):
        near(one, other)


def test_autocast_and_compile(pool: Pool) -> None:
    q = torch.randn(1, 4, 100, 8)
    with torch.autocast("cpu", torch.bfloat16):
        near(qa.attention(q, q, q, devices=pool), qa.attention(q, q, q))
    compiled = torch.compile(lambda t: qa.attention(t * 2, t, t, devices=pool), backend="eager")
    near(compiled(q), qa.attention(q * 2, q, q))


def test_results_of_any_layout(pool: Pool) -> None:
    q = torch.randn(2, 3, 4, 60, 8)
    out = torch.empty(60, 3, 2, 4, 8).permute(2, 1, 3, 0, 4)
    got = qa.attention(q, q, q, devices=pool, out=out)
    assert got is out
    near(out, qa.attention(q, q, q))
    wanted, lse = qa.attention_with_lse(q, q, q)
    grads = tuple(torch.empty(3, 2, 60, 4, 8).permute(1, 0, 3, 2, 4) for _ in range(3))
    qa.attention_backward(wanted, q, q, q, wanted, lse, devices=pool, grads=grads)
    for one, other in zip(grads, qa.attention_backward(wanted, q, q, q, wanted, lse), strict=True):
        near(one, other)


def test_sinks_have_their_gradient(pool: Pool) -> None:
    q = torch.randn(1, 4, 100, 8)
    found = []
    for devices in (pool, None):
        sinks = torch.ones(4, requires_grad=True)
        qa.attention(q, q, q, Mask(sinks=sinks), devices=devices).square().sum().backward()
        found.append(sinks.grad)
    near(found[0], found[1])


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"kernel": get_kernel("dense")}, NotImplementedError, "kernel must be a name"),
        ({"kernel": "longnet"}, Exception, "longnet"),
        ({"attn_mask": Mask(keeps=lambda b, h, q, k: q >= k)}, NotImplementedError, "Mask.keeps"),
        ({"attn_mask": Mask(key_padding=torch.ones(8, dtype=torch.bool))}, ValueError, "padding"),
        ({"budget": [1, 2, 3]}, ValueError, "budget .* 2 devices, got 3"),
        ({"plan": "plan"}, NotImplementedError, "plan is for one device"),
        ({"depth": -1}, ValueError, "depth"),
    ],
)  # fmt: skip
def test_what_several_cannot_do_is_refused(
    pool: Pool, options: dict[str, object], kind: type[Exception], says: str
) -> None:
    q = torch.randn(1, 2, 9, 8)
    with pytest.raises(kind, match=says):
        qa.attention(q, q, q, devices=pool, **options)  # type: ignore[arg-type]


def test_vmap_is_refused(pool: Pool) -> None:
    q = torch.randn(3, 1, 2, 9, 8)
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.vmap(lambda t: qa.attention(t, t, t, devices=pool))(q)
