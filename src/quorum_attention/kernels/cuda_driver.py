"""The few functions of the CUDA driver that load and launch a compiled kernel, by ctypes."""

from __future__ import annotations

import ctypes
import functools
from contextlib import suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

_INVALID_CONTEXT = 201
# More parameters than any kernel of ours has.
_MOST_PARAMETERS = 200


class Driver:
    """Functions of ``libcuda`` that raise ``RuntimeError`` where they fail.

    Raises:
        AttributeError: the driver is too old for one of them (before CUDA 12.4).
    """

    def __init__(self, library: Any) -> None:
        def function(name: str, *kinds: Any) -> Any:
            found = getattr(library, name)
            found.restype, found.argtypes = c_int, kinds
            return found

        self._launch = function(
            "cuLaunchKernel", c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), c_void_p
        )
        self._load = function("cuModuleLoadData", POINTER(c_void_p), c_char_p)
        self._function = function("cuModuleGetFunction", POINTER(c_void_p), c_void_p, c_char_p)
        self._parameter = function(
            "cuFuncGetParamInfo", c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)
        )
        self._current = function("cuCtxGetCurrent", POINTER(c_void_p))
        self._retain = function("cuDevicePrimaryCtxRetain", POINTER(c_void_p), c_int)
        self._set_current = function("cuCtxSetCurrent", c_void_p)
        self._error_string = function("cuGetErrorString", c_int, POINTER(c_char_p))

    def load(self, device: int, cubin: bytes, name: str) -> int:
        """Load a kernel onto ``device``, which has been made current; returns its handle.

        It stays loaded as long as the process lives.
        """
        self._bind(device)
        module, found = c_void_p(), c_void_p()
        self._check("cuModuleLoadData", self._load(byref(module), cubin))
        name_ = name.encode()
        self._check("cuModuleGetFunction", self._function(byref(found), module, name_))
        assert found.value is not None
        return found.value

    def parameters(self, function: int) -> list[tuple[int, int]]:
        """Offset and bytes of each of a kernel's parameters."""
        found = []
        offset, n_bytes = c_size_t(), c_size_t()
        for i in range(_MOST_PARAMETERS):
            if self._parameter(function, i, byref(offset), byref(n_bytes)):
                break
            found.append((offset.value, n_bytes.value))
        return found

    def launch(
        self, function: int, programs: int, threads: int, shared: int, stream: int, pointers: Any
    ) -> None:
        """Launch ``programs`` blocks of ``threads`` on ``stream`` of the current device.

        Args:
            shared: bytes of shared memory of each block.
            pointers: ``void*`` to each parameter's value.
        """
        # The interpreter's lock is free meanwhile: where the queue is full, it waits.
        status = self._launch(
            function, programs, 1, 1, threads, 1, 1, shared, stream, pointers, None
        )
        if status:
            self._check("cuLaunchKernel", status)

    def _bind(self, device: int) -> None:
        """A thread that has used no device yet has no context, whatever torch calls current."""
        context = c_void_p()
        self._check("cuCtxGetCurrent", self._current(byref(context)))
        if context.value is None:
            self._check("cuDevicePrimaryCtxRetain", self._retain(byref(context), device))
            self._check("cuCtxSetCurrent", self._set_current(context))

    def _check(self, what: str, status: int) -> None:
        if status:
            words = c_char_p()
            self._error_string(status, byref(words))
            said = (words.value or b"unknown").decode(errors="replace")
            raise RuntimeError(f"CUDA error in {what}: {said} ({status})")


@functools.cache
def driver() -> Driver | None:
    """The driver of this process; None where there is none, or one too old."""
    with suppress(OSError, AttributeError):
        return Driver(ctypes.CDLL("libcuda.so.1"))
    return None
