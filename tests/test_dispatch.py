"""Calls that are one kernel call: remembered by all that their checks and decisions
depend on, made again unchecked, and as a planned call would be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from helpers.first_calls import Watching, setting
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import quorum_attention as qa
from quorum_attention import dispatch
from quorum_attention.call.backward_inputs import BackwardInputs
from quorum_attention.call.options import Arguments
from quorum_attention.call.validation import Tensors
from quorum_attention.dispatch import cache_key, is_plain_call
from quorum_attention.kernels import registry
from quorum_attention.kernels.cpu import CpuKernel
from quorum_attention.passes import one_call
from quorum_attention.passes.run import run_backward, run_forward

ON_CPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="calls would go to the GPU"
)
GROUPED: dict[str, Any] = {"enable_gqa": True}


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Iterator[None]:
    dispatch._CACHE.clear()
    yield
    dispatch._CACHE.clear()


def inputs(
    n_keys: int = 24,
    kv_heads: int = 2,
    n_queries: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    learned: bool = True,
) -> list[torch.Tensor]:
    shapes = ((4, n_queries or 24), (kv_heads, n_keys), (kv_heads, n_keys))
    return [
        torch.randn(1, h, n, 16).to(dtype).requires_grad_(learned) for h, n in shapes
    ]


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        three = (t.double() for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(
            *three, **options, enable_gqa=True
        )


def refused(*args: Any) -> Any:
    raise AssertionError("a call like one before was checked again")


def remembered() -> int:
    """How many decisions for one kernel call are kept."""
    return sum(len(request.decisions or ()) for request in dispatch._CACHE.values())


# --- Made again -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.5}])
def test_it_is_right_and_is_not_checked_again(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    qa.attention(*inputs(), **options, **GROUPED)
    monkeypatch.setattr(dispatch, "request_of", refused)
    shape = (1, 4, 24, 16)
    for grad_out in (
        torch.randn(shape),
        torch.ones(()).expand(shape),
        torch.randn(1, 4, 16, 24).mT,
    ):
        leaves = inputs()
        out, want = (
            qa.attention(*leaves, **options, **GROUPED),
            exact(*leaves, **options),
        )
        torch.testing.assert_close(out, want.float(), rtol=1e-5, atol=1e-5)
        grads = torch.autograd.grad(out, leaves, grad_out)
        wanted = torch.autograd.grad(want, leaves, grad_out.double())
        torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-5)


def test_a_pass_that_had_to_be_planned_is_planned_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where 16-bit gradients of a kernel call are not finite: it is not tried in
    vain in every later call."""
    leaves = inputs()
    grad_out = torch.randn(1, 4, 24, 16)
    first = both(leaves, grad_out)
    run, ran = one_call.run_single_kernel_call, []

    def fail_backward(*args: Any) -> Any:
        *_, backward_inputs = args
        if backward_inputs is None:
            return run(*args)
        ran.append(backward_inputs)
        return None

    monkeypatch.setattr(one_call, "run_single_kernel_call", fail_backward)
    for _ in range(3):
        again = both(leaves, grad_out)
        torch.testing.assert_close(again, first, rtol=1e-4, atol=1e-5)
    assert len(ran) == 1


def both(
    three: list[torch.Tensor], grad_out: torch.Tensor, *args: Any, **call: Any
) -> list[torch.Tensor]:
    """The output, and gradients."""
    out = qa.attention(*three, *args, **call, **GROUPED)
    return [out.detach(), *torch.autograd.grad(out, three, grad_out)]


