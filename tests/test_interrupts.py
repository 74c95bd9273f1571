"""An interrupt (Ctrl-C) at any step of a call leaves gradients and autocast as they
were, and no level of torch.vmap and no mode behind."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import pytest
import torch

import quorum_attention as qa

pytestmark = pytest.mark.usefixtures("one_thread")
# Interrupts are raised in the package, and where torch turns gradients and autocast
# off, and opens levels of torch.vmap and modes.
_PLACES = (
    "quorum_attention",
    "torch/autograd/grad_mode.py",
    "torch/amp/autocast_mode.py",
    "torch/_functorch/",
    "torch/overrides.py",
)
_CALLS_OF_EACH = 25


class Interrupt:
    """A trace function that raises an interrupt at a step of a call.

    Attributes:
        step: the number of the step.
        steps: how many there were so far.
        steps_of_torch: the numbers of those that were torch's.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.steps = 0
        self.steps_of_torch: list[int] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        # In a generator expression that is being let go of, Python only prints an
        # error.
        code = frame.f_code
        if code.co_name == "<genexpr>" or not any(
            place in code.co_filename for place in _PLACES
        ):
            return None
        # Python looks for signals where a function begins. (Before other lines it does
        # not: not between the body of a ``with`` block and its end.)
        if event == "call":
            self.steps += 1
            if "quorum_attention" not in code.co_filename:
                self.steps_of_torch.append(self.steps)
            if self.steps == self.step:
                raise KeyboardInterrupt
        return None

    def run(self, call: Callable[[], object]) -> None:
        """Make a call, which is interrupted at the step if it has that many."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            call()
        finally:
            sys.settrace(before)


@pytest.fixture(autouse=True)
def _grad_and_autocast_stay() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)


def _plain(q: torch.Tensor) -> object:
    return qa.attention(q, q, q)


def _cut(q: torch.Tensor) -> object:
    return qa.attention(q, q, q, is_causal=True, depth=1)


def _under_a_mask(q: torch.Tensor) -> object:
    return qa.attention(q, q, q, qa.Mask(window=5), kernel="dense")


def _backward(q: torch.Tensor) -> object:
    out, lse = qa.attention_with_lse(q, q, q)
    return qa.attention_backward(out, q, q, q, out, lse)


def _recorded(q: torch.Tensor) -> object:
    q = q.requires_grad_()
    return torch.autograd.grad(qa.attention(q, q, q, depth=1).sum(), q)


def _operator(q: torch.Tensor) -> object:
    rest = [], 0.0, None, False, False, None, "", [], False, False
    return torch.ops.quorum_attention.attention(q, q, q, None, None, None, *rest)


def _function_of_scores(q: torch.Tensor) -> object:
    kernel = qa.from_score_mod(lambda score, b, h, i, j: score + 1, compiled=False)
    return qa.attention(q, q, q, kernel=kernel)


def _function_of_a_mask(q: torch.Tensor) -> object:
    mask = qa.Mask(keeps=lambda b, h, i, j: (i + j) % 3 > 0)
    return qa.attention(q, q, q, mask, kernel="dense")


CALLS = [
    _plain, _cut, _under_a_mask, _backward, _recorded, _operator, _function_of_scores,
    _function_of_a_mask,
]  # fmt: skip
PLACES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "eager": nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__.strip("_"))
def test_gradients_and_autocast_are_as_before(
    call: Callable[..., object], place: str
) -> None:
    if call is _recorded and place == "no_grad":
        pytest.skip("nothing is recorded")
    draw = random.Random(f"{call.__name__} {place}")

    def made() -> object:
        return call(torch.ones(1, 2, 40, 8))

    def state() -> tuple[object, ...]:
        levels = torch._C._functorch.get_dynamic_layer_stack_depth()
        modes = torch._C._len_torch_function_stack()
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), levels, modes

    with PLACES[place]():
        made()
        counter = Interrupt(0)
        counter.run(made)
        before = state()
        interrupted = 0
        for _ in range(_CALLS_OF_EACH):
            step = draw.randint(1, counter.steps)
            if draw.random() < 0.5:
                step = draw.choice(counter.steps_of_torch or [step])
            try:
                Interrupt(step).run(
                    made
                )  # which may have fewer steps than the one before
            # RuntimeError: torch.vmap closes a level that it has not opened yet.
            except (KeyboardInterrupt, RuntimeError):
                interrupted += 1
            assert state() == before, f"interrupted at step {step} of {counter.steps}"
        assert interrupted > _CALLS_OF_EACH // 2
