"""Kernels by name, the one that a call gets, refusals, and the test of what works, made
once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.kernels import (
    BiasShape,
    CallShape,
    CpuKernel,
    DenseKernel,
    get_kernel,
    probe,
    probing,
    registry,
)
from quorum_attention.kernels.cudnn import CudnnKernel
from quorum_attention.kernels.fa4 import Fa4Kernel
from quorum_attention.kernels.masked.choose import kernel_for_mask
from quorum_attention.kernels.masked.kernel import MaskedKernel
from quorum_attention.kernels.protocol import Kernel
from quorum_attention.kernels.registry import registrations
from quorum_attention.kernels.select import select_kernel


def call(device: str = "cpu", dtype: torch.dtype = torch.float32, **more) -> CallShape:
    return CallShape(device, dtype, 4, 2, 16, 16, **more)


def test_registering() -> None:
    class Mine(CpuKernel):
        name = "mine"

    qa.register_kernel(Mine())
    assert list(qa.kernels())[-2:] == ["mine", "dense"]
    Mine.name = "auto"
    with pytest.raises(ValueError, match="cannot be named"):
        qa.register_kernel(Mine())


@pytest.mark.parametrize(
    ("name", "shape", "word"),
    [
        ("cudnn", call("cuda"), "bfloat16"),
        ("cudnn", CallShape("cuda", torch.float16, 4, 2, 20, 16), "multiples of 8"),
        (
            "cudnn",
            CallShape("cuda", torch.float16, 4, 4, 512, 512, needs_grad=True),
            "256",
        ),
        (
            "cudnn",
            call("cuda", torch.float16, needs_grad=True, exact_scale=False),
            "scale",
        ),
        (
            "flash",
            call("cuda", torch.float16, bias=BiasShape(False, False, True)),
            "mask",
        ),
        ("flash", CallShape("cuda", torch.float16, 4, 2, 16, 32), "equal"),
        ("efficient", call("cuda", torch.float64), "float64"),
        ("cpu", call("cuda"), "cuda"),
        ("cpu", call(dtype=torch.int32), "int32"),
    ],
)
def test_refusals_say_why(name: str, shape: CallShape, word: str) -> None:
    assert word in str(get_kernel(name).refusal(shape))


class Broken(CpuKernel):
    name = "broken"

    def __init__(self, how: str) -> None:
        self.how = how

    def rectangle_forward(self, call):
        if self.how == "raises":
            raise RuntimeError("no plan for this shape\nlots of detail")
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
    [("raises", "no plan for this shape"), ("nan", "NaN"), ("lse", "lse"),
     ("gradient", "gradient of key")],
)  # fmt: skip
def test_probe_finds_what_is_wrong(how: str, word: str) -> None:
    reason = str(probe(Broken(how), call(needs_grad=True)))
    assert word in reason
    assert "\n" not in reason


@pytest.mark.parametrize("kernel_class", [CudnnKernel, Fa4Kernel])
def test_packages_are_tested_once_for_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel_class: type[Kernel]
) -> None:
    """But for those that fail, and again where a version differs or the file is
    damaged."""
    monkeypatch.setenv("QUORUM_ATTENTION_CACHE", str(tmp_path))
    reasons, tested = iter(["it is wrong", None, None, None]), []
    there = "quorum_attention.kernels.probing"
    monkeypatch.setattr(f"{there}.capturing", lambda device: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    tried = lambda kernel, *_: tested.append(kernel) or next(reasons)  # noqa: E731
    monkeypatch.setattr(f"{there}._tested_with_memory", tried)

    def in_another_process() -> tuple[str | None, int]:
        reason = probe(
            kernel_class(), call("cuda", torch.float16), torch.device("cuda:0")
        )
        return reason, len(tested)

    assert in_another_process() == ("it is wrong", 1)
    assert [in_another_process() for _ in range(3)] == [(None, 2)] * 3
    if kernel_class is CudnnKernel:
        monkeypatch.setattr(torch, "__version__", "9.0")
    else:
        monkeypatch.setattr(f"{there}.fa4_versions", lambda: ("4.1",))
    assert [in_another_process() for _ in range(2)] == [(None, 3)] * 2
    (tmp_path / "passed.json").write_text('{"no": "list"}')
    assert [in_another_process() for _ in range(2)] == [(None, 4)] * 2


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


def test_a_call_without_heads_is_tried_as_one_with_some() -> None:
    """Of none, torch's operator for CPUs ends the process: it divides by their
    number."""
    q = torch.randn(2, 0, 40, 16)
    window = qa.Mask(window=(3, 0))
    assert qa.attention(q, q, q, attn_mask=window, devices="cpu").shape == q.shape


def test_what_is_no_kernel_is_refused() -> None:
    @dataclass
    class Compared(CpuKernel):
        size: int = 1

    for ask in (get_kernel, qa.register_kernel):
        with pytest.raises(
            TypeError, match=r"lacks __hash__ \(a dataclass keeps it with eq=False"
        ):
            ask(Compared())
        with pytest.raises(TypeError, match=r"not object: make one of.*InnerKernel"):
            ask(object())
        with pytest.raises(TypeError, match="not the class CpuKernel: make one"):
            ask(CpuKernel)


def test_a_kernel_asked_for_is_not_replaced() -> None:
    with pytest.raises(
        NotImplementedError, match=r"'flash' cannot run this call: .*cpu"
    ):
        select_kernel("flash", call(), torch.device("cpu"))


def test_replaced_flash_operators_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch can put another library behind its flash operators, with other bounds."""
    flash, half = get_kernel("flash"), call("cuda", torch.float16)
    gpu = torch.device("cuda", 0)
    before = registrations(gpu)
    assert flash.refusal(half) is None
    monkeypatch.setattr(
        torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False
    )
    assert "replaced by FA4" in str(flash.refusal(half))
    assert registrations(gpu) != before