@pytest.mark.slow_but_first
@ON_CPU
@pytest.mark.parametrize(
    ("dtype", "n"),
    [(torch.bfloat16, 12), (torch.bfloat16, 90), (torch.float16, 12), (torch.float16, 90),
     # Longer ones in float64 are recorded by torch.
     (torch.float64, 12)],
)  # fmt: skip
@pytest.mark.parametrize("upstream", [1.0, 3e4, 1e-7, torch.nan])
def test_gradients_of_ours_on_a_cpu_are_bit_for_bit_those_of_a_planned_call(
    dtype: torch.dtype, n: int, upstream: float
) -> None:
    """From materialised scores and from the operator in fp32; too large in fp16, too
    small, and odd."""
    three, grad_out = (
        inputs(n, n_queries=n, dtype=dtype),
        torch.randn(1, 4, n, 16, dtype=dtype),
    )
    if upstream == upstream:
        grad_out = (upstream * grad_out.double()).to(dtype)
    else:
        grad_out[0, 0, 0, 0] = upstream
    for is_causal in (False, True):
        _, again, planned = (
            both(three, grad_out, is_causal=is_causal, **written)
            for written in ({}, {}, {"out_dtype": dtype})
        )
        assert remembered()
        assert [(t.dtype, t.stride()) for t in again] == [
            (dtype, t.stride()) for t in planned
        ]
        torch.testing.assert_close(again, planned, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow_but_first
@ON_CPU
@pytest.mark.parametrize(
    ("dtype", "n"),
    [(torch.bfloat16, 12), (torch.bfloat16, 90), (torch.float16, 12), (torch.float16, 90),
     (torch.float64, 12), (torch.float64, 90), (torch.float32, 12)],
)  # fmt: skip
def test_calls_under_a_mask_are_remembered_without_it(
    dtype: torch.dtype, n: int
) -> None:
    """Each is of its own mask, boolean or additive, of one dimension or four; also with
    rows that see no key, and where the upstream gradient is not finite."""
    for shape, boolean in (((n, n), True), ((n, n), False), ((1, 4, 1, n), True)):
        names = len(dispatch._CACHE)
        for time in range(3):
            mask = torch.rand(shape) < 0.6
            mask[..., 0] |= time > 1
            mask = (
                mask if boolean else torch.randn(shape).masked_fill(~mask, -torch.inf)
            )
            three = inputs(n, n_queries=n, dtype=dtype)
            grad_out = torch.randn(1, 4, n, 16, dtype=dtype)
            if time == 2:
                grad_out[0, 1, 3, 5] = torch.inf
            found = both(three, grad_out, mask)
            wanted = both(three, grad_out, mask, report=qa.Report())
            bound = {"rtol": 2e-2, "atol": 3e-2} if dtype.itemsize == 2 else {}
            torch.testing.assert_close(found, wanted, equal_nan=True, **bound)
        assert len(dispatch._CACHE) <= names + 1
    assert remembered()


@pytest.mark.parametrize("before", [False, True])
def test_a_checkpoint_of_a_row_that_is_odd_saves_the_same_when_it_runs_again(
    before: bool,
) -> None:
    """A first row of zeros has log-sum-exp 0 under a causal mask: that takes a second
    attempt."""
    q, k, v = inputs()
    with torch.no_grad():
        q[:, :, 0] = 0.0
    want = torch.autograd.grad(exact(q, k, v, is_causal=True).sum(), (q, k, v))
    call = partial(qa.attention, is_causal=True, enable_gqa=True)
    if before:
        call(*inputs())
    out = checkpoint(call, q, k, v, use_reentrant=False)
    got = torch.autograd.grad(out.sum(), (q, k, v))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_bad_arguments_are_refused_after_a_good_call_too() -> None:
    q, k, v = inputs()
    qa.attention(q, k, v, enable_gqa=True)
    for options in ({}, {"value": v[:, :, 1:], **GROUPED}, {"is_causal": 0, **GROUPED}):
        with pytest.raises(
            (ValueError, TypeError), match=r"enable_gqa|tokens|is_causal"
        ):
            qa.attention(q, k, **{"value": v, **options})


# --- By what --------------------------------------------------------------------------------------


def small(
    heads: int = 4, kv_heads: int = 4, n_queries: int = 8, n_keys: int = 8
) -> list[Any]:
    shapes = ((heads, n_queries), (kv_heads, n_keys), (kv_heads, n_keys))
    return [torch.randn(1, h, n, 16) for h, n in shapes]


def key_of(tensors: list[Any], **changes: Any) -> Any:
    arguments = Arguments(**changes)
    return (
        cache_key(*tensors, arguments) if is_plain_call(*tensors, arguments) else None
    )


def changed(which: int, change: Callable[[torch.Tensor], Any]) -> list[Any]:
    """The inputs, with one of them changed."""
    return [change(t) if number == which else t for number, t in enumerate(small())]


def within(context: Any) -> Any:
    with context:
        return key_of(small())


DIFFERENCES: dict[str, Callable[[], Any]] = {
    "dtype": lambda: key_of([t.double() for t in small()]),
    "dtype of one": lambda: key_of(changed(2, torch.Tensor.double)),
    "batch of one": lambda: key_of(changed(2, lambda t: torch.cat((t, t)))),
    "heads": lambda: key_of(small(heads=8)),
    "key heads": lambda: key_of(small(kv_heads=2)),
    "queries": lambda: key_of(small(n_queries=9)),
    "keys": lambda: key_of(small(n_keys=17)),
    "rows that are not dense": lambda: key_of(
        changed(1, lambda t: t.mT.contiguous().mT)
    ),
    "head dimension": lambda: key_of([t[..., :8].contiguous() for t in small()]),
    "place": lambda: key_of(changed(2, lambda t: t.to("meta"))),
    "value dimension": lambda: key_of(changed(2, lambda t: t[..., :8].contiguous())),
    "causal": lambda: key_of(small(), is_causal=True),
    "scale": lambda: key_of(small(), scale=0.25),
    "grouped": lambda: key_of(small(), enable_gqa=True),
    "learned": lambda: key_of(changed(1, torch.Tensor.requires_grad_)),
    "deterministic": lambda: within(
        setting(torch.use_deterministic_algorithms, True, False)
    ),
    "kernels": lambda: within(
        setting(registry.register_kernel, CpuKernel(), registry.get_kernel("cpu"))
    ),
}


def test_equal_calls_have_one_key_and_what_makes_a_difference_gives_another() -> None:
    assert key_of(small()) == key_of(small()) is not None
    assert (
        len({key_of(changed(which, torch.Tensor.requires_grad_)) for which in range(3)})
        == 1
    )
    with torch.no_grad():
        assert key_of(changed(1, torch.Tensor.requires_grad_)) == key_of(small())
    plain = key_of(small())  # before kernels are registered
    keys = {what: find() for what, find in DIFFERENCES.items()}
    assert None not in keys.values()
    assert len({*keys.values(), plain}) == len(keys) + 1


class Wrapped(torch.Tensor):
    pass


UNUSUAL: dict[str, Any] = {
    "settings": lambda: qa.using(budget="1GiB"),
    "a mode": Watching,
    "autocast": lambda: torch.autocast("cpu"),
    "forward-mode": lambda: torch.autograd.forward_ad.dual_level(),
}


def test_a_transformation_gives_what_it_maps_no_key() -> None:
    """The memory of tensors is looked at, and those of a transformation have none."""
    q, k, v = small()
    assert key_of([q, k, v]) is not None
    wrapped, seen = [], []

    def call(x: torch.Tensor) -> torch.Tensor:
        wrapped.append(x)
        seen.append(key_of([x, k, v]))
        return qa.attention(x, k, v)

    torch.func.grad(lambda x: call(x).sum())(q)
    torch.func.vjp(call, q)
    torch.vmap(call)(q[None])
    assert seen == [None] * 3
    # Nor does what is kept until the transformation is over.
    assert [key_of([k, tensor, v]) for tensor in wrapped] == [None] * 3


TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "an array": lambda t: t.numpy(),
    "a subclass": lambda t: t.as_subclass(Wrapped),
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t[0]]),
    "negated": lambda t: torch.complex(t, t).conj().imag,
    "of three dimensions": lambda t: t[0],
    "fake": lambda t: FakeTensorMode().from_tensor(t),
}


