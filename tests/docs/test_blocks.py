"""Every block of the documentation runs, small, and prints what stands below it."""

from __future__ import annotations

import contextlib
import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_docs import blocks, my_attention, normal

import quorum_attention as qa

BLOCKS = list(blocks())
PAGES = sorted({block.page for block in BLOCKS})
# What a page's blocks need and do not show: a call's tensors, slopes, packed documents, a model.
TOKENS, HEADS = 320, 2


def model() -> Any:
    """A decoder of Transformers; None where it is not installed."""
    if find_spec("transformers") is None:
        return None
    from transformers import AutoModelForCausalLM, Qwen3Config

    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 64) | {"head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    return AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=100, **sizes, **heads))


def prelude(*, with_model: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    shape = (1, HEADS, TOKENS, 64)
    q, k, v, grad_out = (torch.randn(shape).half() for _ in range(4))
    return {
        "torch": torch, "qa": qa, "q": q, "k": k, "v": v, "grad_out": grad_out,
        "slopes": torch.tensor([0.5, 0.25]), "ids": torch.arange(TOKENS) // 100,
        "my_attention": my_attention, "tokens": torch.randint(100, (1, TOKENS)),
        "model": model() if with_model else None,
    }  # fmt: skip


def small(source: str) -> str:
    """The block on fewer tokens: the sizes of its tensors are all that is changed."""
    return source.replace("torch.randn(1, 4, 4096, 64,", f"torch.randn(1, {HEADS}, {TOKENS}, 64,")


def can_run(source: str) -> bool:
    """Whether what the block needs beyond this package is installed: the tests' extra has it."""
    needs = ("transformers import", "long_context(")
    return not any(x in source for x in needs) or find_spec("transformers") is not None


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run_and_print_what_they_show(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, as someone reads them; a block of text after one of Python is what it printed."""
    monkeypatch.chdir(tmp_path)
    if any("NativeKernel" in block.text for block in BLOCKS if block.page == page):
        pytest.importorskip("triton")
    models = any("model" in block.text for block in BLOCKS if block.page == page)
    names, printed = prelude(with_model=models), ""
    for block in BLOCKS:
        if block.page != page:
            continue
        if block.language == "python":
            if block.not_run is not None or not can_run(block.text):
                continue
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(small(block.text), str(block), "exec"), names)
            printed = out.getvalue()
        elif block.language == "text":
            assert normal(printed) == normal(block.text), block


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    left_out = [block for block in BLOCKS if block.not_run is not None]
    assert len(left_out) <= 2
    assert all(len(block.not_run or "") > 10 for block in left_out)
