"""Attention of a few rows over keys in host memory, by a C function that is compiled on
this machine.

torch's operator for CPUs computes longer than memory takes to hand it the keys of a few
rows. The C function (few_rows.c) is compiled in a thread, for the processor that it
runs on. Until it is there, and where there is no compiler or another library of
threads, calls go to torch's operator. Triton compiles C on the same terms.
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

import torch

from quorum_attention.arithmetic import ceil_div
from quorum_attention.threads import try_start

_SOURCE = Path(__file__).with_name("few_rows.c")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math")
_LIBRARY_FLAGS = ("-shared", "-fPIC")
# A compiler that takes longer is not waited for.
_TIMEOUT_SECONDS = 60.0
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Numbers of fp32 in a register, by what the processor has. Others were not measured.
_WIDTHS = {"AVX2": 8, "AVX512": 16}
_MAX_DIM = 256
# With more rows for each key head torch's operator is faster.
_MAX_ROWS = 8
# To compile takes a second or two, which fewer keys are not worth.
_WORTH_COMPILING = 32_768
# To wake threads takes as long as to read fewer keys.
_MIN_KEYS = 2048
# The keys of one task of a thread.
_BLOCK_KEYS = 2048
_LOG2_E = math.log2(math.e)
_POINTER = ctypes.c_void_p
_ARGUMENTS = [_POINTER] * 7 + [ctypes.c_int64] * 4 + [ctypes.c_int] * 6


class _Build:
    """The C function for one dtype.

    Attributes:
        function: None before it is compiled, and if it cannot be.
        is_over: whether the compiler is done.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.function: Any = None
        self.is_over = threading.Event()
        thread = threading.Thread(target=self._run, daemon=True)
        if not try_start(thread):
            self.is_over.set()

    def _run(self) -> None:
        try:
            self.function = _compiled(_DTYPES[self._dtype])
        except (OSError, subprocess.SubprocessError):
            # Without a compiler, with one that does not take the source, or without
            # OpenMP's library torch computes.
            self.function = None
        finally:
            self.is_over.set()


def _compiled(dtype_number: int) -> Any:
    """Compile the C function.

    Raises:
        OSError: there is no compiler, or its library cannot be loaded: torch may have
            been built with other threads than OpenMP's.
        subprocess.SubprocessError: the compiler failed.
    """
    # CC may be a compiler with arguments: "ccache gcc".
    compiler = os.environ.get("CC", "").split() or ["cc"]
    with tempfile.TemporaryDirectory(prefix="quorum-attention-") as folder:
        library = Path(folder) / "few_rows.so"
        numbers = (f"-DDTYPE={dtype_number}", f"-DWIDTH={_register_width()}")
        output = ("-o", str(library), str(_SOURCE), "-lm")
        subprocess.run(
            [*compiler, *_FLAGS, *_LIBRARY_FLAGS, *numbers, *output],
            check=True,
            timeout=_TIMEOUT_SECONDS,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            # Ctrl-C ends a generation, and would end the compiler too.
            start_new_session=True,
        )
        function = ctypes.CDLL(str(library)).attend_few_rows
    function.argtypes = _ARGUMENTS
    function.restype = None
    return function


# The builds that were begun.
_builds: dict[torch.dtype, _Build] = {}


def begin_to_compile(dtype: torch.dtype) -> None:
    """Compile the function for keys of a dtype in a thread, if that was not begun
    yet."""
    if dtype in _DTYPES and dtype not in _builds and _register_width() > 0:
        _builds[dtype] = _Build(dtype)


def compiled_statistics(
    rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Attend from rows over all keys.

    Args:
        rows: (b, h, r, d) queries in host memory.
        key, value: (b, h, n, d) and (b, h, n, d_v) in host memory.
        softmax_scale: scores are multiplied by this.

    Returns:
        out (b, h, r, d_v) and lse (b, h, r) in fp32; None if another function has to
        compute them.
    """
    n_keys = key.shape[2]
    if n_keys >= _WORTH_COMPILING:
        begin_to_compile(key.dtype)
    build = _builds.get(key.dtype)
    function = None if build is None else build.function
    if function is None or n_keys < _MIN_KEYS or rows.shape[2] > _MAX_ROWS:
        return None
    if not _is_readable(key) or not _is_readable(value):
        return None
    queries = rows.float() * (softmax_scale * _LOG2_E)
    results = [
        _run(function, *tensors) for tensors in zip(queries, key, value, strict=True)
    ]
    outs, lses = zip(*results, strict=True)
    return torch.stack(outs), torch.stack(lses)


@cache
def _register_width() -> int:
    """Numbers of fp32 in a register of this processor; 0: the function is not for
    it."""
    return _WIDTHS.get(torch.backends.cpu.get_cpu_capability(), 0)


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether the rows of each head lie side by side, and are as wide as the function
    wants."""
    width = tensor.shape[3]
    pair = 2 * _register_width()
    if pair == 0 or width > _MAX_DIM or width % pair != 0:
        return False
    return tensor.stride()[2:] == (width, 1)


def _run(
    function: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Statistics of one batch entry: out (h, r, d_v) and lse (h, r)."""
    heads, n_rows, dim = query.shape
    n_keys, value_dim = value.shape[1:]
    n_blocks = ceil_div(n_keys, _BLOCK_KEYS)
    query = query.contiguous()
    block_out = query.new_empty((heads, n_rows, n_blocks, value_dim))
    block_lse = query.new_empty((heads, n_rows, n_blocks))
    out = query.new_empty((heads, n_rows, value_dim))
    lse = query.new_empty((heads, n_rows))
    tensors = (query, key, value, block_out, block_lse, out, lse)
    function(
        *[tensor.data_ptr() for tensor in tensors],
        key.stride(0) * key.element_size(),
        value.stride(0) * value.element_size(),
        n_keys,
        _BLOCK_KEYS,
        heads,
        n_rows,
        dim,
        value_dim,
        n_blocks,
        torch.get_num_threads(),
    )
    return out, lse
