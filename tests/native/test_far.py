"""Index arithmetic where 32 bits end: tasks of more than 2**30 tokens, rows 2**24
elements apart.

Nothing so large is computed with: bounds are worked out by the functions that kernels
call for them, and rows that far apart lie in a file that is nearly all holes, or in 18
GiB of a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from kernel_harness import Case, exact

from quorum_attention.kernels.native import NativeKernel
from quorum_attention.kernels.native.columns import EntryColumn
from quorum_attention.kernels.native.config import Config, Tiling
from quorum_attention.kernels.native.pieces import NO_DIAGONAL, UNLIMITED
from quorum_attention.kernels.native.runs import bounded
from quorum_attention.kernels.operator_call import Call, Saved

tl = pytest.importorskip("triton.language")
import triton  # noqa: E402

from quorum_attention.kernels.native.tiles_triton import kept_of_query_run  # noqa: E402

FAR = (1 << 30) + 64 * 5


class Constants(NamedTuple):
    """The constants that ``kept_of_query_run`` depends on."""

    WINDOW: bool


@triton.jit
def _keeps(found, row, column, n, diagonal, left, right, K: tl.constexpr) -> None:
    rows = row + tl.arange(0, 16)[:, None]
    columns = column + tl.arange(0, 16)[None, :]
    keep = kept_of_query_run(
        rows, columns, (0, n, diagonal, 0), (0, n), (left, right), K
    )
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(found + at, keep.to(tl.int32))


@pytest.mark.parametrize("axis", ["query", "key"])
@pytest.mark.parametrize("window", [None, (UNLIMITED, 100), (100, UNLIMITED)])
@pytest.mark.parametrize("causal", [False, True])
def test_bounds_of_runs(axis, window, causal: bool) -> None:
    """Of a whole sequence, at a block in its middle and at its last: the pairs that are
    kept, by Python's integers, are those between ``start`` and ``stop``."""
    n = 2 * FAR - 1000
    for first in (FAR // 64 * 64, (n - 1) // 64 * 64):
        last = min(first + 64, n)
        piece = [first, last, 0, n] if axis == "query" else [0, n, first, last]
        piece += [0 if causal else NO_DIAGONAL, 0, 0, 0]
        tiling = Tiling(axis, Config(64, 64, 4, 1))
        (entry,) = bounded(torch.tensor([piece]), n, tiling, window).tolist()
        start, begin, end, stop = entry[EntryColumn.START : EntryColumn.DIAGONAL]
        before, after = window or (n, n)
        after = min(after, 0) if causal else after
        if axis == "query":
            low, high = max(0, first - before), min(n, last + after)
        else:
            low, high = max(0, first - after), min(n, last + before)
        assert (start, stop) == (low, high)
        assert start <= begin <= end <= stop
        assert (end - begin) % 64 == 0
        assert end - begin > (stop - start) - 4 * 64


@pytest.mark.parametrize("window", [None, (UNLIMITED, 3), (3, UNLIMITED)])
def test_pairs_of_a_tile(window, device: str) -> None:
    n = 2 * FAR - 1000
    left, right = (0, 0) if window is None else window
    for row, column in ((n - 16, 0), (0, n - 16), (n - 16, n - 16)):
        found = torch.zeros(256, dtype=torch.int32, device=device)
        constants = Constants(window is not None)
        _keeps[(1,)](found, row, column, n, NO_DIAGONAL, left, right, K=constants)
        apart = (row - column) + np.arange(16)[:, None] - np.arange(16)[None, :]
        wanted = np.ones((16, 16), bool)
        if window is not None:
            wanted = (apart <= left) & (apart >= -right)
        assert np.array_equal(found.cpu().numpy().reshape(16, 16) == 1, wanted)


# Before the first row: where an offset of 32 bits that wraps around leads to.
_BEFORE = 1 << 31
# From head to head, beside all rows.
_HEAD = (1 << 31) + 192


def apart(
    rows: list[torch.Tensor], stride: int, device: str, file: Path
) -> list[torch.Tensor]:
    """The tensors with their rows ``stride`` elements from each other, all in one flat
    one; nothing that lies between them is a number on a GPU, and 0 in a file."""
    length = _BEFORE + _HEAD + (rows[0].shape[2] + 1) * stride
    if device == "cpu":
        flat = torch.from_numpy(np.memmap(file, np.float16, "w+", shape=(length,)))
    else:
        flat = torch.empty(length, dtype=torch.float16, device=device).fill_(torch.nan)
    return [
        flat.as_strided(
            t.shape, (length, _HEAD, stride, 1), _BEFORE + 256 * number
        ).copy_(t)
        for number, t in enumerate(rows)
    ]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("stride", [1 << 24, (1 << 26) + 9])
def test_rows_far_apart(stride: int, tmp_path: Path, device: str) -> None:
    """Rows and heads a long way from each other, as in a slice of a huge tensor."""
    takes = 2 * (_BEFORE + _HEAD + 71 * stride)
    if device == "cuda" and torch.cuda.mem_get_info()[0] < takes + (1 << 30):
        pytest.skip(f"{takes >> 30} GiB of GPU memory are not free")
    case = Case(70, 64, dtype=torch.float16, levels=())
    four = [case.query, case.grad_out, case.key, case.value]
    query, grad_out, key, value = apart(four, stride, device, tmp_path / "flat")
    three = query, key, value
    call = Call(*three, False, case.scale)
    out, lse = NativeKernel().whole_forward(call)
    reference = exact(case)
    assert (out.cpu() - reference["out"]).abs().max() < 2e-3
    grads = NativeKernel().whole_backward(call, Saved(grad_out, out, lse))
    for found, wanted in zip(grads, list(reference.values())[2:], strict=True):
        assert (found.cpu() - wanted).abs().max() < 1e-2
