"""A later call of the same sizes does not ask a mask again which pairs it keeps."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import quorum_attention as qa
from quorum_attention.kernels.kit import from_score_mod, masks
from quorum_attention.kernels.masked.geometry import Geometry

N_TOKENS = 2048
IDS = torch.arange(N_TOKENS) // 500

CALLS = {
    "score_mod": {
        "kernel": from_score_mod(None, masks.sliding_window(64), compiled=False)
    },
    "score_mod and documents": {
        "kernel": from_score_mod(
            None, masks.sliding_window(64) & masks.document(IDS), compiled=False
        )
    },
    "window": {"attn_mask": qa.Mask(causal=True, window=(63, 0))},
    "documents": {"attn_mask": qa.Mask(causal=True, documents=IDS)},
    "padding": {"attn_mask": qa.Mask(key_lengths=torch.tensor([1500]))},
    "keeps": {"attn_mask": qa.Mask(keeps=lambda b, h, q, k: (q - k) % 7 != 3)},
    "chunks": {"attn_mask": qa.Mask(causal=True, chunk=256)},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("depth", ["planned", 1])
def test_a_mask_is_asked_for_its_blocks_once(
    name: str, depth: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_asked: Counter[str] = Counter()
    verdict = Geometry.verdict

    def counted(self: Geometry, block: object) -> object:
        n_asked["blocks"] += 1
        return verdict(self, block)  # type: ignore[arg-type]

    monkeypatch.setattr(Geometry, "verdict", counted)
    query = torch.randn(1, 2, N_TOKENS, 8, requires_grad=True)
    options = {} if depth == "planned" else {"depth": depth}

    def call() -> int:
        n_asked.clear()
        out = qa.attention(query, query, query, **CALLS[name], **options)
        out.sum().backward()
        return n_asked["blocks"]

    n_first = call()
    assert call() == 0, f"the first call asked {n_first} times"
