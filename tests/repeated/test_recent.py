"""One of torch's own looks tells a call like a recent one: whatever differs, it is none."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import quorum_attention as qa
from quorum_attention import autograd
from quorum_attention.kernels import registry
from quorum_attention.kernels.cpu import CpuKernel
from quorum_attention.planner import calibration
from quorum_attention.repeated import calls, recent

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="calls would go to the GPU")


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Iterator[None]:
    calls.forget_all()
    yield
    calls.forget_all()


def inputs(*, n_keys: int = 8, dtype: torch.dtype = torch.float32, learned: bool = False) -> Any:
    shapes = ((1, 4, 8, 16), (1, 4, n_keys, 16), (1, 4, n_keys, 16))
    return [torch.randn(s, dtype=dtype).requires_grad_(learned) for s in shapes]


def known(*tensors: Any, mask: Any = None, **changes: Any) -> Any:
    call = {"is_causal": False, "scale": None, "enable_gqa": False, **changes}
    return recent.again(*tensors, mask, *call.values())


def made_recent(make: Callable[[], Any] = inputs, **options: Any) -> None:
    for _ in range(4):
        qa.attention(*make(), **options)
    assert len(recent._recent) == 1


def refused(*args: Any) -> Any:
    raise AssertionError("a call like a recent one was looked up by its name")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_made_without_a_name_and_the_same(
    dtype: torch.dtype, learned: bool, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = torch.rand(8, 8) < 0.7 if masked else None
    if mask is not None:
        mask[:, 0] = True
    for _ in range(4):
        qa.attention(*inputs(dtype=dtype, learned=learned), mask)
    if not learned and dtype.itemsize == 2 and not recent._recent:
        pytest.skip("such a call is not remembered at all")
    three = inputs(dtype=dtype, learned=learned)
    calls_of_it, grad_out = [], torch.randn(1, 4, 8, 16).to(dtype)
    for named in (False, True):
        if named:
            calls.forget_all()
        else:
            monkeypatch.setattr(calls, "like", refused)
        out = qa.attention(*three, mask)
        grads = torch.autograd.grad(out, three, grad_out) if learned else ()
        calls_of_it.append((out.detach(), *grads))
        monkeypatch.undo()
    for one, other in zip(*calls_of_it, strict=True):
        assert torch.equal(one, other)


class Wrapped(torch.Tensor):
    pass


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "none": lambda t: None,
    "an array": lambda t: t.numpy(),
    "a number": lambda t: 1.0,
    "a subclass": lambda t: t.as_subclass(Wrapped),
    "a parameter": torch.nn.Parameter,
    "learned": lambda t: t.clone().requires_grad_(),
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t[0]]),
    "opaque": lambda t: t.to_mkldnn(),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "negated": lambda t: torch.complex(t, t).conj().imag,
    "of three dimensions": lambda t: t[0],
    "of rows that are not dense": lambda t: t.mT.contiguous().mT,
    "of other strides": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "longer": lambda t: torch.cat((t, t), 2),
    "narrower": lambda t: t[..., :8].contiguous(),
    "of more heads": lambda t: torch.cat((t, t), 1),
    "of a larger batch": lambda t: torch.cat((t, t)),
    "double": lambda t: t.double(),
    "half": lambda t: t.half(),
    "elsewhere": lambda t: t.to("meta"),
    "fake": lambda t: FakeTensorMode().from_tensor(t),
}


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("what", TENSORS)
def test_another_kind_of_tensor_is_none(what: str, which: int) -> None:
    made_recent()
    three = inputs()
    assert known(*three) is not None
    three[which] = TENSORS[what](three[which])
    assert known(*three) is None


def test_nor_are_other_arguments() -> None:
    made_recent()
    for changes in (
        {"is_causal": True}, {"is_causal": 0}, {"enable_gqa": True}, {"scale": 0.25},
        {"scale": 1}, {"scale": torch.tensor(0.25)}, {"mask": torch.ones(8, 8)},
        {"mask": qa.Mask(causal=True)},
    ):  # fmt: skip
        assert known(*inputs(), **changes) is None
    calls.forget_all()
    mask = torch.zeros(8, 8)
    made_recent(attn_mask=mask, scale=0.5)
    three = inputs()
    assert known(*three, mask=mask, scale=0.5) is not None
    for other in (
        None, mask.bool(), mask.double(), mask[:1], mask[None], mask.T.contiguous().T[:, :7],
        mask.clone().requires_grad_(), mask.to_sparse(), mask.as_subclass(Wrapped), mask.numpy(),
    ):  # fmt: skip
        assert known(*three, mask=other, scale=0.5) is None


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


@contextmanager
def other_rates() -> Iterator[None]:
    calibration.rates_known.cache_clear()
    yield


UNUSUAL: dict[str, Any] = {
    "settings": lambda: qa.using(budget="1GiB"),
    "a mode": Mode,
    "fake tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "autocast": lambda: torch.autocast("cpu"),
    "forward-mode": lambda: torch.autograd.forward_ad.dual_level(),
    "another kernel": another_kernel,
    "deterministic": deterministic,
    "other rates": other_rates,
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_nor_is_a_call_under_something_unusual(what: str) -> None:
    made_recent()
    three = inputs()
    assert known(*three) is not None
    with UNUSUAL[what]():
        assert known(*three) is None


def test_nor_is_one_that_is_traced_or_transformed() -> None:
    made_recent()
    q, k, v = inputs()
    seen: list[Any] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.extend((known(x, k, v), known(q, k, v)))
        return x.sum()

    torch.func.grad(look)(q)
    torch.vmap(look)(torch.stack((q, q)))
    torch.jit.trace(look, (q,), check_trace=False)
    make_fx(look)(q)
    make_fx(look, pre_dispatch=True)(q)
    assert seen
    assert set(seen) == {None}


def test_gradients_are_recorded_where_they_were() -> None:
    made_recent(lambda: inputs(learned=True))
    three = inputs(learned=True)
    assert known(*three) is not None
    with torch.no_grad():
        assert known(*three) is None
    with torch.inference_mode():
        assert known(*three) is None
        assert known(*inputs()) is None


def test_lengths_that_grow_are_never_recent() -> None:
    for n_keys in range(9, 30):
        qa.attention(*inputs(n_keys=n_keys))
    assert not recent._recent


def test_no_more_than_a_few_are_kept_and_no_tensor_is() -> None:
    seen = []
    for n_keys in range(8, 15):
        for _ in range(4):
            three = inputs(n_keys=n_keys)
            seen += [weakref.ref(tensor) for tensor in three]
            qa.attention(*three)
            del three
    assert len(recent._recent) == recent._MOST
    gc.collect()
    assert not any(reference() is not None for reference in seen)


def test_a_nan_stays_in_its_row_and_the_next_call_is_right() -> None:
    made_recent()
    for odd in (True, False, True):
        q, k, v = inputs()
        if odd:
            q[0, 1, 5, 3] = torch.nan
        out = qa.attention(q, k, v)
        assert out.isnan().sum() == (16 if odd else 0)
        want = torch.softmax(q.double() @ k.double().mT / 4.0, -1) @ v.double()
        torch.testing.assert_close(out, want.float(), equal_nan=True)


def test_without_torchs_look_calls_are_looked_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "_guards", lambda: None)
    for _ in range(4):
        q, k, v = inputs()
        want = torch.softmax(q.double() @ k.double().mT / 4.0, -1) @ v.double()
        torch.testing.assert_close(qa.attention(q, k, v), want.float())
    assert not recent._recent


@pytest.mark.parametrize("old", [False, True])
def test_a_second_derivative_is_named_and_hooks_of_a_user_stay_his(
    old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All calls share what names it: it must not be seen, and nothing be added to it."""
    if old:
        monkeypatch.setattr(autograd, "_HOOKED", None)
    seen: list[torch.Tensor] = []
    for time in range(5):
        three = inputs(learned=True)
        out = qa.attention(*three)
        assert out._backward_hooks is None
        if not time:
            out.register_hook(seen.append)
        out.sum().backward(retain_graph=True)
        assert len(seen) == 1
        (grad,) = torch.autograd.grad(out.sum(), three[0], create_graph=True)
        del seen[1:]
        with pytest.raises(NotImplementedError, match="second derivatives"):
            torch.autograd.grad(grad.sum(), three[0])