def test_unusual_tensors_and_surroundings_give_no_key() -> None:
    for what, change in TENSORS.items():
        assert [key_of(changed(which, change)) for which in range(3)] == [None] * 3, (
            what
        )
    for what, context in UNUSUAL.items():
        assert within(context()) is None, what
        assert key_of(small()) is not None


def test_calls_under_a_mask_have_a_key_of_its_kind_and_all_lengths() -> None:
    masks = [
        None, torch.ones(8, 8), torch.zeros(8, 8).bool(), torch.ones(1, 8), torch.ones(4, 8, 8),
        torch.ones(1, 4, 8, 8), torch.ones(8, 8).double(), torch.ones(()),
    ]  # fmt: skip
    assert len({key_of(small(), attn_mask=mask) for mask in masks}) == len(masks)
    assert key_of(small(), attn_mask=masks[1]) == key_of(
        small(), attn_mask=torch.rand(8, 8)
    )
    assert (
        len(
            {key_of(small(n_keys=n), attn_mask=torch.ones(8, 1)) for n in range(65, 75)}
        )
        == 10
    )


@ON_CPU
def test_keys_that_grow_have_one_key_for_many_lengths() -> None:
    """However a model that decodes lays them out; results are those of each length."""
    query = torch.randn(1, 4, 1, 16)
    for laid in (
        lambda n: torch.randn(1, 4, n, 16),
        lambda n: torch.randn(1, n, 4, 16).transpose(1, 2),
        lambda n: torch.randn(1, 4, 99, 16)[:, :, :n],
    ):
        names = set()
        for n in range(65, 75):
            three = query, laid(n), laid(n)
            names.add(key_of(list(three)))
            torch.testing.assert_close(qa.attention(*three), exact(*three).float())
        assert len(names) == 1


