"""Index arithmetic where 32 bits end: tasks of more than 2**30 tokens, rows 2**24 elements apart.

Nothing so large is allocated: bounds are worked out by the functions that kernels call for them,
and rows that far apart lie in a file that is nearly all holes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_harness import Case, exact

from quorum_attention.kernels.native import NativeKernel
from quorum_attention.kernels.native.options import UNLIMITED
from quorum_attention.kernels.native.runs import NO_DIAGONAL

tl = pytest.importorskip("triton.language")
import triton  # noqa: E402

from quorum_attention.kernels.native.scores_triton import kept  # noqa: E402
from quorum_attention.kernels.native.walk_triton import keys_of_run, rows_of_run  # noqa: E402

FAR = (1 << 30) + 64 * 5


@triton.jit
def _bounds(
    entries, found, first, n, left, right, BY_QUERY: tl.constexpr, WINDOW: tl.constexpr
) -> None:
    if BY_QUERY:
        _, _, _, _, start, begin, end, stop = keys_of_run(
            entries, 0, first, n, left, right, 64, 64, WINDOW, False, 7
        )
    else:
        start, begin, end, stop = rows_of_run(
            entries, 0, first, n, left, right, 64, 64, WINDOW, False, 7
        )
    tl.store(found, start)
    tl.store(found + 1, begin)
    tl.store(found + 2, end)
    tl.store(found + 3, stop)


@triton.jit
def _keeps(found, row, column, n, diagonal, left, right, WINDOW: tl.constexpr) -> None:
    rows = row + tl.arange(0, 16)[:, None]
    columns = column + tl.arange(0, 16)[None, :]
    keep = kept(rows, columns, 0, n, 0, n, diagonal, 0, left, right, WINDOW)
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(found + at, keep.to(tl.int32))


@pytest.mark.parametrize("by_query", [True, False])
@pytest.mark.parametrize("window", [None, (UNLIMITED, 100), (100, UNLIMITED)])
@pytest.mark.parametrize("causal", [False, True])
def test_bounds_of_runs(by_query: bool, window, causal: bool, device: str) -> None:
    """Of a whole sequence, at a block in its middle and at its last: the pairs that are kept, by
    Python's integers, are those between ``start`` and ``stop``."""
    n = 2 * FAR - 1000
    for first in (FAR // 64 * 64, (n - 1) // 64 * 64):
        last = min(first + 64, n)
        entry = [first, last, 0, n] if by_query else [0, n, first, last]
        entry += [0 if causal else NO_DIAGONAL, 0, 0]
        entries = torch.tensor(entry, dtype=torch.int32, device=device)
        found = torch.zeros(4, dtype=torch.int32, device=device)
        left, right = (0, 0) if window is None else window
        _bounds[(1,)](
            entries, found, first, n, left, right, BY_QUERY=by_query, WINDOW=window is not None
        )
        start, begin, end, stop = found.tolist()
        low, high = 0, n
        before, after = (n, n) if window is None else (left, right)
        after = min(after, 0) if causal else after
        if by_query:
            low, high = max(low, first - before), min(high, last + after)
        else:
            low, high = max(low, first - after), min(high, last + before)
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
        _keeps[(1,)](found, row, column, n, NO_DIAGONAL, left, right, WINDOW=window is not None)
        apart = (row - column) + np.arange(16)[:, None] - np.arange(16)[None, :]
        wanted = np.ones((16, 16), bool)
        if window is not None:
            wanted = (apart <= left) & (apart >= -right)
        assert np.array_equal(found.cpu().numpy().reshape(16, 16) == 1, wanted)


@pytest.mark.parametrize("stride", [1 << 24, (1 << 26) + 8])
def test_rows_far_apart(stride: int, tmp_path: Path, on_gpu: bool) -> None:
    """Keys and values whose rows are a long way from each other, as in a slice of a huge tensor."""
    if on_gpu:
        pytest.skip("it would take as much memory of the GPU as the rows span")
    case = Case(70, 64, dtype=torch.float16, heads=1, levels=())
    tensors = [case.key, case.value]
    for number, rows in enumerate(tensors):
        # In the middle of the file: an offset that wraps around stays inside it.
        length = 2 * 64 * stride
        flat = np.memmap(tmp_path / str(number), np.float16, "w+", shape=(length,))
        far = torch.from_numpy(flat).as_strided(
            rows.shape, (length, length, stride, 1), storage_offset=length // 2
        )
        tensors[number] = far.copy_(rows)
    out, lse = NativeKernel().whole_forward(case.query, *tensors, False, case.scale, None)
    reference = exact(case)
    assert (out - reference.out).abs().max() < 2e-3
    grads = NativeKernel().whole_backward(
        case.grad_out, case.query, *tensors, out, lse, False, case.scale, None
    )
    for found, wanted in zip(grads, list(vars(reference).values())[2:], strict=True):
        assert (found - wanted).abs().max() < 1e-2
