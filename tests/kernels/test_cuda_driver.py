"""The driver's functions, as a library that is made up answers them."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from quorum_attention.kernels import cuda_driver
from quorum_attention.kernels.cuda_driver import Driver

NAMES = (
    "cuLaunchKernel", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncGetParamInfo",
    "cuCtxGetCurrent", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuGetErrorString",
)  # fmt: skip


class Library:
    """Answers with statuses, and remembers who was asked for what."""

    def __init__(self, context: int | None = 1, failing: str = "", missing: str = "") -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.context, self.failing = context, failing
        for name in NAMES:
            if name != missing:
                setattr(self, name, self._function(name))

    def _function(self, name: str) -> Any:
        def call(*of: Any) -> int:
            self.calls.append((name, of))
            if name == self.failing:
                return 700
            getattr(self, f"_{name}", lambda *of: None)(*of)
            return 1 if name == "cuFuncGetParamInfo" and of[1] > 2 else 0

        return call

    def _cuCtxGetCurrent(self, out: Any) -> None:
        out._obj.value = self.context

    def _cuModuleGetFunction(self, out: Any, module: Any, name: bytes) -> None:
        assert name == b"kernel"
        out._obj.value = 1234

    def _cuFuncGetParamInfo(self, function: int, i: int, offset: Any, n_bytes: Any) -> None:
        offset._obj.value, n_bytes._obj.value = 8 * i, 8 - i

    def _cuGetErrorString(self, status: int, out: Any) -> None:
        out._obj.value = b"an illegal memory access was encountered"

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def test_a_kernel_is_loaded_into_the_context_of_its_device() -> None:
    here, new = Library(), Library(context=None)
    assert Driver(here).load(3, b"code", "kernel") == 1234
    assert here.names() == ["cuCtxGetCurrent", "cuModuleLoadData", "cuModuleGetFunction"]
    assert Driver(new).load(3, b"code", "kernel") == 1234
    assert new.names()[1:3] == ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    assert new.calls[1][1][1] == 3


def test_its_parameters_are_asked_for_until_there_are_no_more() -> None:
    assert Driver(Library()).parameters(1234) == [(0, 8), (8, 7), (16, 6)]


def test_a_launch_says_what_went_wrong() -> None:
    well, badly = Library(), Library(failing="cuLaunchKernel")
    pointers = (ctypes.c_void_p * 1)(0)
    Driver(well).launch(1234, 7, 128, 64, 5, pointers)
    assert well.calls == [("cuLaunchKernel", (1234, 7, 1, 1, 128, 1, 1, 64, 5, pointers, None))]
    with pytest.raises(RuntimeError, match=r"cuLaunchKernel: an illegal memory access.*700"):
        Driver(badly).launch(1234, 7, 128, 64, 5, pointers)
    with pytest.raises(RuntimeError, match="cuModuleLoadData"):
        Driver(Library(failing="cuModuleLoadData")).load(0, b"code", "kernel")


@pytest.mark.parametrize("found", ["no library", "an old one"])
def test_without_it_there_is_none(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def library(name: str) -> Any:
        assert name == "libcuda.so.1"
        if found == "no library":
            raise OSError("libcuda.so.1: cannot open shared object file")
        return Library(missing="cuFuncGetParamInfo")

    monkeypatch.setattr(cuda_driver, "ctypes", SimpleNamespace(CDLL=library))
    cuda_driver.driver.cache_clear()
    assert cuda_driver.driver() is None
    cuda_driver.driver.cache_clear()
