"""torch's function taken over: what is taken, what is passed on untouched, and for
whom."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from helpers.attention import assert_close
from helpers.processes import run_python
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as by_name
from torch.utils.checkpoint import checkpoint

import quorum_attention as qa
from quorum_attention import sdpa as module
from quorum_attention.call.settings import current_settings

pytestmark = pytest.mark.usefixtures("one_thread")
ORIGINAL = by_name
PLAIN_MODULES = F.multi_head_attention_forward


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    assert F.scaled_dot_product_attention is ORIGINAL
    assert F.multi_head_attention_forward is PLAIN_MODULES
    assert torch.backends.mha.get_fastpath_enabled()
    assert not module._open_min_tokens


def three(n: int = 40, **how: Any) -> list[torch.Tensor]:
    return [
        torch.randn(2, 4, n, 8, **{"dtype": torch.float64, **how}) for _ in range(3)
    ]


def taken(*args: Any, **named: Any) -> bool:
    """Whether a call of torch's function inside a block is ours."""
    report = qa.Report()
    with qa.using(report=report):
        F.scaled_dot_product_attention(*args, **named)
    return bool(report.total.forwards)


def test_which_lengths_a_block_takes() -> None:
    q, k, v = three()
    with qa.patched_sdpa(min_tokens=10, depth=1):
        assert taken(q, k, v)
        assert_close(F.scaled_dot_product_attention(q, k, v), by_name(q, k, v), 1e-12)
        assert not taken(q[:, :, :9], k[:, :, :9], v[:, :, :9]), "short"
        assert taken(q[:, :, :9], k, v), "the longer one counts"
        assert not taken(q[:, :, :1], k, v), "one query"
        with qa.patched_sdpa():
            assert not taken(q, k, v), "4096 tokens"


CALLS: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"is_causal": True}, "a scale": {"scale": 2},
    "none dropped": {"dropout_p": 0},
    "boolean": {"attn_mask": torch.rand(40, 40) > 0.3}, "grouped": {"enable_gqa": True},
    "learned": {"attn_mask": torch.randn(40, 40, dtype=torch.float64)},
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("depth", [0, 1])
def test_results_and_gradients_are_torchs(kind: str, depth: int) -> None:
    q, k, v = three()
    if kind == "grouped":
        k, v = k[:, :2], v[:, :2]
    found = []
    for patched in (True, False):
        leaves, named = (
            [t.clone().requires_grad_() for t in (q, k, v)],
            dict(CALLS[kind]),
        )
        if kind == "learned":
            named["attn_mask"] = named["attn_mask"].clone().requires_grad_()
            leaves.append(named["attn_mask"])
        with qa.patched_sdpa(min_tokens=0, depth=depth, enabled=patched):
            assert taken(*leaves[:3], **named) == patched
            out = F.scaled_dot_product_attention(*leaves[:3], **named)
        out.square().sum().backward()
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    assert_close(*found, 1e-10)


class Subclass(torch.Tensor):
    pass


def passed_on() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    q, k, v = three(dtype=torch.float32)
    nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)])
    jagged = torch.nested.nested_tensor([torch.randn(3, 2, 8)] * 2, layout=torch.jagged)
    jagged = jagged.transpose(1, 2)
    mask = torch.rand(40, 40) > 0.5
    return {
        "a subclass": ((q.as_subclass(Subclass), k, v), {}),
        "nested": ((nested, nested, nested), {}),
        "jagged": ((jagged, jagged, jagged), {}),
        "meta": (tuple(t.to("meta") for t in (q, k, v)), {}),
        "causal with a mask": ((q, k, v, mask), {"is_causal": True}),
        "no tensors": ((1, 2, 3), {}),
        "heads that do not fit": ((q, k[:, :3], v[:, :3]), {}),
        "dtypes that do not fit": ((q, k.double(), v), {}),
        "a mask that does not fit": ((q, k, v, mask[:30]), {}),
        "complex": (tuple(t.cfloat() for t in (q, k, v)), {}),
        "dropout of all": ((q, k, v), {"dropout_p": 1.5}),
        "empty": (tuple(t[:, :, :0] for t in (q, k, v)), {}),
    }


