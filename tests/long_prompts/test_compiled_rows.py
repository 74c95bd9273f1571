"""Attention of a few rows by the C function, against the equations in float64."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from quorum_attention.long_prompts import compiled_rows
from quorum_attention.long_prompts.compiled_rows import compiled_statistics

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def wait_for_build(dtype: torch.dtype) -> None:
    """Skip the test without a compiler, or on another processor."""
    if compiled_rows._register_width() == 0 or shutil.which("cc") is None:
        pytest.skip("no C compiler, or another processor")
    compiled_rows.begin_to_compile(dtype)
    build = compiled_rows._builds[dtype]
    assert build.is_over.wait(60)
    assert build.function is not None


def assert_right(
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tolerance: float = 2e-6,
) -> None:
    """The results differ from the equations' in float64 by the rounding of fp32."""
    scale = 0.3
    statistics = compiled_statistics(rows, key, value, scale)
    assert statistics is not None
    out, lse = statistics
    scores = rows.double() @ key.double().mT * scale
    expected = scores.softmax(dim=-1) @ value.double()
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    expected_lse = scores.logsumexp(dim=-1)
    torch.testing.assert_close(
        lse.double(), expected_lse, atol=tolerance, rtol=tolerance
    )


@pytest.mark.slow_but_first
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_are_those_of_the_equations(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All numbers of rows, blocks that end anywhere, heads with gaps between them."""
    wait_for_build(dtype)
    monkeypatch.setattr(compiled_rows, "_MIN_KEYS", 1)
    torch.manual_seed(0)
    n_keys_of_rows = {1: 1, 2: 2048, 3: 2049, 4: 5000, 5: 63, 6: 64, 7: 65, 8: 3001}
    for n_rows, n_keys in n_keys_of_rows.items():
        rows = torch.randn(2, 3, n_rows, 96).to(dtype)
        memory = torch.randn(2, 3, n_keys + 10, 96).to(dtype)
        key = memory[:, :, 10:]
        value = torch.randn(2, 3, n_keys, 32).to(dtype)
        assert_right(rows, key, value)


def test_large_and_small_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The running maximum: weights neither overflow nor vanish."""
    wait_for_build(torch.float32)
    monkeypatch.setattr(compiled_rows, "_MIN_KEYS", 1)
    rows = torch.full((1, 1, 2, 32), 1.0)
    rows[:, :, 1] = -1.0
    key = torch.linspace(-20, 20, 3000).reshape(1, 1, -1, 1).expand(-1, -1, -1, 32)
    value = torch.randn(1, 1, 3000, 32)
    # Scores reach 192, whose rounding in fp32 the weights show.
    assert_right(rows, key.contiguous(), value, 1e-4)


def test_a_nan_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_build(torch.float32)
    monkeypatch.setattr(compiled_rows, "_MIN_KEYS", 1)
    rows = torch.ones(1, 1, 1, 32)
    key = torch.ones(1, 1, 100, 32)
    key[0, 0, 70, 3] = torch.nan
    statistics = compiled_statistics(rows, key, key, 1.0)
    assert statistics is not None
    assert statistics[1].isnan().all()


@pytest.mark.parametrize("n_infinite", [64, 2048, 2100, 4999, 5000])
def test_keys_with_scores_of_minus_infinity_have_no_weight(
    n_infinite: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first keys of a block, a whole block, or all keys: those had been NaN."""
    wait_for_build(torch.float32)
    monkeypatch.setattr(compiled_rows, "_MIN_KEYS", 1)
    rows = torch.rand(1, 1, 3, 32)
    key = torch.randn(1, 1, 5000, 32)
    key[:, :, :n_infinite] = -torch.inf
    value = torch.randn(1, 1, 5000, 32)
    statistics = compiled_statistics(rows, key, value, 0.3)
    assert statistics is not None
    out, lse = statistics
    behind = slice(n_infinite, None)
    scores = rows.double() @ key[:, :, behind].double().mT * 0.3
    expected = scores.softmax(-1) @ value[:, :, behind].double()
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)
    expected_lse = scores.logsumexp(-1)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("width", [4, 88, 264])
def test_other_widths_are_left_to_others(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_rows, "_MIN_KEYS", 1)
    key = torch.randn(1, 1, 100, width)
    assert compiled_statistics(key[:, :, :1], key, key, 1.0) is None


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    build = compiled_rows._Build(torch.float32)
    assert build.is_over.wait(60)
    assert build.function is None


@pytest.mark.parametrize("compiler", ["env cc", ""])
def test_the_compiler_may_have_arguments(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in CC="ccache gcc": torch computed, as if there was no compiler."""
    wait_for_build(torch.float32)
    monkeypatch.setenv("CC", compiler)
    build = compiled_rows._Build(torch.float32)
    assert build.is_over.wait(60)
    assert build.function is not None


def test_ctrl_c_does_not_reach_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal interrupts all processes of a group. Without the compiler torch
    computed for as long as the process lived."""
    wait_for_build(torch.float32)
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        "if os.getpgrp() == os.getpgid(os.getppid()):\n"
        "    sys.exit(1)\n"
        "os.execvp('cc', ['cc', *sys.argv[1:]])\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    build = compiled_rows._Build(torch.float32)
    assert build.is_over.wait(60)
    assert build.function is not None
