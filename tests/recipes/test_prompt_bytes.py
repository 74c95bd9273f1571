"""Every phase of a prompt stays inside what its plan counts of the device."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

import transformers
from helpers.models import DECODERS, SIZES, VOCABULARY

from quorum_attention.errors import OutOfMemoryError
from quorum_attention.long_prompts.places import CachePlaces
from quorum_attention.recipes import long_prompt
from quorum_attention.recipes.changes import changes_by
from quorum_attention.recipes.layer_calls import decoder_layers
from quorum_attention.recipes.prefill import LayerwisePrefill
from quorum_attention.recipes.prompt_changes import OWNER, prompt_forward_in
from quorum_attention.recipes.prompt_memory import (
    MIN_TILE,
    PromptPlan,
    TokenBytes,
    plan_prompt,
)
from quorum_attention.recipes.tile_storage import HostTiles

KINDS = ["llama", "qwen3", "gemma3_text"]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that were made since it began, as long as they
    live.

    Attributes:
        peak: the most at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._is_counting = True
        self._sizes: dict[StorageWeakRef, int] = {}
        self._others: set[StorageWeakRef] = set()

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Do not count a tensor: it stands for one in other memory."""
        self._others.add(StorageWeakRef(tensor.untyped_storage()))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing meanwhile."""
        was_counting = self._is_counting
        self._is_counting = False
        try:
            yield
        finally:
            self._is_counting = was_counting

    def now(self) -> int:
        """The bytes that live now."""
        live = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        self._sizes = live
        return sum(live.values())

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and count its results."""
        result = function(*args, **(kwargs or {}))
        if not self._is_counting:
            return result
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        self.peak = max(self.peak, self.now())
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference not in self._others:
            self._sizes[reference] = storage.nbytes()


@dataclass(frozen=True)
class Measured:
    """What a prompt took of the device.

    Attributes:
        plan: it was run by.
        token: bytes of a token.
        peak: of all phases but attention, which has a budget of its own.
        at_attention: the most that lived when a layer's attention began.
    """

    plan: PromptPlan
    token: TokenBytes
    peak: int
    at_attention: int


@contextmanager
def without_collector() -> Iterator[None]:
    """What only the garbage collector frees lives on: on a GPU it is not asked."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def small_model(kind: str) -> Any:
    sizes = {**SIZES, **DECODERS[kind]}
    config = transformers.CONFIG_MAPPING[kind](
        **sizes, bos_token_id=None, eos_token_id=None
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def leaving_out(live: LiveBytes, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose results are not counted."""

    def run(*args: Any, **named: Any) -> Any:
        with live.paused():
            tensor = function(*args, **named)
        live.leave_out(tensor)
        return tensor

    return run


