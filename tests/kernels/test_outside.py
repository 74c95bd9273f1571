"""What is found out and kept is made outside all modes; where nothing has numbers, it is said."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch
from helpers_memory import FailingAllocations
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from quorum_attention.kernels.cpu import _groups
from quorum_attention.kernels.kit.over_pairs import depends_on_batch_head
from quorum_attention.kernels.outside import (
    capturing,
    outside,
    refuse_traces,
    tracing,
    without_autocast,
)

MODES = {
    "a default device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a fake mode": FakeTensorMode,
    "a dispatch mode": lambda: FailingAllocations(1, 1000),
    "gradients": torch.enable_grad,
}


@pytest.mark.parametrize("mode", list(MODES))
def test_tensors_made_in_there_are_like_any_other(mode: str) -> None:
    made: AbstractContextManager[object] = MODES[mode]()
    with made, outside():
        found = torch.ones(2, 2)
        product = found @ found
        assert not torch.is_grad_enabled()
    assert type(found) is torch.Tensor
    assert found.device == torch.device("cpu")
    assert not found.is_inference()
    assert product.dtype == torch.float32
    assert product.tolist() == [[2, 2], [2, 2]]


def test_and_afterwards_everything_is_on_again() -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        with outside():
            assert not torch.is_inference_mode_enabled()
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
        assert torch.ones(1).is_meta


def test_inside_a_transformation() -> None:
    seen = []

    def mapped(x: torch.Tensor) -> torch.Tensor:
        with outside():
            seen.append(torch.ones(3).sum().item())  # .item() of what is mapped would fail
        return x * 2

    torch.func.vmap(mapped)(torch.zeros(2, 3))
    assert seen == [3.0]


def test_hooks_of_saved_tensors_see_nothing_of_a_graph_in_there() -> None:
    seen = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        with outside(), torch.enable_grad():
            leaf = torch.ones(3, requires_grad=True)
            (grad,) = torch.autograd.grad((leaf * leaf).sum(), leaf)
        assert not seen
        leaf * leaf
    assert seen == [(3,), (3,)]
    assert grad.tolist() == [2, 2, 2]


def test_where_hooks_are_refused_there_is_nothing_to_turn_off() -> None:
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"), outside():
        assert not torch.is_grad_enabled()


def test_no_anomalies_are_looked_for_in_there() -> None:
    with torch.autograd.set_detect_anomaly(True):
        with outside(), torch.enable_grad():
            leaf = torch.zeros(1, requires_grad=True)
            (grad,) = torch.autograd.grad((leaf / leaf).sum(), leaf)
        assert torch.is_anomaly_enabled()
    assert grad.isnan().all()
    assert not torch.is_anomaly_enabled()


CPU = torch.device("cpu")
TRIED = {
    "grouped heads": _groups.__wrapped__,
    "entries and heads of a mask": lambda: depends_on_batch_head(
        lambda b, h, q, k: q >= k * h, CPU
    ),
    "entries of scores": lambda: depends_on_batch_head(
        lambda s, b, h, q, k: s + b, CPU, scored=True
    ),
}


@pytest.mark.parametrize("what", list(TRIED))
def test_nothing_that_is_tried_runs_in_a_mode_of_the_callers(what: str) -> None:
    usual = TRIED[what]()
    with FailingAllocations(1, 10_000), torch.inference_mode():
        assert TRIED[what]() == usual
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert TRIED[what]() == usual
    finally:
        torch.set_default_dtype(torch.float32)


def test_no_autocast_where_it_was_on_and_nothing_where_it_was_off() -> None:
    ones = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (ones @ ones).dtype == torch.bfloat16
        with without_autocast("cpu"):
            assert (ones @ ones).dtype == torch.float32
        assert (ones @ ones).dtype == torch.bfloat16


def test_traces_are_told_by_name() -> None:
    assert tracing() is None
    said = []

    def ask(x: torch.Tensor) -> torch.Tensor:
        said.append(tracing())
        return x + 1

    torch.jit.trace(ask, torch.ones(2), check_trace=False)
    make_fx(ask)(torch.ones(2))
    with FakeTensorMode():
        ask(torch.ones(2))
    assert said == ["torch.jit.trace", "make_fx or torch.export", "a FakeTensorMode"]


def test_a_trace_is_refused_with_the_function_s_name() -> None:
    refuse_traces("attention", query=torch.ones(2), mask=None)
    with FakeTensorMode():
        fake = torch.ones(2)
        with pytest.raises(NotImplementedError, match="attention cannot be traced: under a Fake"):
            refuse_traces("attention")
    with pytest.raises(NotImplementedError, match="key is a fake tensor"):
        refuse_traces("attention", query=torch.ones(2), key=fake)


def test_nothing_is_captured_on_a_cpu() -> None:
    assert not capturing(torch.device("cpu"))
