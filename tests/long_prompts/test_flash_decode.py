"""The kernels for a few queries against the equations in float64."""

from __future__ import annotations

import random

import pytest
import torch

from quorum_attention.long_prompts import flash_decode
from quorum_attention.long_prompts.flash_decode import KeysAt, decode
from quorum_attention.long_prompts.key_mask import KeyMask
from quorum_attention.long_prompts.row_groups import RowLayout
from quorum_attention.long_prompts.scores import ScoreScaling, attend_by_equations

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N_CALLS = 120 if torch.cuda.is_available() else 60


def draw_parts(
    drawn: random.Random, dtype: torch.dtype, dims: tuple[int, int]
) -> list[KeysAt]:
    rows = drawn.choice([1, 2])
    heads = drawn.choice([1, 2])
    parts = []
    start = 0
    for _ in range(drawn.randint(1, 3)):
        n_keys = drawn.choice([1, 5, 64, 130, 300])
        shape = (rows, heads, n_keys + drawn.choice([0, 7]))
        key, value = (torch.randn(*shape, dim, device=DEVICE).to(dtype) for dim in dims)
        parts.append(KeysAt(start, key[:, :, :n_keys], value[:, :, :n_keys]))
        start += n_keys
    return parts


def draw_mask(
    drawn: random.Random, n_queries: int, n_keys: int, entries: int
) -> KeyMask:
    padding = None
    if drawn.random() < 0.4:
        padding = torch.rand(entries, n_keys, device=DEVICE) < 0.7
        padding[0] = drawn.random() < 0.5
    window = drawn.choice([None, None, 1, 20, 1000])
    return KeyMask(n_queries, n_keys, drawn.random() < 0.8, window, padding)


def check(seed: int) -> None:
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    dtype = drawn.choice([torch.float32, torch.float16])
    dim = drawn.choice([8, 40, 64, 128])
    parts = draw_parts(drawn, dtype, (dim, drawn.choice([dim, 16, 24])))
    rows, heads = parts[0].key.shape[:2]
    entries = rows * drawn.choice([1, 1, 3])
    n_keys = parts[-1].start + parts[-1].key.shape[2]
    n_queries = min(n_keys, drawn.choice([1, 1, 2, 9]))
    mask = draw_mask(drawn, n_queries, n_keys, entries)
    scaling = ScoreScaling(
        drawn.choice([0.1, 0.0, dim**-0.5]), drawn.choice([None, None, 2.0])
    )
    query = torch.randn(
        entries, heads * drawn.choice([1, 2, 4]), n_queries, dim, device=DEVICE
    )
    query = query.to(dtype)

    out, lse = decode(query, parts, mask, scaling)

    layout = RowLayout.from_tensors(query, parts[0].key)
    key = torch.cat([part.key for part in parts], dim=2).double()
    value = torch.cat([part.value for part in parts], dim=2).double()
    is_kept = layout.mask_of_rows(mask.kept_pairs(0, n_keys, query.device))
    results = attend_by_equations(
        layout.to_rows(query).double(), key, value, scaling, is_kept
    )
    expected_out, expected_lse = map(layout.from_rows, results)
    tolerance = 2e-5 if dtype == torch.float32 else 3e-3
    torch.testing.assert_close(out.double(), expected_out, atol=tolerance, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=3 * tolerance, rtol=0)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("first", range(0, N_CALLS, 3))
def test_random_calls_are_the_equations(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splits of several segments are merged exactly; rows without a key are empty."""
    monkeypatch.setattr(flash_decode, "_MIN_SPLIT_KEYS", 32)
    monkeypatch.setattr(flash_decode, "_n_processors", lambda device: 1)
    for seed in range(first, first + 3):
        n_programs = random.Random(seed).choice([1, 8, 40])
        monkeypatch.setattr(flash_decode, "_PROGRAMS_PER_PROCESSOR", n_programs)
        check(seed)