def in_host_memory(live: LiveBytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what would be in host memory beside a GPU, and the cache."""
    empty = leaving_out(live, HostTiles.empty)
    monkeypatch.setattr(HostTiles, "empty", empty)
    stash = leaving_out(live, lambda _, tensor: tensor.clone())
    monkeypatch.setattr(HostTiles, "stash", stash)
    unstash = staticmethod(torch.clone)
    monkeypatch.setattr(HostTiles, "unstash", unstash)
    allocate = leaving_out(live, CachePlaces.allocate)
    monkeypatch.setattr(CachePlaces, "allocate", allocate)


def measured(
    kind: str, n_tokens: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> Measured:
    """Run a prompt by the plan for a device that has just as much memory."""
    model = small_model(kind)
    cache = long_prompt(model, progress=False)
    changes = changes_by(model, OWNER)
    assert changes is not None
    runner = prompt_forward_in(changes).runner
    plan = smallest_plan(runner.token, n_tokens, place)
    monkeypatch.setattr(runner, "_plan", lambda *_, **__: plan)
    ids = torch.randint(1, VOCABULARY, (1, n_tokens))
    live = LiveBytes()
    for tensor in [ids, *model.parameters(), *model.buffers()]:
        live.leave_out(tensor)
    in_host_memory(live, monkeypatch)
    at_attention: list[int] = []
    attend = LayerwisePrefill._attend

    def attend_uncounted(*args: Any) -> Any:
        at_attention.append(live.now())
        with live.paused():
            return attend(*args)

    monkeypatch.setattr(LayerwisePrefill, "_attend", attend_uncounted)
    with without_collector(), live, torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
    assert len(at_attention) == len(decoder_layers(model))
    return Measured(plan, runner.token, live.peak, max(at_attention))


def smallest_plan(token: TokenBytes, n_tokens: int, place: str) -> PromptPlan:
    """The plan for a small device, where rows lie in "host" memory or on the
    "device"."""
    for_tiles = 2 * MIN_TILE * token.tile
    for_attention = 2 * n_tokens * token.output
    for_rows = n_tokens * token.rows + max(for_tiles, for_attention)
    plan = plan_prompt(token, n_tokens, 1 if place == "host" else for_rows)
    assert plan.is_on_device == (place == "device")
    assert not plan.fits_at_once
    return plan


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_phases_stay_inside_the_plan(
    kind: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once each tile left its embeddings on the device: a million tokens ran out of
    memory before the first layer."""
    run = measured(kind, 2048, place, monkeypatch)
    assert run.peak <= run.plan.device_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_the_device_holds_no_more_of_a_longer_prompt(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as changes:
        short = measured(kind, 1024, "host", changes)
    long = measured(kind, 2048, "host", monkeypatch)
    assert long.peak == short.peak
    assert long.at_attention == short.at_attention
    # Attention has the rest of the device for itself. Two tiles are planned with;
    # positions and what a sliding layer keeps are small.
    tile_rows_bytes = long.plan.tile * (long.token.hidden + long.token.output)
    assert long.at_attention <= 3 * tile_rows_bytes


def run_out(tensor: torch.Tensor, limit: int) -> None:
    """A device that has no room for tiles of more than ``limit`` tokens."""
    if tensor.shape[-2] > limit:
        raise torch.OutOfMemoryError("there is no memory for a tile")


@pytest.mark.parametrize("is_behind_attention", [False, True])
def test_a_prompt_that_runs_out_is_computed_in_smaller_tiles(
    is_behind_attention: bool,
) -> None:
    """Somebody may take memory between the plan and the prompt."""
    model = small_model("llama")
    ids = torch.randint(1, VOCABULARY, (1, 1100))
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
    cache = long_prompt(model, tile=4 * MIN_TILE, progress=False)
    layer = model.model.layers[1]
    part = layer.mlp if is_behind_attention else layer.self_attn.q_proj
    part.register_forward_pre_hook(lambda _, args: run_out(args[0], MIN_TILE))
    with torch.no_grad(), pytest.warns(UserWarning, match="a prompt is computed anew"):
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert {layer.get_seq_length() for layer in cache.layers} == {1100}


def test_a_prompt_that_runs_out_in_the_smallest_tiles_says_so() -> None:
    model = small_model("llama")
    cache = long_prompt(model, tile=2 * MIN_TILE, progress=False)
    mlp = model.model.layers[1].mlp
    mlp.register_forward_pre_hook(lambda _, args: run_out(args[0], 20))
    ids = torch.randint(1, VOCABULARY, (1, 600))
    with torch.no_grad(), warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with pytest.raises(torch.OutOfMemoryError, match="no memory for a tile"):
            model(ids, past_key_values=cache, logits_to_keep=1)
    assert ["computed anew" in str(warning.message) for warning in shown] == [True]
    assert {layer.get_seq_length() for layer in cache.layers} == {0}


def test_logits_that_do_not_fit_are_not_tried_again() -> None:
    """Smaller tiles would have as many: each try takes as long as the prompt."""
    model = small_model("llama")
    cache = long_prompt(model, tile=2 * MIN_TILE, progress=False)
    model.lm_head.register_forward_pre_hook(lambda _, args: run_out(args[0], 1))
    ids = torch.randint(1, VOCABULARY, (1, 600))
    refused = pytest.raises(OutOfMemoryError, match="logits of 600 tokens")
    with torch.no_grad(), warnings.catch_warnings(), refused:
        warnings.filterwarnings("error", message="a prompt is computed anew")
        model(ids, past_key_values=cache)
    assert {layer.get_seq_length() for layer in cache.layers} == {0}