@pytest.mark.parametrize("kind", list(passed_on()))
def test_what_is_not_taken_goes_on_as_it_came(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very same objects, and whatever becomes of them."""
    args, named = passed_on()[kind]
    seen, report = [], qa.Report()

    def recorder(*given: Any, **more: Any) -> Any:
        seen.append((given, more))
        return ORIGINAL(*given, **more)

    def result(call: Any) -> Any:
        try:
            return call(*args, **named)
        except Exception as error:
            return type(error), str(error)

    wanted = result(ORIGINAL)
    monkeypatch.setattr(F, "scaled_dot_product_attention", recorder)
    with qa.patched_sdpa(min_tokens=0, report=report):
        found = result(F.scaled_dot_product_attention)
    monkeypatch.undo()
    assert report.total.forwards == 0
    assert len(seen) == 1
    assert all(one is two for one, two in zip(seen[0][0], args, strict=False))
    assert set(seen[0][1]) == {"scale", "enable_gqa"}
    if isinstance(wanted, torch.Tensor):
        assert type(found) is type(wanted)
        if not wanted.is_nested and not wanted.is_meta:
            assert torch.equal(found, wanted)
    else:
        assert found == wanted


def test_derivatives_that_are_torchs_alone() -> None:
    q, k, v = three(12)
    f = torch.func

    def loss(t: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(t, k, v).square().sum()

    with sdpa_kernel(SDPBackend.MATH):
        asked = {
            "jvp": lambda: f.jvp(loss, (q,), (q,))[1],
            "hessian": lambda: f.jacfwd(f.grad(loss))(q),
            "grad of grad": lambda: f.grad(lambda t: f.grad(loss)(t).sum())(q),
            "math only": lambda: torch.autograd.functional.hvp(loss, q, q)[1],
        }
        wanted = {name: ask() for name, ask in asked.items()}
        report = qa.Report()
        with qa.patched_sdpa(min_tokens=0, report=report):
            for name, ask in asked.items():
                assert torch.equal(ask(), wanted[name]), name
    assert report.total.forwards == 0
    with qa.patched_sdpa(min_tokens=0, report=report):
        assert_close(
            f.grad(loss)(q), torch.autograd.functional.jacobian(loss, q), 1e-10
        )
        f.vmap(lambda t: F.scaled_dot_product_attention(t, t, t))(q)
    assert report.total.forwards == 2 + len(q)


def test_errors_inside_are_the_caller_s_and_leave_nothing() -> None:
    q, k, v = three()
    with pytest.raises(qa.BudgetError), qa.patched_sdpa(min_tokens=0, budget="1KiB"):
        F.scaled_dot_product_attention(q, k, v)

    def stop(*_: object) -> None:
        raise ValueError("mine")

    with (
        pytest.raises(ValueError, match="mine"),
        qa.patched_sdpa(min_tokens=0, depth=1, progress=stop),
    ):
        F.scaled_dot_product_attention(q, k, v)
    for bad in (
        {"min_tokens": -1},
        {"budget": "x"},
        {"kernel": qa.LongNetKernel([(30, 1)])},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            qa.patched_sdpa(**bad)


def test_a_block_is_of_its_own_thread_and_the_permanent_patch_of_all() -> None:
    given = three()
    with ThreadPoolExecutor(1) as pool:
        try:
            with qa.patched_sdpa(min_tokens=0):
                assert not pool.submit(taken, *given).result()
            qa.patch_sdpa(min_tokens=0, depth=1)
            with qa.patched_sdpa(enabled=False):
                assert not taken(*given)
            assert pool.submit(taken, *given).result()
            qa.patch_sdpa(min_tokens=100)
            assert not taken(*given)
        finally:
            qa.unpatch_sdpa()


@pytest.mark.parametrize(
    ("positional", "named"), [((), {"causal": True}), ((None, 0.0, False, 2.0), {})]
)
def test_wrong_arguments_have_torchs_error(positional: Any, named: Any) -> None:
    """Python's error named a function inside of another one."""
    inputs = three()
    with pytest.raises(TypeError) as of_torch:
        ORIGINAL(*inputs, *positional, **named)
    with qa.patched_sdpa(min_tokens=0), pytest.raises(TypeError) as of_patch:
        F.scaled_dot_product_attention(*inputs, *positional, **named)
    assert str(of_patch.value).startswith("scaled_dot_product_attention() ")
    assert str(of_torch.value).startswith("scaled_dot_product_attention() ")


BLOCKS = [qa.using, qa.patched_sdpa, qa.patched_flex_attention]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_that_is_not_open_cannot_be_left(block: Any) -> None:
    """It was an error of a list, and took the patch of another open block away."""
    says = f"this block of {block.__name__} is not open"
    never_entered = block()
    with pytest.raises(RuntimeError, match=says):
        never_entered.__exit__(None, None, None)
    with block() as left:
        pass
    with qa.patched_sdpa(min_tokens=10), qa.patched_sdpa():
        with pytest.raises(RuntimeError, match=says):
            left.__exit__(None, None, None)
        with qa.patched_sdpa(min_tokens=10):
            assert taken(*three())


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_may_be_entered_again_while_it_is_open(block: Any) -> None:
    again = block(depth=1)
    with again:
        with again:
            assert current_settings()["depth"] == 1
        assert current_settings()["depth"] == 1
    assert current_settings() is None


@pytest.mark.parametrize("block", BLOCKS[1:])
@pytest.mark.parametrize("bad", [None, 0, "False"])
def test_enabled_is_a_bool(block: Any, bad: Any) -> None:
    """The text "False" patched, and None did not."""
    with pytest.raises(TypeError, match="enabled must be True or False"):
        block(enabled=bad)


def test_threads_replace_the_permanent_patch_at_the_same_time() -> None:
    """Two threads took the same former patch out, which ended in an error of a list."""

    def replace_often(thread: int) -> None:
        for turn in range(150):
            if (thread + turn) % 3:
                qa.patch_sdpa(min_tokens=thread)
            else:
                qa.unpatch_sdpa()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(replace_often, range(4)))
    finally:
        sys.setswitchinterval(interval)
        qa.unpatch_sdpa()


