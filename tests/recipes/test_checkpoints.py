"""Checkpoints of layers that keep attention's results: computed once, wherever they are
kept."""

from __future__ import annotations

import copy
import gc
import inspect
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("transformers")

from helpers.models import VOCABULARY, tiny
from helpers.processes import warm_forks
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention import autograd
from quorum_attention.recipes import (
    checkpoints,
    kept_layer,
    layer_bytes,
    long_context,
    offload,
)
from quorum_attention.recipes.layer_bytes import KeptBytes, OffloadSplit, split_offload
from quorum_attention.recipes.offload import OffloadedTensor

LAYERS = 4
SIZES = {"num_hidden_layers": LAYERS, "hidden_size": 64}


class LateStream:
    """Copies to host memory of a device that is a CPU, as late as the events allow."""

    def __init__(self) -> None:
        self.late: list[Any] = []

    def empty_on_host(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, 255, dtype=dtype)

    def copy(self, targets: Any, sources: Any) -> int:
        self.late.append((targets, sources))
        return len(self.late)

    def wait(self, event: int) -> None:
        targets, sources = self.late[event - 1]
        self.late[event - 1] = (), ()
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each forward of attention that is computed."""
    made: list[int] = []
    run = autograd.run_forward

    def counted(*args: Any) -> Any:
        made.append(1)
        return run(*args)

    monkeypatch.setattr(autograd, "run_forward", counted)
    return made


def step(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def pair(kind: str = "llama", **sizes: Any) -> tuple[Any, Any]:
    """A model without checkpoints, and one with them."""
    plain = tiny(kind, {**SIZES, **sizes}).train()
    model = copy.deepcopy(plain)
    for one, where in ((plain, None), (model, "auto")):
        long_context(one, budget="64MiB", checkpoints=where, mlp_tile=32)
    return plain, model


def in_host_memory(
    monkeypatch: pytest.MonkeyPatch, away: int, recomputed: int = 0
) -> None:
    """So many bytes go to host memory, of tensors of any size."""
    monkeypatch.setattr(kept_layer, "_SMALL", 0)
    monkeypatch.setattr(offload, "_PIECE", 1000)
    begin = checkpoints.LayerCheckpoints._begin_step

    def elsewhere(self: Any, hidden: torch.Tensor) -> Any:
        step = begin(self, hidden)
        step.offload_bytes = away
        step.n_recomputed = recomputed
        step.stream = LateStream()
        return step

    monkeypatch.setattr(checkpoints.LayerCheckpoints, "_begin_step", elsewhere)


@pytest.mark.parametrize(
    ("kind", "away", "recomputed"),
    [
        ("llama", 0, 0),
        ("gpt_oss", 1 << 30, 0),
        ("gemma2", 200_000, 2),
        ("llama", 200_000, 2),
    ],
)
def test_attention_runs_once_a_layer_and_results_are_the_same_bits(
    kind: str,
    away: int,
    recomputed: int,
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = (
        {"layer_types": ["sliding_attention", "full_attention"] * 2}
        if kind != "llama"
        else {}
    )
    plain, model = pair(kind, attention_dropout=0.1, **more)
    ids = torch.randint(VOCABULARY, (2, 150))
    wanted = step(plain, ids)
    if away or recomputed:
        in_host_memory(monkeypatch, away, recomputed)
    for _ in range(2):
        calls.clear()
        found = step(model, ids)
        assert len(calls) == LAYERS + recomputed
        assert torch.equal(found[0], wanted[0])
        assert all(map(torch.equal, found[1], wanted[1]))
    assert OffloadedTensor.alive_bytes == 0


def test_what_several_calls_of_a_layer_keep_is_counted(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on ranks: the rest of the first forward, and the next, are planned by what a
    layer took; and a layer is computed again as a whole."""
    asked: list[int] = []

    def counted(layers: int, kept: KeptBytes, *room: int) -> OffloadSplit:
        asked.append(kept.result)
        return OffloadSplit(0, 2)

    once = autograd.run_with_hook
    monkeypatch.setattr(layer_bytes, "split_offload", counted)
    monkeypatch.setattr(autograd, "run_with_hook", lambda c: (once(c), once(c))[0])
    plain, model = pair()
    ids = torch.randint(VOCABULARY, (2, 150))
    wanted = step(plain, ids)
    for _ in range(2):
        calls.clear()
        found = step(model, ids)
        assert all(map(torch.equal, found[1], wanted[1]))
    assert len(calls) == 2 * (LAYERS + 2)
    assert asked[0] < asked[1] == asked[2]
    assert len(asked) == 3


