"""Names, order of preference, refusals in words, and the numerical probe."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

import quorum_attention as qa
import quorum_attention.kernels.registry as registry
from quorum_attention.kernels import (
    CallShape,
    CpuKernel,
    DenseKernel,
    MaskShape,
    get_kernel,
    kernels,
    probe,
    register_kernel,
    why_not,
)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_KERNELS", dict(registry._KERNELS))


def call(device: str = "cpu", dtype: torch.dtype = torch.float32, **more) -> CallShape:
    return CallShape(device, dtype, 4, 2, 16, 16, **more)


def test_order_of_preference() -> None:
    assert list(kernels()) == ["fa4", "cudnn", "flash", "efficient", "cpu", "native", "dense"]
    every = kernels().values()
    usable = [kernel.name for kernel in every if why_not(kernel, call(needs_grad=True)) is None]
    # Without a GPU "native" runs where Triton interprets, which tests/native asks of the process.
    assert [name for name in usable if name != "native"] == ["cpu", "dense"]


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no kernel is named 'fast'.*cudnn, flash"):
        get_kernel("fast")
    with pytest.raises(TypeError, match="name or an InnerKernel"):
        get_kernel(3)
    assert get_kernel("cpu").name == "cpu"
    assert get_kernel(get_kernel("cpu")) is get_kernel("cpu")


@pytest.mark.usefixtures("own_registry")
def test_registering() -> None:
    class Mine(CpuKernel):
        name = "mine"

    register_kernel(Mine())
    assert list(kernels())[-2:] == ["mine", "dense"]
    Mine.name = "auto"
    with pytest.raises(ValueError, match="cannot be named"):
        register_kernel(Mine())


@pytest.mark.parametrize(
    ("name", "shape", "word"),
    [
        ("cudnn", call("cuda"), "NaN"),
        ("cudnn", call(), "cpu"),
        ("cudnn", CallShape("cuda", torch.float16, 4, 2, 20, 16), "multiples of 8"),
        ("cudnn", CallShape("cuda", torch.float16, 4, 4, 512, 512, needs_grad=True), "256"),
        ("flash", call("cuda"), "float16"),
        ("flash", call("cuda", torch.float16, mask=MaskShape(True, False, False, True)), "mask"),
        ("flash", CallShape("cuda", torch.float16, 4, 2, 16, 32), "equal"),
        ("efficient", call("cuda", torch.float64), "float64"),
        ("cpu", call("cuda"), "cuda"),
        ("cpu", call(dtype=torch.int32), "int32"),
        ("dense", call(dtype=torch.int32), "int32"),
    ],
)
def test_refusals_say_why(name: str, shape: CallShape, word: str) -> None:
    reason = get_kernel(name).refusal(shape)
    assert reason is not None
    assert word in reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", [None, MaskShape(False, True, True, True)], ids=["", "masked"])
def test_probe_accepts_what_works(dtype: torch.dtype, mask: MaskShape | None) -> None:
    assert probe(CpuKernel(), call(dtype=dtype, needs_grad=True, mask=mask)) is None


class Broken(CpuKernel):
    name = "broken"

    def __init__(self, how: str) -> None:
        self.how = how

    def rectangle_forward(self, call):
        if self.how == "raises":
            raise RuntimeError("no plan for this shape\nlots of detail")
        if self.how == "exhausted":
            raise torch.OutOfMemoryError("out of memory")
        if self.how == "not loaded":
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        if self.how == "no handle":
            raise RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            )
        out, lse = super().rectangle_forward(call)
        if self.how == "nan":
            out[..., 3, :] = torch.nan
        if self.how == "lse":
            lse = lse + 1.0
        return out, lse

    def rectangle_backward(self, *args):
        dq, dk, dv = super().rectangle_backward(*args)
        return dq, dk * (2.0 if self.how == "gradient" else 1.0), dv


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ("raises", "no plan for this shape"),
        ("nan", "NaN"),
        ("lse", "lse"),
        ("gradient", "gradient of key"),
    ],
)
def test_probe_finds_what_is_wrong(how: str, word: str) -> None:
    reason = probe(Broken(how), call(needs_grad=True))
    assert reason is not None
    assert word in reason
    assert "\n" not in reason


@pytest.mark.parametrize("how", ["exhausted", "not loaded", "no handle"])
def test_probe_lets_out_of_memory_through(how: str) -> None:
    kernel = Broken(how)
    with pytest.raises(RuntimeError, match=r"out of memory|ALLOC_FAILED"):
        probe(kernel, call())
    # It is not remembered as a kernel that does not work.
    kernel.how = "fine"
    assert probe(kernel, call()) is None


def test_where_memory_runs_out_on_a_gpu_it_is_tried_again_without_torchs_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def tried(*kind: object) -> None:
        done.append("tried")
        if done == ["tried"]:
            raise RuntimeError("Triton Error [CUDA]: out of memory")

    module = sys.modules["quorum_attention.kernels.probe"]
    monkeypatch.setattr(module, "_tried", tried)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    assert module._tried_with_memory(Broken("fine"), call(), torch.device("cuda", 0)) is None
    assert done == ["tried", "emptied", "tried"]


def test_probe_asks_once() -> None:
    kernel = Broken("fine")
    assert probe(kernel, call()) is None
    kernel.how = "raises"
    assert probe(kernel, call()) is None


class SizeOfTheScale(DenseKernel):
    """Right for scales above 0."""

    name = "size of the scale"

    def forward(self, task: Any, state: Any) -> None:
        super().forward(replace(task, scale=abs(task.scale)), state)


def test_a_kernel_is_tried_on_the_sign_of_the_scale_that_it_gets() -> None:
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    kernel = SizeOfTheScale()
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3)
    out = qa.attention(q, k, v, scale=0.3, kernel=kernel, depth=1, devices="cpu")
    torch.testing.assert_close(out, wanted)
    with pytest.raises(NotImplementedError, match="test"):
        qa.attention(q, k, v, scale=-0.3, kernel=kernel, depth=1, devices="cpu")