def test_a_graph_gone_back_through_many_times_is_named_once() -> None:
    out = qa.attention(*inputs(learned=True))
    registered = []
    node = out.grad_fn
    for _ in range(5):
        torch.autograd.grad(out.sum(), out, create_graph=True)
        registered.append(node.metadata.get(autograd._in_words))
    assert registered[0] is not None
    assert all(one is registered[0] for one in registered)


def test_a_tensor_that_has_left_its_transformation_is_an_error_and_no_crash() -> None:
    """It has no sizes, which torch's own look does not expect."""
    made_recent()
    escaped: list[Any] = []
    many = torch.nested.nested_tensor([torch.randn(1, 4, 8, 16)] * 2)
    torch.vmap(lambda x: escaped.append(x) or x.sin())(many)
    query, key, value = inputs()
    assert known(escaped[0], key, value) is None
    with pytest.raises(RuntimeError):
        qa.attention(escaped[0], key, value)
    mask = torch.zeros(8, 8)
    for _ in range(4):
        qa.attention(*inputs(), mask)
    assert known(query, key, value, mask=escaped[0]) is None


def other_kinds() -> None:
    for n_keys in (9, 10, 11, 12, 13):
        made_recent_again(lambda n_keys=n_keys: inputs(n_keys=n_keys))


def made_recent_again(make: Callable[[], Any]) -> None:
    for _ in range(2 * recent._AGAIN):
        qa.attention(*make())


def without_gradients() -> None:
    with torch.no_grad():
        made_recent_again(inputs)


def deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        made_recent_again(inputs)
    finally:
        torch.use_deterministic_algorithms(False)


def parameters() -> None:
    made_recent_again(lambda: [torch.nn.Parameter(t, False) for t in inputs()])


@pytest.mark.parametrize("between", [other_kinds, without_gradients, deterministic, parameters])
def test_a_call_is_a_recent_one_again_after_others(between: Callable[[], None]) -> None:
    made_recent()
    between()
    made_recent_again(inputs)
    assert known(*inputs()) is not None
    assert len(recent._recent) <= recent._MOST


def test_one_tensor_thrice_takes_no_place() -> None:
    for _ in range(4):
        query, *_ = inputs()
        qa.attention(query, query, query)
    assert not recent._recent


def test_a_default_dtype_does_not_matter() -> None:
    recent._guards.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        made_recent(lambda: inputs(dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
    assert recent._guards() is not None
