"""Models whose sequence is sharded over ranks: logits and gradients of one process."""

from __future__ import annotations

import copy
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import spawn

pytest.importorskip("transformers")

import transformers
from helpers.models import attended, distance, logits_and_gradients, register_all, tiny

from quorum_attention.distributed import ShardedReport
from quorum_attention.integrations.transformers import register, sharded_positions
from quorum_attention.recipes import long_context


def _same(
    rank: int,
    kind: str,
    sizes: list[int],
    group: dist.ProcessGroup,
    *,
    positions: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
    change: dict[str, Any] | None = None,
    hooked: bool = False,
) -> None:
    """The shards of a model's sequence against the whole, both in float64."""
    torch.manual_seed(3)
    model = tiny(kind, change).double()
    tokens, batch = sum(sizes), 2 if padding is not None else 1
    ids = torch.randint(1, 96, (batch, tokens))
    keep = torch.ones(batch, tokens).bool() if padding is None else padding.bool()
    whole: dict[str, Any] = {} if padding is None else {"attention_mask": padding}
    if positions is not None:
        whole["position_ids"] = positions
    alone = attended(model, "exact", torch.float64)
    exact, exact_grads = logits_and_gradients(alone, ids, keep, **whole)
    rows = slice(*[0, *accumulate(sizes)][rank : rank + 2])
    places = torch.arange(tokens)[None] if positions is None else positions
    mine: dict[str, Any] = {} if hooked else {"position_ids": places[:, rows]}
    if padding is not None:
        mine["attention_mask"] = padding[:, rows]
    report = ShardedReport()
    register("sharded", group=group, report=report)
    ours = attended(model, "sharded", torch.float64)
    if hooked:
        sharded_positions(ours, group=group)
    logits = ours(input_ids=ids[:, rows], **mine).logits
    weights = torch.linspace(0.5, 1.5, exact.numel(), dtype=torch.float64).view(
        exact.shape
    )
    part = logits.square() * weights[:, rows] * keep[:, rows, None]
    (part.sum() / exact.numel()).backward()
    real = keep[:, rows]
    assert distance(logits.detach()[real], exact[:, rows][real]) < 1e-7, (kind, sizes)
    assert report.ranks == len(sizes)
    for name, weight in ours.named_parameters():
        if name in exact_grads and exact_grads[name].abs().max() > 1e-9:
            total = (
                torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
            )
            dist.all_reduce(total, group=group)
            found = distance(total, exact_grads[name])
            # Norms are in float32 in some models, whatever the dtype.
            assert found < 1e-6, (kind, name, found)


def _models(rank: int, sizes: list[int], group: dist.ProcessGroup) -> None:
    tokens, edge = sum(sizes), sizes[0]
    _same(rank, "qwen3", sizes, group, hooked=True, change={"num_key_value_heads": 2})
    for cuts in ([edge, edge + 3], [edge - 3, edge + 5]):
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]
        packed = torch.cat([torch.arange(n) for n in lengths])[None]
        _same(rank, "llama", sizes, group, positions=packed)
    _same(rank, "gpt_oss", sizes, group, positions=packed)  # does not ask for documents
    ones = torch.ones(2, tokens, dtype=torch.long)
    left, right = ones.clone(), ones.clone()
    left[1, : edge + 2] = 0
    right[0, -2:] = 0
    _same(rank, "mistral", sizes, group, padding=left)
    _same(rank, "llama", sizes, group, padding=right)
    _same(rank, "llama4_text", sizes, group, padding=ones)
    _same(rank, "gemma2", sizes, group)
    _same(rank, "bert", sizes, group)


def _refusals(rank: int, group: dist.ProcessGroup) -> None:
    """All ranks raise the same."""
    register("sharded", group=group)
    model = attended(tiny("llama"), "sharded")
    ids = torch.randint(1, 96, (1, 8))
    with pytest.raises(ValueError, match="begin at 0 on every rank"):
        model(input_ids=ids)
    alone = attended(model, "quorum")
    sharded_positions(alone, group=group)
    with pytest.raises(ValueError, match="'quorum' is not over this group"):
        alone(input_ids=ids)
    places = torch.arange(8)[None] + 8 * rank
    with pytest.raises(ValueError, match="whether documents begin there"):
        model(input_ids=ids, position_ids=places + 2 * rank)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match="makes its masks itself"):
        model(input_ids=ids, position_ids=places, attention_mask=mask)
    blind = attended(tiny("llama4_text"), "sharded")
    with pytest.raises(NotImplementedError, match="does not hand position_ids"):
        blind(input_ids=ids, position_ids=places)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q"):
        model(input_ids=ids, position_ids=places, cu_seq_lens_q=torch.tensor([0, 8]))
    other = attended(
        tiny("mistral" if rank else "llama", {"num_hidden_layers": 1}), "sharded"
    )
    with pytest.raises(ValueError, match="do not agree on conditions"):
        other(input_ids=ids, position_ids=places)
    cached = attended(tiny("llama"), "sharded")
    cached.config.use_cache = True
    past = cached(input_ids=ids, position_ids=places).past_key_values
    with pytest.raises(NotImplementedError, match="cache"):
        cached(input_ids=ids, position_ids=places + 8, past_key_values=past)
    with pytest.raises(ValueError, match="min_tokens"):
        register("sharded", group=group, min_tokens=3)
    with pytest.raises(TypeError, match="group"):
        register("sharded", group="world")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ShardedReport"):
        register("sharded", group=group, report=3)  # type: ignore[arg-type]