# --- A soft cap ----------------------------------------------------------------------------------


def base_under_a_softcap(
    wanted: str | Kernel, device: str = "cuda", cap: float = 5.0
) -> Kernel:
    """The kernel that computes the parts of a causal call of 8 tokens with a soft
    cap."""
    shape = CallShape(
        device,
        torch.float32,
        4,
        2,
        16,
        16,
        batch_shape=(1,),
        n_queries=8,
        n_keys=8,
        is_causal=True,
    )
    mask = qa.Mask(causal=True, softcap=cap)
    _, kernel = kernel_for_mask(
        mask, wanted, shape, torch.device(device), needs_grad=False, tried=False
    )
    assert isinstance(kernel, MaskedKernel)
    return kernel.base


def test_a_softcap_keeps_the_options_of_a_kernel() -> None:
    """A kernel that was rebuilt by its name computed in full fp32 where TF32 was asked
    for."""
    base = base_under_a_softcap(qa.NativeKernel(allow_tf32=True))
    assert isinstance(base, qa.NativeKernel)
    assert base.allow_tf32
    assert base.softcap == 5.0


@pytest.mark.parametrize("name", ["native", "fa4", "cpu"])
def test_a_users_kernel_is_not_replaced_by_ours_of_the_same_name(
    name: str, monkeypatch
) -> None:
    class Mine(CpuKernel):
        operator = True

        def refusal(self, shape: CallShape) -> None:
            return None

    Mine.name = name
    monkeypatch.setitem(registry._KERNELS, name, Mine())
    with pytest.raises(NotImplementedError, match="no soft cap"):
        base_under_a_softcap(name)
    with pytest.raises(NotImplementedError, match="no soft cap"):
        base_under_a_softcap(Mine())


def test_a_users_dense_kernel_runs_where_it_is_asked_for(monkeypatch) -> None:
    class Mine(CpuKernel):
        name = "dense"

        def with_softcap(self, softcap: float) -> Kernel:
            return self

    monkeypatch.setitem(registry._KERNELS, "dense", Mine())
    assert isinstance(base_under_a_softcap("dense", "cpu"), Mine)


def test_a_kernel_registered_later_is_the_one_that_runs(monkeypatch) -> None:
    base_under_a_softcap("native", cap=7.0)
    monkeypatch.setitem(registry._KERNELS, "native", qa.NativeKernel(allow_tf32=True))
    base = base_under_a_softcap("native", cap=7.0)
    assert isinstance(base, qa.NativeKernel)
    assert base.allow_tf32


@pytest.mark.parametrize("name", ["native", "fa4"])
def test_a_kernel_and_its_softcaps_share_one_test(name: str) -> None:
    """The test before a kernel's first use is of the kernel without its soft cap, made
    once."""
    kernel = get_kernel(name)
    for softcap in (5.0, 30.0):
        capped = kernel.with_softcap(softcap)
        assert capped is not None
        assert capped.plain_variant is kernel


def test_the_test_of_a_kernel_stays_small_whatever_a_call_has() -> None:
    """It took 305 MiB in a call of 12 MiB, with 1,024 query heads over one key head."""
    for group, dim in product((1, 8, 16, 71, 1024, 9000), (1, 64, 128, 256, 5000)):
        if group * dim > 4_000_000:  # one row of the call has 32 MB
            continue
        shape = CallShape("cpu", torch.float32, 2 * group, 2, dim, dim)
        lengths = set()
        for is_causal in (False, True):
            call, grad_out = probing._random_call(shape, is_causal, 1.0)
            lengths.add(call.query.shape[-2])
            n_keys = call.key.shape[-2]
            assert n_keys == call.query.shape[-2] or not is_causal
            for tensor in (call.query, call.key, call.value, grad_out):
                assert tensor.nbytes <= max(8 << 20, 4 * 2 * group * dim)
            assert 2 * group * n_keys * dim <= max(1 << 21, 2 * group * dim), (
                "keys of each head"
            )
        if group <= 8 and dim <= 256:
            assert lengths == {probing._QUERIES}
