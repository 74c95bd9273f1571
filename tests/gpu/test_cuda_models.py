"""Tiny models of Transformers on a GPU: logits, gradients, caches, and memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from helpers.models import (
    DECODERS,
    ENCODERS,
    assert_logits_and_gradients,
    attended,
    register_all,
    some_ids,
    tiny,
)

from quorum_attention.integrations.transformers import register
from quorum_attention.recipes import long_context

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(autouse=True)
def registered() -> None:
    register_all()


@pytest.mark.parametrize("name", ["quorum", "cut_once", "cut_twice"])
@pytest.mark.parametrize("kind", [*DECODERS, *ENCODERS])
def test_logits_and_gradients(kind: str, name: str) -> None:
    assert_logits_and_gradients(kind, name, some_ids(2, 300, "cuda"))


def test_a_sliding_window_of_a_long_text_takes_no_square() -> None:
    """65,536 tokens: one boolean mask of all pairs would be 4 GiB."""
    register("watched", budget="256MiB")
    model = attended(tiny("gemma3_text").cuda(), "watched", torch.bfloat16)
    ids = some_ids(1, 65_536, "cuda")
    model(ids[:, :4096])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model.model(ids).last_hidden_state.float().sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 1 << 30


def test_long_context_is_the_same_loss_in_less_memory() -> None:
    sizes = {"vocab_size": 32_768, "hidden_size": 256, "intermediate_size": 1024}
    model, ids = (
        tiny("llama", sizes).cuda().bfloat16().train(),
        some_ids(1, 8192, "cuda"),
    )
    peaks, losses = [], []
    for changed in (False, True):
        if changed:
            summary = long_context(model, mlp_tile=1024)
            assert not summary.left_out, summary
        for _ in range(2):  # the first call compiles
            model.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        peaks.append(torch.cuda.max_memory_allocated())
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    assert peaks[1] < 0.5 * peaks[0]
