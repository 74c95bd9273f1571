"""Calls of one name are checked and decided alike: whatever could make a difference is in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import quorum_attention as qa
from quorum_attention import direct
from quorum_attention.call.options import Arguments
from quorum_attention.direct import _described, cache_key
from quorum_attention.kernels import registry
from quorum_attention.kernels.cpu import CpuKernel


def inputs(heads: int = 4, kv_heads: int = 4, n_queries: int = 8, n_keys: int = 8) -> list[Any]:
    shapes = ((heads, n_queries), (kv_heads, n_keys), (kv_heads, n_keys))
    return [torch.randn(1, h, n, 16) for h, n in shapes]


def name(tensors: list[Any], **changes: Any) -> Any:
    return cache_key(*tensors, Arguments(**changes))


def test_equal_calls_have_one_name() -> None:
    assert name(inputs()) == name(inputs()) is not None
    assert hash(name(inputs())) == hash(name(inputs()))


def test_a_cache_that_grows_has_one_name_up_to_the_next_power_of_two() -> None:
    assert len({name(inputs(n_queries=1, n_keys=n)) for n in range(65, 129)}) == 1
    assert len({name(inputs(n_queries=1, n_keys=n)) for n in (64, 65, 129)}) == 3
    # Which keys a causal call keeps depends on how many there are.
    assert len({name(inputs(n_keys=n), is_causal=True) for n in range(65, 129)}) == 64


@contextmanager
def another_kernel() -> Iterator[None]:
    before = registry._KERNELS["cpu"]
    registry.register_kernel(CpuKernel())
    try:
        yield
    finally:
        registry._KERNELS["cpu"] = before


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def learned(which: int) -> list[torch.Tensor]:
    tensors = inputs()
    tensors[which].requires_grad_()
    return tensors


DIFFERENCES: dict[str, Callable[[], Any]] = {
    "dtype": lambda: name([t.double() for t in inputs()]),
    "dtype of one": lambda: name([*inputs()[:2], inputs()[2].double()]),
    "batch": lambda: name([torch.cat((t, t)) for t in inputs()]),
    "batch of one": lambda: name([*inputs()[:2], torch.cat((inputs()[2],) * 2)]),
    "heads": lambda: name(inputs(heads=8)),
    "key heads": lambda: name(inputs(kv_heads=2)),
    "queries": lambda: name(inputs(n_queries=9)),
    "keys": lambda: name(inputs(n_keys=17)),
    "head dimension": lambda: name([t[..., :8].contiguous() for t in inputs()]),
    "place": lambda: name([*inputs()[:2], inputs()[2].to("meta")]),
    "value dimension": lambda: name([*inputs()[:2], inputs()[2][..., :8].contiguous()]),
    "causal": lambda: name(inputs(), is_causal=True),
    "scale": lambda: name(inputs(), scale=0.25),
    "grouped": lambda: name(inputs(), enable_gqa=True),
    "query learned": lambda: name(learned(0)),
    "deterministic": lambda: within(deterministic()),
    "kernels": lambda: within(another_kernel()),
}


def within(context: Any) -> Any:
    with context:
        return name(inputs())


@pytest.mark.parametrize("what", DIFFERENCES)
def test_what_makes_a_difference_gives_another_name(what: str) -> None:
    found = DIFFERENCES[what]()
    assert found is not None
    assert found != name(inputs())


def test_every_input_that_is_learned_counts_where_gradients_are_recorded() -> None:
    assert len({name(learned(which)) for which in range(3)}) == 1
    with torch.no_grad():
        assert name(learned(1)) == name(inputs())


class Wrapped(torch.Tensor):
    pass


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


UNUSUAL: dict[str, Any] = {
    "settings": lambda: qa.using(budget="1GiB"),
    "a mode": Mode,
    "autocast": lambda: torch.autocast("cpu"),
    "forward-mode": lambda: torch.autograd.forward_ad.dual_level(),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_a_call_under_something_unusual_has_no_name(what: str) -> None:
    with UNUSUAL[what]():
        assert name(inputs()) is None
    assert name(inputs()) is not None


def test_a_call_under_a_transformation_has_no_name() -> None:
    q, k, v = inputs()
    seen = []
    torch.func.grad(lambda x: (seen.append(name([x, k, v])), x.sum())[1])(q)
    torch.vmap(lambda x: (seen.append(name([x, k, v])), x)[1])(torch.stack((q, q)))
    assert seen == [None, None]


def test_a_transformation_gives_what_it_maps_no_name_on_a_gpu_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There the memory of tensors is looked at, and those of a transformation have none."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        direct, "_on_a_cpu", lambda q, k, v, *others: direct._on_a_gpu(q, k, v, None)
    )
    q, k, v = inputs()
    assert name([q, k, v]) is not None
    wrapped = []
    for transform in (
        lambda function: torch.func.grad(lambda x: function(x).sum()),
        lambda function: lambda x: torch.func.vjp(function, x)[0],
        lambda function: lambda x: torch.vmap(function)(x[None]),
    ):
        transform(lambda x: (wrapped.append(x), qa.attention(x, k, v))[1])(q)
    # Kept until the transformation is over.
    assert [name([k, tensor, v]) for tensor in wrapped] == [None] * len(wrapped)


TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "an array": lambda t: t.numpy(),
    "a subclass": lambda t: t.as_subclass(Wrapped),
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t[0]]),
    "negated": lambda t: torch.complex(t, t).conj().imag,
    "of three dimensions": lambda t: t[0],
    "of rows that are not dense": lambda t: t.mT.contiguous().mT,
    "fake": lambda t: FakeTensorMode().from_tensor(t),
}


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("what", TENSORS)
def test_another_kind_of_tensor_has_no_name(what: str, which: int) -> None:
    tensors = inputs()
    tensors[which] = TENSORS[what](tensors[which])
    assert name(tensors) is None


def test_another_kind_of_argument_has_no_name() -> None:
    for changes in (
        {"is_causal": 1}, {"enable_gqa": None}, {"scale": 1}, {"scale": torch.tensor(0.5)},
        {"attn_mask": torch.ones(8, 8).numpy()}, {"attn_mask": qa.Mask(causal=True)},
        {"attn_mask": torch.ones(8, 8, requires_grad=True)}, {"attn_mask": 1.0},
        {"attn_mask": torch.ones(8, 8).to_sparse()},
        {"attn_mask": torch.ones(8, 8).as_subclass(Wrapped)},
    ):  # fmt: skip
        assert name(inputs(), **changes) is None
    assert name(inputs(n_keys=0)) is None
    q, k, _ = inputs()
    assert name([q, k, torch.randn(1, 4, 7, 16)]) is None


def test_calls_under_a_tensor_are_named_by_its_kind_and_all_lengths() -> None:
    masks = [
        None, torch.ones(8, 8), torch.zeros(8, 8).bool(), torch.ones(1, 8), torch.ones(4, 8, 8),
        torch.ones(1, 4, 8, 8), torch.ones(8, 8).double(), torch.ones(()),
    ]  # fmt: skip
    assert len({name(inputs(), attn_mask=mask) for mask in masks}) == len(masks)
    assert name(inputs(), attn_mask=masks[1]) == name(inputs(), attn_mask=torch.rand(8, 8))
    lengths = {name(inputs(n_keys=n), attn_mask=torch.ones(8, 1)) for n in range(65, 75)}
    assert len(lengths) == 10


def test_masks_in_numbers_are_described_by_them_and_no_others_are() -> None:
    masks = [
        qa.Mask(causal=True), qa.Mask(causal="lower_right"), qa.Mask(causal=True, window=3),
        qa.Mask(causal=True, window=(3, -1)), qa.Mask(window=3), qa.Mask(causal=True, offset=2),
        qa.Mask(causal=True, chunk=4), qa.Mask(causal=True, softcap=2.0),
    ]  # fmt: skip
    assert len({_described(mask) for mask in masks}) == len(masks)
    assert _described(qa.Mask(window=3)) == _described(qa.Mask(window=(3, 3)))
    ids = torch.zeros(8, dtype=torch.int64)
    for mask in (
        qa.Mask(documents=ids), qa.Mask(key_lengths=ids), qa.Mask(key_padding=ids == 0),
        qa.Mask(keeps=lambda b, h, i, j: i > j), qa.Mask(causal=True) | qa.Mask(window=3),
        qa.Mask(bias=torch.zeros(8, 8)), qa.Mask(sinks=torch.zeros(4)),
        qa.Mask(every=(qa.Mask(causal=True),)), torch.ones(8, 8),
    ):  # fmt: skip
        assert _described(mask) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="calls would go to the GPU")
@pytest.mark.parametrize("which", range(3))
def test_rows_of_16_bits_that_overlap_have_no_name(which: int) -> None:
    """Torch's matrix products may refuse them, so such a call is not what one like it was."""
    for dtype, named in ((torch.float32, True), (torch.bfloat16, False), (torch.float16, False)):
        three = [torch.randn(1, 2, 6, 4).to(dtype) for _ in range(3)]
        assert name(three) is not None
        three[which] = torch.randn(1, 2, 16).to(dtype).as_strided((1, 2, 6, 4), (32, 16, 2, 1))
        assert (name(three) is not None) == named
