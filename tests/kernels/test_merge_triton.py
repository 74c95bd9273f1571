"""The fused merge kernel: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

SCRIPT = """
import sys
import torch
sys.modules["triton"] = None  # the package imports without it
import quorum_attention.kernels
assert "quorum_attention.kernels.merge_triton" not in sys.modules
del sys.modules["triton"]
from quorum_attention.kernels.merge import _merge_block_
from quorum_attention.kernels.merge import add_, launch_add, launch_merge

device = sys.argv[1]
torch.manual_seed(0)
shapes = [(1, 1, 1, 1), (2, 3, 37, 40), (1, 2, 130, 64), (1, 1, 5, 257), (1, 0, 4, 8)]
dtypes = [torch.float32, torch.float16, torch.bfloat16]
if device == "cuda":
    shapes.append((1, 1, 70_000 * 64, 64))  # more than 65,535 programs
for number, shape in enumerate(shapes):
    for dtype in dtypes if device == "cuda" else [dtypes[number % 3]]:
        b, h, n, d = shape
        base = torch.randn(b, h, n + 7, d, device=device)
        out = base[:, :, 3 : 3 + n]
        lse = (torch.randn(b, h, n + 2, device=device) * 100)[:, :, 1 : 1 + n]
        out_i = torch.randn(b, n, h, d, device=device).to(dtype).transpose(1, 2)
        lse_i = (torch.randn(b, n, h, device=device) * 100).transpose(1, 2)
        lse[..., ::3] = -torch.inf
        out[:, :, ::3] = 0
        lse_i[..., ::2] = -torch.inf
        out_i[:, :, ::2] = 0
        expected, expected_lse, before = out.clone(), lse.clone(), base.clone()
        _merge_block_(expected, expected_lse, out_i, lse_i)
        # Into 16 bits: computed in fp32, rounded once.
        narrow, its_lse = out.half(), lse.clone()
        in_fp32, wide_lse = narrow.float(), lse.clone()
        launch_merge(narrow, its_lse, out_i, lse_i)
        launch_merge(in_fp32, wide_lse, out_i, lse_i)
        assert torch.equal(narrow, in_fp32.half())
        assert torch.equal(its_lse, wide_lse)
        launch_merge(out, lse, out_i, lse_i)
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-6)
        assert torch.equal(base[:, :, :3], before[:, :, :3])
        assert torch.equal(base[:, :, 3 + n :], before[:, :, 3 + n :])
        target = torch.randn(b, h, n + 5, d, device=device)[:, :, 2 : 2 + n]
        factor = 2.0 ** torch.randint(-9, 9, (1, h), device=device).float()
        wanted, flag = target.double(), torch.zeros(3, h, dtype=torch.int32, device=device)
        wanted += 0.25 * factor[:, :, None, None].double() * out_i.double()
        launch_add(target, out_i, 0.25, factor, flag[1:2])
        torch.testing.assert_close(target.double(), wanted, atol=1e-5, rtol=1e-5)
        assert not flag.any()
        for broken in (torch.inf, -torch.inf, torch.nan):
            if out_i.numel() and n > 1:
                poisoned = out_i.clone()
                poisoned[-1, -1, -1, -1] = broken
                flag.zero_()
                launch_add(target, poisoned, 0.25, None, flag[1:2])
                # Of the head at fault alone, and nothing beside the flags.
                assert flag.nonzero().tolist() == [[1, h - 1]]
                reference = torch.zeros(1, h, dtype=torch.int32)
                on_cpu = torch.zeros(shape), poisoned.cpu()
                add_(*on_cpu, overflow=reference)
                assert reference.nonzero().tolist() == [[0, h - 1]]
# What an addend of a small weight costs is a rounding of its share, not of its size.
for large_first in (True, False):
    parts = [(torch.full((1, 1, 1, 4), value, device=device),
              torch.full((1, 1, 1), score, device=device))
             for value, score in ((30_000.0, 0.0), (2.0**-10, 18.0))]
    (out, lse), (out_i, lse_i) = parts if large_first else parts[::-1]
    launch_merge(out, lse, out_i, lse_i)
    weight = torch.tensor(-18.0, dtype=torch.float64).sigmoid()
    exact = weight * 30_000.0 + (1 - weight) * 2.0**-10
    assert ((out.cpu().double() - exact).abs() < 1e-6 * exact).all(), out
print("merged")
"""


def run_script(device: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, device],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "merged" in done.stdout


@needs_triton
def test_in_the_interpreter() -> None:
    # In a process of its own: Triton reads the variable when it is imported.
    run_script("cpu", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_the_gpu() -> None:
    run_script("cuda")