def test_a_checkpoint_s_backward_outside_of_the_block_is_noticed() -> None:
    """Its second run, which torch's own makes there, would save other tensors than the
    first."""
    leaf = three()[0].requires_grad_()
    with qa.patched_sdpa(min_tokens=0):
        out = checkpoint(
            lambda t: F.scaled_dot_product_attention(t, t, t).sin(),
            leaf,
            use_reentrant=False,
        )
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        out.sum().backward()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("bbepuf"), st.booleans(), st.integers(0, 9)),
        max_size=12,
    )
)
def test_whatever_begins_and_ends_in_whatever_order(moves) -> None:
    """Blocks, the permanent patch, and somebody else who wraps the name and lets go
    again."""
    q, k, v = three(4)
    blocks: list[tuple[Any, bool]] = []
    permanent = False
    others: list[Any] = []
    try:
        for move, on, which in moves:
            if move == "b":
                blocks.append((qa.patched_sdpa(min_tokens=0, enabled=on), on))
                blocks[-1][0].__enter__()
            elif move == "e" and blocks:
                blocks.pop(which % len(blocks))[0].__exit__(None, None, None)
            elif move in "pu":
                permanent = move == "p"
                (qa.patch_sdpa(min_tokens=0) if permanent else qa.unpatch_sdpa())
            elif move == "f" and not others and not blocks and not permanent:
                inner = F.scaled_dot_product_attention
                others.append(inner)
                F.scaled_dot_product_attention = lambda *a, _inner=inner, **n: _inner(
                    *a, **n
                )
            wanted = blocks[-1][1] if blocks else permanent
            assert taken(q, k, v) == wanted
            if not blocks and not permanent and not others:
                assert F.scaled_dot_product_attention is ORIGINAL
    finally:
        for block, _ in blocks:
            block.__exit__(None, None, None)
        qa.unpatch_sdpa()
        F.scaled_dot_product_attention = ORIGINAL


