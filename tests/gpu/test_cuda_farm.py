"""A farm of processes on one GPU: from files to files, in a budget, whoever is killed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import quorum_attention as qa
from quorum_attention.devices.report import PoolReport
from quorum_attention.farm import Farm
from quorum_attention.farm.processes import Processes
from quorum_attention.files import create_tensors, open_tensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

HALF = torch.float16
BUDGET = 256 << 20


def crew(count: int) -> Processes:
    return Processes(["cuda:0"] * count, BUDGET)


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    with Farm.of(crew(2)) as made:
        yield made


class Call:
    """A causal call whose tensors are in files, and what one device makes of it."""

    def __init__(self, folder: Path, tokens: int, heads: int = 2, kv_heads: int = 1) -> None:
        self.folder = folder
        self.shape, small = (1, heads, tokens, 64), (1, kv_heads, tokens, 64)
        made = create_tensors(
            folder / "in",
            {"q": (self.shape, HALF), "k": (small, HALF), "v": (small, HALF),
             "do": (self.shape, HALF)},
        )  # fmt: skip
        for tensor in made.values():
            tensor.copy_(torch.randn(tensor.shape, dtype=HALF))
        self.inputs = open_tensors(folder / "in")
        q, k, v, grad_out = (self.inputs[n].cuda() for n in ("q", "k", "v", "do"))
        options = {"is_causal": True, "enable_gqa": True}
        out, lse = qa.attention_with_lse(q, k, v, **options)
        grads = qa.attention_backward(grad_out, q, k, v, out, lse, **options)
        self.wanted = [out, lse, *grads]
        self.times = 0

    def by(self, farm: Farm, chunks: int | None) -> PoolReport:
        """Both passes on a farm, compared; what they left behind in the folder is an error."""
        self.times += 1
        path, report = self.folder / f"out{self.times}", PoolReport()
        q, k, v, grad_out = self.inputs.values()
        names = ("out", "gq", "gk", "gv")
        shapes = (self.shape, self.shape, tuple(k.shape), tuple(v.shape))
        lse = {"lse": (self.shape[:3], torch.float32)}
        made = create_tensors(
            path, {n: (s, HALF) for n, s in zip(names, shapes, strict=True)} | lse
        )
        options = {"is_causal": True, "enable_gqa": True, "chunks": chunks, "report": report}
        farm.attention_with_lse(q, k, v, out=made["out"], lse=made["lse"], **options)
        farm.attention_backward(
            grad_out, q, k, v, made["out"], made["lse"],
            grads=(made["gq"], made["gk"], made["gv"]), **options,
        )  # fmt: skip
        found = [made["out"], made["lse"], made["gq"], made["gk"], made["gv"]]
        for got, wanted in zip(found, self.wanted, strict=True):
            error = (got.cuda().float() - wanted.float()).abs().max()
            assert error <= 6e-3 * wanted.abs().max().clamp_min(1.0).float()
        assert sorted(one.name for one in self.folder.iterdir()) == sorted(["in", path.name])
        del made
        path.unlink()
        return report


@pytest.mark.parametrize("chunks", [1, 31])
def test_as_one_call(farm: Farm, tmp_path: Path, chunks: int) -> None:
    report = Call(tmp_path, 20_000).by(farm, chunks)
    for one in (report.forward, report.backward):
        assert one is not None
        assert one.ran
        assert one.copied_bytes == 0


def test_tasks_keep_to_their_budget(farm: Farm, tmp_path: Path) -> None:
    """Their rows lie on the device, and what is left is the calls'."""
    report = Call(tmp_path, 150_000, 1).by(farm, 13)
    for passed in (report.forward, report.backward):
        assert passed is not None
        for one in passed.ran:
            made = one.report.forward or one.report.backward
            assert made is None or made.peak_bytes is None or made.peak_bytes <= BUDGET


def test_a_worker_is_killed(tmp_path: Path) -> None:
    """One of two, while a pass runs or between two: no unit that was done is computed again."""
    draw = random.Random(os.environ.get("QUORUM_ATTENTION_SEED"))
    call = Call(tmp_path, 60_000)
    workers = crew(2)
    with Farm.of(workers) as farm:
        begun = time.monotonic()
        call.by(farm, 13)
        # The first time kernels are prepared as well.
        moment = draw.uniform(0, 0.7 * (time.monotonic() - begun))
        doomed = workers._workers[0].process.pid
        timer = threading.Timer(moment, os.kill, (doomed, signal.SIGKILL))
        timer.start()
        report = call.by(farm, 13)
        timer.join()
        for one in (report.forward, report.backward):
            assert one is not None
            indices = [ran.index for ran in one.ran]
            assert len(indices) == len(set(indices))
        call.by(farm, 13)  # the other one alone
        assert len(farm.workers) == 1


@pytest.mark.parametrize("chunks", [1, 7])
def test_masks(farm: Farm, chunks: int) -> None:
    """Windows, documents and sinks; and gradients, from memory."""
    q, grad_out = (torch.randn(1, 2, 9000, 64, dtype=HALF) for _ in range(2))
    ids = torch.arange(9000) // 4000
    options = {
        "attn_mask": qa.Mask(causal=True, window=(3000, 0), documents=ids, sinks=torch.randn(2))
    }
    out, lse = farm.attention_with_lse(q, q, q, chunks=chunks, **options)
    grads = farm.attention_backward(grad_out, q, q, q, out, lse, chunks=chunks, **options)
    place = q.cuda()
    wanted = qa.attention_with_lse(place, place, place, **options)
    wanted_grads = qa.attention_backward(grad_out.cuda(), place, place, place, *wanted, **options)
    for got, one in zip((out, lse, *grads), (*wanted, *wanted_grads), strict=True):
        assert (got.float() - one.cpu().float()).abs().max() <= 6e-3 * one.abs().max()