def test_a_mask_of_a_bias_is_cached_as_its_tensor_is() -> None:
    """A call under such a ``Mask`` was planned each time, which took the host longer
    than the call."""
    q, k, v = inputs()
    bias = torch.randn(1, 4, 24, 24, requires_grad=True)
    expected = qa.attention(q, k, v, bias, **GROUPED)
    assert len(dispatch._CACHE) == 1
    out = qa.attention(q, k, v, qa.Mask(bias=bias), **GROUPED)
    assert len(dispatch._CACHE) == 1
    assert torch.equal(out, expected)
    for results in (out, expected):
        (grad,) = torch.autograd.grad(results.sum(), bias)
        assert bool(grad.abs().sum() > 0.0)
    # With another field it is a mask, whose pairs are looked at.
    window = qa.attention(q, k, v, qa.Mask(bias=bias, window=3), **GROUPED)
    assert not torch.equal(window, expected)


@ON_CPU
@pytest.mark.parametrize("n_keys", [17, 31])
def test_a_planned_backward_of_a_cached_request_has_its_own_number_of_keys(
    n_keys: int,
) -> None:
    """Sharded calls run backwards by requests that calls with other numbers of keys may
    have made. A backward that had to be planned, here for gradients beyond fp16, was
    planned for the keys of that other call."""
    arguments = Arguments(scale=0.25, enable_gqa=True)
    others = inputs(n_keys, 4, 24, dtype=torch.float16, learned=False)
    query, key, value = inputs(24, 4, dtype=torch.float16, learned=False)
    request = dispatch.cached_request(*others, arguments)
    assert request is dispatch.cached_request(query, key, value, arguments)
    assert request is not None
    tensors = Tensors(query, key, value, None)
    out, lse = run_forward(tensors, request)
    grad_out = torch.full_like(out, 6e4)
    backward_inputs = BackwardInputs(grad_out, out, lse)
    gradients = run_backward(tensors, request, backward_inputs)
    assert not all(gradient.isfinite().all() for gradient in gradients)
    leaves = [t.double().requires_grad_() for t in (query, key, value)]
    results = exact(*leaves, scale=0.25)
    expected = torch.autograd.grad(results, leaves, grad_out.double())
    for gradient, true_gradient in zip(gradients, expected, strict=True):
        assert gradient.shape == true_gradient.shape
        error = (gradient.double() - true_gradient).abs()
        assert error[true_gradient.abs() < 6e4].max() < 300.0
