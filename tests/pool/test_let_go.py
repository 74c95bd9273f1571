"""A worker lets go of no tensor of another process before its device has done all its work."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.errors import OutOfMemoryError
from quorum_attention.execution.device.cpu import Cpu
from quorum_attention.execution.device.lookup import BACKENDS, HOST
from quorum_attention.pool import worker
from quorum_attention.pool.messages import Begin, Compute, Done, Failed
from quorum_attention.pool.openings import Openings
from quorum_attention.pool.parts import Part, Sizes
from quorum_attention.pool.worker import _Pass, answer

SIZES = Sizes(1, 2, 2, 6, 6, False)
# Rows of one head: the gradients of its keys are added up with those of other parts.
PART = Part(0, Interval(0, 1), Interval(2, 6), whole=False)
NAMES = ("grad_key", "grad_value")


class Watched(Cpu):
    """Notes at each wait for the device which of the opened tensors are still there.

    Attributes:
        seen: how many were, at each wait.
        opened: those that a worker has opened.
    """

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.opened: list[weakref.ref[Any]] = []

    @property
    def there(self) -> int:
        return sum(one() is not None for one in self.opened)

    def open(self, handle: torch.Tensor) -> torch.Tensor:
        """Another tensor of the same memory, as one that was opened; its memory has an owner whose
        end is seen, whatever views of it there are."""
        owner = handle.numpy().view()
        self.opened.append(weakref.ref(owner))
        return torch.from_numpy(owner)

    def synchronize(self, device: torch.device) -> None:
        self.seen.append(self.there)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    made = Watched()
    monkeypatch.setitem(BACKENDS, "cpu", made)
    monkeypatch.setattr(worker, "opened", made.open)
    return made


def backward() -> tuple[_Pass, Compute, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A pass in a worker, a part of it, where its sums go, and what they should be."""
    query, key, value, grad_out = (torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(4))
    out, lse = qa.attention_with_lse(query, key, value, scale=0.5)
    rows = (slice(0, 1), slice(0, 1), slice(2, 6))
    leaves = [t[:, :1].clone().requires_grad_() for t in (key, value)]
    made = torch.softmax(query[rows] @ leaves[0].mT * 0.5, -1) @ leaves[1]
    made.backward(grad_out[rows])
    wanted = {name: torch.as_tensor(t.grad) for name, t in zip(NAMES, leaves, strict=True)}
    tensors = {
        "query": query, "key": key, "value": value, "grad_out": grad_out, "out": out, "lse": lse,
        "grad_query": torch.zeros_like(query),
    }  # fmt: skip
    options = {"depth": "auto", "kernel": "auto", "accumulator": "auto", "scale": 0.5}
    sums = {name: torch.zeros(1, 1, 6, 4, dtype=torch.float64) for name in NAMES}
    tensors |= {name: torch.zeros_like(key) for name in NAMES}
    begin = Begin(1, True, SIZES, tensors, options)  # type: ignore[arg-type]
    return _Pass(begin, HOST, Openings(), set()), Compute(1, 0, PART, sums), sums, wanted


def opened_by(watched: Watched) -> int:
    """All that were opened for a part are seen at the wait, and none is held on to after it."""
    assert watched.seen
    assert all(n == len(watched.opened) for n in watched.seen)
    return watched.there


def test_after_the_device_has_done_its_work(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quorum_attention.pool.openings.opened", lambda handle: handle)
    one, message, sums, wanted = backward()
    said = answer(one, message)
    assert isinstance(said, Done), said
    for name in NAMES:
        assert torch.allclose(sums[name], wanted[name])
    assert len(watched.opened) == 2
    assert opened_by(watched) == 0


@pytest.mark.parametrize("kind", [OutOfMemoryError, ValueError])
def test_also_where_a_part_fails(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """Its kernels may still run."""

    def fails(*given: Any) -> None:
        raise kind("no")

    monkeypatch.setattr("quorum_attention.pool.openings.opened", watched.open)
    monkeypatch.setattr(worker, "run_backward", fails)
    one, message, _, _ = backward()
    said = answer(one, message)
    assert isinstance(said, Failed)
    assert said.memory == (kind is OutOfMemoryError)
    assert len(watched.opened) == 11
    opened_by(watched)
    one.end()
    del one
    assert watched.there == 0
