"""What a part makes for another GPU's memory is put there by copies of the driver alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quorum_attention.devices import worker
from quorum_attention.devices.worker import put

AT, FROM = "the other GPU", "the device of the part"


class Copies(TorchDispatchMode):
    """Keeps where memory is, on two devices that are not there, and what was copied across.

    Attributes:
        places: by the address of the storage.
        across: of each copy across: whether both sides are contiguous and of one dtype.
        beside: bytes of the largest tensor made at the target.
    """

    def __init__(self, target: torch.Tensor, made: torch.Tensor) -> None:
        super().__init__()
        self.places: dict[int, str] = {}
        self._note(target, AT), self._note(made, FROM)
        self.across: list[bool] = []
        self.beside = 0

    def _note(self, tensor: torch.Tensor, place: str) -> None:
        self.places[tensor.untyped_storage().data_ptr()] = place

    def place(self, tensor: torch.Tensor) -> str:
        return self.places[tensor.untyped_storage().data_ptr()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "empty_like":
            self._note(found, AT)
            self.beside = max(self.beside, found.nbytes)
        elif name in ("_to_copy", "clone"):
            self._note(found, self.place(args[0]))
        elif name == "copy_":
            to, of = args[:2]
            if self.place(to) != self.place(of):
                alike = to.dtype == of.dtype
                self.across.append(alike and to.is_contiguous() and of.is_contiguous())
        return found


@pytest.mark.parametrize("seed", range(40))
def test_only_contiguous_tensors_of_one_dtype_are_copied_across(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anything else is a kernel of the part's device, which does not reach that memory."""
    draw = random.Random(seed)
    monkeypatch.setattr(worker, "_is_near", lambda target, made: False)
    monkeypatch.setattr(worker, "_PIECE_BYTES", piece := draw.choice([64, 1000, 1 << 20]))
    shape = [draw.randint(1, 7) for _ in range(4)]
    if draw.random() < 0.1:
        shape[draw.randrange(4)] = 0
    dtypes = [draw.choice([torch.float16, torch.float32]) for _ in range(2)]
    made = torch.randn(shape).to(dtypes[0])
    order = draw.sample(range(4), 4) if draw.random() < 0.5 else list(range(4))
    whole = torch.full([shape[dim] + draw.choice([0, 0, 2]) for dim in order], 7.0)
    inverse = [order.index(dim) for dim in range(4)]
    every = whole.to(dtypes[1]).permute(inverse)
    target = every[tuple(slice(0, n) for n in shape)]
    if draw.random() < 0.3:
        made = made.transpose(2, 3).contiguous().transpose(2, 3)
    outside = every.float().sum() - target.float().sum()
    with Copies(target, made) as copies:
        put(target, made)
    assert torch.equal(target, made.to(dtypes[1]))
    assert all(copies.across)
    assert copies.across or made.numel() == 0
    assert copies.beside <= max(piece, 4)
    torch.testing.assert_close(every.float().sum() - target.float().sum(), outside)
