"""One call on two GPUs gives what one of them gives, wherever tensors are, whoever is
killed."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_sharer
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention.devices import Pool

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(["cuda:0", "cuda:1"]) as made:
        yield made
    resource_sharer.stop(timeout=5)  # type: ignore[attr-defined]


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """In shared memory if it is."""
    found = tensor.detach().clone()
    shared = not tensor.is_cuda and tensor.is_shared()
    return found.share_memory_() if shared else found


def compare(devices: Any, three: list[torch.Tensor], **options: Any) -> qa.Report:
    """A call and its gradients on several devices and on one."""
    report = qa.Report()
    found = []
    grad = torch.randn(*three[0].shape[:-1], three[2].shape[-1]).to(three[0])
    alone = three[0].device if three[0].is_cuda else "cuda:0"
    for place, more in ((devices, {"report": report}), (alone, {})):
        leaves = [clone(t).requires_grad_() for t in three]
        if isinstance(options.get("attn_mask"), torch.Tensor):
            leaves.append(options["attn_mask"].clone().requires_grad_())
            more["attn_mask"] = leaves[3]
        call = {"enable_gqa": True, "devices": place, **options, **more}
        out, lse = qa.attention_with_lse(*leaves[:3], **call)
        out.backward(grad)
        assert out.device == three[0].device
        found.append([out.detach(), lse.detach(), *(t.grad for t in leaves)])
        options.pop("budget", None)
    for number, (got, wanted) in enumerate(zip(*found, strict=True)):
        # lse is on the device that computes; several have it in host memory.
        assert got.device == wanted.device or (number == 1 and got.device.type == "cpu")
        got = got.to(wanted.device)
        assert got.dtype == wanted.dtype
        largest = wanted.abs().max().clamp_min(1.0).float()
        assert (got.float() - wanted.float()).abs().max() <= 6e-3 * largest
    return report


def inputs(kv_heads: int, share: int, n: int, where: str = "cpu") -> list[torch.Tensor]:
    heads = kv_heads * share, kv_heads, kv_heads
    made = [torch.randn(2, h, n, 64, device="cuda:0").half().to(where) for h in heads]
    return [t.share_memory_() for t in made] if where == "cpu" else made


@pytest.mark.parametrize(
    ("where", "causal", "kv_heads", "share"),
    [
        ("cpu", False, 4, 1), ("cpu", True, 2, 3), ("cpu", True, 1, 1), ("cpu", False, 3, 1),
        ("cuda:0", True, 4, 1), ("cuda:0", False, 1, 1), ("cuda:1", True, 3, 1),
        ("cuda:1", False, 2, 3),
    ],
)  # fmt: skip
def test_as_on_one_device(
    pool: Pool, where: str, causal: bool, kv_heads: int, share: int
) -> None:
    """The same heads go to the same device from call to call."""
    three, seen = inputs(kv_heads, share, 2000, where), []
    for _ in range(2):
        made = compare(pool, three, is_causal=causal).pool.forward
        seen.append(sorted((one.device, one.index) for one in made.ran))
    assert {device for device, _ in seen[0]} == {0, 1}
    assert (
        seen[0] == seen[1] or kv_heads == 3
    )  # with several blocks each may take another's
    assert len(made.ran) == made.parts
    # From a GPU to shared memory; what is there already is handed over as it is.
    assert (made.copied_bytes == 0) == (where == "cpu")


@pytest.mark.parametrize("where", ["cpu", "cuda:0"])
def test_in_a_small_budget(pool: Pool, where: str) -> None:
    report = compare(
        pool, inputs(2, 1, 30_000, where), is_causal=True, budget=["96MiB", "64MiB"]
    )
    for one in report.pool.forward.ran:
        if one.report.forward is not None:
            limit = (96 << 20, 64 << 20)[one.device]
            assert one.report.forward.peak_bytes is not None
            assert one.report.forward.peak_bytes <= limit


@pytest.mark.parametrize("where", ["cpu", "cuda:0", "cuda:1"])
def test_masks_and_dropout(pool: Pool, where: str) -> None:
    """And the gradient of a bias, added up where heads share it."""
    three = inputs(3, 1, 900, where)
    compare(pool, three, attn_mask=Mask(causal=True, window=200))
    for heads in (1, 3):
        compare(pool, three, attn_mask=torch.randn(heads, 900, 900).half().to(where))
    compare(pool, three, dropout_p=0.2, dropout_seed=5)


def test_a_cpu_beside_a_gpu_and_all_by_name() -> None:
    with Pool(["cuda:0", "cpu"]) as pool:
        compare(pool, inputs(4, 1, 600), is_causal=True)
    try:
        compare("all", inputs(2, 1, 1000, "cuda:0"), is_causal=True)
    finally:
        qa.devices.close()


@pytest.mark.parametrize("n", [70_000, 131_072])
def test_what_stays_locked(pool: Pool, n: int) -> None:
    """Inputs that come again, results that are used again, and other parts of them."""
    wide = inputs(4, 1, n)
    wanted = qa.attention(*wide, is_causal=True, devices="cuda:0")
    for turn in range(7):
        heads = slice(0, 4) if turn % 3 else slice(1, 3)
        three = [t[:, heads] for t in wide]
        if turn == 4:
            three = [clone(t) for t in three]
        got = qa.attention(*three, is_causal=True, devices=pool, budget="512MiB")
        assert (got - wanted[:, heads]).abs().max() <= 6e-3
        del got


@pytest.mark.parametrize("where", ["cpu", "cuda:0"])
@pytest.mark.parametrize("seed", range(4))
def test_a_worker_is_killed(where: str, seed: int) -> None:
    """At a random moment: the other one finishes, and nothing stays behind."""
    gc.collect()
    before = torch.cuda.memory_allocated("cuda:0")
    with Pool(["cuda:0", "cuda:1"]) as pool:
        three = inputs(4, 1, 20_000, where)
        compare(pool, three, is_causal=True)
        worker = random.Random(seed).choice(pool.workers)
        timer = threading.Timer(
            random.Random(seed).random() * 0.1,
            os.kill,
            (worker.process.pid, signal.SIGKILL),
        )
        timer.start()
        compare(pool, three, is_causal=True)
        timer.join()
        worker.process.join()
        compare(pool, three, is_causal=True)
        assert len(pool.devices) == 1
        pool.restart_lost()
        compare(pool, three, is_causal=True)
        assert len(pool.devices) == 2
    del three
    gc.collect()
    assert torch.cuda.memory_allocated("cuda:0") <= before + (1 << 20)
