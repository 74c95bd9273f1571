"""Accelerate shards a changed model over two ranks (FSDP2), trains, saves and resumes
it."""

from __future__ import annotations

import copy
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from helpers.models import VOCABULARY, tiny
from helpers.processes import warm_forks

from quorum_attention.recipes import long_context

RANKS = 2
SIZES = {"num_hidden_layers": 3, "hidden_size": 64}
STEPS = 2
# A rank's texts of a step, of which gradients are added up.
TEXTS = 2


def models(with_adapters: bool) -> tuple[Any, Any]:
    """Two equal models, the second one changed."""
    torch.manual_seed(0)
    plain = tiny("llama", SIZES).train()
    if with_adapters:
        import peft

        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False
        )
        plain = peft.get_peft_model(plain, config)
    changed = copy.deepcopy(plain)
    long_context(changed, budget="64MiB", mlp_tile=16)
    return plain, changed


def accelerator() -> Any:
    """Return Accelerate's, with FSDP2. By itself it shards on accelerators only: its
    state is told that this is one."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    # It is shared by all of a process, and was told about another model.
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerate = Accelerator(
        cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=TEXTS
    )
    for state in (accelerate.state, PartialState()):
        state.distributed_type = DistributedType.FSDP
    accelerate.state.fsdp_plugin = plugin
    return accelerate


def join_ranks(rank: int, store: str) -> None:
    """Join the group of all ranks, as a launcher of Accelerate says it."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS
    )
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)


def train_both(rank: int, store: str, folder: str) -> None:
    """Train all weights, then adapters. Both share the processes, which take seconds to
    import what they need."""
    join_ranks(rank, store)
    train_a_share(rank, f"{folder}/all weights", with_adapters=False)
    if find_spec("peft") is not None:
        train_a_share(rank, f"{folder}/adapters", with_adapters=True)
    dist.destroy_process_group()


def train_a_share(rank: int, folder: str, with_adapters: bool) -> None:
    """Train on this rank's text, and compare with a plain model that is trained on all
    texts."""
    plain, changed = models(with_adapters)
    ids = torch.randint(VOCABULARY, (RANKS * TEXTS, 60))
    accelerate = accelerator()
    optimizer = torch.optim.SGD(changed.parameters(), 0.1)
    changed, optimizer = accelerate.prepare(changed, optimizer)
    plain_optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(STEPS):
        for text in ids[rank::RANKS].split(1):
            with accelerate.accumulate(changed):
                accelerate.backward(changed(input_ids=text, labels=text).loss)
                optimizer.step()
                optimizer.zero_grad()
        plain_optimizer.zero_grad()
        for text in ids.split(1):
            loss = plain(input_ids=text, labels=text).loss / len(ids)
            loss.backward()
        plain_optimizer.step()
    with torch.no_grad():
        losses = [
            model.eval()(input_ids=ids, labels=ids).loss for model in (changed, plain)
        ]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-4)
    weights = accelerate.get_state_dict(changed)  # of all ranks, for the first one
    if rank == 0:
        expected = plain.state_dict()
        torch.testing.assert_close(weights, dict(expected), atol=1e-5, rtol=1e-3)
        accelerate.unwrap_model(changed).save_pretrained(folder, state_dict=weights)
        assert_saved(Path(folder), plain, ids, with_adapters)


def assert_saved(
    folder: Path, plain: Any, ids: torch.Tensor, with_adapters: bool
) -> None:
    """What was saved is loaded without this package's changes, and computes what it
    learned."""
    from transformers import AutoModelForCausalLM

    if with_adapters:
        import peft

        torch.manual_seed(0)
        loaded = peft.PeftModel.from_pretrained(
            tiny("llama", SIZES), folder
        ).merge_and_unload()
    else:
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager"
        )
    with torch.no_grad():
        logits = loaded.eval()(input_ids=ids).logits
        expected = plain.eval()(input_ids=ids).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_two_ranks_train_and_save(tmp_path: Path) -> None:
    """Two steps of added gradients, an evaluation, the weights saved by one rank, loaded (adapters merged) and called."""
    warm_forks()
    arguments = (str(tmp_path / "store"), str(tmp_path))
    mp.start_processes(train_both, arguments, RANKS, start_method="forkserver")
    assert (tmp_path / "all weights").is_dir()
    assert (tmp_path / "adapters").is_dir() == (find_spec("peft") is not None)


N_STEPS = 4
# The step after which a run is saved.
SAVED = 2


def run_both(rank: int, store: str, folder: str, first_step: int) -> None:
    """Run all weights, then adapters, from a step on."""
    join_ranks(rank, store)
    run_from(rank, Path(folder) / "all weights", first_step, with_adapters=False)
    if find_spec("peft") is not None:
        run_from(rank, Path(folder) / "adapters", first_step, with_adapters=True)
    dist.destroy_process_group()


def run_from(rank: int, folder: Path, first_step: int, with_adapters: bool) -> None:
    """Train from a step on, the first one or one that was saved. Losses of each step
    and weights at the end are written to the folder."""
    _, changed = models(with_adapters)
    ids = torch.randint(VOCABULARY, (N_STEPS, RANKS, TEXTS, 60))
    if first_step > 0:
        # Weights come from the file alone.
        for weight in changed.parameters():
            torch.nn.init.ones_(weight)
    accelerate = accelerator()
    trained = [weight for weight in changed.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, 0.01)
    changed, optimizer = accelerate.prepare(changed, optimizer)
    if first_step > 0:
        accelerate.load_state(str(folder / "state"))
    losses = []
    for step in range(first_step, N_STEPS):
        for text in ids[step, rank].split(1):
            with accelerate.accumulate(changed):
                loss = changed(input_ids=text, labels=text).loss
                accelerate.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if step + 1 == SAVED:
            accelerate.save_state(str(folder / "state"))
    weights = accelerate.get_state_dict(changed)  # of all ranks, for the first one
    torch.save((losses, weights), folder / f"rank {rank} from {first_step}")


@pytest.mark.slow
def test_a_run_that_is_resumed_by_two_ranks(tmp_path: Path) -> None:
    """A run that goes on in other processes, from what was saved of its second step,
    has the losses and weights of a run in one go."""
    warm_forks()
    for first_step in (0, SAVED):
        arguments = (str(tmp_path / f"store {first_step}"), str(tmp_path), first_step)
        mp.start_processes(run_both, arguments, RANKS, start_method="forkserver")
    kinds = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(kinds) == 1 + (find_spec("peft") is not None)
    for folder in kinds:
        for rank in range(RANKS):
            losses, weights = torch.load(folder / f"rank {rank} from 0")
            resumed, again = torch.load(folder / f"rank {rank} from {SAVED}")
            assert len(losses) == N_STEPS * TEXTS
            assert resumed == losses[SAVED * TEXTS :]
            assert (rank == 0) == bool(weights)
            torch.testing.assert_close(again, weights, atol=0.0, rtol=0.0)
