"""An interrupt (Ctrl-C) at any point of a training step leaves nothing behind: the next
step has the loss and the gradients of an uninterrupted one, bit for bit.

Python raises an interrupt where a function begins, and behind a call of a function that
is written in C: there a function of ``sys.setprofile`` raises it.
"""

from __future__ import annotations

import os
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import torch._dynamo
from helpers.models import VOCABULARY, tiny
from torch.autograd.graph import _engine_run_backward

from quorum_attention.autograd import attend, result_hook
from quorum_attention.call import settings
from quorum_attention.integrations.substitutes import substitutes
from quorum_attention.recipes import checkpoints, lent_weights, long_context

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.as_allocated]
N_INTERRUPTS = int(os.environ.get("QUORUM_ATTENTION_INTERRUPTS", "10"))
"""For each kind of step; some thousands by the variable."""
IDS = torch.arange(12)[None] * 7 % VOCABULARY
# Where contexts end, and generators and objects are let go of: what a clean-up has not
# put back yet stays as it is, or Python prints the interrupt and goes on.
# "remove" and "_remove_id" are called when an object that was referred to weakly is gone.
_CLEAN_UPS = {"__exit__", "__del__", "close", "<genexpr>", "remove", "_remove_id"}
# Where contexts begin, and optimizers turn gradients on and off: there an interrupt
# leaves them as they are, unless a function further out puts them back.
_SWITCHES = {"__enter__", "graph_break"}
# Such functions: autograd's, of each backward, and those that the package decorates.
_RESTORING = {
    _engine_run_backward.__code__,
    checkpoints._run_with_results.__code__,
    attend.__code__,
}
Place = tuple[str, str, int, str]


class Interrupt:
    """A profile function that raises an interrupt at a point of a call, or at the first
    later one that is not in a clean-up.

    Attributes:
        point: the number of the point; 0: there is no interrupt.
        n_points: how many there were so far.
        points: the numbers of the points at each place in code.
        where: the place of the interrupt; None: there was none.
    """

    def __init__(self, point: int = 0) -> None:
        self.point = point
        self.n_points = 0
        self.points: dict[Place, list[int]] = defaultdict(list)
        self.where: Place | None = None

    def __call__(self, frame: FrameType, event: str, callee: object) -> None:
        if event not in ("call", "c_return"):
            return
        self.n_points += 1
        if self.point == 0:
            self.points[_place_of(frame, event, callee)].append(self.n_points)
            return
        if self.n_points < self.point or _is_excluded(frame):
            return
        self.where = _place_of(frame, event, callee)
        sys.setprofile(None)
        raise KeyboardInterrupt

    def run(self, call: Callable[[], object]) -> None:
        """Make a call."""
        sys.setprofile(self)
        try:
            call()
        finally:
            sys.setprofile(None)


def _place_of(frame: FrameType, event: str, callee: object) -> Place:
    name = getattr(callee, "__name__", "") if event == "c_return" else ""
    return frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno, name


def _is_excluded(frame: FrameType) -> bool:
    """Whether an interrupt of a frame is for Python, torch or Transformers to deal
    with."""
    codes: list[CodeType] = []
    caller: FrameType | None = frame
    while caller is not None:
        codes.append(caller.f_code)
        caller = caller.f_back
    if any(code.co_name in _CLEAN_UPS for code in codes):
        return True
    if not _RESTORING.isdisjoint(codes):
        return False
    return any(
        code.co_name in _SWITCHES or code.co_filename.endswith("grad_mode.py")
        for code in codes
    )


def modes(model: torch.nn.Module) -> dict[str, Any]:
    """What an interrupt could leave behind, in this thread and in a model."""
    return {
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "levels of vmap": torch._C._functorch.get_dynamic_layer_stack_depth(),
        "hooks of saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(
            True
        ),
        "the compiler's stance": torch._dynamo.eval_frame._stance.stance,
        "substitutes": {
            name: part for name, part in vars(substitutes).items() if part is not None
        },
        "a checkpoint's hook": result_hook.get(),
        "defaults of calls": settings._LAYERS.get(),
        "the lock of swapped weights": lent_weights._swapping._is_owned(),
        "weights": {name: id(weight) for name, weight in model.named_parameters()},
        "modules in training": sum(module.training for module in model.modules()),
    }


class Step:
    """A training step of a tiny model, of the same weights each time.

    Args:
        kind: one of ``KINDS``.
    """

    def __init__(self, kind: str) -> None:
        self.dtype = torch.bfloat16 if kind == "autocast" else None
        self.model = tiny("qwen3").train()
        if kind == "sixteen bits":
            self.model.bfloat16()
        changed = long_context(self.model, budget="64MiB", mlp_tile=6)
        assert len(changed.done) == 5
        self.weights = list(self.model.parameters())
        self.initial = [weight.detach().clone() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-2)

    def reset(self) -> None:
        """Begin anew, as a program does that goes on after an interrupt."""
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        with torch.no_grad():
            for weight, initial in zip(self.weights, self.initial, strict=True):
                weight.copy_(initial)

    def __call__(self) -> list[Any]:
        """Return the loss and all gradients."""
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
            loss = self.model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        self.optimizer.step()
        return [loss.detach(), *(weight.grad for weight in self.weights)]


KINDS = ("float32", "sixteen bits", "autocast", "layers in tiles")


@pytest.fixture
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Step:
    """A step with all changes: norms as on a GPU, and a loss in two chunks."""
    monkeypatch.setattr(
        "quorum_attention.recipes.fused_norms._is_fused", lambda weight: True
    )
    monkeypatch.setattr(
        "quorum_attention.recipes.chunked_loss.loss_tokens", lambda *_: 6
    )
    if request.param == "layers in tiles":
        begin = checkpoints.LayerCheckpoints._begin_step

        def begin_in_tiles(self: Any, hidden: torch.Tensor) -> Any:
            forward_step = begin(self, hidden)
            forward_step.tile = 6
            return forward_step

        monkeypatch.setattr(checkpoints.LayerCheckpoints, "_begin_step", begin_in_tiles)
    return Step(request.param)


@pytest.mark.parametrize("step", KINDS, indirect=True)
def test_the_next_step_is_as_if_there_had_been_no_interrupt(
    step: Step, request: pytest.FixtureRequest
) -> None:
    draw = random.Random(request.node.name)
    expected = [result.clone() for result in step()]
    step.reset()
    counter = Interrupt()
    counter.run(step)
    places = sorted(counter.points)
    before = modes(step.model)
    n_interrupts = 0
    for _ in range(N_INTERRUPTS):
        # Each place is as likely as the others, however often it is passed.
        interrupt = Interrupt(draw.choice(counter.points[draw.choice(places)]))
        step.reset()
        with suppress(KeyboardInterrupt):
            interrupt.run(step)
        if interrupt.where is None:  # no later point than in a clean-up
            continue
        n_interrupts += 1
        assert modes(step.model) == before, interrupt.where
        step.reset()
        assert all(map(torch.equal, step(), expected)), interrupt.where
    # Which points come before a clean-up depends on what ran before in the process.
    assert n_interrupts >= N_INTERRUPTS * 0.8