def test_modules_of_torch_and_names_imported_before() -> None:
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 30, 32, dtype=torch.float64)
    wanted = layer(x, x, x, need_weights=False)[0]
    report = qa.Report()
    with qa.patched_sdpa(min_tokens=0, depth=1, report=report):
        assert_close(layer(x, x, x, need_weights=False)[0], wanted, 1e-10)
        assert report.total.cut == 1
        by_name(*three())
        assert report.total.forwards == 1


def encoder(layers: int = 0) -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(
        32, 4, 48, batch_first=True, dtype=torch.float64
    )
    return torch.nn.TransformerEncoder(layer, layers) if layers else layer


def multihead(**named: Any) -> torch.nn.Module:
    return torch.nn.MultiheadAttention(
        32, 4, batch_first=True, dtype=torch.float64, **named
    )


def attend_to_itself(
    module: torch.nn.Module, x: torch.Tensor, **named: Any
) -> torch.Tensor:
    """The output of a module of attention, without weights."""
    if isinstance(module, torch.nn.MultiheadAttention):
        out: torch.Tensor = module(x, x, x, need_weights=False, **named)[0]
        return out
    name = "src_key_padding_mask"
    padding = {name: named["key_padding_mask"]} if named else {}
    result: torch.Tensor = module(x, **padding)
    return result


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", [multihead, encoder, lambda: encoder(2)])
def test_modules_in_evaluation_have_no_fast_path(make: Any, padded: bool) -> None:
    """Torch's fast path would not call the function that is replaced."""
    module, x = make().eval(), torch.randn(2, 30, 32, dtype=torch.float64)
    padding = torch.arange(30)[None] >= torch.tensor([[30], [21]])
    named = {"key_padding_mask": padding} if padded else {}
    real = ~padding if padded else torch.ones_like(padding)
    report, calls = (
        qa.Report(),
        2 if isinstance(module, torch.nn.TransformerEncoder) else 1,
    )
    with torch.inference_mode():
        wanted = attend_to_itself(module, x, **named)
        with qa.patched_sdpa(min_tokens=0, depth=1, report=report):
            out = attend_to_itself(module, x, **named)
    assert_close(out[real], wanted[real], 1e-10)
    assert report.total.forwards == report.total.cut == calls


@pytest.mark.parametrize("before", [True, False])
def test_the_fast_path_is_as_it_was_after_the_last_block(before: bool) -> None:
    enabled = torch.backends.mha.get_fastpath_enabled
    torch.backends.mha.set_fastpath_enabled(before)
    try:
        outer, inner = qa.patched_sdpa(), qa.patched_sdpa()
        outer.__enter__()
        inner.__enter__()
        outer.__exit__(None, None, None)  # blocks may end in any order
        assert not enabled()
        inner.__exit__(None, None, None)
        assert enabled() == before
        for _ in range(2):
            qa.patch_sdpa()
        assert not enabled()
        qa.unpatch_sdpa()
        qa.unpatch_sdpa()
        assert enabled() == before
        with pytest.raises(RuntimeError, match="inside"), qa.patched_sdpa():
            raise RuntimeError("inside")
        assert enabled() == before
        with qa.patched_sdpa():
            torch.backends.mha.set_fastpath_enabled(True)
        assert enabled(), "somebody switched it on"
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("training", [True, False])
def test_weights_that_are_asked_for_are_said(training: bool) -> None:
    """They are a tensor of tokens x tokens, which no replacement of SDPA can
    prevent."""
    module, x = multihead().train(training), torch.randn(2, 30, 32, dtype=torch.float64)
    with torch.no_grad():
        wanted = module(x, x, x)
        with (
            qa.patched_sdpa(min_tokens=20),
            pytest.warns(UserWarning, match="need_weights=False"),
        ):
            assert_close(module(x, x, x)[1], wanted[1], 1e-12)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with qa.patched_sdpa(min_tokens=20):
                module(x[:, :10], x[:, :10], x[:, :10])
                module(x, x, x, need_weights=False)
                with qa.patched_sdpa(enabled=False):
                    module(x, x, x)
            module(x, x, x)


