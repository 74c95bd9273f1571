"""Ranks that are not asked in every call whether they agree, because lengths are given: still none
gets a wrong answer without a word, and none waits for good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_ranks import compare, inputs_of, spawn

from quorum_attention import Mask
from quorum_attention import distributed as sharded


def _call(group: dist.ProcessGroup | None, heads: int = 4, rows: int = 12, **options: Any) -> Any:
    dtype = options.pop("dtype", torch.float32)
    kv_heads, dim = options.pop("kv_heads", heads), options.pop("dim", 8)
    grad = options.pop("grad", True)
    q = torch.randn(1, heads, rows, dim, dtype=dtype, requires_grad=grad)
    k, v = (torch.randn(1, kv_heads, rows, dim, dtype=dtype) for _ in range(2))
    options = {"lengths": [12, 12], "enable_gqa": True, **options}
    return sharded.attention(q, k, v, group=group, **options)


# Of the one rank and of the other, and what is said.
APART: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"lengths": [13, 12]}, "do not agree on lengths"),
    ({"lengths": "equal"}, {"lengths": "equal", "rows": 11}, "do not agree on lengths"),
    ({}, {"lengths": None, "rows": 11}, "do not agree on lengths"),
    ({"dtype": torch.float16}, {"dtype": torch.bfloat16}, "dtype"),
    ({}, {"heads": 2, "dim": 16}, "heads"),
    ({}, {"kv_heads": 2}, "kv_heads"),
    ({}, {"is_causal": True}, "is_causal"),
    ({}, {"scale": 0.3}, "scale"),
    ({}, {"grad": False}, "gradients"),
    ({}, {"dropout_p": 0.5, "dropout_seed": 1}, "dropout_p"),
    ({"attn_mask": Mask(window=3)}, {"attn_mask": Mask(window=4)}, "attn_mask"),
    ({}, {"attn_mask": Mask(key_padding=torch.ones(12, dtype=torch.bool))}, "attn_mask"),
    (
        {"attn_mask": Mask(documents=torch.zeros(24, dtype=torch.int64))},
        {"attn_mask": Mask(documents=torch.zeros(12, dtype=torch.int64))},
        "documents",
    ),
]  # fmt: skip


def _both(rank: int) -> None:
    group = dist.new_group([0, 1])
    for one, other, words in APART:
        with pytest.raises(ValueError, match=words):
            _call(group, **(other if rank else one))
    # All of them heard of it, and the group is as good as before.
    torch.manual_seed(0)
    tensors = inputs_of(4, 2, 24, 8, 8, torch.float64, 1)
    for lengths in ([12, 12], [12, 12], "equal", [10, 14], [10, 14]):
        sizes = [12, 12] if isinstance(lengths, str) else lengths
        compare(rank, sizes, tensors, True, lengths=lengths, group=group)
    _known_and_apart(rank, group)
    _other_passes(rank, group)


def _known_and_apart(rank: int, group: dist.ProcessGroup) -> None:
    """Each rank makes a call on which both have agreed, and it is not the same one."""
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"is_causal": True}),  # messages of the same sizes
        ({"heads": 5, "kv_heads": 1}, {"heads": 5, "kv_heads": 1, "scale": 0.3}),
        ({}, {"heads": 8, "dim": 4}),
        ({"dropout_p": 0.5, "dropout_seed": 3}, {"dropout_p": 0.5, "dropout_seed": 4}),
    ]
    for one, other in pairs:
        for known in (one, other):
            _call(group, **known).sum().backward()
        with pytest.raises(ValueError, match="do not agree on"):
            _call(group, **(other if rank else one))


def _other_passes(rank: int, group: dist.ProcessGroup) -> None:
    """A backward on one rank, and on the other another call's, a forward, or decoding."""
    first, second = _call(group).sum(), _call(group, is_causal=True).sum()
    with pytest.raises(ValueError, match="do not agree on is_causal"):
        (second if rank else first).backward()
    first = _call(group).sum()
    q = torch.randn(1, 4, 12, 8)
    for other in (_call, lambda group: sharded.decode(q, q, q, group=group)):
        with pytest.raises(ValueError, match="do not agree on call"):
            other(group) if rank else first.backward(retain_graph=True)
    _call(group).sum().backward()


def test_ranks_that_do_not_agree(tmp_path: Path) -> None:
    spawn(_both, 2, tmp_path)
