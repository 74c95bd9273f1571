"""``generate`` over the ranks of a group: the tokens and scores of one process."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_ranks import spawn

pytest.importorskip("transformers")

from helpers_models import attended, distance, register_all, tiny
from transformers import GenerationConfig

from quorum_attention.distributed import ShardedReport
from quorum_attention.integrations.transformers import register, sharded_generate
from quorum_attention.integrations.transformers.generation import alive

ASKED: dict[str, Any] = {
    "max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_scores": True,
}  # fmt: skip


def _same(
    kind: str,
    group: dist.ProcessGroup,
    *,
    tokens: int = 23,
    change: dict[str, Any] | None = None,
    left: int = 0,
    **asked: Any,
) -> ShardedReport:
    torch.manual_seed(5)
    model = tiny(kind, change).double()
    ids = torch.randint(1, 96, (2 if left else 1, tokens))
    mask = torch.ones_like(ids)
    mask[0, :left] = 0
    asked = {**ASKED, "attention_mask": mask, "eos_token_id": None, **asked}
    wanted = attended(model, "exact", torch.float64).generate(ids, use_cache=True, **asked)
    report = ShardedReport()
    register("sharded", group=group, report=report)
    found = sharded_generate(attended(model, "sharded", torch.float64), ids, group=group, **asked)
    assert torch.equal(found.sequences, wanted.sequences), (kind, found.sequences)
    for step, (got, true) in enumerate(zip(found.scores, wanted.scores, strict=True)):
        assert distance(got, true) < 1e-6, (kind, step)
    assert (report.way, report.ranks) == ("keys and values stay", group.size())
    layers = found.past_key_values.layers
    held = torch.tensor([layers[0].keys.shape[2]])
    dist.all_reduce(held, group=group)
    assert int(held) == found.sequences.shape[1] - 1, "a key is kept by one rank, and only one"
    assert abs(layers[0].keys.shape[2] * group.size() - int(held)) <= group.size() * 2
    return report


def _sampled(rank: int, group: dist.ProcessGroup) -> None:
    """All ranks draw the same, and their generators go on as if nothing had been drawn."""
    register("sharded", group=group)
    model = attended(tiny("llama"), "sharded")
    ids = torch.arange(1, 12)[None]
    torch.manual_seed(rank)
    found = [
        sharded_generate(model, ids, group=group, max_new_tokens=12, do_sample=True, top_k=0)
        for _ in range(2)
    ]
    assert not torch.equal(*found)
    for sequence in found:
        every = [torch.empty_like(sequence) for _ in range(group.size())]
        dist.all_gather(every, sequence, group=group)
        assert all(torch.equal(one, sequence) for one in every)


class _Adapted(torch.nn.Module):
    """As PEFT's models are: ``generate`` runs the model within."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.generate = model, model.generate

    def get_base_model(self) -> Any:
        return self.model


def _wrapped(group: dist.ProcessGroup) -> None:
    """Compiled, with adapters, and for a prompt whose shards are one token of padding and one."""
    register("sharded", group=group)
    model, ids = attended(tiny("llama"), "sharded"), torch.arange(1, 12)[None]
    asked = {"group": group, "max_new_tokens": 3}
    wanted = sharded_generate(model, ids, **asked)
    for wrapped in (torch.compile(model, backend="eager"), _Adapted(model)):
        assert torch.equal(sharded_generate(wrapped, ids, **asked), wanted)
    _same("llama", group, tokens=2, left=1)


def _refusals(rank: int, group: dist.ProcessGroup) -> None:
    register("sharded", group=group)
    model = attended(tiny("llama"), "sharded")
    ids = torch.arange(1, 12)[None]
    for name, value in (
        ("max_time", 3.0), ("assistant_model", model), ("cache_implementation", "static"),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=name):
            sharded_generate(model, ids, group=group, **{name: value})
    config = GenerationConfig(max_new_tokens=3, prompt_lookup_num_tokens=2)
    with pytest.raises(NotImplementedError, match="prompt_lookup_num_tokens"):
        sharded_generate(model, ids, group=group, generation_config=config)
    model.generation_config.max_time = 3.0
    with pytest.raises(NotImplementedError, match="max_time"):
        sharded_generate(model, ids, group=group)
    model.generation_config.max_time = None
    with pytest.raises(NotImplementedError, match="use_cache"):
        sharded_generate(model, ids, group=group, use_cache=False)
    with pytest.raises(ValueError, match="input_ids must be"):
        sharded_generate(model, ids[0], group=group)
    with pytest.raises(ValueError, match="do not agree on input_ids"):
        sharded_generate(model, ids + rank, group=group)
    with pytest.raises(ValueError, match="do not agree on the arguments"):
        sharded_generate(model, ids, group=group, max_new_tokens=3 + rank)
    config = GenerationConfig(max_new_tokens=3 + rank)
    with pytest.raises(ValueError, match="do not agree on the arguments"):
        sharded_generate(model, ids, group=group, generation_config=config)
    mask = torch.ones_like(ids)
    mask[:, :rank] = 0
    with pytest.raises(ValueError, match="do not agree on input_ids and attention_mask"):
        sharded_generate(model, ids, group=group, attention_mask=mask)
    for name in ("quorum", "sdpa"):  # of each rank's rows alone
        with pytest.raises(ValueError, match=f"'{name}', which is not over this group"):
            sharded_generate(attended(model, name), ids, group=group)
    register("of_all", group=dist.group.WORLD)
    with pytest.raises(ValueError, match="'of_all', which is not over this group"):
        sharded_generate(attended(model, "of_all"), ids, group=group)


def _all_of_it(rank: int) -> None:
    register_all()
    pair = dist.new_group([0, 1])
    everyone = dist.group.WORLD
    assert everyone is not None
    for kind in ("llama", "gemma2", "llama4_text"):
        _same(kind, everyone)
    _same("qwen3", everyone, left=9)
    _same("llama", everyone, tokens=2)  # less than there are ranks
    _sampled(rank, everyone)
    if rank < 2:
        _same("gpt_oss", pair)
        _same("mistral", pair, left=4, num_beams=3)
        report = _same("llama", pair, prefill_chunk_size=8, tokens=20)
        # Of one query, in float64: 4 heads of 16 values and a log-sum-exp, and a number.
        assert report.forward_bytes == (4 * (16 + 1) + 1) * 8
        _wrapped(pair)
        _refusals(rank, pair)


def test_on_processes(tmp_path: Path) -> None:
    spawn(_all_of_it, 3, tmp_path)


def test_a_destroyed_group_is_named_where_its_attention_is_called() -> None:
    group = dist.ProcessGroup(0, 1)
    kept = weakref.ref(group)
    assert alive(kept) is group
    del group
    with pytest.raises(RuntimeError, match="process group of this attention has been destroyed"):
        alive(kept)