COMPILED = """
import itertools, threading, torch, torch.nn.functional as F
import quorum_attention as qa
from torch._dynamo.utils import counters
torch.set_num_threads(1)
original = F.scaled_dot_product_attention
report = qa.Report()

@torch.compile(backend="eager", fullgraph=True)
def model(q, k, v):
    return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True) + 1

def check(ours, n=50):
    three = [torch.randn(1, 2, n, 8, requires_grad=True) for _ in range(3)]
    before = report.total.forwards, report.total.backwards
    with qa.using(report=report):
        out = model(*three)
    grads = torch.autograd.grad(out.square().sum(), three)
    wanted = original(three[0] * 2, *three[1:], is_causal=True) + 1
    found, like = (out, *grads), (wanted, *torch.autograd.grad(wanted.square().sum(), three))
    torch.testing.assert_close(found, like, rtol=1e-4, atol=1e-4)
    done = report.total.forwards - before[0], report.total.backwards - before[1]
    assert done == (ours, ours), (done, ours)

# First compiled outside, then inside, and outside again; then the other way around.
for first in (False, True):
    torch._dynamo.reset()
    for on in (first, not first, first):
        if on:
            with qa.patched_sdpa(min_tokens=40, depth=1):
                check(True)
                check(False, 30)
                with qa.patched_sdpa(enabled=False):
                    check(False)
        else:
            check(False)
assert not counters["graph_break"]
torch._dynamo.reset()
counters.clear()
with qa.patched_sdpa(min_tokens=40, depth=1):
    for n in (50, 60, 70, 80):
        check(True, n)
    assert counters["stats"]["unique_graphs"] == 2, counters["stats"]
qa.patch_sdpa(min_tokens=0)
check(True)
qa.unpatch_sdpa()
check(False)

module, x = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, 50, 32)
compiled = torch.compile(module, backend="eager", fullgraph=True)
for need_weights in (False, True):
    with torch.no_grad(), qa.patched_sdpa(min_tokens=40, depth=1, report=report):
        before = report.total.forwards
        out = compiled(x, x, x, need_weights=need_weights)[0]
        assert report.total.forwards - before == 1 - need_weights
    torch.testing.assert_close(out, module(x, x, x)[0])
"""


@pytest.mark.slow
def test_compiled_code() -> None:
    done = run_python(COMPILED)
    assert done.returncode == 0, done.stderr


def test_other_traces() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    given = three()
    with qa.patched_sdpa(min_tokens=0):
        graph = make_fx(lambda *t: F.scaled_dot_product_attention(*t))(*given)
        assert "quorum_attention" in graph.code
        with FakeTensorMode():
            fakes = three()
            assert F.scaled_dot_product_attention(*fakes).shape == fakes[0].shape
    assert_close(graph(*given), by_name(*given), 1e-12)
    with (
        pytest.warns(DeprecationWarning, match="deprecated"),
        qa.patched_sdpa(min_tokens=0),
    ):
        traced = torch.jit.trace(
            lambda *t: F.scaled_dot_product_attention(*t), tuple(given)
        )
    assert_close(traced(*given), by_name(*given), 1e-12)