def test_several_forwards_backward_again_and_autocast(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second backward computes attention again: its results were given to the first
    one."""
    in_host_memory(monkeypatch, 1 << 30)
    plain, model = pair()
    first, second = (torch.randint(VOCABULARY, (1, n)) for n in (120, 90))
    found = []
    for one in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            losses = [one(input_ids=ids, labels=ids).loss for ids in (first, second)]
        calls.clear()
        sum(losses).backward(retain_graph=True)  # type: ignore[union-attr]
        assert not calls
        losses[1].backward()
        found.append([p.grad for p in one.parameters()])
    assert len(calls) == LAYERS
    assert all(map(torch.equal, *found))


def test_a_layer_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the layers before it either, whose graph an interrupt lets go of."""
    in_host_memory(monkeypatch, 1 << 30)
    plain, model = pair()
    ids = torch.randint(VOCABULARY, (1, 100))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[2].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=ids, labels=ids)
    gc.collect()
    assert OffloadedTensor.alive_bytes == 0
    hook.remove()
    assert all(map(torch.equal, step(model, ids)[1], step(plain, ids)[1]))


@pytest.mark.parametrize("within", [False, True])
def test_an_input_written_to_is_refused(within: bool) -> None:
    """By the layer itself, or after it."""
    _, model = pair()
    ids = torch.randint(VOCABULARY, (1, 100))
    inputs: list[torch.Tensor] = []

    def note(_: Any, given: Any) -> None:
        inputs.append(given[0].detach())
        if within:
            inputs[0].mul_(2)

    layer = model.model.layers[1]
    (layer.input_layernorm if within else layer).register_forward_pre_hook(note)

    def run() -> None:
        loss = model(input_ids=ids, labels=ids).loss
        inputs[0].mul_(2)
        loss.backward()

    with pytest.raises(RuntimeError, match="written to in place"):
        run()


def test_what_is_kept_goes_when_it_has_been_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layer by layer, on the device and in host memory; and with a loss that is let go
    of."""
    in_host_memory(monkeypatch, 1 << 30)
    _, model = pair()
    ids = torch.randint(VOCABULARY, (1, 100))
    alive: list[int] = []
    for layer in model.model.layers:
        layer.mlp.register_full_backward_hook(
            lambda *_: alive.append(OffloadedTensor.alive_bytes)
        )
    loss = model(input_ids=ids, labels=ids).loss
    every = OffloadedTensor.alive_bytes
    loss.backward()
    # In the last layer's MLP its results are given to the graph, its input is still
    # there.
    assert [LAYERS * left // every for left in alive] == [3, 2, 1, 0]
    assert OffloadedTensor.alive_bytes == 0
    del loss
    loss = model(input_ids=ids, labels=ids).loss
    assert OffloadedTensor.alive_bytes == every
    del loss
    assert OffloadedTensor.alive_bytes == 0


def test_a_copy_of_a_model_has_checkpoints_of_its_own(calls: list[int]) -> None:
    plain, model = pair()
    ids = torch.randint(VOCABULARY, (1, 100))
    wanted = step(plain, ids)
    with torch.no_grad():
        other = copy.deepcopy(model)
        for weight in model.parameters():
            weight.zero_()
    calls.clear()
    assert all(map(torch.equal, step(other, ids)[1], wanted[1]))
    assert len(calls) == LAYERS


def test_each_device_has_a_step_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas of ``DataParallel`` run at the same time: a layer of one of them had the
    step of the other, with copies on the other's stream."""
    _, model = pair()
    keep = model.model.layers[0]._gradient_checkpointing_func.func
    begun: list[str] = []
    begin = type(keep)._begin_step

    def counted(self: Any, hidden: torch.Tensor) -> Any:
        begun.append(hidden.device.type)
        return begin(self, hidden)

    monkeypatch.setattr(type(keep), "_begin_step", counted)
    for number in range(LAYERS):
        for device in ("cpu", "meta"):
            x = torch.ones(1, 4, 8, device=device, requires_grad=True)
            keep(number, partial(torch.nn.ReLU().__call__), x)
    assert begun == ["cpu", "meta"]


