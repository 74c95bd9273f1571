"""Which kernel a call gets: the one asked for or none, else the first that can."""

from __future__ import annotations

import pytest
import torch

import quorum_attention.kernels.registry as select
from quorum_attention.kernels import CallShape, CpuKernel, DenseKernel, get_kernel, kernels
from quorum_attention.kernels.registry import registrations, rivals, select_kernel, unrounded_kernel

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
HERE = torch.cuda.is_available()


def call(device: str = "cpu", dtype: torch.dtype = torch.float32, **more) -> CallShape:  # type: ignore[no-untyped-def]
    return CallShape(device, dtype, 4, 2, 16, 16, **more)


class Failing(CpuKernel):
    """Says that it can, and cannot."""

    name = "failing"

    def forward(self, task, state):  # type: ignore[no-untyped-def]
        raise RuntimeError("no such instruction")


def test_free_choice_takes_the_first_that_can() -> None:
    assert select_kernel("auto", call(), CPU).name == "cpu"
    wide = CallShape("cpu", torch.float64, 4, 2, 16, 24, is_causal=True)
    assert select_kernel("auto", wide, CPU).refusal(wide) is None


@pytest.mark.parametrize("name", ["cpu", "dense"])
def test_a_kernel_asked_for_is_the_one(name: str) -> None:
    assert select_kernel(name, call(), CPU) is get_kernel(name)
    mine = DenseKernel()
    assert select_kernel(mine, call(), CPU) is mine


def test_a_kernel_asked_for_is_not_replaced() -> None:
    with pytest.raises(NotImplementedError, match=r"'flash' cannot run this call: .*cpu"):
        select_kernel("flash", call(), CPU)


def test_its_word_is_believed_only_where_nothing_is_tried() -> None:
    with pytest.raises(NotImplementedError, match="no such instruction"):
        select_kernel(Failing(), call(), CPU)
    mine = Failing()
    assert select_kernel(mine, call(), CPU, tried=False) is mine


def test_replaced_flash_operators_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch can put another library behind its flash operators, with other bounds."""
    flash, half = get_kernel("flash"), call("cuda", torch.float16)
    before = registrations()
    assert flash.refusal(half) is None
    monkeypatch.setattr(
        torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False
    )
    assert "replaced by FA4" in str(flash.refusal(half))
    assert registrations() != before


def test_where_no_kernel_can_every_one_says_why() -> None:
    with pytest.raises(NotImplementedError) as refused:
        select_kernel("auto", call(dtype=torch.int32), CPU)
    for name in kernels():
        assert f"{name}: " in str(refused.value)


@pytest.mark.skipif(HERE, reason="a GPU is here")
def test_a_plan_for_a_device_that_is_not_here_takes_kernels_word() -> None:
    assert select_kernel("auto", call("cuda", torch.float16), CUDA).name == "cudnn"


def test_only_a_wider_result_on_a_gpu_asks_for_an_unrounded_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[str | None] = [None]
    monkeypatch.setattr(select, "why_not", lambda *_: answers[0])
    half = call("cuda", torch.float16)
    assert unrounded_kernel("auto", half, CUDA, torch.float32) == "native"
    assert unrounded_kernel("auto", half, CUDA, torch.float16) == "auto"
    assert unrounded_kernel("cudnn", half, CUDA, torch.float32) == "cudnn"
    assert unrounded_kernel("auto", call(dtype=torch.float16), CPU, torch.float32) == "auto"
    narrow = CallShape("cuda", torch.float16, 4, 2, 16, 8)
    assert unrounded_kernel("auto", narrow, CUDA, torch.float32) == "auto"
    answers[0] = "it cannot"
    assert unrounded_kernel("auto", half, CUDA, torch.float32) == "auto"


def test_rivals_are_kernels_of_known_rates_that_take_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(select, "_is_hopper", lambda device: True)
    half = call("cuda", torch.float16)
    preferred = get_kernel("cudnn")
    found = rivals(preferred, half, CUDA)
    assert preferred not in found
    assert all(kernel.refusal(half) is None for kernel in found)
    assert rivals(preferred, call(), CPU) == ()
    monkeypatch.setattr(select, "_is_hopper", lambda device: False)
    assert rivals(preferred, half, CUDA) == ()
