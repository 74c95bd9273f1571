"""What is prepared ahead is what is launched: the same constants, dtypes and alignment."""

from __future__ import annotations

import random
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quorum_attention.kernels import merge, scaling
from quorum_attention.kernels.merge import Launch

GPU = torch.device("cuda", 0)


def slot(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A field of a slot, and in it the rows of one call: they begin at a whole tile."""
    batch, heads, rows, width = shape
    return torch.empty(batch, heads, rows + 384, width, dtype=dtype)[:, :, 128 : 128 + rows]


def compiled_for(what: Launch) -> tuple[object, ...]:
    """What Triton compiles for, but for the alignment of tensors."""
    kinds = tuple(a.dtype if isinstance(a, torch.Tensor) else type(a) for a in what.arguments)
    # The only number that is specialised (merge_triton.py), the last but one.
    rows = what.arguments[-2] % 16 if what.kernel in ("norm", "divide") else None
    return what.kernel, what.constants, kinds, rows


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """As if there were a GPU: what is prepared."""
    found: list[Launch] = []

    monkeypatch.setattr(merge, "compile_for", found.append)
    monkeypatch.setattr(merge, "triton_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (96, 64), (80, 80)])
def test_the_kernels_prepared_are_those_launched(
    dtype: torch.dtype,
    widths: tuple[int, int],
    prepared: list[Launch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head_dim, value_dim = widths
    scaled = dtype == torch.float16
    # A default device changes nothing.
    with torch.device("meta"):
        merge.compile_ahead(GPU, dtype, head_dim, value_dim, scaled)
    merge._warming[-1].join()
    assert all(a.is_cpu for w in prepared for a in w.arguments if isinstance(a, torch.Tensor))
    ready = {compiled_for(what) for what in prepared}
    assert len(ready) == len(prepared) == (4 if scaled else 2)
    launched: list[Launch] = []
    for module in (merge, scaling):
        monkeypatch.setattr(module, "launch", launched.append)
    monkeypatch.setattr(merge, "_triton_can_merge", lambda *of, **more: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for _ in range(5):
        heads, queries, keys = random.choice((1, 2, 4)), *(128 * random.randint(1, 9) for _ in "qk")
        out = slot(1, heads, queries, value_dim)
        lse = slot(1, heads, queries, 1)[..., 0]
        part = torch.empty(1, heads, queries, value_dim, dtype=dtype)
        merge.merge_(out, lse, part, torch.empty(1, heads, queries))
        states = (
            slot(1, heads, queries, head_dim),
            slot(1, heads, keys, head_dim),
            slot(1, heads, keys, value_dim),
        )
        parts = tuple(torch.empty(t.shape, dtype=dtype) for t in states)
        flags = torch.zeros(1, heads, dtype=torch.int32) if scaled else None
        factors = torch.ones(1, heads) if scaled else None
        merge.add_all_(states, parts, 0.5, factors, flags)
        if scaled:
            values = torch.empty(1, heads, keys, value_dim, dtype=dtype)
            scaling.divide_gradient_(part, values, torch.ones(1, heads), 0)
    assert {compiled_for(what) for what in launched} == ready
    assert len(launched) == 5 * (5 if scaled else 2)
    # Whatever Triton specialises on lies as it does in what was prepared.
    for what in launched:
        large = [a for a in what.arguments if isinstance(a, torch.Tensor) and a.dim() == 4]
        assert large
        assert all(tensor.data_ptr() % 16 == 0 for tensor in large)


class Kernel:
    """In the place of a Triton kernel, which is compiled once; that takes until ``go``."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        self.done: list[str] = []
        self.fails = False

    def warmup(self, *arguments: Any, grid: tuple[int]) -> Any:
        self.begun.set()
        assert self.go.wait(20)
        if self.fails:
            raise RuntimeError("no C compiler")
        self.done.append("compiled")
        return SimpleNamespace(run=None)

    def __getitem__(self, grid: tuple[int]) -> Any:
        assert grid[0] > 0
        return lambda *arguments: self.done.append("launched")


@pytest.mark.parametrize("fails", [False, True])
def test_a_launch_waits_for_the_thread_that_compiles(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise Triton would compile the same twice, side by side. Failures are the launch's."""
    kernel = Kernel()
    kernel.fails = fails
    monkeypatch.setattr(merge, "_kernel", lambda name: kernel)
    monkeypatch.setattr(merge, "triton_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    merge.compile_ahead(GPU, torch.float16, 64, 64, None)
    assert kernel.begun.wait(20)
    threading.Timer(0.1, kernel.go.set).start()
    merge.launch(merge._kinds(torch.float16, 64, 64, None)[0])
    merge._warming[-1].join()
    assert kernel.done == (["launched"] if fails else ["compiled", "launched"])