@settings(deadline=None)
@given(
    *(st.integers(1, 50) for _ in range(3)), *(st.integers(0, 3000) for _ in range(2))
)
def test_everything_has_a_place(
    layers: int, checkpoint: int, result: int, device: int, host: int
) -> None:
    """What does not go to host memory fits the device; attention is computed again only
    if it must be; checkpoints that fit nowhere stay on the device."""
    away, recomputed = split_offload(
        layers, KeptBytes(checkpoint, result), device, host
    )
    kept = layers * checkpoint + (layers - recomputed) * result
    assert 0 <= recomputed <= layers
    assert 0 <= away <= host
    assert kept - away <= device or recomputed == layers
    if recomputed:
        assert kept + result > device + host
    if device:
        assert away == 0 or kept - away >= min(device, kept)


def test_a_model_in_evaluation_is_told_what_that_is_right_for() -> None:
    """The words named only what to do before training, which misled who generates."""
    model = tiny("llama", SIZES)
    for training in (False, True):
        changed = copy.deepcopy(model).train(training)
        summary = " ".join(str(long_context(changed, mlp_tile=None)).split())
        assert ("that is right for generating; to train it" in summary) != training


def test_they_stay_where_a_trainer_switches_checkpoints_on(calls: list[int]) -> None:
    """Transformers' Trainer and TRL's do so; ``every_n_layers``, where there is such an
    argument, leaves some layers as they are."""
    plain, model = pair()
    ids = torch.randint(VOCABULARY, (1, 100))
    wanted = step(plain, ids)
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    enable = getattr(model, new, None) or getattr(model, old)
    kinds: list[dict[str, int]] = [{}]
    if (
        "every_n_layers" in inspect.signature(enable).parameters
    ):  # not in Transformers 5.6
        kinds.append({"every_n_layers": 3})
    for more in kinds:
        enable({"use_reentrant": True}, **more)
        calls.clear()
        assert all(map(torch.equal, step(model, ids)[1], wanted[1]))
        assert len(calls) == LAYERS


def _sharded(rank: int, store: str) -> None:
    """Weights sharded by layers, as Accelerate's FSDP2 does it; each rank has a text of
    its own."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    torch.manual_seed(0)
    plain, model = pair()
    ids = torch.randint(VOCABULARY, (2, 60))
    sum(plain(input_ids=one, labels=one).loss / 2 for one in ids.split(1)).backward()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    step(model, ids[rank : rank + 1])
    for ours, own in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), own.grad)
    dist.destroy_process_group()


@pytest.mark.slow
def test_weights_that_two_ranks_share(tmp_path: Path) -> None:
    warm_forks()
    store = str(tmp_path / "store")
    mp.start_processes(_sharded, (store,), 2, start_method="forkserver")


def test_a_trainer_of_transformers(calls: list[int], tmp_path: Any) -> None:
    """Gradients of two texts, checkpoints saved, and an evaluation."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    texts = [
        {"input_ids": (ids := torch.randint(VOCABULARY, (60,))), "labels": ids}
    ] * 4
    losses = []
    for runs, model in zip((2, 1), pair(), strict=True):
        calls.clear()
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=1, gradient_accumulation_steps=2,
            max_steps=2, use_cpu=True, gradient_checkpointing=True, logging_steps=1, save_steps=2,
            report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=texts, eval_dataset=texts)  # type: ignore[arg-type]
        trainer.train()
        assert len(calls) == 2 * 2 * LAYERS * runs
        losses.append([entry.get("loss") for entry in trainer.state.log_history])
        losses[-1].append(trainer.evaluate()["eval_loss"])
        assert any(tmp_path.iterdir())
    assert losses[0] == losses[1]


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    host = SimpleNamespace(free_bytes=lambda device: 600)
    monkeypatch.setattr(offload, "backend_of", lambda device: host)
    monkeypatch.setattr(OffloadedTensor, "peak_bytes", OffloadedTensor.alive_bytes)
    for ranks, room in (("", 500), ("1", 500), ("4", 125)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert offload.host_room() == room