def _not_for_shards(rank: int, group: dist.ProcessGroup) -> None:
    """Models whose tokens meet elsewhere, or that count positions in a way of their
    own."""
    register("sharded", group=group)
    ids = torch.randint(1, 96, (2, 8))
    small = {
        "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 1,
    }  # fmt: skip
    mixing = transformers.Lfm2Config(
        **small, layer_types=["full_attention", "conv"], block_multiple_of=8
    )
    model = transformers.AutoModelForCausalLM.from_config(
        mixing, attn_implementation="sharded"
    )
    places = torch.arange(8)[None] + 8 * rank
    with pytest.raises(NotImplementedError, match="layers conv"):
        model(input_ids=ids, position_ids=places)
    tuned = attended(tiny("llama4_text", {"floor_scale": 24}), "sharded")
    with pytest.raises(NotImplementedError, match="scales queries by a count"):
        tuned(input_ids=ids, position_ids=places, attention_mask=torch.ones_like(ids))
    counting = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**small))
    blind = transformers.BartForCausalLM(
        transformers.BartConfig(
            vocab_size=96, d_model=32, decoder_layers=1, decoder_ffn_dim=48
        )
    )
    for one, message in (
        (counting, "counts positions by its inputs"), (tiny("opt"), "counts positions by its"),
        (blind, "takes no position_ids"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            sharded_positions(one, group=group)
    plain = attended(tiny("llama"), "sharded")
    sharded_positions(plain, group=group)
    other = copy.deepcopy(plain)
    other.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="is not over this group"):
        other(input_ids=ids)
    with pytest.raises(ValueError, match=r"got \[8, 0, 8\]"):
        plain(input_ids=ids[:, : 8 * (rank != 1)])


def _compiled(rank: int) -> None:
    """A compiled model says the same, and keeps no group: ``spawn`` looks whether one
    is left."""
    register("sharded", group=dist.group.WORLD)
    torch.manual_seed(3)
    model, ids = tiny("llama", {"num_hidden_layers": 1}), torch.randint(1, 96, (1, 12))
    wanted, rows = attended(model, "exact")(ids).logits, slice(4 * rank, 4 * rank + 4)
    ours = attended(model, "sharded")
    sharded_positions(ours)
    model = (
        torch.compile(ours, backend="eager") if rank == 0 else ours
    )  # it takes its time
    found = model(input_ids=ids[:, rows]).logits
    assert distance(found, wanted[:, rows].double()) < 1e-5


def _long_context(rank: int) -> None:
    """A whole training step: the loss and gradients of one process, attention computed
    once."""
    torch.manual_seed(5)
    plain = tiny("llama").train()
    ours, ids = copy.deepcopy(plain), torch.randint(1, 96, (1, 31))
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    wanted = plain(input_ids=ids, labels=ids).loss
    wanted.backward()
    rows, report = slice(*[0, 9, 23, 31][rank : rank + 2]), ShardedReport()
    register(group=dist.group.WORLD, report=report)
    ours.set_attn_implementation("quorum")
    sharded_positions(ours)
    done = long_context(ours, mlp_tile=4)
    assert done.left_out == ("fused norms",), (
        done
    )  # torch has a kernel for them on GPUs alone
    part = ours(
        input_ids=ids[:, rows], labels=ids[:, rows], shift_labels=shifted[:, rows],
        num_items_in_batch=30,
    ).loss  # fmt: skip
    forward = len(report.calls)  # of the last layer
    part.backward()
    assert (
        len(report.calls) == forward
    )  # the first layer's second run, and its backward
    total = part.detach().clone()
    dist.all_reduce(total)
    assert distance(total, wanted.detach().double()) < 1e-5
    for name, weight in ours.named_parameters():
        dist.all_reduce(weight.grad)
        assert distance(weight.grad, plain.get_parameter(name).grad.double()) < 1e-4, (
            name
        )


def _all_of_it(rank: int) -> None:
    register_all()
    everyone = dist.group.WORLD
    assert everyone is not None
    _models(rank, [9, 14, 8], everyone)
    _refusals(rank, everyone)
    _not_for_shards(rank, everyone)
    _compiled(rank)
    _long_context(rank)


@pytest.mark.slow
def test_on_processes(tmp_path: Path) -> None:
    spawn(_all_of_it, 3, tmp_path)
